"""Tests of loader settings that are accepted, translated, ignored, or refused in one line."""

import json

import pytest
from omegaconf import OmegaConf
from support.project import raises
from support.training import AsIs, Letters, flat, take

from sharmill.errors import ConfigError
from sharmill.training import get_dataloader
from sharmill.training.nemo.classic import CLASSIC_KEY_HANDLING
from sharmill.training.nemo.settings import prepare_settings, read_train_settings

OURS = {"type": "sharmill", "dataset": "d"}
SECTION = {"input_cfg": [OURS], "batch_size": 1}
STREAM = {"type": "parquet", "manifest_filepath": "t"}  # not divided
SPOKEN = {"type": "multimodal_conversation", "manifest_filepath": "m", "audio_locator_tag": "A"}
IN_TOKENS = {"use_multimodal_sampling": True, "batch_size": 1}
TOKENS = {"use_multimodal_sampling": True, "token_equivalent_duration": 0.1, "prompt_format": "plain"}
MULTI = {"multi_config": True}
SECTIONS = MULTI | {"a": SECTION, "b": SECTION}
GROUP = {"type": "group", "shard_seed": 8, "input_cfg": [OURS]}
RANDOMIZED = {"seed": 6, "shard_seed": "randomized"}
MAP_STYLE = {"force_map_dataset": True}
TARRED = {"type": "nemo_tarred", "manifest_filepath": "m_0.json", "tarred_audio_filepath": "a_0.tar"}
PAIR = {"type": "txt_pair", "source_path": "s", "target_path": "t"}

# Given settings, and the settings that NeMo gets; None for a key that is removed.
TAKEN = [
    ({}, {"concurrent_bucketing": False, "shard_seed": "trng", "shuffle": False}),
    ({"input_cfg": [GROUP]}, {"input_cfg": [{"input_cfg": [{"shard_seed": 8, "world_size": 2, "rank": 1}]}]}),
    # Outside worker processes, lhotse resolves `randomized` to a number that does not depend on the seed.
    (RANDOMIZED | MAP_STYLE | {"num_workers": 2}, {"shard_seed": 6}),
    (RANDOMIZED | MAP_STYLE, {"shard_seed": 6}),
    (RANDOMIZED, {"shard_seed": 100006}),
    (RANDOMIZED | {"num_workers": 2}, {"shard_seed": "randomized"}),
    (RANDOMIZED | {"shard_seed": 4}, {"shard_seed": 4}),
    (MAP_STYLE | {"shuffle": True, "shard_seed": 3}, {}),
    ({"shuffle": True, "seed": "trng"}, {}),
    ({"input_cfg": [OURS, STREAM], "shuffle": True}, {}),
    ({"input_cfg": [OURS | {"shard_seed": 3}, STREAM], "shuffle": True, "shard_seed": "randomized"}, {}),
    ({"force_finite": True, "shard_seed": 1, "input_cfg": [OURS, STREAM]} | MAP_STYLE, {}),
    ({"multi_config": True, "force_finite": True, "a": SECTION | {"force_finite": True}},
     {"a": {"input_cfg": [{"world_size": 2}]}}),
    ({"input_cfg": [{"type": "lhotse_magpietts_data_as_continuation", "input_cfg": [OURS]}]}, {}),
    # Settings of classic loaders and of NeMo's documentation.
    ({"trim_silence": True, "max_utts": 0}, {"trim_silence": None, "max_utts": None}),
    ({key: None for key, fate in CLASSIC_KEY_HANDLING.items() if fate.startswith("ignored")}, {"use_dali": None}),
    ({"input_cfg": [TARRED, PAIR], "use_multimodal_dataloading": True, "prompt_format": "plain",
      "token_equivalent_duration": 0.1},
     {"use_multimodal_sampling": True,
      "input_cfg": [{"tarred_audio_filepaths": "a_0.tar"}, {"source_paths": "s", "target_paths": "t"}]}),
    ({"input_cfg": [SPOKEN | {"audio_locator_tag": ["audio"]}], "prompt_format": "plain"},
     {"input_cfg": [{"audio_locator_tag": "[audio]"}]}),
    ({"bucketing_batch_size": 8, "num_buckets": 4, "max_duration": 16.0},
     {"bucket_batch_size": [32, 24, 16, 8], "bucket_duration_bins": [4.0, 8.0, 12.0, 16.0], "batch_size": None}),
    ({"use_semi_sorted_batching": True, "randomization_factor": 0.1}, {"use_bucketing": True, "num_buckets": 10}),
    ({"tarred_shard_strategy": "scatter"}, {"shard_seed": 100_000}),
    ({"bucket_duration_bins": [[1.0, 3], [1.0, 6], [2.8, 3]], "batch_duration": 5.6, "quadratic_duration": 2.8,
      "batch_size": None}, {"bucket_batch_size": [4, 4, 1]}),
]  # fmt: skip

