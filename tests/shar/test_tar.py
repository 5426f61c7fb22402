"""The tar writer and the strict reader: what is written is read, by others too, and every damage is an error."""

from __future__ import annotations

import io
import json
import tarfile
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lhotse import Recording
from lhotse.array import Array, TemporalArray
from lhotse.shar import ArrayTarWriter, AudioTarWriter
from lhotse.shar.readers.tar import TarIterator
from support.errors import raises
from support.properties import examples
from support.shar import members_of

from sharmill.errors import DamagedShard
from sharmill.shar.items import FieldWriter, Item, read_field
from sharmill.shar.lhotse_json import recording_json
from sharmill.shar.tar import TarTable, TarWriter, tar_header

NAMES = ["a.flac", "a.json", "x" * 101 + ".flac", "y" * 300 + ".json", "größe-日本語.wav", "ü" * 99, "with space'\".b"]


def archive(members) -> bytes:
    stream = io.BytesIO()
    writer = TarWriter(stream)
    for name, data in members:
        writer.add(name, data)
    writer.finish()
    return stream.getvalue()


def parse(path, data: bytes) -> list[tuple[str, bytes]]:
    path.write_bytes(data)
    return members_of(path)


@pytest.fixture
def tar(tmp_path):
    return tmp_path / "field.000000.tar"


MEMBERS = [(name, bytes(range(256)) * number) for number, name in enumerate(NAMES)]


# Small archives are read as a whole, and large ones mapped.
@pytest.mark.parametrize("more", [0, 1 << 20])
def test_members_come_back_in_order(tar, more):
    members = [*MEMBERS, ("last", bytes(more))]
    assert parse(tar, archive(members)) == members
    for length in (0, 1, 512, 1024, 1500):
        with raises(DamagedShard, "damaged_shard", tar.name):
            parse(tar, archive(members)[: -1 - length])


@pytest.mark.parametrize("name", [*NAMES, "", "z" * 100, "z" * 99 + "é", "deep/folder/a.json"])
@pytest.mark.parametrize("size", [0, 1, 512, 0o77777777777, 1 << 33])
def test_headers_are_those_of_the_standard_library(name, size):
    expected = tarfile.TarInfo(name)
    expected.size = size
    assert tar_header(name, size) == expected.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def test_python_reads_the_same_members(tar):
    with tarfile.open(fileobj=io.BytesIO(archive(MEMBERS))) as opened:
        assert [(member.name, opened.extractfile(member).read()) for member in opened] == MEMBERS


def test_an_archive_without_members_is_whole(tar):
    assert parse(tar, archive([])) == []
    assert len(archive([])) == 1024
    with tarfile.open(tar) as opened:
        assert opened.getnames() == []


def test_headers_carry_no_time_and_no_owner(tar):
    with tarfile.open(fileobj=io.BytesIO(archive(MEMBERS))) as opened:
        assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in opened} == {(0, 0, 0, "", "", 0o644)}
    assert archive(MEMBERS) == archive(MEMBERS)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=300),
            st.binary(max_size=1100),
        ),
        max_size=5,
    )
)
def test_any_members_make_the_round_trip(tmp_path_factory, members):
    assert parse(tmp_path_factory.getbasetemp() / "any.tar", archive(members)) == members


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tars_of_python_are_read_in_every_format(tar, format):
    long = "p" * 90 + "/" + "n" * 90 if format == tarfile.USTAR_FORMAT else "n" * 300
    members = [(long, b"x" * 700), ("b.json", b""), ("c", bytes(512))]
    if format != tarfile.USTAR_FORMAT:
        members.append(("größe" * 30, b"y"))
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=format) as opened:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            opened.addfile(info, io.BytesIO(data))
    assert parse(tar, stream.getvalue()) == members


def test_a_size_in_a_pax_header_counts(tar):
    info = tarfile.TarInfo("a")
    info.size = 3
    info.pax_headers = {"size": "3", "comment": "ü" * 200}
    data = info.tobuf(tarfile.PAX_FORMAT) + b"abc".ljust(512, b"\0") + bytes(1024)
    assert parse(tar, data) == [("a", b"abc")]


def test_lhotse_reads_our_fields(tmp_path):
    path = tmp_path / "recording.000000.tar"
    ids = ["cut-a-0.00-1.00", "cut-" + "b" * 250 + "-0.00-1.00", "cut-größe.x-0.00-1.00"]
    with FieldWriter(path) as writer:
        for number, cut_id in enumerate(ids):
            writer.add(Item(cut_id, "flac", b"f" * number, recording_json(cut_id, 16000, 16000)))
        writer.add(Item("cut-nothing", "flac", None, None))
    found = list(TarIterator(path))
    assert [manifest.id for manifest, _ in found[:3]] == ids
    assert [manifest.sources[0].source for manifest, _ in found[:3]] == [b"", b"f", b"ff"]
    assert found[3][0] is None
    assert [item.cut_id for item in read_field(path)] == [*ids, "cut-nothing"]
    assert list(read_field(path))[3].data is None


