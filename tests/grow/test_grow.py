"""Datasets that are appended to, merged and split: the results, and refusals.

``tests/faults/test_power.py`` interrupts these commands at any point.
"""

import json
import shutil
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from support import damage as do
from support.fields import SCORE, add_fields, require_fields, score_of
from support.project import (
    TINY_ENCODER,
    Project,
    check_dataset,
    config_for,
    copy,
    lines,
    make_voices,
    members_of,
    raises,
    read_with_lhotse,
    run_sharmill,
    snapshot,
    voice,
    write_config,
    write_lines,
)

from sharmill.demo.corpus import make_corpus
from sharmill.engine.executor import Listener
from sharmill.errors import ConfigError, DamagedShard, FatalError
from sharmill.files.locks import FolderLock
from sharmill.files.staging import STAGING_NAME
from sharmill.grow.join import SourceDataset, append_dataset, merge_datasets, require_fitting
from sharmill.grow.split import SpeakerTable, split_dataset
from sharmill.pipeline import run_dataset
from sharmill.shar import open_shar
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.index import read_dataset


@pytest.fixture(scope="module")
def coded(tmp_path_factory):
    """Two datasets with the codec a, of 2 and of 3 voices."""
    folder = tmp_path_factory.mktemp("coded")
    return [make_voices(folder / name, name, voices, codecs="a").dataset for name, voices in (("x", 2), ("y", 3))]


@pytest.fixture(scope="module")
def parts(coded, tmp_path_factory):
    """Two datasets, of 4 and 6 cuts, with the codec a, a score that may be missing, and an array."""
    folder = tmp_path_factory.mktemp("parts")
    return [add_fields(copy(dataset, folder / dataset.parent.name)) for dataset in coded]


def appended(parts, work):
    append_dataset(copy(parts[0], work / "out"), parts[1])


def merged(parts, work):
    merge_datasets(parts, work / "out", name="x")


def divided(parts, work):
    split_dataset(parts[1], work / "out", {"valid": 0.2, "test": 0.2}, workers=1)


WAYS = [appended, merged, divided]
ways = pytest.mark.parametrize("way", WAYS)


def datasets_in(work):
    return sorted(path.parent for path in work.rglob("dataset.json"))


def ids_of(dataset):
    return [cut["id"] for file in sorted((dataset / "cuts").iterdir()) for cut in lines(file)]


@ways
def test_results_have_every_cut_once_and_sources_stay(parts, tmp_path, way):
    before = [snapshot(part) for part in parts]
    way(parts, tmp_path)
    assert [snapshot(part) for part in parts] == before
    found = []
    for dataset in datasets_in(tmp_path):
        assert check_dataset(dataset, tmp_path / f"checks of {dataset.name}", deep=True).findings == []
        assert [field.name for field in read_dataset(dataset).added_fields] == ["score", "voices/voice"]
        assert require_fields(dataset) == read_dataset(dataset).num_cuts
        for cut in read_with_lhotse(dataset, "a"):
            assert cut.load_target_codes().shape[0] == cut.load_context_codes().shape[0] == 3
            assert cut.load_target_audio().shape[1] == cut.target_audio.num_samples
            found.append(cut.id)
    expected = [cut_id for part in (parts[1:] if way is divided else parts) for cut_id in ids_of(part)]
    assert (sorted(found) if way is divided else found) == (sorted(expected) if way is divided else expected)


@pytest.fixture
def growing(coded, tmp_path):
    """A dataset of two shards that tests may append to."""
    return copy(coded[0], tmp_path / "growing")


def test_old_files_stay_and_an_open_reader_keeps_its_shards(coded, growing, tmp_path):
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in growing.rglob("*.*") if path.is_file()}
    old = snapshot(growing)
    cuts = iter(open_shar(growing, ["target_codes"]))
    ids = [next(cuts).id]
    grown = append_dataset(growing, coded[1])
    assert (grown.first, grown.count, grown.already) == (2, 2, False)
    assert grown.placed == {"linked": 10, "copied": 0}
    assert ids + [cut.id for cut in cuts] == ids_of(coded[0])
    for path, (modified, inode) in before.items():
        if path.name not in ("dataset.json", "shards.jsonl"):
            assert (path.stat().st_mtime_ns, path.stat().st_ino) == (modified, inode)
    assert (growing / "shards.jsonl").read_bytes().startswith(old["shards.jsonl"])
    after = snapshot(growing)
    again = append_dataset(growing, coded[1])
    assert (again.already, again.first, again.count) == (True, 2, 2)
    assert snapshot(growing) == after
    # The result is as if they had been merged, except for the name.
    merge_datasets(coded, tmp_path / "merged", name=read_dataset(growing).name)
    assert snapshot(growing) == snapshot(tmp_path / "merged")


