"""Settings of NeMo's classic loaders and of its documentation: translated, named and ignored, or one clear line."""

from __future__ import annotations

import json
import logging

import pytest
from support.errors import raises
from support.training import AsIs, Letters, flat, take

from sharmill.errors import ConfigError
from sharmill.training import get_dataloader
from sharmill.training.nemo.classic import FATES
from sharmill.training.nemo.loader_settings import float_limits, prepare_settings

OURS = {"type": "sharmill", "dataset": "d"}
TOKENS = {"use_multimodal_sampling": True, "token_equivalent_duration": 0.1, "prompt_format": "plain"}


def settle(**settings):
    return prepare_settings(settings, 0, 1)


@pytest.fixture
def manifests(tmp_path):
    """Manifests of 3 and 1 utterances."""
    for name, count in (("a", 3), ("b", 1)):
        lines = [json.dumps({"audio_filepath": f"{n}.wav", "duration": 1.0, "text": "x"}) for n in range(count)]
        (tmp_path / f"{name}.json").write_text("\n".join(lines) + "\n")
    return str(tmp_path / "a.json"), str(tmp_path / "b.json")


def test_ignored_keys_are_named_in_one_warning(caplog):
    with caplog.at_level(logging.WARNING, "sharmill"):
        settled = settle(input_cfg=[OURS | {"weight": 1}], trim_silence=True, is_tarred=False, max_utts=0, batch_size=2)
    ours = [record for record in caplog.records if record.name.startswith("sharmill")]
    assert [record.getMessage() for record in ours] == [
        "the loader ignores trim_silence, is_tarred, max_utts: see the table of classic keys in docs/training.md"
    ]
    assert not {"trim_silence", "is_tarred", "max_utts"} & settled.keys()


@pytest.mark.parametrize("key", [key for key, fate in FATES.items() if fate.startswith("ignored")])
def test_every_ignored_key_is_accepted(key):
    assert key not in settle(input_cfg=[OURS], batch_size=2, **{key: None})


def test_unknown_keys_stay_errors():
    with raises(ConfigError, "unknown_key", "'trim_silense'"):
        settle(input_cfg=[OURS], trim_silense=True)


def test_the_documentations_spellings_are_read():
    tarred = {"type": "nemo_tarred", "manifest_filepath": "m_0.json", "tarred_audio_filepath": "a_0.tar"}
    pair = {"type": "txt_pair", "source_path": "s", "target_path": "t"}
    settled = settle(
        input_cfg=[tarred, pair],
        use_multimodal_dataloading=True,
        prompt_format="plain",
        batch_size=4,
        token_equivalent_duration=0.1,
    )
    assert settled["input_cfg"][0]["tarred_audio_filepaths"] == "a_0.tar"
    assert (settled["input_cfg"][1]["source_paths"], settled["input_cfg"][1]["target_paths"]) == ("s", "t")
    assert settled["use_multimodal_sampling"] is True


def test_a_tag_that_yaml_takes_for_a_list():
    entry = {"type": "multimodal_conversation", "manifest_filepath": "m", "audio_locator_tag": ["audio"]}
    settled = settle(input_cfg=[entry], batch_size=1, prompt_format="plain")
    assert settled["input_cfg"][0]["audio_locator_tag"] == "[audio]"


@pytest.mark.parametrize(
    ("entry", "code", "names"),
    [
        ({"type": "nemo_tarred", "manifest_filepath": "m", "wieght": 1}, "unknown_key", ["nemo_tarred", "'wieght'"]),
        ({"type": "txt", "paths": "t", "tgas": {}}, "unknown_key", ["type txt", "'tgas'", "tags"]),
        ({"type": "nemo_tarred", "manifest_filepath": "m"}, "missing_key", ["needs tarred_audio_filepaths"]),
        ({"type": "txt_pair", "source_paths": "t"}, "missing_key", ["needs target_paths"]),
        ({"type": "multimodal_conversation", "manifest_filepath": "m"}, "missing_key", ["needs audio_locator_tag"]),
        ({"type": "txt", "paths": "t"}, "missing_key", ["use_multimodal_sampling", "prompt_format"]),
        ({"type": "txt_pair", "source_path": "t", "source_paths": "t"}, "bad_config_value", ["keep one"]),
    ],
)
def test_entries_of_nemos_types_are_checked(entry, code, names):
    with raises(ConfigError, code, *names):
        settle(input_cfg=[entry], batch_size=1)


def test_text_without_a_language_runs(corpora):
    cfg = {"input_cfg": [{"type": "txt", "paths": str(corpora.text)}], "batch_size": 4} | TOKENS
    (batch,) = take(get_dataloader(cfg, 0, 1, Letters(), dataset=AsIs()), 1)
    assert [example.text for example in batch] == [f"line {n:02d}\n" for n in range(4)]


@pytest.mark.parametrize(("limit", "shortest"), [(0.1, 1), (0.9, 5)])
def test_fractions_of_tokens_per_second(corpora, limit, shortest):
    """Cut n has n % 6 + 1 letters in 0.5 + n / 10 seconds."""
    cfg = {"input_cfg": [corpora.entry("large")], "min_tps": 2 * limit, "batch_size": 8, "force_finite": True}
    cuts = flat(take(get_dataloader(cfg, 0, 1, Letters(), dataset=AsIs())))
    rates = [len(cut.supervisions[0].text) / cut.duration for cut in cuts]
    assert min(rates) >= 2 * limit
    assert (len(rates) == 23) == (limit == 0.1)


