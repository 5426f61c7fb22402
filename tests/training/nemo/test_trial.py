"""``sharmill doctor`` and ``sharmill verify-resume``."""

from __future__ import annotations

import gzip
import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from omegaconf import OmegaConf
from support.errors import raises

from sharmill.errors import ConfigError
from sharmill.shar import open_shar
from sharmill.training.nemo import verify
from sharmill.training.nemo.doctor import examine
from sharmill.training.nemo.examples import count_lines
from sharmill.training.nemo.loader_settings import resolve_settings
from sharmill.training.nemo.trial import Seen, SeenExamples, TrialPart, read_train_settings
from sharmill.training.nemo.verify import stop_and_resume

SETTINGS = {"batch_size": 2, "shuffle": True, "shard_seed": "randomized", "seed": 1, "shuffle_buffer_size": 3}


def advice(settings, ranks=2, tokenizer=None):
    return "\n".join(examine(settings, ranks=ranks, num_batches=12, tokenizer=tokenizer))


def test_the_doctor_says_who_reads_what(corpora):
    text = {"type": "txt", "paths": str(corpora.text), "weight": 0.5}
    tokens = {"use_multimodal_sampling": True, "token_equivalent_duration": 0.1, "prompt_format": "plain"}
    said = advice({"input_cfg": [corpora.entry("large", weight=0.5), text]} | SETTINGS | tokens, tokenizer="bytes")
    assert "2 ranks with 1 worker each" in said
    assert f"sharmill {corpora.large}: one order, of which each of 2 readers has its part" in said
    assert f"txt {corpora.text}: one order" in said
    assert "can be resumed exactly" in said
    assert "12 batches of 2 to 2 examples\n" in said
    assert re.search(r"\naudio: \d+\.\d % of the batches is padding\ntokens: \d+\.\d % of", said)
    assert f"txt {corpora.text}: 40 examples, " in said
    assert "epochs in 1000 steps" in said


def test_the_doctor_names_what_stops_a_resume_and_what_costs(corpora):
    cfg = {"input_cfg": [corpora.entry("large")]} | SETTINGS
    assert "every rank reads all of it in an order of its own" in advice(cfg | {"shard_seed": "trng"})
    assert "ignored: trim_silence" in advice(cfg | {"trim_silence": True})
    assert "cannot be resumed: resumable=True is for streaming without end" in advice(cfg | {"shard_seed": "trng"})
    assert "map style: the main process of every rank reads all manifests" in advice(cfg | {"force_map_dataset": True})
    buckets = {"bucket_duration_bins": [1.0, 2.0, 50.0], "batch_duration": 4.0, "bucket_buffer_size": 8}
    assert "buckets that no batch came from: 50.0 to the longest" in advice(cfg | buckets)
    with raises(ConfigError, "unknown_key", "'batch_sise'"):
        advice(cfg | {"batch_sise": 2})


def test_the_doctor_knows_parts_epochs_and_padding(corpora, tmp_path):
    cfg = {"input_cfg": [corpora.entry("large")]} | SETTINGS
    assert "canonical: 4 parts" in advice(cfg | {"canonical": 4})
    whole = {"force_map_dataset": True, "force_finite": True}
    assert "takes one batch in 2" in advice(cfg | whole)
    assert "the epoch of the first rank ends after 6 batches" in advice(cfg | whole)
    # Pairs of n + 1 letters on both sides: a batch of all ten has 110 of 200 tokens.
    pairs = {"type": "txt_pair", "source_paths": str(corpora.pairs[0]), "target_paths": str(corpora.pairs[1])}
    tokens = {"use_multimodal_sampling": True, "prompt_format": "plain", "batch_size": 10, "shuffle": False}
    said = advice({"input_cfg": [pairs]} | SETTINGS | tokens | {"shard_seed": 1}, ranks=1, tokenizer="bytes")
    assert "audio" not in said
    assert "\ntokens: 45.0 % of the batches is padding" in said


def test_the_doctor_names_empty_buckets_of_two_dimensions(corpora):
    """Cut n has n % 6 + 1 letters: none in the first bucket has more than six."""
    bins = {"bucket_duration_bins": [[1.5, 6], [1.5, 90], [9.0, 6]], "bucket_batch_size": [2, 2, 2]}
    cfg = {"input_cfg": [corpora.entry("large")]} | SETTINGS | bins | {"batch_size": None, "bucket_buffer_size": 8}
    assert "buckets that no batch came from: [1.5, 90]" in advice(cfg, tokenizer="bytes")


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


def test_another_section_is_read(corpora, tmp_path):
    path = tmp_path / "train.yaml"
    entry = [corpora.entry("small")]
    path.write_text(OmegaConf.to_yaml({"train_ds": {"input_cfg": []}, "validation_ds": {"input_cfg": entry}}))
    assert read_train_settings(path, "validation_ds")["input_cfg"] == entry


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        ("- 1\n", "bad_config_file", "is a list"),
        ("train_ds: [1]\n", "bad_config_file", "train_ds has no settings"),
        ("train_ds: 1\n", "bad_config_file", "train_ds has no settings"),
        ("input_cfg: ${nope}\n", "bad_config_value", "at input_cfg: Interpolation key 'nope' not found"),
        ("train_ds: ${nope}\n", "bad_config_value", "at train_ds: Interpolation key 'nope' not found"),
        ("input_cfg: ${no_resolver:1}\n", "bad_config_value", "no_resolver"),
        ("input_cfg: ${open\n", "bad_config_file", "cannot read"),
        ("a: b: c\n", "bad_config_file", "cannot read"),
        ("\x00", "bad_config_file", "cannot read"),
        ("[" * 5000, "bad_config_file", "cannot read"),
    ],
)
def test_what_is_no_settings_is_told_in_one_line(tmp_path, text, code, told):
    path = tmp_path / "train.yaml"
    path.write_text(text)
    with raises(ConfigError, code, "train.yaml", told) as caught:
        read_train_settings(path)
    assert "\n" not in str(caught.value)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "train.yaml")
    with raises(ConfigError, "bad_config_file", "not a regular file"):
        read_train_settings(tmp_path / "train.yaml")
    with raises(ConfigError, "bad_manifest", "not a regular file"):
        count_lines(str(tmp_path / "train.yaml"))