def test_we_read_the_audio_fields_of_lhotse(tmp_path):
    ids = ["short", "l" * 260]
    samples = np.zeros((1, 800), dtype=np.float32)
    with AudioTarWriter(f"{tmp_path}/recording.%06d.tar", shard_size=10, format="flac") as writer:
        for cut_id in ids:
            recording = Recording(cut_id, [], sampling_rate=16000, num_samples=800, duration=0.05)
            writer.write(cut_id, samples, 16000, recording)
        writer.write_placeholder("placeholder")
    first, second, third = read_field(tmp_path / "recording.000000.tar")
    assert [first.cut_id, second.cut_id, third.cut_id] == [*ids, "placeholder"]
    assert (first.extension, first.data[:4], first.metadata["num_samples"]) == ("flac", b"fLaC", 800)
    assert (third.data, third.metadata) == (None, None)


def test_we_read_the_array_fields_of_lhotse(tmp_path):
    codes = np.arange(8, dtype=np.int16).reshape(2, 4)
    manifest = TemporalArray(
        Array("memory_npy", "", "", shape=[2, 4]), temporal_dim=-1, frame_shift=0.02, start=0.0
    )  # fmt: skip
    with ArrayTarWriter(f"{tmp_path}/codes.%06d.tar", shard_size=10, compression="numpy") as writer:
        writer.write("cut", codes, manifest)
    (item,) = read_field(tmp_path / "codes.000000.tar")
    assert (item.cut_id, item.extension) == ("cut", "npy")
    assert item.metadata["array"]["shape"] == [2, 4]


SMALL = archive([("c" * 120 + ".flac", b"\1" * 700), ("c" * 120 + ".json", b"{}\n"), ("e", b"")])


@pytest.mark.parametrize("length", [*range(0, len(SMALL), 512), *np.random.default_rng(0).integers(1, len(SMALL), 40)])
def test_a_shortened_archive_is_damaged(tar, length):
    with raises(DamagedShard, "damaged_shard", tar.name):
        parse(tar, SMALL[: int(length)])


def test_a_flipped_bit_outside_the_data_is_damage_or_changes_nothing(tar):
    """Names in extensions have no checksum in a tar archive; the pairing of the members is what protects those."""
    members = parse(tar, SMALL)
    long_names = [range(512, 512 + 126), range(2560 + 512, 2560 + 512 + 126)]
    data = [range(1536, 1536 + 700), range(2560 + 1536, 2560 + 1536 + 3)]
    harmless = 0
    for position in range(len(SMALL)):
        if any(position in place for place in (*long_names, *data)):
            continue
        flipped = bytearray(SMALL)
        flipped[position] ^= 1 << (position % 8)
        try:
            assert parse(tar, bytes(flipped)) == members, position
            harmless += 1
        except DamagedShard:
            pass
    # A digit of the checksum may become a space, and the space after it a NUL.
    assert harmless < 10


def test_a_prefix_that_begins_with_nothing_is_one(tar):
    block = bytearray(header())
    block[257:265], block[345:348] = b"ustar\00000"[:8], b"\0xy"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    assert parse(tar, bytes(block) + BODY + END) == [("\0xy/a", b"abc")]


def test_a_header_within_the_data_of_a_member_is_data(tar):
    inner = header() + BODY + END
    assert parse(tar, archive([("a", inner), ("b", b"")])) == [("a", inner), ("b", b"")]


def test_a_flipped_bit_in_a_long_name_breaks_the_pair(tmp_path):
    path = tmp_path / "f.tar"
    cut_id = "c" * 150
    with FieldWriter(path) as writer:
        writer.add(Item(cut_id, "flac", b"data", {"id": "x"}))
    good = path.read_bytes()
    for position in range(512, 512 + len(cut_id)):
        flipped = bytearray(good)
        flipped[position] ^= 4
        path.write_bytes(flipped)
        with raises(DamagedShard, "damaged_shard", path.name):
            list(read_field(path))


def header(name=b"a", size=b"%011o\0" % 3, kind=b"0") -> bytes:
    block = bytearray(512)
    block[: len(name)] = name
    block[100:108] = b"0000644\0"
    block[124:136] = size.ljust(12, b"\0")
    block[156:157] = kind
    block[257:265] = b"ustar  \0"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