def test_fractions_of_tokens_per_token(corpora):
    """Pair n has n + 1 letters on both sides, so the documentation's values let all of them pass and 1.5 none."""
    pair = {"type": "txt_pair", "source_path": str(corpora.pairs[0]), "target_path": str(corpora.pairs[1])}
    for limit in (0.1, 0.333):
        cfg = {"input_cfg": [pair], "min_tpt": limit, "max_tpt": 10, "batch_size": 10, "force_finite": True} | TOKENS
        assert len(flat(take(get_dataloader(cfg, 0, 1, Letters(), dataset=AsIs())))) == 10
    assert float_limits({"min_tpt": 1.5}) == {"min_tpt": 1.5}
    cfg |= {"min_tpt": 1.5}
    assert take(get_dataloader(cfg, 0, 1, Letters(), dataset=AsIs())) == []


def test_lists_of_manifests_with_weights(manifests):
    a, b = manifests
    (group,) = settle(manifest_filepath=[[a, 0.7], [b, 0.3]], batch_size=1)["input_cfg"]
    assert [(one["manifest_filepath"], one["weight"]) for one in group["input_cfg"]] == [(a, 0.7), (b, 0.3)]
    (group,) = settle(manifest_filepath=[a, b], batch_size=1)["input_cfg"]
    assert [one["weight"] for one in group["input_cfg"]] == [3, 1]
    (group,) = settle(manifest_filepath=[[a], [b]], bucketing_weights=[2, 3], batch_size=1)["input_cfg"]
    assert [one["weight"] for one in group["input_cfg"]] == [6, 3]


def test_lists_of_tarred_manifests(manifests):
    a, b = manifests
    tars = [["audio_0.tar"], ["audio_1.tar"]]
    (group,) = settle(manifest_filepath=[[a], [b]], tarred_audio_filepaths=tars, batch_size=1)["input_cfg"]
    assert [one["tarred_audio_filepaths"] for one in group["input_cfg"]] == ["audio_0.tar", "audio_1.tar"]
    with raises(ConfigError, "bad_config_value", "tarred_audio_filepaths has as many items"):
        settle(manifest_filepath=[[a], [b]], tarred_audio_filepaths=tars[:1], batch_size=1)
    with raises(ConfigError, "bad_config_value", "bucketing_weights"):
        settle(manifest_filepath=[[a], [b]], bucketing_weights=[1], batch_size=1)


def test_batch_sizes_of_buckets_by_linear_scaling():
    settled = settle(input_cfg=[OURS], bucketing_batch_size=8, batch_size=1, num_buckets=4, max_duration=16.0)
    assert settled["bucket_batch_size"] == [32, 24, 16, 8]
    assert settled["bucket_duration_bins"] == [4.0, 8.0, 12.0, 16.0]
    assert "batch_size" not in settled
    with raises(ConfigError, "bad_config_value", "max_duration"):
        settle(input_cfg=[OURS], bucketing_batch_size=[4, 2])


def test_semi_sorted_batches_are_buckets_as_wide_as_the_noise():
    settled = settle(input_cfg=[OURS], use_semi_sorted_batching=True, randomization_factor=0.1, batch_size=8)
    assert (settled["use_bucketing"], settled["num_buckets"]) == (True, 10)


def test_strategies_of_shards_and_buckets(corpora):
    assert settle(input_cfg=[OURS], tarred_shard_strategy="replicate", batch_size=1)["shard_seed"] == "trng"
    entry = corpora.entry("large")
    cfg = {"input_cfg": [entry], "batch_size": 2, "bucket_duration_bins": [1.0], "shard_seed": 1}
    for strategy, in_step in (("synced_randomized", True), ("fully_randomized", False)):
        loader = get_dataloader(cfg | {"bucketing_strategy": strategy}, 0, 1, dataset=AsIs())
        assert loader.dataset.sampler.sync_buckets is in_step
    with raises(ConfigError, "bad_config_value", "bucketing_strategy"):
        settle(input_cfg=[OURS], bucketing_strategy="random", batch_size=1)


def test_buckets_of_two_dimensions_with_a_batch_duration(corpora):
    """Bins as ``sharmill bins --sub-buckets`` prints them: batches have as many cuts as fit at the bucket's bound."""
    bins = [[1.0, 3], [1.0, 6], [2.8, 3], [2.8, 6]]
    cfg = {"input_cfg": [corpora.entry("large")], "bucket_duration_bins": bins, "batch_duration": 5.6, "shard_seed": 1,
           "bucket_buffer_size": 60}  # fmt: skip
    for batch in take(get_dataloader(cfg, 0, 1, Letters(), dataset=AsIs()), 12):
        assert len(batch) == (5 if max(cut.duration for cut in batch) <= 1.0 else 2)
    settled = settle(input_cfg=[OURS], bucket_duration_bins=bins, batch_duration=5.6, quadratic_duration=2.8)
    assert settled["bucket_batch_size"] == [4, 4, 1, 1]
    with raises(ConfigError, "missing_key", "bucket_batch_size", "batch_duration"):
        settle(input_cfg=[OURS], bucket_duration_bins=bins)
