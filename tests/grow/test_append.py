"""Datasets that grow in place: old bytes stay, the commit is one step, and what is there already is recognised."""

from __future__ import annotations

import json
from itertools import count

import pytest
from support.errors import raises
from support.growing import make_dataset
from support.pipelines import digest, read_with_lhotse, run_sharmill, save_encodec, write_config
from support.shar import copy, lines, snapshot
from support.sudden_end import killed_at

from sharmill.cli.append import append
from sharmill.cli.run import run
from sharmill.cli.validate import validate
from sharmill.config import to_config, to_yaml
from sharmill.demo.corpus import make_corpus
from sharmill.errors import ConfigError
from sharmill.files.locks import FolderLock
from sharmill.files.staging import STAGING_NAME
from sharmill.grow import append as grow_append
from sharmill.grow.append import append_dataset, require_fitting
from sharmill.grow.merge import merge_datasets
from sharmill.shar import open_shar
from sharmill.shar.dataset import ShardedDataset


@pytest.fixture
def growing(coded, tmp_path):
    """A dataset of two shards, that may be appended to."""
    return copy(coded[0], tmp_path / "growing")


def read_ids(directory):
    return [cut.id for cut in open_shar(directory, ["target_codes"])]


def test_old_files_stay_and_the_new_shards_follow(coded, growing, tmp_path):
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in growing.rglob("*.*") if path.is_file()}
    old, ids = snapshot(growing), read_ids(growing)
    appended = append_dataset(growing, coded[1])
    assert (appended.first, appended.count, appended.already) == (2, 2, False)
    assert (appended.placed.linked, appended.placed.copied) == (10, 0)
    index = {"dataset.json", "shards.jsonl"}
    for path, (modified, inode) in before.items():
        if path.name not in index:
            assert (path.stat().st_mtime_ns, path.stat().st_ino) == (modified, inode)
            assert path.read_bytes() == old[path.relative_to(growing).as_posix()]
    assert (growing / "shards.jsonl").read_bytes().startswith(old["shards.jsonl"])
    assert read_ids(growing) == ids + read_ids(coded[1])
    # As if they had been merged, but for the name.
    merge_datasets(coded, tmp_path / "merged", name=ShardedDataset(growing).record().name)
    assert digest(growing) == digest(tmp_path / "merged")
    assert not (growing / STAGING_NAME).exists()


def test_what_was_appended_is_recognised(coded, growing):
    append_dataset(growing, coded[1])
    after = snapshot(growing)
    again = append_dataset(growing, coded[1])
    assert (again.already, again.first, again.count) == (True, 2, 2)
    assert snapshot(growing) == after


@pytest.mark.slow
def test_an_append_that_is_killed_anywhere_leaves_the_old_or_the_new_dataset(coded, growing, tmp_path):
    expected = copy(growing, tmp_path / "expected")
    append_dataset(expected, coded[1])
    old, new = read_ids(growing), read_ids(expected)
    seen = set()
    for change in count():
        work = copy(growing, tmp_path / f"work{change}")
        killed = killed_at(change, lambda work=work: append_dataset(work, coded[1]), below=str(tmp_path))
        ids = read_ids(work)
        assert ids in (old, new)
        assert len(list(read_with_lhotse(coded[0], "a"))) == len(old)
        seen.add(len(ids))
        append_dataset(work, coded[1])
        assert digest(work) == digest(expected)
        if not killed:
            break
    assert change > 20
    assert seen == {len(old), len(new)}


def test_a_reader_that_is_open_goes_on_with_the_shards_that_it_knows(coded, growing):
    reader = open_shar(growing, ["target_codes"])
    cuts = iter(reader)
    ids = [next(cuts).id]
    append_dataset(growing, coded[1])
    ids += [cut.id for cut in cuts]
    assert ids == read_ids(coded[0])


@pytest.mark.slow
def test_the_checker_finds_nothing_and_lhotse_reads_all(coded, growing):
    done = run_sharmill("append", growing, coded[1])
    assert (done.returncode, done.stderr) == (0, "")
    assert "appended the shards 2 to 3; 10 files linked, 0 copied; now 10 cuts" in done.stdout
    assert "are those of" in run_sharmill("append", growing, coded[1]).stdout
    checked = run_sharmill("validate", growing, "--deep")
    assert checked.returncode == 0, checked.stdout
    cuts = list(read_with_lhotse(growing, "a"))
    assert len(cuts) == 10
    assert all(cut.load_context_codes().shape[0] == 3 for cut in cuts)


