"""``sharmill doctor`` and ``sharmill verify-resume``."""

import json
import re

import pytest
from omegaconf import OmegaConf
from support.project import raises, write_lines

from sharmill.errors import ConfigError
from sharmill.training.nemo.settings import read_train_settings
from sharmill.training.nemo.trial import examine, stop_and_resume

SETTINGS = {"batch_size": 2, "shuffle": True, "shard_seed": "randomized", "seed": 1, "shuffle_buffer_size": 3}


def advice(settings, ranks=2, tokenizer=None):
    return "\n".join(examine(settings, ranks=ranks, num_batches=12, tokenizer=tokenizer))


def test_the_doctor_says_who_reads_what(corpora):
    text = {"type": "txt", "paths": str(corpora.text), "weight": 0.5}
    tokens = {"use_multimodal_sampling": True, "token_equivalent_duration": 0.1, "prompt_format": "plain"}
    said = advice({"input_cfg": [corpora.entry("large", weight=0.5), text]} | SETTINGS | tokens, tokenizer="bytes")
    assert "2 ranks with 1 worker each" in said
    assert f"sharmill {corpora.large}: 2 readers divide one order among them" in said
    assert f"txt {corpora.text}: 2 readers divide one order" in said
    assert "can be resumed exactly" in said
    assert "12 batches of 2 to 2 examples\n" in said
    assert re.search(r"\naudio: \d+\.\d % of the batches is padding\ntokens: \d+\.\d % of", said)
    assert f"txt {corpora.text}: 40 examples, " in said
    assert "epochs in 1000 steps" in said


def test_the_doctor_names_what_stops_a_resume_and_what_costs(corpora):
    cfg = {"input_cfg": [corpora.entry("large")]} | SETTINGS
    assert "every rank reads all examples in its own order" in advice(cfg | {"shard_seed": "trng"})
    said = advice(cfg | {"trim_silence": True, "tarred_shard_strategy": "scatter", "text_field": "answer"})
    for line in ("ignored: trim_silence", "tarred_shard_strategy: scatter is read", "text_field: answer has no effect"):
        assert said.count(f"\nadvice: {line}") == 1
    assert "cannot be resumed: resumable=True needs an infinite stream" in advice(cfg | {"shard_seed": "trng"})
    assert "map style: the main process of every rank reads all manifests" in advice(cfg | {"force_map_dataset": True})
    buckets = {"bucket_duration_bins": [1.0, 2.0, 50.0], "batch_duration": 4.0, "bucket_buffer_size": 8}
    assert "no batch came from these buckets: 50.0 to the longest" in advice(cfg | buckets)
    with raises(ConfigError, "unknown_key", "'batch_sise'"):
        advice(cfg | {"batch_sise": 2})


def test_the_doctor_knows_parts_epochs_and_padding(corpora, tmp_path):
    cfg = {"input_cfg": [corpora.entry("large")]} | SETTINGS
    assert "canonical: 4 parts" in advice(cfg | {"canonical": 4})
    whole = {"force_map_dataset": True, "force_finite": True}
    assert "takes one of 2 batches" in advice(cfg | whole)
    assert "the epoch of the first rank ends after 6 batches" in advice(cfg | whole)
    # Pair n has n + 1 letters on both sides, so a batch of all ten has 110 of 200 tokens.
    pairs = {"type": "txt_pair", "source_paths": str(corpora.pairs[0]), "target_paths": str(corpora.pairs[1])}
    tokens = {"use_multimodal_sampling": True, "prompt_format": "plain", "batch_size": 10, "shuffle": False}
    said = advice({"input_cfg": [pairs]} | SETTINGS | tokens | {"shard_seed": 1}, ranks=1, tokenizer="bytes")
    assert "audio" not in said
    assert "\ntokens: 45.0 % of the batches is padding" in said


@pytest.mark.parametrize(
    ("settings", "ranks", "status", "said"),
    [
        ({"num_buckets": 3}, 1, 2, ["error: num_buckets: 3 has no effect without use_bucketing"]),
        (
            {"num_buckets": 30, "bucket_duration_bins": [1.0, 2.0, 3.0]}, 1, 2,
            ["error: num_buckets: 30 has no effect with 3 bucket_duration_bins"],
        ),
        (
            {"bucket_duration_bins": [1.0, 1.65], "bucket_batch_size": [2, 2], "bucket_buffer_size": 4}, 1, 2,
            ["error: sharmill DATASET: 12 of 24 examples are always dropped", "DATASET: 12 examples, 167 epochs"],
        ),
        ({"max_duration": 1.05}, 1, 2, ["18 of 24 examples are always dropped", "DATASET: 6 examples, 333 epochs"]),
        (
            {"shuffle_buffer_size": 100}, 2, 0,
            ["advice: 2 readers buffer up to 200 examples (shuffle_buffer_size each), more than half of 23"],
        ),
        ({}, 16, 0, ["advice: 16 readers (ranks x workers) have 1.4 of 23 examples each, but a batch has 2.0"]),
        ({"force_finite": True, "batch_size": 1}, 5, 2, ["error: the ranks have 4 to 5 batches"]),
        ({"resumable": True}, 1, 0, ["can be resumed exactly"]),
        ({"perturb_speed": True}, 1, 2, ["error: perturb_speed changes 2 of 3 examples, but codes cannot"]),
    ],
)  # fmt: skip
def test_the_doctor_tells_advice_from_errors(corpora, tmp_path, call, settings, ranks, status, said):
    path = tmp_path / "train.yaml"
    path.write_text(OmegaConf.to_yaml({"input_cfg": [corpora.entry("large")]} | SETTINGS | settings))
    found, out, _ = call("doctor", path, "--ranks", ranks)
    assert found == status
    for words in said:
        assert words.replace("DATASET", str(corpora.large)) in out


