"""Reading of segments' codes for one shard after the other: what is opened and read is counted."""

from __future__ import annotations

import os
import resource
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sharmill.encode import segment_codes
from sharmill.encode.segment_codes import SegmentCodes, bounds_file, codes_file, write_codes
from sharmill.errors import UnitFailed

CODEC = SimpleNamespace(num_codebooks=2, codebook_size=64)
BOUNDS = np.array([0, 30, 50, 90, 120])
BYTES_OF_LONG = 20000


def encoded(folder, bounds, frames):
    """The folders of a stage that has encoded segments with so many frames, in blocks with these bounds, and codes."""
    rng = np.random.default_rng(0)
    codes = [rng.integers(0, 64, (2, number)).astype("<i2") for number in frames]
    (folder / "parts").mkdir()
    (folder / "plan").mkdir()
    np.save(bounds_file(folder / "plan"), bounds)
    for block, (start, stop) in enumerate(pairwise(bounds.tolist())):
        write_codes(folder / codes_file(block), codes[start:stop], CODEC.codebook_size)
    return SimpleNamespace(path=folder, plan=folder / "plan", codes=codes, bounds=bounds)


@pytest.fixture
def stage(tmp_path):
    """120 short segments in four blocks."""
    return encoded(tmp_path, BOUNDS, np.random.default_rng(2).integers(5, 20, BOUNDS[-1]).tolist())


@pytest.fixture
def stage_of_many(tmp_path):
    """1,200 short segments in 200 blocks."""
    return encoded(tmp_path, np.arange(0, 1201, 6), [3] * 1200)


@pytest.fixture
def stage_of_long(tmp_path):
    """150 segments in one block, the codes of each larger than what is read to no purpose between two of them."""
    return encoded(tmp_path, np.array([0, 150]), [5000] * 150)


@pytest.fixture
def counted(monkeypatch):
    """Counts the files that are opened by name, and notes the sizes of all reads."""
    opened, read = Counter(), []
    open_stored, pread = segment_codes.open_stored, os.pread

    def count_opened(path, **options):
        opened[path.name] += 1
        return open_stored(path, **options)

    def note_read(file, size, position):
        read.append(size)
        return pread(file, size, position)

    monkeypatch.setattr(segment_codes, "open_stored", count_opened)
    monkeypatch.setattr(segment_codes.os, "pread", note_read)
    return opened, read