def test_a_killed_append_is_removed_by_checksum(coded, growing, call):
    left = [line | {"index": line["index"] + 2} for line in lines(coded[1] / "shards.jsonl")]
    # These are the lines of an append of other shards, whose first cuts file is the second one here.
    left[0]["fields"]["cuts"] = left[1]["fields"]["cuts"] | {"file": "cuts/mine.txt"}
    write_lines(growing / "shards.jsonl", [*lines(growing / "shards.jsonl"), *left])
    shutil.copy(coded[1] / "cuts/cuts.000001.jsonl.gz", growing / "cuts/cuts.000002.jsonl.gz")
    mine = [growing / "cuts/mine.txt", growing / "target_audio/recording.000003.tar"]
    for path in mine:
        path.write_bytes(b"mine")
    assert [cut.id for cut in open_shar(growing, [])] == ids_of(coded[0])
    assert (call("append", growing, coded[1])[0], [path.read_bytes() for path in mine]) == (2, [b"mine", b"mine"])
    mine[1].unlink()
    assert "now 10 cuts" in call("append", growing, coded[1])[1]


def test_merged_shards_are_links_or_copies_with_the_same_bytes(coded, tmp_path):
    grown = merge_datasets(coded, tmp_path / "out")
    assert grown.record == read_dataset(tmp_path / "out")
    assert (grown.record.name, grown.record.num_cuts, grown.record.num_shards) == ("out", 10, 4)
    assert grown.placed == {"linked": 20, "copied": 0}
    assert (tmp_path / "out/cuts/cuts.000002.jsonl.gz").samefile(coded[1] / "cuts/cuts.000000.jsonl.gz")
    copied = merge_datasets(coded, tmp_path / "copied", copy=True, name="out")
    assert copied.placed == {"linked": 0, "copied": 20}
    assert snapshot(tmp_path / "copied") == snapshot(tmp_path / "out")
    with mock.patch("os.link", side_effect=OSError(18, "Invalid cross-device link")):
        assert merge_datasets(coded, tmp_path / "elsewhere").placed["copied"] == 20


def limit_scores(layout):
    return [field | ({"limits": [0, 5]} if field["name"] == SCORE.name else {}) for field in layout]


UNLIKE = [
    (do.change_description(audio_format="wav"), "unlike_datasets", ["audio_format", "'flac'", "'wav'"]),
    (do.change_description(sampling_rate=8000), "unlike_datasets", ["sampling_rate", "8000"]),
    (do.change_description(limits={"min_duration": 9.0}), "unlike_datasets", ["limits", "9.0"]),
    (do.change_description(contract="foreign"), "unlike_datasets", ["another tool"]),
    (do.change_codec(checksum="another"), "unlike_datasets", ["checksum of the codec 'a'", "another"]),
    (do.change_description(codecs=[]), "unlike_datasets", ["codecs", "['a']", "[]"]),
    (do.change_description(layout=limit_scores), "unlike_datasets", ["limits of the field 'score' differ"]),
    (do.change_bytes(do.CONTEXTS, lambda data: data[:-1]), "damaged_shard", ["differs from the index"]),
    (do.change_bytes(do.CONTEXTS, lambda data: bytes([data[0] ^ 1]) + data[1:]), "damaged_shard", ["differs from"]),
    (do.remove_files(do.CUTS), "damaged_shard", [do.CUTS]),
    (do.change_shards(lambda shards: shards[:1]), "damaged_shard", ["1 shards instead of 2"]),
    (shutil.rmtree, "no_dataset", []),
]


@pytest.mark.parametrize("way", [appended, merged])
@pytest.mark.parametrize(("change", "code", "words"), UNLIKE)
def test_what_does_not_fit_is_named_and_changes_nothing(parts, tmp_path, way, change, code, words):
    other = copy(parts[1], tmp_path / "other")
    change(other)
    with raises(DamagedShard if code == "damaged_shard" else ConfigError, code, str(other), *words):
        way([parts[0], other], tmp_path / "work")
    if way is merged:
        assert not (tmp_path / "work/out").exists()
    else:
        assert read_dataset(tmp_path / "work/out") == read_dataset(parts[0])