# Given settings, the code of the error, and words of its message.
REFUSED = [
    ({"input_cfg": [OURS | {"dataset": "???"}]}, "missing_key", ["input_cfg[0].dataset has no value (???)"]),
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
    ({"seed": 1.5}, "bad_config_value", ["seed must be an integer"]),
    ({"min_duration": 5, "max_duration": 1}, "bad_config_value", ["no example passes"]),
    ({"bucket_duration_bins": [3, 1]}, "bad_config_value", ["an ascending list"]),
    ({"bucket_duration_bins": "1,2"}, "bad_config_value", ["list of numbers"]),
    ({"bucket_duration_bins": [[1, 2], 3]}, "bad_config_value", ["[length, tokens]"]),
    ({"bucket_duration_bins": [1, 2], "bucket_batch_size": [4]}, "bad_config_value", ["1 numbers for 2"]),
    ({"bucket_batch_size": [4]}, "bad_config_value", ["1 numbers for 0"]),
    ({"bucket_duration_bins": [1, 2], "max_tps": [9, 9]}, "bad_config_value", ["max_tps must be a number"]),
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
        {"force_finite": True, "input_cfg": [OURS, STREAM]},
        "split_wrong",
        ["each of 2 readers", "type parquet", "set force_map_dataset"],
    ),
    (
        {"force_finite": True, "input_cfg": [{"type": "group", "input_cfg": [STREAM]}]},
        "split_wrong",
        ["type parquet"],
    ),
    ({"input_cfg": [OURS, STREAM]}, "split_wrong", ["each of 2 readers", "type parquet", "same order"]),
    ({"input_cfg": [OURS, STREAM], "shuffle": True, "shard_seed": 3}, "split_wrong", ["set shuffle: true"]),
    ({"input_cfg": OURS}, "bad_config_value", ["input_cfg must be a list"]),
    ({"input_cfg": ["data/libritts"]}, "bad_config_value", ["input_cfg must be a list"]),
    ({"input_cfg": [OURS | {"type": "sharmil"}], "shuffle": True}, "unknown_name", ["did you mean 'sharmill'"]),
    ({"input_cfg": [{"dataset": "d"}]}, "unknown_name", ["input_cfg", "None"]),
    ({"input_cfg": [OURS | {"weight": 0}]}, "bad_config_value", ["weight must be a positive number, not 0"]),
    ({"reweight_temperature": [0.5, 1.0]}, "bad_config_value", ["reweight_temperature", "each of 1 levels"]),
    ({"input_cfg": [{"type": "sharmill"}]}, "missing_key", ["dataset"]),
    (
        {"input_cfg": [{"type": "group", "wieght": 0.5, "input_cfg": [OURS]}]},
        "unknown_key",
        ["group", "'wieght'", "did you mean 'weight'"],
    ),
    ({"a": SECTION | {"batch_sizes": 1}} | MULTI, "unknown_key", ["did you mean 'batch_size'"]),
    ({"a": SECTION, "fusion": "zip"} | MULTI, "unknown_key", ["'fusion'"]),
    ({"a": SECTION, "max_duration": 20} | MULTI, "bad_config_value", ["max_duration", "set it in each section"]),
    ({"a": SECTION, "input_cfg": [OURS]} | MULTI, "bad_config_value", ["input_cfg", "at the top level"]),
    ({"a": SECTION | {"force_finite": True}} | MULTI, "bad_config_value", ["force_finite", "set it at the top level"]),
    ({"a": SECTION | {"shuffle": True}, "shuffle": False} | MULTI, "bad_config_value", ["shuffle", "in a section"]),
    (MULTI, "missing_key", ["multi_config"]),
    (
        {"input_cfg": [{"type": "nemo_tarred", "manifest_filepath": "m", "wieght": 1}]},
        "unknown_key",
        ["nemo_tarred", "'wieght'"],
    ),
    ({"input_cfg": [{"type": "txt", "paths": "t", "tgas": {}}]}, "unknown_key", ["type txt", "'tgas'", "tags"]),
    (
        {"input_cfg": [{"type": "nemo_tarred", "manifest_filepath": "m"}]},
        "missing_key",
        ["needs tarred_audio_filepaths"],
    ),
    ({"input_cfg": [{"type": "txt_pair", "source_paths": "t"}]}, "missing_key", ["needs target_paths"]),
    (
        {"input_cfg": [{"type": "multimodal_conversation", "manifest_filepath": "m"}]},
        "missing_key",
        ["needs audio_locator_tag"],
    ),
    ({"input_cfg": [{"type": "txt", "paths": "t"}]}, "missing_key", ["use_multimodal_sampling"]),
    (
        {"use_semi_sorted_batching": True, "seed": "trng"} | MAP_STYLE,
        "split_wrong",
        ["use_semi_sorted_batching", "seed to a number"],
    ),
    ({"use_semi_sorted_batching": True, "randomization_factor": "x"}, "bad_config_value", ["randomization_factor"]),
    ({"input_cfg": [{"type": "txt_pair", "source_path": "t", "source_paths": "t"}]}, "bad_config_value", ["keep one"]),
    ({"sampler_fusion": "zipp"} | SECTIONS, "bad_config_value", ["sampler_fusion", "round_robin", "'zipp'"]),
    ({"sampler_weights": {"a": 1}} | SECTIONS, "bad_config_value", ["sampler_weights", "each of a, b"]),
    ({"sampler_weights": [0.5, 0.5]} | SECTIONS, "bad_config_value", ["sampler_weights", "each of a, b"]),
    ({"bucketing_batch_size": [4, 2]}, "bad_config_value", ["max_duration"]),
    ({"bucketing_strategy": "random"}, "bad_config_value", ["bucketing_strategy"]),
    ({"bucket_duration_bins": [[1, 2]], "batch_size": None}, "missing_key", ["bucket_batch_size", "batch_duration"]),
]


