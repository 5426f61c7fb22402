"""Splits by speaker: who goes where, that every cut ends in one split as it was, and what is refused."""

from __future__ import annotations

import shutil
from collections import Counter
from itertools import count

import numpy as np
import pytest
from support.errors import raises
from support.growing import make_dataset
from support.pipelines import digest, read_with_lhotse, run_sharmill
from support.shar import Project, copy, lines, members_of, rewrite, snapshot, voice
from support.sudden_end import killed_at

from sharmill.errors import ConfigError, FatalError
from sharmill.grow.parts import SourceDataset
from sharmill.grow.speakers import SpeakerTable
from sharmill.grow.split import split_dataset
from sharmill.shar.dataset import ShardedDataset


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    """Six voices of two cuts each, with the codec a."""
    return make_dataset(tmp_path_factory.mktemp("speech") / "s", "s", 6, codecs="a").dataset


def cuts_of(dataset):
    return [cut for file in sorted((dataset / "cuts").iterdir()) for cut in lines(file)]


def items_of(dataset, field):
    """The members of a field over all shards, in order."""
    return [member for file in sorted((dataset / field).iterdir()) for member in members_of(file)]


def split(speech, out, **options):
    return split_dataset(speech, out, {"valid": 0.2, "test": 0.2}, workers=1, **options)


def test_every_cut_is_in_one_split_as_it_was_and_no_speaker_in_two(speech, tmp_path):
    made = split(speech, tmp_path / "out")
    names = [part.name for part in made]
    assert names == ["train", "valid", "test"] == [path.name for path in sorted_by(names, tmp_path / "out")]
    cuts = {name: cuts_of(tmp_path / "out" / name) for name in names}
    assert Counter(cut["id"] for part in cuts.values() for cut in part) == Counter(cut["id"] for cut in cuts_of(speech))
    speakers = {name: {cut["supervisions"][0]["speaker"] for cut in part} for name, part in cuts.items()}
    assert [len(speakers[name]) for name in names] == [part.num_speakers for part in made]
    assert sum(len(found) for found in speakers.values()) == len(set.union(*speakers.values())) == 6
    for field in ShardedDataset(speech).record().fields[1:]:
        whole = dict(items_of(speech, field))
        parts = [member for name in names for member in items_of(tmp_path / "out" / name, field)]
        assert len(parts) == len(whole)
        assert dict(parts) == whole
    # In the order of the dataset, in shards of its size.
    order = [cut["id"] for cut in cuts_of(speech)]
    for name in names:
        assert (ids := [cut["id"] for cut in cuts[name]]) == sorted(ids, key=order.index)
        assert [shard.count for shard in ShardedDataset(tmp_path / "out" / name).shards()][:-1] in ([], [3], [3, 3])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def sorted_by(names, folder):
    return sorted(folder.iterdir(), key=lambda path: names.index(path.name))


def test_the_totals_add_up_and_the_shares_are_near_the_wish(speech, tmp_path):
    made = split(speech, tmp_path / "out")
    total = ShardedDataset(speech).record()
    for key in ("num_cuts", "target_seconds", "context_seconds"):
        assert sum(getattr(part.record, key) for part in made) == pytest.approx(getattr(total, key), abs=0.005)
    for part in made[1:]:
        assert part.record.target_seconds / total.target_seconds == pytest.approx(0.2, abs=0.06)
        assert part.record.name == f"s_{part.name}"
        assert part.record.codecs == total.codecs


def test_the_same_seed_makes_the_same_bytes_and_another_chooses_others(speech, tmp_path):
    for name, seed in (("one", 1), ("again", 1)):
        split(speech, tmp_path / name, seed=seed)
    assert digest(tmp_path / "one") == digest(tmp_path / "again")
    table = SpeakerTable.read(SourceDataset.read(speech))
    chosen = {tuple(table.assign({"valid": 0.2}, seed)["valid"].tolist()) for seed in range(20)}
    assert len(chosen) > 3


def test_the_shard_size_may_be_chosen(speech, tmp_path):
    split_dataset(speech, tmp_path / "out", {"valid": 0.5}, shard_size=4, workers=1)
    assert [shard.count for shard in ShardedDataset(tmp_path / "out/train").shards()] in ([4, 2], [4], [4, 4])