def test_a_moved_model_is_the_same_and_devices_are_united(coded, tmp_path):
    other = copy(coded[1], tmp_path / "other")
    do.change_codec(model="nemo:/new/place/model.nemo", devices=["A GPU"])(other)
    do.change_description(match_devices=["A GPU"])(other)
    record = merge_datasets([coded[0], other], tmp_path / "out").record
    assert (record.codecs[0].model, record.codecs[0].devices) == ("builtin", ["A GPU", "cpu"])
    assert record.match_devices == ["A GPU", "cpu"]


def test_a_cut_of_two_datasets_is_named(coded, growing, tmp_path):
    before = snapshot(growing)
    other = make_voices(tmp_path / "x", "x", 3, codecs="a").dataset
    with raises(ConfigError, "duplicate_cut", "cut-rec-x0"):
        append_dataset(growing, other)
    with raises(ConfigError, "duplicate_cut", str(coded[0])):
        merge_datasets([coded[0], coded[0]], tmp_path / "out")
    assert snapshot(growing) == before


def test_what_is_in_the_way_or_being_changed_is_refused(coded, growing, tmp_path, monkeypatch):
    stray = growing / "target_audio/recording.000003.tar"
    stray.write_bytes(b"mine")
    with raises(ConfigError, "foreign_output", str(stray)):
        append_dataset(growing, coded[1])
    stray.unlink()
    with raises(ConfigError, "bad_usage", "itself"):
        append_dataset(growing, growing)
    claim = growing / STAGING_NAME / "0000000000000000.reservation"
    claim.parent.mkdir()
    reservation = {"id": "0" * 16, "run": "/run", "host": "h", "user": "u", "since": "now", "device": 1}
    claim.write_text(json.dumps(reservation | {"folders": ["codes_b/target_codes"]}))
    with raises(ConfigError, "reserved", str(claim)):
        append_dataset(growing, coded[1])
    claim.unlink()
    monkeypatch.setattr("sharmill.shar.index.SECONDS_TO_WAIT_FOR_INDEX", 0.0)
    with FolderLock(growing), raises(ConfigError, "locked", str(growing)):
        append_dataset(growing, coded[1])
    staging = tmp_path / f".out{STAGING_NAME}"
    staging.mkdir()
    with FolderLock(staging), raises(ConfigError, "locked", str(staging)):
        merge_datasets(coded, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    # A leftover of a killed append does not count as foreign, even if another run has rewritten the index meanwhile.
    stray.write_bytes((coded[1] / "target_audio/recording.000001.tar").read_bytes())
    assert append_dataset(growing, coded[1]).count == 2


@pytest.mark.parametrize("way", [merged, divided])
def test_only_a_new_or_empty_place_is_taken(parts, tmp_path, way):
    (tmp_path / "out").mkdir()
    mine = tmp_path / "out/notes.txt"
    mine.write_text("mine")
    # The leftovers of a process that was killed at its very end.
    (tmp_path / f".out{STAGING_NAME}/.sharmill-lock").mkdir(parents=True)
    with raises(ConfigError, "foreign_output", "not empty"):
        way(parts, tmp_path)
    mine.unlink()
    way(parts, tmp_path)
    with raises(ConfigError, "foreign_output", "not empty"):
        way(parts, tmp_path)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".out.sharmill")] == ["out"]
    with raises(ConfigError, "bad_usage", str(parts[1])):
        way(parts, parts[1])
    (tmp_path / "file").mkdir()
    (tmp_path / "file/out").write_text("mine")
    with pytest.raises(ConfigError, match="file/out"):
        way(parts, tmp_path / "file")


