"""The checker: a clean dataset has no findings, and what it says of a damaged one. All kinds are in ``test_damage``."""

from __future__ import annotations

import os

import numpy as np
import pytest
from support.damage import CODES, CUTS, TARGETS, change_codes, change_item, change_items, flip_bit, swap_items
from support.errors import raises
from support.shar import Project, ToyCodec, copy, lines, loading, put, reindex, run, run_codec, snapshot, voice

from sharmill.engine.rundir import RunDir
from sharmill.errors import ConfigError
from sharmill.validate.stage import ValidateStage
from sharmill.write.stage import WriteStage


@pytest.fixture
def dataset(built, tmp_path):
    return copy(built.dataset, tmp_path / "dataset")


def check(directory, scratch, **options):
    """The findings as (code, shard, where)."""
    stage = ValidateStage(directory, RunDir(scratch), **options)
    result = run(stage)
    assert result.ok, result.failures
    return [(finding.code, finding.shard, finding.where) for finding in stage.findings()]


def codes_of(findings):
    return sorted({code for code, _, _ in findings})


def test_a_clean_dataset_has_no_findings_and_stays_as_it_is(dataset, tmp_path):
    before = snapshot(dataset)
    times = {path: path.stat().st_mtime_ns for path in dataset.rglob("*")}
    assert check(dataset, tmp_path / "run") == []
    assert check(dataset, tmp_path / "deep", deep=True) == []
    assert snapshot(dataset) == before
    assert {path: path.stat().st_mtime_ns for path in dataset.rglob("*")} == times


def test_a_dataset_without_codecs_and_one_without_cuts_are_clean(project, tmp_path):
    for number in range(2):
        project.add(f"{number}.wav", voice(0.5, seed=number))
    project.write(match={"min_duration": 0.0})
    assert check(project.dataset, tmp_path / "first") == []
    # An empty audio root would be that of a disk that is not mounted.
    (project.root / "notes.txt").touch()
    for number in range(2):
        (project.root / f"{number}.wav").unlink()
    assert run(WriteStage(project.configure(match={"min_duration": 0.0})), restart=True).ok
    assert lines(project.dataset / "shards.jsonl")[0]["count"] == 0
    assert check(project.dataset, tmp_path / "second") == []


def test_a_rank_waits_where_it_sees_an_index_that_the_plan_was_not_made_of(dataset, tmp_path):
    stage = ValidateStage(dataset, RunDir(tmp_path / "run"))
    assert run(stage).ok
    assert stage.sees_input()
    index = dataset / "shards.jsonl"
    planned = index.read_bytes()
    index.write_bytes(planned.splitlines(keepends=True)[0])
    assert not stage.sees_input()
    index.write_bytes(planned)
    assert stage.sees_input()


def test_what_is_no_dataset_is_a_configuration_error(tmp_path):
    with raises(ConfigError, "no_dataset"):
        check(tmp_path, tmp_path / "run")


@pytest.mark.parametrize("name", ["dataset.json", "shards.jsonl"])
@pytest.mark.parametrize(("content", "code"), [(b"{", "damaged"), (None, "missing_file")])
def test_a_damaged_or_lost_index_is_found_and_the_rest_is_checked(dataset, tmp_path, name, content, code):
    (dataset / name).unlink() if content is None else (dataset / name).write_bytes(content)
    assert check(dataset, tmp_path / "run") == [(code, None, name)]
    change_items(CODES, swap_items)(dataset)
    assert "wrong_id" in codes_of(check(dataset, tmp_path / "run"))


def test_a_finding_names_shard_and_place(dataset, tmp_path):
    flip_bit(TARGETS, 1500)(dataset)
    assert check(dataset, tmp_path / "run") == [("wrong_checksum", 1, TARGETS)]
    change_codes(CODES, lambda codes: codes + 64)(dataset)
    cut_id = lines(dataset / CUTS)[0]["id"]
    findings = check(dataset, tmp_path / "run")
    assert ("bad_codes", 1, f"codes_toy/target_codes: {cut_id}") in findings


def test_only_the_deep_check_sees_what_only_decoding_tells(project, tmp_path):
    """A NaN in a WAV of floats: header, length and checksums are as they should be."""
    for number in range(2):
        project.add(f"{number}.wav", voice(0.5, seed=number), subtype="FLOAT")
    project.write(write={"audio_format": "wav"}, match={"min_duration": 0.0})
    nan = np.float32(np.nan).tobytes()
    change_item("target_audio/recording.000000.tar", data=lambda data: data[:-4] + nan)(project.dataset)
    reindex(project.dataset)
    assert check(project.dataset, tmp_path / "quick") == []
    assert codes_of(check(project.dataset, tmp_path / "deep", deep=True)) == ["bad_audio"]


def test_a_damage_done_after_a_check_is_found_by_the_next(dataset, tmp_path):
    """Also where it keeps the number of files and their times, as copying an older file does."""
    run_dir = tmp_path / "run"
    assert check(dataset, run_dir) == []
    path = dataset / TARGETS
    status = path.stat()
    flip_bit(TARGETS, 1500)(dataset)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert codes_of(check(dataset, run_dir)) == ["wrong_checksum"]


def test_ids_with_line_breaks_are_no_duplicates(project, tmp_path):
    """Of ids that differ before a line break only, the ends are the same."""
    for name in ("a\nb.wav", "c\nb.wav"):
        project.add(name, voice(0.5, seed=ord(name[0])))
    config = project.write([1, 0], match={"min_duration": 0.0})
    assert {cut["id"] for cut in lines(project.dataset / "cuts/cuts.000000.jsonl.gz")} == {
        "cut-rec-a\nb-0.00-0.50", "cut-rec-c\nb-0.00-0.50",
    }  # fmt: skip
    project.encode(config)
    assert check(project.dataset, tmp_path / "check") == []


def test_a_folder_that_lies_elsewhere_behind_a_link_is_no_stray(dataset, tmp_path):
    (dataset / "target_audio").rename(tmp_path / "elsewhere")
    (dataset / "target_audio").symlink_to(tmp_path / "elsewhere")
    assert check(dataset, tmp_path / "run") == []


def test_two_codecs_are_both_checked(tmp_path):
    project = Project(tmp_path / "two")
    project.folder.mkdir()
    for number in range(3):
        project.add(f"{number}.wav", voice(0.5, seed=number))
    config = project.write(match={"min_duration": 0.0})
    for name, frame in (("a", 320), ("b", 160)):
        with loading(ToyCodec(samples_per_frame=frame)):
            run_codec(config, name)
    assert check(project.dataset, tmp_path / "first") == []
    change_codes("codes_b/target_codes/codes.000000.tar", np.negative)(project.dataset)
    reindex(project.dataset)
    ((code, shard, where),) = check(project.dataset, tmp_path / "second")
    assert (code, shard, where.split(":")[0]) == ("bad_codes", 0, "codes_b/target_codes")


def test_audio_put_in_from_outside_is_found(dataset, tmp_path):
    other = put(tmp_path / "other.flac", voice(0.9)).read_bytes()
    change_item(TARGETS, 1, data=other)(dataset)
    reindex(dataset)
    assert codes_of(check(dataset, tmp_path / "run")) == ["bad_audio"]
