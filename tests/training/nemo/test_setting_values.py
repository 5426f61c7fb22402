"""Values that NeMo or lhotse would end in an error of their own over, or pass over: one line says what to write."""

from __future__ import annotations

import pytest
from support.errors import raises
from support.training import AsIs, Letters, flat, take

from sharmill.errors import ConfigError
from sharmill.training import get_dataloader
from sharmill.training.nemo.loader_settings import prepare_settings

OURS = {"type": "sharmill", "dataset": "d"}
SPOKEN = {"type": "multimodal_conversation", "manifest_filepath": "m", "audio_locator_tag": "A"}
IN_TOKENS = {"use_multimodal_sampling": True, "batch_size": 1}


@pytest.mark.parametrize(
    ("settings", "code", "names"),
    [
        ({"input_cfg": [OURS | {"dataset": "???"}]}, "missing_key", ["input_cfg[0].dataset is ???"]),
        ({"input_cfg": "no/such.yaml"}, "missing_input", ["no/such.yaml"]),
        ({"batch_size": "two"}, "bad_config_value", ["batch_size", "'two'"]),
        ({"batch_size": None}, "missing_key", ["batch_duration, batch_size"]),
        (
            {"batch_size": None, "batch_duration": 9, **IN_TOKENS} | {"batch_size": None},
            "missing_key",
            ["batch_tokens"],
        ),
        ({"tags": {"task": "asr"}}, "unknown_key", ["'tags'", "entries of input_cfg"]),
        ({"wieght": 1}, "unknown_key", ["'wieght'", "docs/training.md"]),
        ({"shard_seed": "maybe"}, "bad_config_value", ["shard_seed", "trng or randomized"]),
        ({"seed": 1.5}, "bad_config_value", ["seed is a whole number"]),
        ({"min_duration": 5, "max_duration": 1}, "bad_config_value", ["nothing passes"]),
        ({"bucket_duration_bins": [3, 1]}, "bad_config_value", ["each above the one before"]),
        ({"bucket_duration_bins": "1,2"}, "bad_config_value", ["a list of numbers"]),
        ({"bucket_duration_bins": [[1, 2], 3]}, "bad_config_value", ["[length, tokens]"]),
        ({"bucket_duration_bins": [1, 2], "bucket_batch_size": [4]}, "bad_config_value", ["1 numbers for 2"]),
        ({"bucket_batch_size": [4]}, "bad_config_value", ["1 numbers for 0"]),
        ({"bucket_duration_bins": [1, 2], "max_tps": [9, 9]}, "bad_config_value", ["max_tps is a number"]),
        ({"bucket_duration_bins": [[1, 2]], "max_tps": [9, 9]}, "bad_config_value", ["2 numbers for 1"]),
        ({"prompt_format": "nonsense"}, "unknown_name", ["nonsense", "llama2"]),
        ({"input_cfg": [SPOKEN]}, "missing_key", ["multimodal_conversation", "prompt_format"]),
        ({"input_cfg": [SPOKEN], "prompt_format": "plain"} | IN_TOKENS, "missing_key", ["token_equivalent_duration"]),
        (IN_TOKENS, "missing_key", ["token_equivalent_duration"]),
        (
            {"input_cfg": [SPOKEN | {"token_equivalent_duration": 0.1}, OURS], "prompt_format": "plain"} | IN_TOKENS,
            "missing_key",
            ["token_equivalent_duration"],
        ),
    ],
)
def test_refused(settings, code, names):
    with raises(ConfigError, code, *names):
        prepare_settings({"input_cfg": [OURS], "batch_size": 1} | settings, 0, 1)