@pytest.mark.slow
def test_the_checker_finds_nothing_and_lhotse_reads_the_splits(speech, tmp_path):
    done = run_sharmill("split", speech, tmp_path / "out", "--by-speaker", "--valid", "20%", "--workers", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "12 cuts, each in exactly one split" in done.stdout
    for name in ("train", "valid"):
        checked = run_sharmill("validate", tmp_path / "out" / name, "--deep")
        assert checked.returncode == 0, checked.stdout
        for cut in read_with_lhotse(tmp_path / "out" / name, "a"):
            assert cut.load_target_codes().shape[0] == 3
            assert cut.load_target_audio().shape[1] == cut.target_audio.num_samples
    again = run_sharmill("split", speech, tmp_path / "out", "--by-speaker", "--valid", "20%")
    assert again.returncode == 2
    assert "is not empty" in again.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.slow
def test_a_split_that_is_killed_anywhere_goes_on_and_ends_with_the_same_bytes(speech, tmp_path):
    split(speech, tmp_path / "expected")
    expected, out = digest(tmp_path / "expected"), tmp_path / "out"
    # Not at every change, but some further on each time, until one is not killed.
    for change in count():
        killed = killed_at(6 * change, lambda: split(speech, out), below=str(tmp_path))
        if not killed or ((out / "test/dataset.json").exists() and not (tmp_path / ".out.split/split").exists()):
            break
        for name in ("train", "valid", "test"):
            if (out / name / "dataset.json").exists():
                assert len(cuts_of(out / name)) == ShardedDataset(out / name).record().num_cuts
    assert change > 5
    assert digest(out) == expected
    # What a kill at the very end has left is removed by the next call, which finds the splits there.
    with raises(ConfigError, "foreign_output", "out"):
        split(speech, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected", "out"]


@pytest.mark.slow
def test_an_interrupted_split_is_not_mixed_with_another(speech, tmp_path):
    for change in count():
        assert killed_at(6 * change, lambda: split(speech, tmp_path / "out"), below=str(tmp_path))
        if any(tmp_path.glob(".out.split/split/ranks/*/ledger/*.jsonl")):
            break
    with raises(ConfigError, "changed_plan", "seed"):
        split(speech, tmp_path / "out", seed=7)
    split(speech, tmp_path / "out", seed=7, restart=True)
    split(speech, tmp_path / "expected", seed=7)
    assert digest(tmp_path / "out") == digest(tmp_path / "expected")


def test_what_others_have_put_into_the_state_stays(speech, tmp_path):
    (tmp_path / ".out.split/mine").mkdir(parents=True)
    (tmp_path / ".out.split/mine/file").write_text("mine")
    with raises(ConfigError, "bad_usage"):
        split_dataset(speech, tmp_path / "out", {"valid": 2.0}, workers=1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("mine")
    with raises(ConfigError, "foreign_output", "not empty"):
        split(speech, tmp_path / "out")
    (tmp_path / "out/mine").unlink()
    assert len(split(speech, tmp_path / "out")) == 3
    assert snapshot(tmp_path / ".out.split") == {"mine/file": b"mine"}


def test_one_speaker_cannot_be_split(tmp_path):
    dataset = make_dataset(tmp_path / "one", "o", 1).dataset
    with raises(ConfigError, "too_few_speakers", "2 splits", "1"):
        split_dataset(dataset, tmp_path / "out", {"valid": 0.1}, workers=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "out"]
    assert list((tmp_path / "out").rglob("*")) == []


def test_speakers_with_contexts_of_each_other_stay_together(tmp_path):
    """As with ``speaker_key: all``: 0 and 1 share contexts, 2 and 3 have their own."""
    project = Project(tmp_path / "shared")
    for number in range(8):
        project.add(f"{number}.flac", voice(0.5, seed=number), speaker=f"s{number // 2}")
    dataset = project.write([2, 0, 3, 1, 5, 4, 7, 6], match={"min_duration": 0.0}) and project.dataset
    table = SpeakerTable.read(SourceDataset.read(dataset))
    together = table.groups[table.speaker_of]
    by_name = {cut["id"]: group for cut, group in zip(cuts_of(dataset), together.tolist(), strict=True)}
    groups = [by_name[f"cut-rec-{number}-0.00-0.50"] for number in range(8)]
    assert len(set(groups[:4])) == 1
    assert len(set(groups)) == 3
    project = Project(tmp_path / "ring")
    for number in range(4):
        project.add(f"{number}.flac", voice(0.5, seed=number), speaker=f"s{number}")
    dataset = project.write([1, 2, 3, 0], match={"min_duration": 0.0}) and project.dataset
    with raises(ConfigError, "too_few_speakers", "1 groups of its 4 speakers"):
        split_dataset(dataset, tmp_path / "out", {"valid": 0.1}, workers=1)


def test_cuts_without_speaker_are_refused(speech, tmp_path):
    other = copy(speech, tmp_path / "other")
    file = other / "cuts/cuts.000001.jsonl.gz"
    cuts = lines(file)
    cuts[1]["supervisions"][0]["speaker"] = "| Language:en Dataset:s Speaker:unknown |"
    rewrite(file, cuts)
    with raises(ConfigError, "no_speaker", cuts[1]["id"]):
        split(other, tmp_path / "out")


def test_damage_is_not_copied(speech, tmp_path):
    other = copy(speech, tmp_path / "other")
    file = other / "target_audio/recording.000001.tar"
    data = bytearray(file.read_bytes())
    data[600] ^= 1
    file.write_bytes(data)
    with raises(FatalError, "units_failed", str(file)):
        split(other, tmp_path / "out")
    shutil.copy(speech / "target_audio/recording.000001.tar", file)
    split(other, tmp_path / "out")
    split(speech, tmp_path / "expected")
    assert digest(tmp_path / "out") == digest(tmp_path / "expected")


def test_what_is_not_free_or_no_share_is_refused(speech, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    with raises(ConfigError, "foreign_output", "full"):
        split(speech, tmp_path / "full")
    for shares in ({"valid": 0.0}, {"valid": 1.0}, {"valid": 0.5, "test": 0.5}):
        with raises(ConfigError, "bad_usage", "valid"):
            split_dataset(speech, tmp_path / "out", shares)
    with raises(ConfigError, "no_dataset", "absent"):
        split(tmp_path / "absent", tmp_path / "out")
    with raises(ConfigError, "bad_usage", "lies in the dataset"):
        split(speech, speech / "out")
    assert not (tmp_path / "out").exists()
    assert not np.any([path.name.startswith(".") for path in speech.parent.iterdir()])