@pytest.fixture
def limit_files():
    """A function that lowers the limit of open files of this process, which may be raised again."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda number: resource.setrlimit(resource.RLIMIT_NOFILE, (number, before[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def read_all(stage):
    """Reads the codes of 200 shards that mix all blocks; how many shards each block has segments in, by its file."""
    rng = np.random.default_rng(1)
    reader, visits = SegmentCodes(stage, CODEC), Counter()
    for _ in range(200):
        shard = np.unique(rng.integers(0, stage.bounds[-1], 12))
        found = dict(reader.read(shard))
        assert list(found) == shard.tolist()
        for segment, codes in found.items():
            np.testing.assert_array_equal(codes, stage.codes[segment])
        blocks = {int(np.searchsorted(stage.bounds, segment, side="right")) - 1 for segment in shard}
        visits.update(Path(codes_file(block)).name for block in blocks)
    reader.close()
    return visits


def test_each_file_is_opened_once_and_read_twice_for_a_shard(stage, counted):
    visits = read_all(stage)
    opened, read = counted
    assert opened == dict.fromkeys(visits, 1)
    assert len(opened) == 4
    assert len(read) == 2 * visits.total()


def test_codes_that_lie_far_from_each_other_are_read_without_what_is_between(stage_of_long, counted):
    reader = SegmentCodes(stage_of_long, CODEC)
    wanted = np.array([0, 2, 3, 9])
    found = dict(reader.read(wanted))
    reader.close()
    for segment in wanted.tolist():
        np.testing.assert_array_equal(found[segment], stage_of_long.codes[segment])
    entries = 11 * 16  # from the first to the one behind the last
    assert counted[1] == [entries, BYTES_OF_LONG, 2 * BYTES_OF_LONG, BYTES_OF_LONG]


def test_a_whole_block_is_read_in_parts(stage_of_long, counted):
    reader = SegmentCodes(stage_of_long, CODEC)
    assert len(dict(reader.read(np.arange(150)))) == 150
    reader.close()
    in_part = (1 << 20) // BYTES_OF_LONG
    assert counted[1] == [151 * 16, *[in_part * BYTES_OF_LONG] * 2, (150 - 2 * in_part) * BYTES_OF_LONG]


def test_of_many_more_files_than_the_limit_allows_each_is_opened_once_as_it_is_raised(
    stage_of_many, counted, limit_files
):
    limit_files(100)
    visits = read_all(stage_of_many)
    opened, read = counted
    assert len(opened) == 200
    assert opened == dict.fromkeys(visits, 1)
    assert len(read) == 2 * visits.total()


def test_where_the_limit_cannot_be_raised_half_of_it_stays_open(stage_of_many, counted, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (100, 100))
    visits = read_all(stage_of_many)
    opened, _ = counted
    kept = list(opened)[:50]  # the first that were met
    assert opened == {**visits, **dict.fromkeys(kept, 1)}


def test_a_limit_that_is_high_enough_stays(stage_of_many, limit_files):
    for limit, then in ((700, 700), (399, 400)):
        limit_files(limit)
        SegmentCodes(stage_of_many, CODEC)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == then


def test_of_no_segments_nothing_is_opened(stage, counted):
    assert dict(SegmentCodes(stage, CODEC).read(np.array([], np.uint32))) == {}
    assert counted == (Counter(), [])


def files_open():
    """How many files of codes this process has open."""
    return sum(os.path.realpath(path).endswith(".codes") for path in Path("/proc/self/fd").iterdir())


def test_files_stay_open_until_the_end_and_no_longer(stage):
    reader = SegmentCodes(stage, CODEC)
    dict(reader.read(np.arange(BOUNDS[-1])))
    assert files_open() == 4
    reader.close()
    assert files_open() == 0


@pytest.mark.parametrize("position", [0, 3, 7, 16, 8, 15])
def test_a_damaged_table_is_seen_at_the_segment_that_it_concerns(stage, position):
    path = stage.path / codes_file(1)
    whole = path.read_bytes()
    data = bytearray(whole)
    data[position] ^= 0x80
    path.write_bytes(data)
    reader = SegmentCodes(stage, CODEC)
    with pytest.raises(UnitFailed, match=r"000001\.codes is damaged"):
        dict(reader.read(np.arange(30, 32)))
    # It is opened again after that.
    path.unlink()
    path.write_bytes(whole)
    assert len(dict(reader.read(np.arange(30, 32)))) == 2
    reader.close()


def test_a_damaged_byte_is_seen_wherever_it_concerns_a_segment_that_is_asked_for(stage):
    path = stage.path / codes_file(1)
    whole, table = path.read_bytes(), 21 * 16
    # The checksum of the table, at its end, is not looked at.
    seen = {*range(table - 8), *range(table, table + sum(codes.nbytes for codes in stage.codes[30:50]))}
    for position in range(len(whole)):
        data = bytearray(whole)
        data[position] ^= 0x10
        path.write_bytes(data)
        reader = SegmentCodes(stage, CODEC)
        try:
            found = dict(reader.read(np.arange(30, 50)))
        except UnitFailed:
            assert position in seen
        else:
            assert position not in seen
            assert all(np.array_equal(codes, stage.codes[segment]) for segment, codes in found.items())
        reader.close()


def test_damage_between_segments_that_are_read_at_once_is_not_theirs(stage):
    path = stage.path / codes_file(0)
    data = bytearray(path.read_bytes())
    between = 31 * 16 + sum(codes.nbytes for codes in stage.codes[:5])
    data[between : between + stage.codes[5].nbytes] = bytes(stage.codes[5].nbytes)
    path.write_bytes(data)
    reader = SegmentCodes(stage, CODEC)
    found = dict(reader.read(np.array([4, 6])))
    np.testing.assert_array_equal(found[6], stage.codes[6])
    with pytest.raises(UnitFailed, match=r"000000\.codes is damaged"):
        dict(reader.read(np.array([4, 5, 6])))
    reader.close()


@pytest.mark.parametrize("size", [0, 16, 40, 30 * 16, 31 * 16, 31 * 16 + 100])
def test_a_file_that_was_cut_short_is_damaged(stage, size):
    path = stage.path / codes_file(3)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UnitFailed, match=r"000003\.codes is damaged"):
        dict(SegmentCodes(stage, CODEC).read(np.arange(90, 120)))
