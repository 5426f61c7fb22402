"""Merged datasets: their files, their index, what is refused, and what a killed merge leaves."""

from __future__ import annotations

import shutil
from itertools import count
from unittest import mock

import msgspec
import pytest
from lhotse import CutSet
from support.errors import raises
from support.pipelines import digest, run_sharmill, shar_fields
from support.shar import copy, lines, members_of, rewrite, snapshot
from support.sudden_end import killed_at

from sharmill.errors import ConfigError, DamagedShard
from sharmill.files.locks import FolderLock
from sharmill.files.staging import STAGING_NAME
from sharmill.grow import placing
from sharmill.grow.merge import merge_datasets
from sharmill.shar import open_shar
from sharmill.shar.dataset import ShardedDataset


def test_the_shards_are_those_of_all_in_order(coded, tmp_path):
    merged = merge_datasets(coded, tmp_path / "out")
    out, parts = ShardedDataset(tmp_path / "out"), [ShardedDataset(path) for path in coded]
    before = [(part, shard) for part in parts for shard in part.shards()]
    assert [shard.index for shard in out.shards()] == list(range(len(before))) == [0, 1, 2, 3]
    for shard, (part, old) in zip(out.shards(), before, strict=True):
        assert shard.count == old.count
        for field, file in shard.fields.items():
            assert out.file(field, shard.index) == out.directory / file.file
            assert (out.directory / file.file).samefile(part.file(field, old.index))
    assert merged.record == out.record()
    assert (merged.record.name, merged.record.num_cuts, merged.record.num_shards) == ("out", 10, 4)
    assert merged.record.target_seconds == pytest.approx(sum(part.record().target_seconds for part in parts))
    assert (merged.placed.linked, merged.placed.copied) == (20, 0)


def test_copies_have_the_same_bytes_as_links(plain, tmp_path):
    file = "cuts/cuts.000000.jsonl.gz"
    merge_datasets(plain, tmp_path / "linked", name="three")
    merged = merge_datasets(plain, tmp_path / "copied", copy=True, name="three")
    assert digest(tmp_path / "copied") == digest(tmp_path / "linked")
    assert (merged.placed.linked, merged.placed.copied) == (0, 18)
    assert not (tmp_path / "copied" / file).samefile(plain[0] / file)


def test_where_no_links_are_possible_files_are_copied(plain, tmp_path):
    with mock.patch.object(placing.os, "link", side_effect=OSError(18, "Invalid cross-device link")):
        merged = merge_datasets(plain[:2], tmp_path / "out")
    assert (merged.placed.linked, merged.placed.copied) == (0, 12)


@pytest.mark.slow
def test_the_checker_finds_nothing_and_readers_see_all_cuts(coded, tmp_path):
    done = run_sharmill("merge", *coded, tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert "4 shards, 10 cuts" in done.stdout
    assert "20 files linked, 0 copied" in done.stdout
    checked = run_sharmill("validate", tmp_path / "out", "--deep")
    assert checked.returncode == 0, checked.stdout
    expected = [cut["id"] for path in coded for file in sorted((path / "cuts").iterdir()) for cut in lines(file)]
    assert [cut.id for cut in open_shar(tmp_path / "out", ["target_codes"])] == expected
    cuts = list(CutSet.from_shar(fields=shar_fields(tmp_path / "out", "a")))
    assert [cut.id for cut in cuts] == expected
    assert all(len(cut.load_target_codes()) == 3 for cut in cuts)


def test_a_cut_of_two_datasets_is_named(plain, tmp_path):
    same = copy(plain[0], tmp_path / "same")
    cut_id = lines(same / "cuts/cuts.000000.jsonl.gz")[0]["id"]
    with raises(ConfigError, "duplicate_cut", cut_id, str(plain[0]), str(same)):
        merge_datasets([plain[0], plain[1], same], tmp_path / "out")
    with raises(ConfigError, "duplicate_cut", str(plain[0])):
        merge_datasets([plain[0], plain[0]], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["same"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"audio_format": "wav"}, ["audio_format", "'flac'", "'wav'"]),
        ({"sampling_rate": 8000}, ["sampling_rate", "8000"]),
        ({"limits": {"min_duration": 9.0}}, ["limits", "9.0"]),
    ],
)
def test_what_differs_is_named(plain, tmp_path, change, named):
    other = change_record(copy(plain[1], tmp_path / "other"), **change)
    with raises(ConfigError, "unlike_datasets", *named, str(plain[0]), str(other)):
        merge_datasets([plain[0], other], tmp_path / "out")


