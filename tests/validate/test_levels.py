"""The deeper levels: what decoding tells, and codes that are made again."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from support.errors import raises
from support.shar import Project, ToyCodec, copy, run, voice

from sharmill.engine.rundir import RunDir
from sharmill.errors import ConfigError
from sharmill.shar.arrays import array_from_bytes, array_to_bytes
from sharmill.shar.items import FieldWriter, Item, read_field
from sharmill.validate.checked_dataset import read_checked_dataset
from sharmill.validate.levels import MAX_CLIPPING_SHARE, MAX_SILENCE_SHARE, measure
from sharmill.validate.recheck import MAX_DIFFERENT_CODES, Rechecker
from sharmill.validate.shard import ShardCheck
from sharmill.validate.stage import ValidateStage


def validate(directory, scratch, **options):
    stage = ValidateStage(directory, RunDir(scratch), **options)
    assert run(stage).ok
    return stage.report()


def kinds(report):
    return {kind.code: kind.count for kind in report.kinds}


def levels_of(samples, rate=16000):
    from sharmill.audio.encoding import encode

    return measure(Item("x", "wav", encode(samples.astype(np.float32), rate, "wav"), {}))


def test_shares_of_silence_and_clipping():
    tone = voice(1.0)
    assert (levels_of(tone).silence, levels_of(tone).clipping) == (0.0, 0.0)
    assert levels_of(np.concatenate([tone, np.zeros(48000)])).silence == 0.75
    loud = tone.copy()
    loud[:160] = 1.0
    loud[160:320] = -1.0
    assert levels_of(loud).clipping == 320 / 16000
    # Shorter than one stretch.
    assert levels_of(np.zeros(10)).silence == 1.0
    assert levels_of(tone[:10]).num_samples == 10


def test_silent_and_clipped_audio_are_warnings_of_the_deep_level(project, tmp_path):
    quiet = np.zeros(16000, np.float32)
    quiet[: round(16000 * (1 - MAX_SILENCE_SHARE)) - 800] = voice(1.0)[: round(16000 * (1 - MAX_SILENCE_SHARE)) - 800]
    clipped = voice(1.0)
    clipped[: round(16000 * MAX_CLIPPING_SHARE) + 2] = 1.0
    for name, samples in (("quiet", quiet), ("clipped", clipped), ("good", voice(1.0))):
        project.add(f"{name}.wav", samples)
    project.write(match={"min_duration": 0.0})
    assert kinds(validate(project.dataset, tmp_path / "default")) == {}
    report = validate(project.dataset, tmp_path / "deep", deep=True)
    # Each is a target once and a context once, and decoded once.
    assert kinds(report) == {"silent_audio": 2, "clipped_audio": 2}
    assert (report.errors, report.warnings, report.units_to_repeat) == (0, 4, [])
    assert report.checked["items decoded"] == 6
    assert report.checked["seconds decoded"] == 3.0
    assert {row["member"] for row in report.findings if row["field"] == "target_audio"} == {
        "cut-rec-quiet-0.00-1.00", "cut-rec-clipped-0.00-1.00",
    }  # fmt: skip


@pytest.fixture
def encoded(built, tmp_path):
    return copy(built.dataset, tmp_path / "dataset")


@pytest.fixture
def toy():
    """The codec that made the codes is what is loaded."""
    with (
        mock.patch("sharmill.models.recorded.load_codec", return_value=ToyCodec()) as load,
        mock.patch("sharmill.models.recorded.find_codec"),
    ):
        yield load


def change_codes(directory, share):
    """Other values in a share of the codes of the first target of shard 1."""
    path = directory / "codes_toy/target_codes/codes.000001.tar"
    items = list(read_field(path))
    codes = array_from_bytes(items[0].data, "x").copy()
    different = round(codes.size * share)
    codes.reshape(-1)[:different] ^= 1
    items[0] = Item(items[0].cut_id, "npy", array_to_bytes(codes), items[0].metadata)
    with FieldWriter(path) as writer:
        for item in items:
            writer.add(item)
    return different, items[0].cut_id


def test_codes_that_are_made_again_are_the_same(encoded, toy, tmp_path):
    report = validate(encoded, tmp_path / "run", recheck_codes=1.0)
    assert report.findings == []
    assert report.checked["segments encoded again"] == 14
    assert report.checked["codes that differ"] == 0
    assert report.checked["codes compared"] > 1000


@pytest.mark.parametrize(("share", "is_found"), [(MAX_DIFFERENT_CODES * 0.8, False), (MAX_DIFFERENT_CODES * 1.5, True)])
def test_codes_may_differ_by_as_much_as_arithmetic_does(encoded, toy, tmp_path, share, is_found):
    different, cut_id = change_codes(encoded, share)
    report = validate(encoded, tmp_path / "run", recheck_codes=1.0)
    assert report.checked["codes that differ"] == different > 0
    found = [(row["shard"], row["field"], row["member"]) for row in report.findings if row["code"] == "different_codes"]
    assert found == ([(1, "codes_toy/target_codes", cut_id)] if is_found else [])
    # Its checksum is wrong in either case; the wrong codes may also be those of the run directory.
    expected = ["assemble/toy", "encode/toy"] if is_found else ["assemble/toy"]
    assert [unit.stage for unit in report.units_to_repeat] == expected


def test_the_sample_is_a_share_and_does_not_depend_on_the_run(tmp_path, toy):
    project = Project(tmp_path)
    for number in range(60):
        project.add(f"{number}.wav", voice(0.1, seed=number))
    project.encode(project.write(write={"shard_size": 7}, match={"min_duration": 0.0}))
    first = validate(project.dataset, tmp_path / "first", recheck_codes=0.25).checked
    assert validate(project.dataset, tmp_path / "second", recheck_codes=0.25).checked == first
    assert 15 <= first["segments encoded again"] <= 45  # 30 of 120, give or take


@pytest.mark.parametrize(("deep", "share"), [(True, 0.0), (False, 1.0), (False, 1e-9), (True, 1.0)])
def test_progress_is_told_item_by_item_up_to_the_cost_of_the_shard(encoded, toy, deep, share):
    subject = read_checked_dataset(encoded)
    recheck = Rechecker(subject, share) if share else None
    if recheck is not None:
        recheck.load()
    for shard in subject.shards:
        steps = []
        ShardCheck(subject, deep=deep, recheck=recheck)(shard, steps.append)
        assert len(steps) == (deep + bool(share)) * 2 * shard.size
        assert sum(steps) == pytest.approx(shard.record.target_seconds + shard.record.context_seconds, abs=2e-3)


def test_a_sample_without_a_segment_is_told(encoded, toy, tmp_path):
    report = validate(encoded, tmp_path / "run", recheck_codes=1e-9)
    assert any("no segment fell in the sample" in phrase for phrase in report.unchecked)


def test_another_model_is_refused(encoded, toy, tmp_path):
    toy.return_value.checksum = "other"
    with raises(ConfigError, "bad_codec", "--codec-model toy=MODEL"):
        validate(encoded, tmp_path / "run", recheck_codes=1.0)


def test_a_model_that_has_moved_is_looked_for_where_it_is_said(encoded, toy, tmp_path):
    validate(encoded, tmp_path / "run", recheck_codes=1.0, codec_models={"toy": "transformers:/there"})
    assert {call.args for call in toy.call_args_list} == {("transformers:/there",)}
    with raises(ConfigError, "unknown_codec", "'other'"):
        validate(encoded, tmp_path / "run", recheck_codes=1.0, codec_models={"other": "builtin"})


def test_a_model_that_is_not_there_is_an_error_before_any_work(encoded, tmp_path):
    with raises(ConfigError, "bad_model", "--codec-model toy=MODEL"):
        validate(encoded, tmp_path / "run", recheck_codes=1.0, codec_models={"toy": "nemo:/nowhere/x.nemo"})
