"""Settings that would train on wrong data are errors that say what to change."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf
from support.errors import raises
from support.training import AsIs, Letters

from sharmill.errors import ConfigError
from sharmill.training import get_dataloader
from sharmill.training.nemo.loader_settings import prepare_settings

OURS = {"type": "sharmill", "dataset": "d"}
SECTION = {"input_cfg": [OURS], "batch_size": 1}
TEXT = {"type": "parquet", "manifest_filepath": "t"}  # read as a stream, and not divided


def test_the_users_settings_stay_as_they_are():
    cfg = OmegaConf.create({"input_cfg": [OURS], "batch_size": 1, "seed": "${oc.decode:'3'}"})
    before = OmegaConf.to_yaml(cfg)
    settled = prepare_settings(cfg, 1, 4)
    assert OmegaConf.to_yaml(cfg) == before
    assert settled["seed"] == 3
    assert settled["input_cfg"][0] == OURS | {
        "seed": 3,
        "rank": 1,
        "world_size": 4,
        "shard_seed": "trng",
        "force_map_dataset": False,
    }


def test_a_part_of_a_recipe_refers_to_the_rest_of_it():
    recipe = OmegaConf.create(
        {
            "model": {
                "sample_rate": 8000,
                "train_ds": {"sample_rate": "${model.sample_rate}", "batch_size": 1, "input_cfg": [OURS]},
            }
        }
    )
    assert prepare_settings(recipe.model.train_ds, 0, 1)["sample_rate"] == 8000


def test_a_group_hands_down_its_shard_seed():
    cfg = {
        "batch_size": 1,
        "shard_seed": "randomized",
        "input_cfg": [{"type": "group", "shard_seed": 8, "input_cfg": [OURS]}, OURS],
    }
    group, entry = prepare_settings(cfg, 0, 2)["input_cfg"]
    assert group["input_cfg"][0]["shard_seed"] == 8
    assert entry["shard_seed"] == "randomized"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"force_map_dataset": True, "num_workers": 2}, 6),
        ({"force_map_dataset": True}, 6),
        ({}, 100006),
        ({"num_workers": 2}, "randomized"),
        ({"shard_seed": 4}, 4),
    ],
)
def test_randomized_outside_workers_is_the_seed(settings, expected):
    cfg = SECTION | {"seed": 6, "shard_seed": "randomized"} | settings
    assert prepare_settings(cfg, 1, 2)["shard_seed"] == expected


@pytest.mark.parametrize(
    ("settings", "code", "names"),
    [
        ({"batch_duratoin": 5}, "unknown_key", ["'batch_duratoin'", "did you mean 'batch_duration'"]),
        ({"input_cfg": []}, "missing_key", ["input_cfg"]),
        ({"force_map_dataset": True, "shuffle": True}, "split_wrong", ["shard_seed: trng"]),
        ({"force_map_dataset": True, "input_cfg": [OURS, OURS]}, "split_wrong", ["shard_seed: trng"]),
        (
            {"force_map_dataset": True, "shuffle": True, "shard_seed": "randomized", "seed": "trng"},
            "split_wrong",
            ["set seed to a number"],
        ),
        ({"shuffle": True, "shard_seed": "randomized", "seed": "trng"}, "split_wrong", ["set seed to a number"]),
        ({"shuffle": True, "force_finite": True, "seed": "trng"}, "split_wrong", ["set seed to a number"]),
        (
            {"force_finite": True, "input_cfg": [OURS, TEXT]},
            "split_wrong",
            ["each of 2 readers", "type parquet", "set force_map_dataset"],
        ),
        (
            {"force_finite": True, "input_cfg": [{"type": "group", "input_cfg": [TEXT]}]},
            "split_wrong",
            ["type parquet"],
        ),
        ({"input_cfg": [OURS, TEXT]}, "split_wrong", ["each of 2 readers", "type parquet", "same order"]),
        ({"input_cfg": [OURS, TEXT], "shuffle": True, "shard_seed": 3}, "split_wrong", ["set shuffle: true"]),
        ({"input_cfg": OURS}, "bad_config_value", ["input_cfg is a list"]),
        ({"input_cfg": ["data/libritts"]}, "bad_config_value", ["input_cfg is a list"]),
        ({"input_cfg": [OURS | {"type": "sharmil"}], "shuffle": True}, "unknown_name", ["did you mean 'sharmill'"]),
        ({"input_cfg": [{"dataset": "d"}]}, "unknown_name", ["input_cfg", "None"]),
        ({"input_cfg": [{"type": "sharmill"}]}, "missing_key", ["dataset"]),
        (
            {"input_cfg": [{"type": "group", "wieght": 0.5, "input_cfg": [OURS]}]},
            "unknown_key",
            ["group", "'wieght'", "did you mean 'weight'"],
        ),
    ],
)
def test_refused(settings, code, names):
    with raises(ConfigError, code, *names):
        prepare_settings(SECTION | settings, 0, 2)


@pytest.mark.parametrize(
    ("settings", "code", "names"),
    [
        ({"a": SECTION | {"batch_sizes": 1}}, "unknown_key", ["did you mean 'batch_size'"]),
        ({"a": SECTION, "fusion": "zip"}, "unknown_key", ["'fusion'"]),
        ({"a": SECTION, "max_duration": 20}, "bad_config_value", ["max_duration", "set it in each section"]),
        ({"a": SECTION, "input_cfg": [OURS]}, "bad_config_value", ["input_cfg", "at the top level"]),
        ({"a": SECTION | {"force_finite": True}}, "bad_config_value", ["force_finite", "set it at the top level"]),
        ({"a": SECTION | {"shuffle": True}, "shuffle": False}, "bad_config_value", ["shuffle", "in a section"]),
        ({}, "missing_key", ["multi_config"]),
    ],
)
def test_refused_of_several_sections(settings, code, names):
    with raises(ConfigError, code, *names):
        prepare_settings({"multi_config": True} | settings, 0, 2)


def test_a_section_may_say_what_the_top_level_says():
    settings = {"multi_config": True, "force_finite": True, "a": SECTION | {"force_finite": True}}
    assert prepare_settings(settings, 0, 2)["a"]["input_cfg"][0]["world_size"] == 2


@pytest.mark.parametrize(
    "settings",
    [
        {"force_map_dataset": True},
        {"force_map_dataset": True, "shuffle": True, "shard_seed": 3},
        {"shuffle": True, "seed": "trng"},
        {"input_cfg": [OURS, TEXT], "shuffle": True},
        {"input_cfg": [OURS | {"shard_seed": 3}, TEXT], "shuffle": True, "shard_seed": "randomized"},
        {"force_finite": True, "force_map_dataset": True, "shard_seed": 1, "input_cfg": [OURS, TEXT]},
    ],
)
def test_accepted(settings):
    assert prepare_settings(SECTION | settings, 0, 2)["concurrent_bucketing"] is False


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_no_such_rank(rank, world_size):
    with raises(ConfigError, "bad_config_value", "rank"):
        prepare_settings({"input_cfg": [OURS]}, rank, world_size)


@pytest.mark.parametrize(
    ("changes", "code", "names"),
    [
        ({"datasett": "x"}, "unknown_key", ["'datasett'", "did you mean 'dataset'"]),
        ({"fields": ["codes"]}, "unknown_field", ["'codes'"]),
        ({"codec": "nano"}, "unknown_codec", ["'nano'"]),
        ({"speaker_tags": "magpie"}, "bad_config_value", ["speaker_tags", "kept or nemo"]),
        ({"shard_seed": "random"}, "bad_config_value", ["shard_seed"]),
        ({"slice_length": 3}, "bad_config_value", ["slice_length"]),
    ],
)
def test_options_of_an_entry(corpora, changes, code, names):
    cfg = {"input_cfg": [corpora.entry("small") | changes], "batch_size": 1}
    with raises(ConfigError, code, *names):
        get_dataloader(cfg, 0, 1, dataset=AsIs())


def test_an_entry_needs_a_dataset():
    with raises(ConfigError, "missing_key", "dataset"):
        get_dataloader({"input_cfg": [{"type": "sharmill"}], "batch_size": 1}, 0, 1, dataset=AsIs())


def test_a_prompt_needs_a_tokenizer_of_nemo(corpora):
    cfg = {"input_cfg": [corpora.entry("small")], "batch_size": 1, "prompt_format": "plain"}
    with raises(ConfigError, "bad_tokenizer", "text_to_ids"):
        get_dataloader(cfg, 0, 1, Letters().text_to_ids, dataset=AsIs())