def test_no_command_is_run_to_count_lines(tmp_path):
    with raises(ConfigError, "bad_config_value", "is a command"):
        count_lines(f"pipe:echo > {tmp_path}/run; echo a")
    assert not (tmp_path / "run").exists()
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"a\nb\n"))
    assert count_lines(str(tmp_path / "a.txt.gz")) == 2


def test_files_of_an_input_cfg_are_read_likewise(tmp_path):
    (tmp_path / "list.yaml").write_text("- type: ${nope}\n")
    with raises(ConfigError, "bad_config_value", "list.yaml", "nope"):
        resolve_settings({"input_cfg": str(tmp_path / "list.yaml")})
    os.mkfifo(tmp_path / "fifo.yaml")
    with raises(ConfigError, "bad_config_file", "not a regular file"):
        resolve_settings({"input_cfg": str(tmp_path / "fifo.yaml")})


@pytest.mark.slow
def test_a_resume_is_verified_in_fresh_processes(corpora):
    cfg = {"input_cfg": [corpora.entry("small")]} | SETTINGS | {"batch_size": 3, "shuffle_buffer_size": 1}
    said = list(stop_and_resume(cfg, ranks=1, then=2, num_batches=3, num_stops=1, tokenizer=None))
    assert said[0] == "1 ranks: 3 batches, 9 examples"
    assert "whole epochs of 8 examples, none twice" in said[-1]


def test_an_example_that_comes_twice_is_an_error(monkeypatch):
    state = {"readers": [{"epoch": 0}]}
    part = TrialPart([[Seen((0, 0, 0, 5, 1, 2))]], {})
    monkeypatch.setattr(verify, "check_ranks", lambda *_: None)
    monkeypatch.setattr(verify, "try_ranks", lambda *_: ([part], state))
    with raises(ConfigError, "wrong_state", "entry 0", "epoch 0", "before stop 1"):
        list(stop_and_resume({}, ranks=1, then=1, num_batches=1, num_stops=1, tokenizer=None))


@pytest.mark.parametrize(("lost", "unstopped_epoch"), [(0, 1), (1, 1), (0, 0)])
def test_an_epoch_is_compared_with_one_without_stops(monkeypatch, lost, unstopped_epoch):
    """Two turns of two examples each, or one lost; the same epoch at once has four."""

    def some(begin, end):
        return [TrialPart([[Seen((0, 0, 0, 0, 0, item)) for item in range(begin, end)]], {})]

    def tried(_, __, world_size, ___, ____, state):
        if world_size == 1:
            return some(0, 4), {"readers": [{"epoch": unstopped_epoch}]}
        return (some(2, 4 - lost), {"readers": [{"epoch": 1}]}) if state else (some(0, 2), {"readers": [{"epoch": 0}]})

    monkeypatch.setattr(verify, "check_ranks", lambda *_: None)
    monkeypatch.setattr(verify, "try_ranks", tried)
    told = stop_and_resume({}, ranks=2, then=3, num_batches=1, num_stops=1, tokenizer=None)
    if lost:
        with raises(ConfigError, "wrong_state", "4 examples in an epoch without stops", "[3]"):
            list(told)
        return
    compared = "as many as" if unstopped_epoch else "not compared with an epoch"
    assert list(told)[-1] == f"entry 0: 1 whole epochs of 4 examples, none twice, {compared} without stops"


@pytest.mark.parametrize("settings", [{"canonical": 4}, {"input_cfg": [{"type": "nonsense"}]}])
def test_both_numbers_of_ranks_are_checked_first(corpora, monkeypatch, settings):
    """In this process, since another one imports NeMo for seconds."""
    monkeypatch.setattr(verify, "fresh_python", lambda: ThreadPoolExecutor(1))
    monkeypatch.setattr(verify, "try_ranks", None)
    cfg = {"input_cfg": [corpora.entry("small")]} | SETTINGS | settings
    told = {"canonical": ("split_wrong", "3 readers"), "input_cfg": ("unknown_name", "nonsense")}
    with raises(ConfigError, *told[next(iter(settings))]):
        next(stop_and_resume(cfg, ranks=2, then=3, num_batches=1, num_stops=1, tokenizer=None))


def test_an_undivided_entry_before_others_changes_no_lengths(corpora):
    """Reader 0 is that of the second sampler, since a pipe has no reader."""
    pipe = {"type": "txt", "paths": "pipe:echo a"}
    tokens = {"use_multimodal_sampling": True, "prompt_format": "plain", "batch_size": 2}
    sections = {
        "text": {"input_cfg": [pipe], **tokens},
        "speech": {"input_cfg": [corpora.entry("small")], "batch_size": 2},
    }
    seen = SeenExamples({"multi_config": True, "shuffle": True, **sections})
    (cut, *_) = open_shar(corpora.small, [])
    cut.shar_reader = 0
    (found,) = seen[[cut]]
    assert (found.place[0], found.length) == (0, cut.duration)