def test_a_dataset_without_a_layout_grows_by_one_with_a_layout(coded, growing):
    do.change_description(layout=...)(growing)
    append_dataset(growing, coded[1])
    assert len(read_dataset(growing).layout) == 5
    assert read_dataset(growing).num_cuts == 10


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"write": {"audio_format": "wav"}}, ["write.audio_format", "'wav'", "'flac'"]),
        ({"write": {"sampling_rate": 8000}}, ["write.sampling_rate", "8000", "None"]),
        ({"match": {"min_duration": 1.0}}, ["match.min_duration", "1.0", "0.0"]),
        ({"encode": {"codecs": []}}, ["encode.codecs", "[]", "['a']"]),
    ],
)
def test_an_unfit_configuration_is_refused_before_any_work(coded, tmp_path, changes, named):
    values = {
        "append_to": str(coded[0]), "match": {"min_similarity": 0.6, "min_duration": 0.0},
        "encode": {"codecs": [{"name": "a", "model": "builtin"}]},
    }  # fmt: skip
    configure = partial(config_for, tmp_path, [("m.json", ".")])
    require_fitting(configure(**values), coded[0])
    changes = {key: values.get(key, {}) | value for key, value in changes.items()}
    with raises(ConfigError, "unlike_datasets", *named):
        require_fitting(configure(**values | changes), coded[0])
    with raises(ConfigError, "bad_config_value", "append_to"):
        require_fitting(configure(**values, dataset_dir=str(coded[0])), coded[0])


@pytest.mark.slow
@pytest.mark.e2e
def test_append_runs_a_configuration_on_the_records_that_are_new(tmp_path, call):
    corpus = make_corpus(tmp_path / "corpus", num_voices=2, utterances_per_voice=6)
    records = corpus.manifest.read_text().splitlines(keepends=True)
    (tmp_path / "half.json").write_text("".join(records[::2]))
    match = {"encoder": TINY_ENCODER, "min_similarity": -1.0, "min_duration": 0.5}
    changes = {"match": match, "write": {"shard_size": 3}}
    old = write_config(tmp_path / "old", tmp_path / "half.json", corpus.audio_root, **changes)
    assert call("run", old)[0] == 0
    dataset = tmp_path / "old/dataset"
    before, number = snapshot(dataset), read_dataset(dataset).num_cuts
    more = write_config(
        tmp_path / "new", corpus.manifest, corpus.audio_root, **changes, append_to=str(dataset),
        max_reject_fraction=0.7,
    )  # fmt: skip
    assert run_sharmill("append", more).stderr == ""
    rejects = [reject["reason"] for reject in lines(tmp_path / "new/run/rejects.jsonl")]
    assert rejects.count("already_there") == number
    assert read_dataset(dataset).num_cuts == number + read_dataset(tmp_path / "new/dataset").num_cuts > number
    assert len(rejects) / len(records) > 0.7
    after = snapshot(dataset)
    assert {name for name in before if after[name] != before[name]} == {"dataset.json", "shards.jsonl"}
    assert call("validate", dataset, "--deep")[0] == 0
    status, said, _ = call("append", more)
    assert (status, "already" in said, snapshot(dataset)) == (0, True, after)
    status, _, said = call("run", old)
    assert status == 2
    assert "foreign" in said or "not written from" in said


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    """Six voices of two cuts each, with the codec a."""
    return make_voices(tmp_path_factory.mktemp("speech") / "s", "s", 6, codecs="a").dataset


def split(speech, out, **options):
    return split_dataset(speech, out, {"valid": 0.2, "test": 0.2}, workers=1, **options)


def items_of(dataset, field):
    """Return the members of a field over all shards, in order."""
    return [member for file in sorted((dataset / field).iterdir()) for member in members_of(file)]


def speakers_of(dataset):
    files = sorted((dataset / "cuts").iterdir())
    return {cut["supervisions"][0]["speaker"] for file in files for cut in lines(file)}


