"""Reading of segments' codes for one shard after the other, from many files, and from damaged ones."""

from __future__ import annotations

import os
import resource
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sharmill.encode.segment_codes import SegmentCodes, bounds_file, codes_file, write_codes
from sharmill.errors import UnitFailed

CODEC = SimpleNamespace(num_codebooks=2, codebook_size=64)
BOUNDS = np.array([0, 30, 50, 90, 120])


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
def limit_files():
    """A function that lowers the limit of open files of this process, which may be raised again."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda number: resource.setrlimit(resource.RLIMIT_NOFILE, (number, before[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("limit", [None, 100], ids=["", "few open files are allowed"])
def test_shards_that_mix_all_blocks_get_the_codes_of_their_segments(stage_of_many, limit_files, limit):
    if limit is not None:
        limit_files(limit)
    rng = np.random.default_rng(1)
    reader = SegmentCodes(stage_of_many, CODEC)
    for _ in range(200):
        assert_read(reader, stage_of_many, np.unique(rng.integers(0, stage_of_many.bounds[-1], 12)))
    reader.close()


@pytest.mark.parametrize("wanted", [[0, 2, 3, 9], list(range(150)), []], ids=["far apart", "a whole block", "none"])
def test_codes_larger_than_what_is_read_at_once_are_those_of_their_segments(stage_of_long, wanted):
    reader = SegmentCodes(stage_of_long, CODEC)
    assert_read(reader, stage_of_long, np.array(wanted, np.uint32))
    reader.close()


def assert_read(reader, stage, wanted):
    found = dict(reader.read(wanted))
    assert list(found) == wanted.tolist()
    for segment, codes in found.items():
        np.testing.assert_array_equal(codes, stage.codes[segment])


def test_where_the_limit_cannot_be_raised_all_is_read(stage_of_many, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (100, 100))
    reader = SegmentCodes(stage_of_many, CODEC)
    assert_read(reader, stage_of_many, np.arange(1200))
    assert files_open() <= 100
    reader.close()


def test_a_limit_that_is_high_enough_stays(stage_of_many, limit_files):
    for limit, then in ((700, 700), (399, 400)):
        limit_files(limit)
        SegmentCodes(stage_of_many, CODEC)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == then


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
