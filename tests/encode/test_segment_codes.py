"""Reading of segments' codes for one shard after the other: what is opened and read is counted."""

from __future__ import annotations

import os
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
BYTES_OF_A_PLACE = 32


@pytest.fixture
def stage(tmp_path):
    """The folders of a stage that has encoded 120 segments in four blocks, and the codes."""
    rng = np.random.default_rng(0)
    codes = [rng.integers(0, 64, (2, int(rng.integers(5, 20)))).astype("<i2") for _ in range(BOUNDS[-1])]
    (tmp_path / "parts").mkdir()
    (tmp_path / "plan").mkdir()
    np.save(bounds_file(tmp_path / "plan"), BOUNDS)
    for block, (start, stop) in enumerate(pairwise(BOUNDS.tolist())):
        write_codes(tmp_path / codes_file(block), codes[start:stop], CODEC.codebook_size)
    return SimpleNamespace(path=tmp_path, plan=tmp_path / "plan", codes=codes)


@pytest.fixture
def counted(monkeypatch):
    """Counts the files that are opened by name, and bytes read."""
    opened, read = Counter(), Counter()
    open_stored, pread = segment_codes.open_stored, os.pread

    def count_opened(path):
        opened[path.name] += 1
        return open_stored(path)

    def count_read(file, size, position):
        read["bytes"] += size
        return pread(file, size, position)

    monkeypatch.setattr(segment_codes, "open_stored", count_opened)
    monkeypatch.setattr(segment_codes.os, "pread", count_read)
    return opened, read


def shards():
    """The segments of 200 shards in an order that mixes all blocks."""
    rng = np.random.default_rng(1)
    return [np.unique(rng.integers(0, BOUNDS[-1], 12)) for _ in range(200)]


def read_all(stage):
    """Reads the codes of all shards; how many bytes these have, and how many they are."""
    reader, size, number = SegmentCodes(stage, CODEC), 0, 0
    for shard in shards():
        found = dict(reader.read(shard))
        assert list(found) == shard.tolist()
        for segment, codes in found.items():
            np.testing.assert_array_equal(codes, stage.codes[segment])
            size, number = size + codes.nbytes, number + 1
    reader.close()
    return size, number


def test_each_file_is_opened_once_and_nothing_is_read_but_what_is_asked_for(stage, counted):
    size, number = read_all(stage)
    opened, read = counted
    assert set(opened.values()) == {1}
    assert len(opened) == 4
    assert read["bytes"] == size + number * BYTES_OF_A_PLACE


def test_with_more_files_than_are_kept_open_each_is_opened_once_a_shard_at_most(stage, counted, monkeypatch):
    monkeypatch.setattr(segment_codes, "_KEPT_OPEN", 1)
    size, number = read_all(stage)
    opened, read = counted
    assert min(opened.values()) == 1
    assert max(opened.values()) <= len(shards())
    assert read["bytes"] == size + number * BYTES_OF_A_PLACE


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


def test_a_file_that_was_cut_short_is_damaged(stage):
    path = stage.path / codes_file(3)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(UnitFailed, match=r"000003\.codes is damaged"):
        dict(SegmentCodes(stage, CODEC).read(np.arange(90, 120)))