BODY = b"abc".ljust(512, b"\0")
END = bytes(1024)


def pax(records: bytes) -> bytes:
    return header(size=b"%011o\0" % len(records), kind=b"x") + records.ljust(-(-len(records) // 512) * 512, b"\0")


def test_the_hand_made_header_is_a_good_one(tar):
    assert parse(tar, header() + BODY + END) == [("a", b"abc")]
    assert parse(tar, pax(b"12 path=bcd\n") + header() + BODY + END) == [("bcd", b"abc")]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(1023),
        header() + BODY,
        header() + BODY + bytes(512),
        header() + BODY + END + b"\1",
        header() + BODY + END + header() + BODY + END,
        header() + BODY[:3] + b"\1" + BODY[4:] + END,
        header(size=b"00000000003x") + BODY + END,
        header(size=b"-1") + BODY + END,
        header(size=b"-1000") + BODY + END,
        header(size=b"0o3") + BODY + END,
        header(size=b"1_0") + BODY + END,
        header(size=b"") + BODY + END,
        header(size=b"\x80" + b"\xff" * 11) + BODY + END,
        header(size=b"77777777777\0") + BODY + END,
        header(kind=b"2") + BODY + END,
        header(kind=b"1") + BODY + END,
        header(kind=b"5") + BODY + END,
        header(kind=b"g") + BODY + END,
        header(kind=b"K") + BODY + END,
        header(size=b"%011o\0" % (1 << 21), kind=b"L") + END,
        header(size=b"%011o\0" % (1 << 21), kind=b"x") + END,
        header(kind=b"L") + BODY + END,
        pax(b"12 path=bcd\n") + END,
        pax(b"11 path=bcd\n") + header() + BODY + END,
        pax(b"99 path=bcd\n") + header() + BODY + END,
        pax(b"path=bcd\n") + header() + BODY + END,
        pax(b"5 abc\n"[:5]) + header() + BODY + END,
        pax(b"0 path=bcd\n") + header() + BODY + END,
        pax(b"9" * 5000 + b" path=a\n") + header() + BODY + END,
        pax(b"11 size=-3\n") + header() + BODY + END,
        pax(b"5011 size=" + b"9" * 5000 + b"\n") + header() + BODY + END,
        pax(b"22 GNU.sparse.major=1\n") + header() + BODY + END,
    ],
)
def test_every_damage_is_found(tar, data):
    with raises(DamagedShard, "damaged_shard", tar.name):
        parse(tar, data)


def test_a_file_that_is_not_there_is_damage(tar):
    with raises(DamagedShard, "damaged_shard", tar.name):
        TarTable(tar)


@pytest.mark.parametrize(
    "members",
    [
        [("a.flac", b"x")],
        [("a.flac", b"x"), ("b.json", b"{}")],
        [("a.flac", b"x"), ("a.flac", b"{}")],
        [("a.nodata", b""), ("a.json", b"{}")],
        [("a.flac", b"x"), ("a.json", b"{")],
        [("a.flac", b"x"), ("a.json", b"[]")],
        [("a.flac", b"x"), ("a.json", b"\xff")],
        [("a.flac", b"x"), ("a.json", b"[" * 100_000)],
    ],
)
def test_members_that_are_no_pair_are_damage(tar, members):
    tar.write_bytes(archive(members))
    with raises(DamagedShard, "damaged_shard", tar.name):
        list(read_field(tar))


def test_an_error_while_writing_leaves_no_end_marker(tar):
    def interrupted():
        with FieldWriter(tar) as writer:
            writer.add(Item("a", "flac", b"x" * 2000, {"id": "a"}))
            raise KeyError("a")

    with pytest.raises(KeyError):
        interrupted()
    with raises(DamagedShard, "damaged_shard", tar.name):
        list(read_field(tar))


def test_the_pairs_of_a_field_are_data_then_metadata(tar):
    with FieldWriter(tar) as writer:
        for cut_id in ("a.1", "b"):
            writer.add(Item(cut_id, "wav", b"x", {"id": cut_id}))
    with tarfile.open(tar) as opened:
        assert opened.getnames() == ["a.1.wav", "a.1.json", "b.wav", "b.json"]
        assert json.loads(opened.extractfile("a.1.json").read()) == {"id": "a.1"}
        assert all(a.offset < b.offset for a, b in pairwise(opened.getmembers()))


def test_a_small_archive_that_is_cut_off_while_it_is_open_keeps_its_members(tar):
    tar.write_bytes(archive(MEMBERS))
    with TarTable(tar) as table:
        tar.write_bytes(b"")
        assert [table.read(index) for index in range(len(table))] == [data for _, data in MEMBERS]
