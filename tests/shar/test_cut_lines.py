"""Files of cuts: what is written is read, and what is damaged is an error."""

from __future__ import annotations

import gzip

import pytest
from support.errors import raises

from sharmill.errors import DamagedShard
from sharmill.shar.cut_lines import read_cuts, write_cuts

CUTS = [{"id": f"cut-{number}", "text": "größe"} for number in range(50)]


@pytest.fixture
def cuts(tmp_path):
    path = tmp_path / "cuts.000000.jsonl.gz"
    write_cuts(path, CUTS)
    return path


def test_cuts_come_back(cuts):
    assert list(read_cuts(cuts)) == CUTS


def test_the_bytes_of_cuts_carry_neither_time_nor_name(cuts, tmp_path):
    other = tmp_path / "other.jsonl.gz"
    write_cuts(other, CUTS)
    assert other.read_bytes() == cuts.read_bytes()
    assert cuts.read_bytes()[3:8] == bytes(5)


def test_no_cuts_are_a_file_that_reads_as_none(cuts):
    write_cuts(cuts, [])
    assert list(read_cuts(cuts)) == []


def test_plain_lines_are_read_too(tmp_path):
    path = tmp_path / "cuts.000000.jsonl"
    path.write_bytes(b'{"id":"a"}\n{"id":"b"}\n')
    assert [cut["id"] for cut in read_cuts(path)] == ["a", "b"]


def test_every_truncation_of_cuts_is_damage(cuts):
    data = cuts.read_bytes()
    for length in range(len(data)):
        cuts.write_bytes(data[:length])
        with raises(DamagedShard, "damaged_shard", cuts.name):
            list(read_cuts(cuts))


def test_every_flipped_bit_of_cuts_is_damage_or_changes_nothing(cuts):
    data = cuts.read_bytes()
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << (position % 8)
        cuts.write_bytes(flipped)
        try:
            assert list(read_cuts(cuts)) == CUTS, position
        except DamagedShard:
            pass


@pytest.mark.parametrize(
    "content", [b"not json\n", b"[1]\n", b"3\n", b"\n", b'{"id":1}\n{"id"', b"\xff\n", b'{"a":' * 100_000]
)
def test_lines_that_are_no_objects_are_damage(cuts, content):
    cuts.write_bytes(gzip.compress(content))
    with raises(DamagedShard, "damaged_shard", cuts.name):
        list(read_cuts(cuts))


def test_what_follows_the_compressed_cuts_is_damage(cuts):
    cuts.write_bytes(cuts.read_bytes() + b"more")
    with raises(DamagedShard, "damaged_shard", cuts.name):
        list(read_cuts(cuts))


def test_cuts_that_are_not_there_are_damage(tmp_path):
    with raises(DamagedShard, "damaged_shard", "cuts.000000.jsonl.gz"):
        list(read_cuts(tmp_path / "cuts.000000.jsonl.gz"))
