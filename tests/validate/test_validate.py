"""The checker has no findings for clean datasets; its levels on other ones. ``test_damage`` has all kinds of damage."""

import os
import shutil
from unittest import mock

import numpy as np
import pytest
from support import damage as do
from support.audio import container
from support.project import Project, ToyCodec, check_dataset, copy, lines, raises, reindex, run, stage_of, voice

from sharmill.errors import ConfigError
from sharmill.shar.index import read_dataset
from sharmill.shar.rebuild import rebuild_index
from sharmill.sources.nemo import NemoSource
from sharmill.validate.accounts import ExpectedRecords
from sharmill.validate.shard import MAX_CLIPPING_SHARE, MAX_DIFFERENT_CODES, MAX_SILENCE_SHARE


@pytest.fixture
def dataset(built, tmp_path):
    return copy(built.dataset, tmp_path / "dataset")


@pytest.fixture(autouse=True)
def toy():
    """Make the checker load the codec that made the codes."""
    with (
        mock.patch("sharmill.models.load_codec", return_value=ToyCodec()) as load,
        mock.patch("sharmill.models.find_codec"),
    ):
        yield load


def found(directory, scratch, **level):
    return {(row["code"], row["shard"], row["field"]) for row in check_dataset(directory, scratch, **level).findings}


def kinds(report):
    return {kind.code: kind.count for kind in report.kinds}


def test_a_dataset_without_codecs_and_one_without_cuts_are_clean(project, tmp_path):
    project.add_voices([0.5] * 2, "{}.wav")
    project.write(match={"min_duration": 0.0})
    assert found(project.dataset, tmp_path / "first") == set()
    # Keep the audio root from being empty, since it would count as a disk that is not mounted.
    (project.root / "notes.txt").touch()
    for number in range(2):
        (project.root / f"{number}.wav").unlink()
    assert run(stage_of(project.configure(match={"min_duration": 0.0}), "write"), restart=True).ok
    assert lines(project.dataset / "shards.jsonl")[0]["count"] == 0
    assert found(project.dataset, tmp_path / "second") == set()


def test_a_damage_done_after_a_check_is_found_by_the_next(dataset, tmp_path):
    """This also holds if the number of files and their times stay the same, as after copying an older file."""
    run_dir = tmp_path / "run"
    assert found(dataset, run_dir) == set()
    path = dataset / do.TARGETS
    status = path.stat()
    do.flip_bit(do.TARGETS, 1500)(dataset)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert found(dataset, run_dir) == {("wrong_checksum", 1, "target_audio")}


def test_ids_with_line_breaks_are_no_duplicates(project, tmp_path):
    """The ids differ only before a line break, so their last lines are the same."""
    for name in ("a\nb.wav", "c\nb.wav"):
        project.add(name, voice(0.5, seed=ord(name[0])))
    config = project.write([1, 0], match={"min_duration": 0.0})
    assert {cut["id"] for cut in lines(project.dataset / "cuts/cuts.000000.jsonl.gz")} == {
        "cut-rec-a\nb-0.00-0.50", "cut-rec-c\nb-0.00-0.50",
    }  # fmt: skip
    project.encode(config)
    assert found(project.dataset, tmp_path / "check") == set()


def test_a_folder_that_lies_elsewhere_behind_a_link_is_no_stray(dataset, tmp_path):
    (dataset / "target_audio").rename(tmp_path / "elsewhere")
    (dataset / "target_audio").symlink_to(tmp_path / "elsewhere")
    assert found(dataset, tmp_path / "run") == set()


def test_silent_and_clipped_audio_are_warnings_of_the_deep_level(project, tmp_path):
    num_heard = round(16000 * (1 - MAX_SILENCE_SHARE)) - 800
    quiet, clipped = np.zeros(16000, np.float32), voice(1.0)
    quiet[:num_heard] = voice(1.0)[:num_heard]
    clipped[: round(16000 * MAX_CLIPPING_SHARE) + 2] = 1.0
    for name, samples in (("quiet", quiet), ("clipped", clipped), ("good", voice(1.0))):
        project.add(f"{name}.wav", samples)
    project.write(match={"min_duration": 0.0})
    assert kinds(check_dataset(project.dataset, tmp_path / "default")) == {}
    report = check_dataset(project.dataset, tmp_path / "deep", deep=True)
    # Each item is a target once and a context once, but is decoded only once.
    assert kinds(report) == {"silent_audio": 2, "clipped_audio": 2}
    assert (report.errors, report.warnings, report.units_to_repeat) == (0, 4, [])
    assert report.checked["items decoded"] == 6
    assert report.checked["seconds decoded"] == 3.0
    assert {row["member"] for row in report.findings if row["field"] == "target_audio"} == {
        "cut-rec-quiet-0.00-1.00", "cut-rec-clipped-0.00-1.00",
    }  # fmt: skip


def test_audio_at_the_scale_of_integers_is_an_error(project, tmp_path):
    project.add_voices([0.5] * 2, "{}.wav")
    project.write(match={"min_duration": 0.0}, write={"audio_format": "wav"})
    do.change_item(do.TARGETS.replace("1", "0"), data=lambda _: container(voice(0.5) * 32768, 16000, "WAV", "FLOAT"))(
        project.dataset
    )
    reindex(project.dataset)
    assert found(project.dataset, tmp_path / "default") == set()
    (row,) = check_dataset(project.dataset, tmp_path / "deep", deep=True).findings
    assert (row["code"], row["severity"], row["field"]) == ("bad_audio", "error", "target_audio")
    assert "over_full_scale" in row["sentence"]