def test_what_does_not_fit_changes_nothing(coded, plain, growing, tmp_path):
    before = snapshot(growing)
    with raises(ConfigError, "unlike_datasets", "codecs"):
        append_dataset(growing, plain[0])
    other = make_dataset(tmp_path / "x", "x", 3, codecs="a").dataset
    with raises(ConfigError, "duplicate_cut", "cut-rec-x0"):
        append_dataset(growing, other)
    with raises(ConfigError, "bad_usage", "itself"):
        append_dataset(growing, growing)
    with raises(ConfigError, "no_dataset", "absent"):
        append_dataset(growing, tmp_path / "absent")
    stray = growing / "target_audio/recording.000003.tar"
    stray.write_bytes(b"mine")
    with raises(ConfigError, "foreign_output", str(stray)):
        append_dataset(growing, coded[1])
    stray.unlink()
    assert snapshot(growing) == before


def test_a_dataset_that_is_being_changed_is_refused(coded, growing, monkeypatch):
    claim = growing / STAGING_NAME / "codes_b+target_codes.reservation"
    claim.parent.mkdir()
    claim.write_text(json.dumps({"id": "0" * 16, "run": "/run", "host": "h", "user": "u", "since": "now", "device": 1}))
    with raises(ConfigError, "reserved", str(claim)):
        append_dataset(growing, coded[1])
    claim.unlink()
    monkeypatch.setattr("sharmill.shar.index.SECONDS_TO_WAIT_FOR_INDEX", 0.0)
    with FolderLock(growing), raises(ConfigError, "locked", str(growing)):
        append_dataset(growing, coded[1])


def test_a_damaged_note_is_named(coded, growing):
    note = growing / STAGING_NAME / grow_append.NOTE_NAME
    note.parent.mkdir()
    note.write_text("{")
    with raises(ConfigError, "foreign_output", str(note)):
        append_dataset(growing, coded[1])


@pytest.mark.parametrize("values", [{"fields": ["../elsewhere"], "count": 1}, {"fields": ["cuts"], "count": 10**15}])
def test_a_note_that_names_what_no_append_places_removes_nothing(coded, growing, values):
    other = growing.parent / "elsewhere/recording.000001.tar"
    other.parent.mkdir()
    other.touch()
    note = growing / STAGING_NAME / grow_append.NOTE_NAME
    note.parent.mkdir()
    note.write_text(json.dumps({"first": 1} | values))
    with raises(ConfigError, "foreign_output", str(note)):
        append_dataset(growing, coded[1])
    assert other.exists()


def project_with(folder, names):
    """A project whose utterances have these numbers, of one voice, each with the next one as context."""
    from support.shar import Project, voice

    project = Project(folder)
    for name in names:
        project.add(f"{name}.flac", voice(0.5 + 0.05 * name, seed=name))
    return project


def test_records_that_are_there_already_are_rejected_and_the_others_appended(tmp_path):
    old = project_with(tmp_path / "old", range(4))
    old.write(match={"min_duration": 0.0})
    new = project_with(tmp_path / "new", range(7))
    config = new.configure(
        match={"min_duration": 0.0}, append_to=str(old.dataset), encode={"codecs": []}, max_reject_fraction=0.1
    )
    require_fitting(config, old.dataset)
    utterances = new.match_by_hand(config)
    assert [utterance.audio_filepath for utterance in utterances] == ["4.flac", "5.flac", "6.flac"]
    rejects = new.rejects("prepare")
    assert [(reject["reason"], reject["record"]["audio_filepath"]) for reject in rejects] == [
        ("already_there", f"{number}.flac") for number in range(4)
    ]
    new.write(match={"min_duration": 0.0}, append_to=str(old.dataset), encode={"codecs": []}, max_reject_fraction=0.1)
    append_dataset(old.dataset, new.dataset)
    assert len(list(open_shar(old.dataset, []))) == 7
    # The run is as it was, although the dataset has all records now.
    assert [utterance.cut_id for utterance in new.prepare(config)] == [utterance.cut_id for utterance in utterances]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"write": {"audio_format": "wav"}}, ["write.audio_format", "'wav'", "'flac'"]),
        ({"write": {"sampling_rate": 8000}}, ["write.sampling_rate", "8000", "None"]),
        ({"match": {"min_duration": 1.0}}, ["match.min_duration", "1.0", "0.0"]),
        ({"encode": {"codecs": []}}, ["encode.codecs", "[]", "['a']"]),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_before_any_work(coded, tmp_path, changes, named):
    values = {
        "name": "new", "run_dir": str(tmp_path / "run"), "dataset_dir": str(tmp_path / "new"),
        "sources": [{"manifest": "m.json", "audio_root": "."}], "append_to": str(coded[0]),
        "match": {"min_similarity": 0.6, "min_duration": 0.0},
        "encode": {"codecs": [{"name": "a", "model": "builtin"}]},
    }  # fmt: skip
    require_fitting(to_config(values, "test"), coded[0])
    changes = {key: values.get(key, {}) | value for key, value in changes.items()}
    with raises(ConfigError, "unlike_datasets", *named):
        require_fitting(to_config(values | changes, "test"), coded[0])
    with raises(ConfigError, "bad_config_value", "append_to"):
        require_fitting(to_config(values | {"dataset_dir": str(coded[0])}, "test"), coded[0])


