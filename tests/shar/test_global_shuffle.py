"""``shuffle="global"``: every cut may come anywhere in the epoch, and only what is asked for is read."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from support.errors import raises
from support.reader import make_dataset, numbers
from support.shar import copy

from sharmill.errors import ConfigError, DamagedShard
from sharmill.shar import open_shar
from sharmill.shar.sidecars import write_sidecars

COUNTS = [9] * 40


@pytest.fixture
def dataset(built, tmp_path):
    path = copy(built.dataset, tmp_path / "dataset")
    write_sidecars(path)
    return path


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A dataset of 40 shards."""
    path = make_dataset(tmp_path_factory.mktemp("many") / "dataset", COUNTS, codes=True)
    write_sidecars(path)
    return path


def test_the_cuts_are_those_of_the_reader_without_index_files(dataset):
    plain = {cut.id: cut for cut in open_shar(dataset)}
    found = list(open_shar(dataset, shuffle="global", seed=1))
    assert sorted(cut.id for cut in found) == sorted(plain)
    assert [cut.id for cut in found] != list(plain)
    for cut in found:
        cut.shar_position = plain[cut.id].shar_position
        assert cut.to_dict() == plain[cut.id].to_dict()
        np.testing.assert_array_equal(cut.load_audio(), plain[cut.id].load_audio())
        np.testing.assert_array_equal(cut.load_context_codes(), plain[cut.id].load_context_codes())


def test_cuts_of_a_shard_are_spread_over_the_whole_epoch(many):
    """With 40 shards and 8 of them mixed, the cuts of one lie within a fifth of the epoch."""
    spread = {}
    for shuffle in (True, "global"):
        places = {number: place for place, number in enumerate(numbers(open_shar(many, shuffle=shuffle, seed=3)))}
        shards = [[places[9 * shard + item] for item in range(9)] for shard in range(40)]
        spread[shuffle] = np.mean([max(shard) - min(shard) for shard in shards])
    assert spread[True] < sum(COUNTS) / 5
    assert spread["global"] > sum(COUNTS) / 2


def test_epochs_and_seeds_have_orders_of_their_own(many):
    cuts = open_shar(many, [], shuffle="global", seed=3)
    first, second = numbers(cuts), numbers(cuts)
    assert first != second
    assert first != numbers(open_shar(many, [], shuffle="global", seed=4))
    assert first == numbers(open_shar(many, [], shuffle="global", seed=3))
    assert sorted(first) == sorted(second) == list(range(sum(COUNTS)))


def test_index_files_may_lie_elsewhere(many, tmp_path):
    into = tmp_path / "index"
    bare = make_dataset(tmp_path / "dataset", COUNTS[:3])
    with raises(ConfigError, "missing_input", "is not there", f"sharmill sidecars {bare}"):
        open_shar(bare, shuffle="global")
    write_sidecars(bare, into)
    assert sorted(numbers(open_shar(bare, shuffle="global", sidecars=into))) == list(range(27))


def test_a_folder_without_index_is_refused_with_what_to_do(dataset):
    for name in ("dataset.json", "shards.jsonl"):
        (dataset / name).unlink()
    with raises(ConfigError, "no_dataset", "sharmill index"):
        open_shar(dataset, shuffle="global")


DAMAGE = {
    "of another file": lambda index, archive: archive.write_bytes(archive.read_bytes() + bytes(512)),
    "cut off": lambda index, archive: index.write_bytes(index.read_bytes()[:-3]),
    "empty": lambda index, archive: index.write_bytes(b""),
    "backwards": lambda index, archive: index.write_bytes(
        np.frombuffer(index.read_bytes(), "<u8")[[1, 0, *range(2, index.stat().st_size // 8)]].tobytes()
    ),
    "in the middle of members": lambda index, archive: index.write_bytes(
        (np.frombuffer(index.read_bytes(), "<u8") + np.append(np.full(index.stat().st_size // 8 - 1, 512), 0))
        .astype("<u8").tobytes()
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_or_foreign_index_is_an_error(dataset, damage):
    archive = dataset / "target_audio/recording.000000.tar"
    damage(archive.with_name(archive.name + ".idx"), archive)
    with raises(DamagedShard, "damaged_shard", "recording.000000.tar"):
        list(open_shar(dataset, shuffle="global"))


def test_a_cut_off_archive_is_an_error(dataset):
    archive = dataset / "target_audio/recording.000000.tar"
    index = archive.with_name(archive.name + ".idx")
    data = archive.read_bytes()[:-2048]
    archive.write_bytes(data)
    offsets = np.frombuffer(index.read_bytes(), "<u8").copy()
    offsets[-1] = len(data)
    index.write_bytes(offsets.tobytes())
    with raises(DamagedShard, "damaged_shard", "cut off"):
        list(open_shar(dataset, shuffle="global"))


def test_a_lost_index_of_a_later_shard_is_an_error(dataset):
    shutil.move(dataset / "cuts/cuts.000002.jsonl.idx", dataset / "moved")
    with raises(DamagedShard, "damaged_shard", "cuts.000002.jsonl.idx"):
        list(open_shar(dataset, shuffle="global"))