@pytest.mark.parametrize(("share", "is_found"), [(MAX_DIFFERENT_CODES * 0.8, False), (MAX_DIFFERENT_CODES * 1.5, True)])
def test_codes_may_differ_by_as_much_as_arithmetic_does(dataset, tmp_path, share, is_found):
    def change(codes):
        codes.reshape(-1)[: round(codes.size * share)] ^= 1
        return codes

    do.change_codes(do.CODES, change)(dataset)
    report = check_dataset(dataset, tmp_path / "run", recheck_codes=1.0)
    assert report.checked["codes that differ"] > 0
    cut_id = lines(dataset / do.CUTS)[0]["id"]
    rows = [(row["shard"], row["field"], row["member"]) for row in report.findings if row["code"] == "different_codes"]
    assert rows == ([(1, "codes_toy/target_codes", cut_id)] if is_found else [])
    # The checksum is wrong in either case; if the codes differ too, the run directory may hold the same wrong codes.
    expected = [("encode/toy", False), ("encode/toy", True)] if is_found else [("encode/toy", False)]
    assert [(unit.stage, unit.encode_again) for unit in report.units_to_repeat] == expected


def test_the_sample_is_a_share_and_does_not_depend_on_the_run(tmp_path):
    project = Project(tmp_path).add_voices([0.1] * 60, "{}.wav")
    project.encode(project.write(write={"shard_size": 7}, match={"min_duration": 0.0}))
    first = check_dataset(project.dataset, tmp_path / "first", recheck_codes=0.25).checked
    assert check_dataset(project.dataset, tmp_path / "second", recheck_codes=0.25).checked == first
    assert 15 <= first["segments encoded again"] <= 45  # about 30 of 120


def test_another_model_is_refused_and_a_moved_one_is_found(dataset, toy, tmp_path):
    check_dataset(dataset, tmp_path / "run", recheck_codes=1.0, codec_models={"toy": "transformers:/there"})
    assert {call.args for call in toy.call_args_list} == {("transformers:/there",)}
    with raises(ConfigError, "unknown_codec", "'other'"):
        check_dataset(dataset, tmp_path / "run", recheck_codes=1.0, codec_models={"other": "builtin"})
    toy.return_value.checksum = "other"
    with raises(ConfigError, "bad_codec", "--codec-model toy=MODEL"):
        check_dataset(dataset, tmp_path / "other", recheck_codes=1.0)


def test_a_dataset_without_contexts_is_checked_at_every_level(without_contexts, tmp_path):
    sources = (NemoSource(manifest=str(without_contexts.folder / "small.json"), audio_root="."),)
    rejects = (str(without_contexts.run_dir / "prepare/rejects.jsonl"),)
    against = ExpectedRecords(sources=sources, rejects=rejects)
    report = check_dataset(without_contexts.dataset, tmp_path / "run", against, deep=True, recheck_codes=1.0)
    assert report.findings == []
    assert report.unchecked == []
    assert report.checked["items decoded"] == report.checked["segments encoded again"] == 7
    assert (report.checked["records found as cuts"], report.checked["records not found"]) == (7, 0)


@pytest.mark.parametrize("lie", [{"context_seconds": 1.0}, {"limits": {"min_similarity": 0.5}}])
def test_seconds_and_limits_without_contexts_are_found(without_contexts, tmp_path, lie):
    dataset = copy(without_contexts.dataset, tmp_path / "dataset")
    do.change_description(**lie)(dataset)
    assert found(dataset, tmp_path / "run") == {("wrong_totals", None, None)}


def test_a_dataset_with_contexts_cannot_pass_for_one_without(dataset, tmp_path):
    """Its description is consistent, but the files and ``shards.jsonl`` still have contexts."""

    def without(fields):
        return [field for field in fields if "context" not in field]

    do.change_description(fields=without, limits={}, context_seconds=0.0)(dataset)
    unnamed = {("wrong_totals", s, f) for s in range(3) for f in ("context_audio", "codes_toy/context_codes")}
    assert found(dataset, tmp_path / "run") == {("wrong_totals", None, None)} | unnamed
    # Remove them from the lines of the index as well.
    for number in range(3):
        do.change_shard(number, context_seconds=0.0, fields=lambda old: {field: old[field] for field in without(old)})(
            dataset
        )
    expected = {("stray_file", None, None)} | {("bad_cut", shard, "cuts") for shard in range(3)}
    assert found(dataset, tmp_path / "run") == expected


def test_a_dataset_whose_contexts_were_removed_is_foreign(dataset, tmp_path):
    for folder in ("context_audio", "codes_toy/context_codes"):
        shutil.rmtree(dataset / folder)
    assert any("without" in line for line in rebuild_index(dataset))
    record = read_dataset(dataset)
    assert (record.contract, record.limits, record.has_contexts) == ("foreign", {}, False)
    assert found(dataset, tmp_path / "run") == set()