def test_codecs_must_be_the_same(coded, plain, tmp_path):
    with raises(ConfigError, "unlike_datasets", "codecs", "['a']", "[]"):
        merge_datasets([coded[0], plain[0]], tmp_path / "out")
    other = copy(coded[1], tmp_path / "other")
    codecs = msgspec.to_builtins(ShardedDataset(other).record().codecs)
    change_record(other, codecs=[codecs[0] | {"checksum": "another"}])
    with raises(ConfigError, "unlike_datasets", "checksum of the codec 'a'", "another"):
        merge_datasets([coded[0], other], tmp_path / "out")
    change_record(other, codecs=[codecs[0] | {"model": "nemo:/new/place/model.nemo", "devices": ["A GPU"]}])
    merged = merge_datasets([coded[0], other], tmp_path / "out").record.codecs[0]
    assert merged.model == "builtin"
    assert merged.devices == ["A GPU", "cpu"]


def test_the_devices_that_chose_contexts_are_those_of_all_parts(plain, tmp_path):
    other = change_record(copy(plain[1], tmp_path / "other"), match_devices=["A GPU"])
    assert merge_datasets([plain[0], other], tmp_path / "out").record.match_devices == ["A GPU", "cpu"]
    assert merge_datasets(plain[:2], tmp_path / "cpus").record.match_devices == []


def test_a_dataset_of_another_tool_is_refused(plain, tmp_path):
    other = change_record(copy(plain[1], tmp_path / "other"), contract="foreign")
    with raises(ConfigError, "unlike_datasets", str(other)):
        merge_datasets([plain[0], other], tmp_path / "out")


def test_what_is_not_free_is_refused(plain, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    with raises(ConfigError, "foreign_output", "full"):
        merge_datasets(plain, tmp_path / "full")
    (tmp_path / "file").write_text("mine")
    with raises(ConfigError, "foreign_output", "file"):
        merge_datasets(plain, tmp_path / "file")
    with raises(ConfigError, "bad_usage", str(plain[0])):
        merge_datasets(plain, plain[0] / "out")
    with raises(ConfigError, "no_dataset", "absent"):
        merge_datasets([plain[0], tmp_path / "absent"], tmp_path / "out")
    (tmp_path / "empty").mkdir()
    assert merge_datasets(plain, tmp_path / "empty").record.num_cuts == 12


def test_a_damaged_source_is_named_and_nothing_is_left(plain, tmp_path):
    damaged = copy(plain[1], tmp_path / "damaged")
    file = damaged / "context_audio/recording.000001.tar"
    file.write_bytes(file.read_bytes()[:-1])
    with raises(DamagedShard, "damaged_shard", str(file)):
        merge_datasets([plain[0], damaged], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    file.unlink()
    with raises(DamagedShard, "damaged_shard", str(file)):
        merge_datasets([plain[0], damaged], tmp_path / "out")
    rewrite(damaged / "shards.jsonl", lines(damaged / "shards.jsonl")[:1])
    with raises(DamagedShard, "damaged_shard", "1 shards instead of 2"):
        merge_datasets([plain[0], damaged], tmp_path / "out")


def test_a_second_merge_into_the_same_place_is_refused_meanwhile(plain, tmp_path):
    staging = tmp_path / f".out{STAGING_NAME}"
    staging.mkdir()
    with FolderLock(staging), raises(ConfigError, "locked", str(staging)):
        merge_datasets(plain, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_merge_that_is_killed_anywhere_leaves_nothing_half_done_and_is_repeated(plain, tmp_path):
    merge_datasets(plain[:2], tmp_path / "expected", name="out")
    expected, out = digest(tmp_path / "expected"), tmp_path / "out"
    for change in count():
        if not killed_at(change, lambda: merge_datasets(plain[:2], out), below=str(tmp_path)):
            break
        if out.exists():
            assert digest(out) == expected
            shutil.rmtree(out)
    assert change > 20
    assert digest(out) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected", "out"]


def change_record(dataset, **changes):
    """Rewrites ``dataset.json`` with other values."""
    path = dataset / "dataset.json"
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | changes))
    return dataset


def test_what_was_killed_at_the_very_end_leaves_nothing_beside_it_for_long(plain, tmp_path):
    merge_datasets(plain, tmp_path / "both")
    (tmp_path / f".both{STAGING_NAME}/.sharmill-lock").mkdir(parents=True)
    with raises(ConfigError, "foreign_output", "both", "not empty"):
        merge_datasets(plain, tmp_path / "both")
    assert [path.name for path in tmp_path.iterdir()] == ["both"]


def test_the_sources_stay_as_they_are(plain, tmp_path):
    before = [snapshot(path) for path in plain]
    merge_datasets(plain, tmp_path / "out")
    assert [snapshot(path) for path in plain] == before
    assert members_of(tmp_path / "out/target_audio/recording.000002.tar") == members_of(
        plain[1] / "target_audio/recording.000000.tar"
    )