def test_every_cut_and_speaker_is_in_exactly_one_split(speech, tmp_path):
    made = split(speech, tmp_path / "out", shard_size=4)
    total, folders = read_dataset(speech), [tmp_path / "out" / part.name for part in made]
    assert [part.name for part in made] == ["train", "valid", "test"]
    assert Counter(cut_id for folder in folders for cut_id in ids_of(folder)) == Counter(ids_of(speech))
    speakers = [speakers_of(folder) for folder in folders]
    assert [len(found) for found in speakers] == [part.num_speakers for part in made]
    assert sum(map(len, speakers)) == len(set.union(*speakers)) == 6
    for field in total.fields[1:]:
        assert dict(member for folder in folders for member in items_of(folder, field)) == dict(items_of(speech, field))
    for folder in folders:
        # The cuts are in the order of the dataset.
        assert all(a < b for a, b in pairwise(map(ids_of(speech).index, ids_of(folder))))
        assert [shard.count for shard in ShardedDataset(folder).shards()][:-1] in ([], [4])
    for key in ("num_cuts", "target_seconds", "context_seconds"):
        assert sum(getattr(part.record, key) for part in made) == pytest.approx(getattr(total, key), abs=0.005)
    for part in made[1:]:
        assert part.record.target_seconds / total.target_seconds == pytest.approx(0.2, abs=0.06)
        assert (part.record.name, part.record.codecs) == (f"s_{part.name}", total.codecs)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_an_interrupted_split_is_not_mixed_with_another(speech, tmp_path, call):
    other, out, damage = copy(speech, tmp_path / "other"), tmp_path / "out", do.flip_bit(do.TARGETS, 600)
    damage(other)
    with raises(FatalError, "units_failed", "recording.000001.tar differs from the index"):
        split(other, out)
    damage(other)
    with raises(ConfigError, "changed_plan", "seed"):
        split(other, out, seed=7)
    # Imitate another user who replaced the folder.
    shutil.rmtree(out / STAGING_NAME)
    mine = out / "train/cuts/cuts.000000.jsonl.gz"
    mine.write_bytes(b"mine")
    for options in (["--valid", "20%"], ["--valid", "20%", "--restart"]):
        assert call("split", other, out, "--by-speaker", "--test", "20%", *options)[0] == 2
    assert mine.read_bytes() == b"mine"
    mine.unlink()
    split(other, out, seed=7, restart=True)
    split(other, tmp_path / "expected", seed=7)
    assert snapshot(out) == snapshot(tmp_path / "expected")
    table = SpeakerTable.read(SourceDataset.read(speech))
    assert len({tuple(table.assign({"valid": 0.2}, seed)["valid"].tolist()) for seed in range(20)}) > 3


def test_speakers_with_contexts_of_each_other_stay_together(tmp_path):
    """As with ``speaker_key: all``, 0 and 1 share contexts, but 2 and 3 have their own."""
    project = Project(tmp_path / "shared")
    for number in range(8):
        project.add(f"{number}.flac", voice(0.5, seed=number), speaker=f"s{number // 2}")
    project.write([2, 0, 3, 1, 5, 4, 7, 6], match={"min_duration": 0.0})
    table = SpeakerTable.read(SourceDataset.read(project.dataset))
    groups = dict(zip(ids_of(project.dataset), table.groups[table.speaker_of].tolist(), strict=True))
    found = [groups[f"cut-rec-{number}-0.00-0.50"] for number in range(8)]
    assert (len(set(found[:4])), len(set(found))) == (1, 3)
    project = Project(tmp_path / "ring")
    for number in range(4):
        project.add(f"{number}.flac", voice(0.5, seed=number), speaker=f"s{number}")
    project.write([1, 2, 3, 0], match={"min_duration": 0.0})
    with raises(ConfigError, "too_few_speakers", "1 groups of its 4 speakers"):
        split_dataset(project.dataset, tmp_path / "out", {"valid": 0.1}, workers=1)


def test_splits_have_the_cuts_that_meet_a_condition(speech, tmp_path, call):
    scored = add_fields(copy(speech, tmp_path / "scored"))
    wanted = {id for id in ids_of(scored) if (score_of(id) or 0.0) > 0.1}
    assert 3 < len(wanted) < 12
    status, out, err = call(
        "split", scored, tmp_path / "out", "--by-speaker", "--valid", "30%", "--where", "score > 0.1"
    )
    assert status == 0, err
    assert f"{len(wanted)} cuts, each in exactly one split; {12 - len(wanted)} cuts do not meet score > 0.1" in out
    train, valid = (set(ids_of(tmp_path / "out" / name)) for name in ("train", "valid"))
    assert (train | valid, train & valid) == (wanted, set())
    assert not speakers_of(tmp_path / "out/train") & speakers_of(tmp_path / "out/valid")
    with raises(ConfigError, "unknown_field", "did you mean 'score'"):
        split_dataset(scored, tmp_path / "other", {"valid": 0.3}, where="scor > 1", workers=1)


UNKNOWN = "| Language:en Dataset:s Speaker:unknown |"


@pytest.mark.parametrize(
    ("change", "shares", "code", "words"),
    [
        (do.change_supervision(do.CUTS, speaker=UNKNOWN), {"valid": 0.2}, "no_speaker", ["cut-rec-"]),
        (do.change_supervision(do.CUTS, speaker="N/A"), {"valid": 0.2}, "no_speaker", ["cut-rec-"]),
        (shutil.rmtree, {"valid": 0.2}, "no_dataset", []),
        (Path.exists, {"valid": 0.0}, "bad_usage", ["valid"]),
        (Path.exists, {"valid": 1.0}, "bad_usage", ["valid"]),
        (Path.exists, {"valid": 0.5, "test": 0.5}, "bad_usage", ["valid"]),
    ],
)
def test_what_cannot_be_split_is_refused(speech, tmp_path, change, shares, code, words):
    other = copy(speech, tmp_path / "other")
    change(other)
    with raises(ConfigError, code, *words):
        split_dataset(other, tmp_path / "out", shares, workers=1)
    assert not list((tmp_path / "out").rglob("dataset.json"))