def part_of(found, expected):
    """Return the part of the found settings that corresponds to the expected ones."""
    if isinstance(expected, dict):
        return {key: part_of(found.get(key), value) for key, value in expected.items()}
    if isinstance(expected, list) and expected and isinstance(expected[0], dict):
        return [part_of(*pair) for pair in zip(found, expected, strict=True)]
    return found


@pytest.mark.parametrize(("given", "expected"), TAKEN)
def test_taken(given, expected):
    settings = given if "multi_config" in given else SECTION | given
    before = json.dumps(settings)
    assert part_of(prepare_settings(OmegaConf.create(settings), 1, 2), expected) == expected
    assert json.dumps(settings) == before


@pytest.mark.parametrize(("given", "code", "names"), REFUSED)
def test_refused(given, code, names):
    with raises(ConfigError, code, *names):
        prepare_settings(given if "multi_config" in given else SECTION | given, 0, 2)


# Given settings, and words of the single warning about them.
TOLD = [
    ({"trim_silence": True, "max_utts": 5}, "ignored: trim_silence, max_utts; see docs/training.md"),
    ({"max_open_streams": 2}, "ignored: max_open_streams"),
    ({"manifest_filepath": "m.json"}, "data are read from input_cfg; ignored: manifest_filepath"),
    (
        {"input_cfg": None, "cuts_path": "c", "manifest_filepath": "m"},
        "data are read from cuts_path; ignored: manifest_filepath",
    ),
    ({"tarred_shard_strategy": "scatter"}, "tarred_shard_strategy: scatter is read as shard_seed: randomized"),
    ({"tarred_shard_strategy": "scatter", "shard_seed": 4}, "tarred_shard_strategy: scatter is read as shard_seed: 4"),
    ({"bucketing_strategy": "synced_randomized"}, "bucketing_strategy: synced_randomized has no effect"),
    ({"bucketing_strategy": "fully_randomized"}, "lets each rank draw its buckets, if any, independently"),
    (
        {"bucketing_batch_size": [4, 2], "batch_duration": 9},
        "ignored: bucketing_batch_size, because batch_duration sizes",
    ),
    ({"bucketing_batch_size": [4, 2], "max_duration": 8.0}, "batch sizes are [4, 2] for buckets of up to [4.0, 8.0] s"),
    ({"use_semi_sorted_batching": True}, "use_semi_sorted_batching is read as use_bucketing: true"),
    ({"use_semi_sorted_batching": True, "shard_seed": 1} | MAP_STYLE, "use_semi_sorted_batching sorts whole epochs"),
]