def test_lines_that_no_dataset_json_counts_are_no_part_of_the_dataset(coded, growing):
    ids = read_ids(growing)
    more = (coded[1] / "shards.jsonl").read_bytes()
    with (growing / "shards.jsonl").open("ab") as stream:
        stream.write(more)
    assert read_ids(growing) == ids
    assert len(ShardedDataset(growing).shards()) == 2
    assert len(lines(growing / "shards.jsonl")) == 4


def test_append_runs_a_configuration_without_contexts(tmp_path):
    old, new = project_with(tmp_path / "old", range(3)), project_with(tmp_path / "new", range(5))
    values = {"match": None, "encode": {"codecs": []}, "executor": {"workers": 1}, "max_reject_fraction": 0.7}
    path = tmp_path / "c.yaml"
    for project, further in ((old, {}), (new, {"append_to": str(old.dataset)})):
        path.write_bytes(to_yaml(project.configure(**values, **further)))
        command = append if further else run
        assert command.main([str(path)], standalone_mode=False) == 0
    assert ShardedDataset(old.dataset).record().num_cuts == len(list(open_shar(old.dataset, []))) == 5


@pytest.mark.slow
@pytest.mark.e2e
def test_append_runs_a_configuration_on_the_records_that_are_new(tmp_path, capsys):
    corpus = make_corpus(tmp_path / "corpus", num_voices=2, utterances_per_voice=6)
    codec = save_encodec(tmp_path / "encodec")
    records = corpus.manifest.read_text().splitlines(keepends=True)
    half = tmp_path / "half.json"
    half.write_text("".join(records[::2]))
    changes = {"match": {"min_similarity": -1.0, "min_duration": 0.5}, "write": {"shard_size": 3}}
    old = write_config(tmp_path / "old", half, corpus.audio_root, codec, **changes)
    assert run.main([str(old)], standalone_mode=False) == 0
    dataset = tmp_path / "old/dataset"
    before, number = digest(dataset), ShardedDataset(dataset).record().num_cuts
    more = write_config(
        tmp_path / "new", corpus.manifest, corpus.audio_root, codec, **changes, append_to=str(dataset),
        max_reject_fraction=0.7,
    )  # fmt: skip
    done = run_sharmill("append", more)
    assert (done.returncode, done.stderr) == (0, "")
    rejects = [json.loads(line)["reason"] for line in (tmp_path / "new/run/rejects.jsonl").read_text().splitlines()]
    assert rejects.count("already_there") == number
    record = ShardedDataset(dataset).record()
    assert record.num_cuts == number + ShardedDataset(tmp_path / "new/dataset").record().num_cuts > number
    assert len(rejects) / len(records) > 0.7
    after = digest(dataset)
    assert {name for name in before if after[name] != before[name]} == {"dataset.json", "shards.jsonl"}
    assert validate.main([str(dataset), "--deep"], standalone_mode=False) == 0
    capsys.readouterr()
    assert append.main([str(more)], standalone_mode=False) == 0
    assert digest(dataset) == after
    assert "already" in capsys.readouterr().out
    refused = run_sharmill("run", old)
    assert refused.returncode == 2
    assert "foreign" in refused.stderr or "not written from" in refused.stderr