def test_conversions_that_give_cuts_need_no_prompt():
    entry = {"type": "lhotse_magpietts_data_as_continuation", "input_cfg": [OURS]}
    assert prepare_settings({"input_cfg": [entry], "batch_size": 1}, 0, 1)["input_cfg"][0]["type"] == entry["type"]


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"sampler_fusion": "zipp"}, ["sampler_fusion", "round_robin", "'zipp'"]),
        ({"sampler_weights": {"a": 1}}, ["sampler_weights", "each of a, b"]),
        ({"sampler_weights": [0.5, 0.5]}, ["sampler_weights", "each of a, b"]),
    ],
)
def test_samplers_that_cannot_be_put_together(settings, names):
    section = {"input_cfg": [OURS], "batch_size": 1}
    with raises(ConfigError, "bad_config_value", *names):
        prepare_settings({"multi_config": True, "a": section, "b": section} | settings, 0, 1)


@pytest.mark.parametrize(
    ("settings", "tokenizer", "names"),
    [
        (IN_TOKENS | {"token_equivalent_duration": 0.1}, None, ["use_multimodal_sampling needs a tokenizer"]),
        ({"bucket_duration_bins": [[1, 9]], "batch_duration": 9}, None, ["need a tokenizer"]),
        ({"bucket_duration_bins": [[1, 9]], "batch_duration": 9, "pretokenize": False}, Letters(), ["pretokenize"]),
        ({"prompt_format": "plain", "batch_size": 1}, len, ["prompt_format", "text_to_ids"]),
    ],
)
def test_tokens_that_nobody_makes(corpora, settings, tokenizer, names):
    with raises(ConfigError, "bad_tokenizer", *names):
        get_dataloader({"input_cfg": [corpora.entry("small")]} | settings, 0, 1, tokenizer, dataset=AsIs())


@pytest.mark.parametrize(
    ("paths", "code", "names"),
    [
        ({"manifest_filepath": "FOLDER/none.json"}, "missing_input", ["type nemo", "none.json"]),
        ({"cuts_path": "FOLDER/none.jsonl.gz"}, "missing_input", ["type lhotse", "none.jsonl.gz"]),
        ({"manifest_filepath": "FOLDER/manifest__OP_0..2_CL_.json",
          "tarred_audio_filepaths": "FOLDER/none__OP_0..2_CL_.tar"}, "missing_input", ["nemo_tarred", "none_0.tar"]),
        ({"manifest_filepath": "FOLDER/manifest__OP_0..2_CL_.json",
          "tarred_audio_filepaths": "FOLDER/tars.tar"}, "bad_config_value", ["nemo_tarred", "shard_id"]),
        ({"manifest_filepath": "FOLDER/plain.json", "num_buckets": 30, "use_bucketing": True}, "bad_config_value",
         ["number of buckets (30)"]),
    ],
)  # fmt: skip
def test_files_and_buckets_that_cannot_be(nemo_data, tmp_path, paths, code, names):
    (tmp_path / "manifest_0.json").write_text((nemo_data / "manifest_0.json").read_text())
    (tmp_path / "tars.tar").write_bytes((nemo_data / "audio_0.tar").read_bytes())
    folder = tmp_path if "FOLDER/tars.tar" in paths.values() else nemo_data
    cfg = {
        key: value.replace("FOLDER", str(folder)) if isinstance(value, str) else value for key, value in paths.items()
    }
    if folder == tmp_path:
        cfg["manifest_filepath"] = str(tmp_path / "manifest_0.json")
    with raises(ConfigError, code, *names):
        get_dataloader(cfg | {"batch_size": 2}, 0, 1, Letters(), dataset=AsIs())


def test_manifests_with_commas_between_them(nemo_data):
    paths = ",".join(str(nemo_data / f"manifest_{n}.json") for n in range(2))
    tars = ",".join(str(nemo_data / f"audio_{n}.tar") for n in range(2))
    cfg = {"manifest_filepath": paths, "tarred_audio_filepaths": tars, "batch_size": 2, "force_finite": True}
    assert len(flat(take(get_dataloader(cfg, 0, 1, Letters(), dataset=AsIs())))) == 6