@pytest.mark.parametrize(("given", "line"), TOLD)
def test_a_translated_key_has_one_warning(given, line, caplog):
    prepare_settings(SECTION | given, 0, 1)
    assert sum(line in record.message for record in caplog.records) == 1


def test_keys_that_datasets_and_examples_do_not_obey_are_named(corpora, caplog):
    cfg = {"input_cfg": [corpora.entry("small")], "batch_size": 1, "text_field": "answer", "max_tps": 12}
    get_dataloader(cfg, 0, 1, dataset=AsIs())
    for line in ("text_field: answer has no effect on type sharmill", "max_tps has no effect without a tokenizer"):
        assert sum(line in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("given", "tokenizer", "code", "names"),
    [
        (
            IN_TOKENS | {"token_equivalent_duration": 0.1},
            None,
            "bad_tokenizer",
            ["use_multimodal_sampling needs a tokenizer"],
        ),
        ({"bucket_duration_bins": [[1, 9]], "batch_duration": 9}, None, "bad_tokenizer", ["pass a tokenizer"]),
        (
            {"bucket_duration_bins": [[1, 9]], "batch_duration": 9, "pretokenize": False},
            Letters(),
            "bad_tokenizer",
            ["pretokenize"],
        ),
        ({"prompt_format": "plain", "batch_size": 1}, len, "bad_tokenizer", ["prompt_format", "text_to_ids"]),
        ({"prompt_format": "plain", "batch_size": 1}, Letters().text_to_ids, "bad_tokenizer", ["text_to_ids"]),
        ({"input_cfg": [{"type": "sharmill"}], "batch_size": 1}, None, "missing_key", ["dataset"]),
        (
            {"input_cfg": [{"type": "txt_pair", "source_paths": "none.txt", "target_paths": "none.txt"}]}
            | IN_TOKENS
            | TOKENS,
            Letters(),
            "missing_input",
            ["none.txt"],
        ),
        (
            {"manifest_filepath": "none.json", "batch_size": 2, "input_cfg": None},
            Letters(),
            "missing_input",
            ["none.json"],
        ),
        ({"cuts_path": "none.jsonl.gz", "batch_size": 2, "input_cfg": None}, None, "missing_input", ["type lhotse"]),
    ],
)
def test_refused_where_data_and_tokenizer_are_looked_at(corpora, given, tokenizer, code, names):
    with raises(ConfigError, code, *names):
        get_dataloader({"input_cfg": [corpora.entry("small")]} | given, 0, 1, tokenizer, dataset=AsIs())


@pytest.mark.parametrize(
    ("changes", "code", "names"),
    [
        ({"datasett": "x"}, "unknown_key", ["'datasett'", "did you mean 'dataset'"]),
        ({"fields": ["codes"]}, "unknown_field", ["'codes'"]),
        ({"codec": "nano"}, "unknown_codec", ["'nano'"]),
        ({"speaker_tags": "magpie"}, "bad_config_value", ["speaker_tags", "kept or nemo"]),
        ({"shard_seed": "random"}, "bad_config_value", ["shard_seed"]),
        ({"slice_length": 3}, "bad_config_value", ["slice_length"]),
        ({"dataset": "no/such"}, "no_dataset", ["no/such"]),
    ],
)
def test_refused_of_an_entry(corpora, changes, code, names):
    cfg = {"input_cfg": [corpora.entry("small") | changes], "batch_size": 1}
    with raises(ConfigError, code, *names):
        get_dataloader(cfg, 0, 1, dataset=AsIs())


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        ("- 1\n", "bad_config_file", "is a list"),
        ("train_ds: [1]\n", "bad_config_file", "train_ds must hold the settings"),
        ("input_cfg: ${nope}\n", "bad_config_value", "at input_cfg: Interpolation key 'nope' not found"),
        ("input_cfg: ${open\n", "bad_config_file", "cannot read"),
        ("a: b: c\n", "bad_config_file", "cannot read"),
        ("[" * 5000, "bad_config_file", "cannot read"),
    ],
)
def test_a_file_that_has_no_settings_is_named_in_one_line(tmp_path, text, code, told):
    path = tmp_path / "train.yaml"
    path.write_text(text)
    with raises(ConfigError, code, "train.yaml", told):
        read_train_settings(path)


