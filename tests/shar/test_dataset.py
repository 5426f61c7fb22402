"""A dataset directory: codecs are added and removed, and the index stays where it is of these shards."""

from __future__ import annotations

import msgspec
import pytest
from support.shar import Project, ToyCodec, copy, snapshot, voice

from sharmill.files import storage
from sharmill.files.locks import LOCK_NAME
from sharmill.shar import index
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.index import FieldFile
from sharmill.shar.layout import codec_fields, sorted_fields


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A dataset of two shards with the codecs a and b."""
    project = Project(tmp_path_factory.mktemp("project"))
    for number in range(3):
        project.add(f"{number}.flac", voice(0.5, seed=number))
    config = project.write(write={"shard_size": 2}, match={"min_duration": 0.0})
    for name in "ab":
        project.encode(config, name, ToyCodec())
    return project.dataset


@pytest.fixture
def dataset(finished, tmp_path):
    return ShardedDataset(copy(finished, tmp_path / "dataset"))


def test_its_files_are_where_its_fields_say(dataset):
    for shard in dataset.shards():
        for field in dataset.record().layout:
            assert dataset.file(field.name, shard.index) == dataset.directory / shard.fields[field.name].file


def test_a_removed_codec_leaves_the_others_and_the_audio(dataset):
    before = snapshot(dataset.directory)
    dataset.remove_fields(codec_fields("a"), 2)
    left = {name for name in before if not name.startswith("codes_a/")}
    after = snapshot(dataset.directory)
    assert after.keys() == left
    assert {name for name in left if after[name] != before[name]} == {"dataset.json", "shards.jsonl"}
    assert [codec.name for codec in dataset.record().codecs] == dataset.stored_codecs() == ["b"]
    assert {field for shard in dataset.shards() for field in shard.fields} == set(dataset.record().fields)
    dataset.remove_fields(codec_fields("a"), 2)
    assert snapshot(dataset.directory) == after


def test_a_codec_that_is_added_again_makes_the_same_index(dataset):
    before = snapshot(dataset.directory)
    record = next(codec for codec in dataset.record().codecs if codec.name == "a")
    files = [{field.name: shard.fields[field.name] for field in codec_fields("a")} for shard in dataset.shards()]
    dataset.add_fields(codec_fields("a"), files, record)
    assert snapshot(dataset.directory) == before
    other = [{field: FieldFile(file.file, 1, "0") for field, file in shard.items()} for shard in files]
    dataset.add_fields(codec_fields("a"), other, msgspec.structs.replace(record, checksum="other"))
    assert [codec.checksum for codec in dataset.record().codecs] == ["other", "toy"]
    assert dataset.shards()[1].fields["codes_a/target_codes"].size == 1
    assert dataset.record().fields == msgspec.json.decode(before["dataset.json"])["fields"]


def test_an_index_of_the_same_shards_stays_with_its_codecs_and_another_is_written_anew(dataset):
    before = snapshot(dataset.directory)
    audio = [field for field in dataset.record().fields if "/" not in field]
    shards = [
        msgspec.structs.replace(shard, fields={field: shard.fields[field] for field in audio})
        for shard in dataset.shards()
    ]
    record = msgspec.structs.replace(dataset.record(), fields=audio, codecs=[]).complete()
    dataset.write_index(record, shards)
    assert snapshot(dataset.directory) == before
    dataset.index_files[0].write_bytes(b"{")
    dataset.write_index(record, shards)
    assert (dataset.record(), dataset.shards()) == (record, shards)


def test_what_others_have_put_there_is_not_removed(dataset):
    (dataset.directory / "notes.txt").write_text("mine")
    dataset.remove(2)
    assert snapshot(dataset.directory) == {"notes.txt": b"mine"}
    assert not dataset.is_empty()
    (dataset.directory / "notes.txt").unlink()
    assert dataset.is_empty()
    assert ShardedDataset(dataset.directory / "absent").is_empty()


def test_fields_are_listed_base_first():
    fields = ["codes_b/x", "cuts", "target_audio", "codes_a/y", "context_audio"]
    assert sorted_fields(fields) == ["cuts", "target_audio", "context_audio", "codes_a/y", "codes_b/x"]


def test_what_is_removed_does_not_come_back_after_a_loss_of_power(dataset, monkeypatch):
    """The run has no plan of it by then, and would refuse it as another's."""
    fields, left = dataset.record().fields, {}

    def look(folder):
        left[folder] = [path.name for path in folder.iterdir() if path.is_file()]

    monkeypatch.setattr(storage, "fsync_directory", look)
    dataset.remove(2)
    assert left == {folder: [] for folder in (dataset.directory, *(dataset.directory / field for field in fields))}


def test_the_lock_of_an_index_does_not_come_back_after_a_loss_of_power(tmp_path, monkeypatch):
    """The checker would find it in a finished dataset."""
    is_there = []
    monkeypatch.setattr(index, "fsync_directory", lambda folder: is_there.append((folder / LOCK_NAME).exists()))
    with index.changing_index(tmp_path):
        assert (tmp_path / LOCK_NAME).exists()
    assert is_there == [False]