def _missing_tar(corpora, folder):
    cuts = sorted(map(str, (corpora.small / "cuts").iterdir()))
    return {"type": "lhotse_shar", "shar_path": {"cuts": cuts, "target_audio": [str(folder / "gone.tar")] * len(cuts)}}


def _relative_paths(_, folder):
    lines = [{"audio_filepath": "gone/0.wav", "duration": 1.0, "text": "x"}]
    return {"type": "nemo", "manifest_filepath": str(write_lines(folder / "manifest.json", lines))}


def _piped(corpora, folder):
    pipe = {"type": "nemo_tarred", "tarred_audio_filepaths": "pipe:cat a.tar"}
    return _relative_paths(corpora, folder) | pipe


@pytest.mark.parametrize(
    ("make_entry", "settings", "said"),
    [
        (_relative_paths, {"force_iterable_dataset": True}, "the data cannot be read: .*'gone/0.wav' failed; correct"),
        (_missing_tar, {}, r"the data cannot be read: \[Errno 2\] No such file or directory: '/.*/gone.tar'"),
        (_piped, {}, "a record of the data has no 'shard_id': give each tar its own manifest"),
        (lambda corpora, _: corpora.entry("small"), {"max_duration": 0.1, "num_workers": 1},
         "the filters dropped 1000 examples in a row"),
        (lambda *_: {"type": "sharmill", "dataset": "ftp://host/data"}, {}, "the URL of dataset, .* must begin with"),
    ],
)  # fmt: skip
def test_the_doctor_names_unreadable_data_in_one_line(corpora, tmp_path, call, make_entry, settings, said):
    path = tmp_path / "train.yaml"
    path.write_text(OmegaConf.to_yaml({"input_cfg": [make_entry(corpora, tmp_path)]} | SETTINGS | settings))
    status, _, err = call("doctor", path)
    assert status == 2
    assert re.match(f"Error: {said}", err)
    assert err.count("\n") == 1


def test_settings_lie_below_train_ds(corpora, tmp_path):
    path = tmp_path / "train.yaml"
    for found in (
        {"model": {"train_ds": {"use_lhotse": True, "dataset": {"input_cfg": [corpora.entry("small")]}}}},
        {"rate": 16000, "data": {"train_ds": {"sample_rate": "${rate}", "input_cfg": [corpora.entry("small")]}}},
        {"model": {"train_ds": {"input_cfg": [corpora.entry("small")]}}},
        {"input_cfg": [corpora.entry("small")]},
    ):
        path.write_text(OmegaConf.to_yaml(found))
        assert read_train_settings(path)["input_cfg"][0]["type"] == "sharmill"
    path.write_text("trainer: {}\n")
    with raises(ConfigError, "bad_config_file", "train_ds"):
        read_train_settings(path)
    with raises(ConfigError, "missing_input", "none.yaml"):
        read_train_settings(tmp_path / "none.yaml")


@pytest.mark.slow
def test_a_resume_is_verified_in_fresh_processes(corpora):
    cfg = {"input_cfg": [corpora.entry("small")]} | SETTINGS | {"batch_size": 3, "shuffle_buffer_size": 1}
    said = list(stop_and_resume(cfg, ranks=1, then=2, num_batches=3, num_stops=1, tokenizer=None))
    assert said[0] == "1 ranks: 3 batches, 9 examples"
    assert "whole epochs of 8 examples, none twice" in said[-1]


@pytest.mark.slow
def test_buffers_are_named_where_no_epoch_ends(corpora):
    cfg = {"input_cfg": [corpora.entry("small")]} | SETTINGS | {"shuffle_buffer_size": 9}
    said = list(stop_and_resume(cfg, ranks=1, then=1, num_batches=1, num_stops=1, tokenizer=None))
    assert said[-1].startswith(
        "entry 0: no epoch was completed; 1 readers buffer up to 9 examples (shuffle_buffer_size each)"
    )


@pytest.mark.slow
def test_an_epoch_that_differs_without_stops_is_an_error(tmp_path):
    """Three examples are skipped after the first stop, at least one of which was delivered before it."""
    lines = [
        {"audio_filepath": f"{n}.wav", "duration": 1.0, "text": "x", "sampling_rate": 16000, "_skipme": 0}
        for n in range(8)
    ]
    path = tmp_path / "manifest.json"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    entry = {"type": "nemo", "manifest_filepath": str(path)}
    cfg = {"input_cfg": [entry], "force_iterable_dataset": True} | SETTINGS | {"batch_size": 1}
    said = stop_and_resume(cfg, ranks=1, then=1, num_batches=6, num_stops=2, tokenizer=None)
    assert next(said) == "1 ranks: 6 batches, 6 examples"
    path.write_text(path.read_text().replace('"_skipme": 0', '"_skipme": 1', 3))
    with raises(ConfigError, "wrong_state", "entry 0 has 5 examples in an epoch without stops"):
        list(said)