@pytest.fixture
def manifests(tmp_path):
    """Manifests with 3 utterances and 1 utterance."""
    for name, count in (("a", 3), ("b", 1)):
        lines = [json.dumps({"audio_filepath": f"{n}.wav", "duration": 1.0, "text": "x"}) for n in range(count)]
        (tmp_path / f"{name}.json").write_text("\n".join(lines) + "\n")
    return str(tmp_path / "a.json"), str(tmp_path / "b.json")


@pytest.mark.parametrize(("limit", "shortest"), [(0.1, 1), (0.9, 5)])
def test_fractions_of_tokens_per_second(corpora, limit, shortest):
    """Cut n has n % 6 + 1 letters in 0.5 + n / 10 seconds."""
    cfg = {"input_cfg": [corpora.entry("large")], "min_tps": 2 * limit, "batch_size": 8, "force_finite": True}
    cuts = flat(take(get_dataloader(cfg, 0, 1, Letters(), dataset=AsIs())))
    rates = [len(cut.supervisions[0].text) / cut.duration for cut in cuts]
    assert min(rates) >= 2 * limit
    assert (len(rates) == 23) == (limit == 0.1)


def test_fractions_of_tokens_per_token(corpora):
    """Pair n has n + 1 letters on both sides, so all pairs pass the documentation's values, but none passes 1.5."""
    pair = {"type": "txt_pair", "source_path": str(corpora.pairs[0]), "target_path": str(corpora.pairs[1])}
    for limit in (0.1, 0.333):
        cfg = {"input_cfg": [pair], "min_tpt": limit, "max_tpt": 10, "batch_size": 10, "force_finite": True} | TOKENS
        assert len(flat(take(get_dataloader(cfg, 0, 1, Letters(), dataset=AsIs())))) == 10
    cfg |= {"min_tpt": 1.5}
    assert take(get_dataloader(cfg, 0, 1, Letters(), dataset=AsIs())) == []


def settled(**settings):
    return prepare_settings(settings, 0, 1)


def test_lists_of_manifests_with_weights(manifests):
    a, b = manifests
    (group,) = settled(manifest_filepath=[[a, 0.7], [b, 0.3]], batch_size=1)["input_cfg"]
    assert [(one["manifest_filepath"], one["weight"]) for one in group["input_cfg"]] == [(a, 0.7), (b, 0.3)]
    (group,) = settled(manifest_filepath=[a, b], batch_size=1)["input_cfg"]
    assert [one["weight"] for one in group["input_cfg"]] == [3, 1]
    (group,) = settled(manifest_filepath=[[a], [b]], bucketing_weights=[2, 3], batch_size=1)["input_cfg"]
    assert [one["weight"] for one in group["input_cfg"]] == [6, 3]


def test_strings_and_directories_are_no_buckets(manifests, tmp_path):
    """There are four buckets, as in ``num_buckets``, rather than one for each of two manifests."""
    keys = {"bucketing_batch_size": 2, "num_buckets": 4, "max_duration": 8.0}
    assert settled(manifest_filepath=[*manifests], **keys)["bucket_batch_size"] == [8, 6, 4, 2]


def test_lists_of_tarred_manifests(manifests):
    a, b = manifests
    tars = [["audio_0.tar"], ["audio_1.tar"]]
    (group,) = settled(manifest_filepath=[[a], [b]], tarred_audio_filepaths=tars, batch_size=1)["input_cfg"]
    assert [one["tarred_audio_filepaths"] for one in group["input_cfg"]] == ["audio_0.tar", "audio_1.tar"]
    with raises(ConfigError, "bad_config_value", "tarred_audio_filepaths must have"):
        settled(manifest_filepath=[[a], [b]], tarred_audio_filepaths=tars[:1], batch_size=1)
    with raises(ConfigError, "bad_config_value", "bucketing_weights"):
        settled(manifest_filepath=[[a], [b]], bucketing_weights=[1], batch_size=1)