VALUES = {
    "match": {"encoder": TINY_ENCODER, "min_similarity": -1.0, "min_duration": 0.0},
    "encode": {"codecs": []}, "executor": {"workers": 1}, "max_reject_fraction": 1.0,
    "validate": {"deep": True, "against_sources": True},
}  # fmt: skip


@pytest.fixture
def grown(tmp_path):
    """Return a function from changes of match to the finished project of the new records and the extended dataset.

    The dataset has two cuts of anna and two of bert. The new records are one of anna, one of carl, and two of bert,
    both from a file that the dataset has a part of.
    """

    def make(**match):
        values = VALUES | {"match": VALUES["match"] | match}
        old, new = Project(tmp_path / "old"), Project(tmp_path / "new")
        new.root = old.root
        new.folder.mkdir()
        for number, speaker in enumerate(("anna", "anna", "bert", "bert")):
            old.add(f"{speaker}/{number}.flac", voice(1.0 + 0.05 * number, seed=number), speaker=speaker)
        old.records[3] |= {"offset": 0.0, "duration": 0.6}
        new.add("anna/new.flac", voice(0.5, seed=10), speaker="anna")
        new.add("carl/new.flac", voice(0.5, seed=11), speaker="carl")
        new.records.append(old.records[3] | {"offset": 0.5, "duration": 0.4, "text": "overlaps"})
        new.records.append(old.records[3] | {"offset": 0.7, "duration": 0.3, "text": "does not overlap"})
        plain = VALUES | {"match": {k: v for k, v in values["match"].items() if k != "contexts_from_dataset"}}
        assert run_dataset(old.configure(**plain), Listener()).ok
        config = new.configure(**values, append_to=str(old.dataset))
        assert run_dataset(config, Listener()).num_errors == 0
        return new, old.dataset, config

    return make


def contexts(project):
    """Return the text of each cut, and the origin of its context."""
    found = [cut.supervisions[0] for cut in open_shar(project.dataset, [])]
    return {said.text: said.custom["context_audio_filepath"] for said in found}


def test_contexts_are_those_of_new_records_unless_asked(grown):
    new, _, _ = grown()
    assert {reject["reason"] for reject in new.rejects("match")} == {"single_utterance_speaker", "no_long_context"}
    assert contexts(new) == {}


@pytest.mark.parametrize("max_group", [None, 3])
def test_contexts_are_also_old_cuts_with_their_stored_audio(grown, max_group):
    new, dataset, config = grown(contexts_from_dataset=True, max_group=max_group)
    old = {cut.supervisions[0].custom["audio_filepath"]: cut for cut in open_shar(dataset)}
    found = contexts(new)
    assert [r["record"]["text"] for r in new.rejects("match") if r["reason"] == "single_utterance_speaker"] == [
        "text of carl/new.flac"
    ]
    # With max_group, a part may contain no other utterance.
    if max_group is None:
        assert found["text of anna/new.flac"] in ("anna/0.flac", "anna/1.flac")
        assert found["overlaps"] == "bert/2.flac"
        assert set(found) == {"text of anna/new.flac", "overlaps", "does not overlap"}
    for cut in open_shar(new.dataset):
        said = cut.supervisions[0].custom
        if said["context_audio_filepath"] in old and said["context_audio_duration"] != 0.3:
            stored = old[said["context_audio_filepath"]]
            np.testing.assert_array_equal(cut.load_context_audio(), stored.load_target_audio())
            assert said["context_audio_text"] == stored.supervisions[0].text
    before = len(old)
    appended = append_dataset(dataset, new.dataset)
    assert ShardedDataset(dataset).record().num_cuts == appended.record.num_cuts == before + len(found)
    assert len(list(open_shar(dataset))) == before + len(found)
    # Appending does not change the plan, so the run is still complete.
    assert run_dataset(config, Listener()).num_errors == 0
    assert append_dataset(dataset, new.dataset).already
