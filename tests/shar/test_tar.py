"""Tar archives and arrays: written ones can be read, also by other tools.

The walk over an archive finds any damage, and a tolerant walk also yields all members before it.
"""

import os
import shutil
import subprocess
import tarfile

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays
from support.project import examples, members_of, raises, write_members
from support.sources import tar_bytes

from sharmill.errors import ConfigError, DamagedShard
from sharmill.shar.arrays import array_from_bytes, array_to_bytes, codes_dtype
from sharmill.shar.items import FieldWriter, Item, ItemTable, read_field
from sharmill.shar.tar import TarDamage, TarMember, Window, tar_header, walk

NAMES = ["a.flac", "a.json", "x" * 101 + ".flac", "y" * 300 + ".json", "größe-日本語.wav", "ü" * 99, "with space'\".b"]
MEMBERS = [(name, bytes(range(256)) * number) for number, name in enumerate(NAMES)]


@pytest.fixture
def tar(tmp_path):
    return tmp_path / "field.000000.tar"


def read(path, data, *, strict, begin=0):
    """Return the (name, content) pairs of the members, and the damage after them, if there is any."""
    path.write_bytes(data)
    found = []
    with path.open("rb") as stream:
        try:
            for name, _, start, size in walk(Window(stream), begin, strict=strict):
                found.append((name, data[start : start + size]))
        except TarDamage as damage:
            return found, damage
    return found, None


both_ways = pytest.mark.parametrize("strict", [True, False])


@pytest.mark.parametrize("name", [*NAMES, "", "z" * 100, "z" * 99 + "é", "deep/folder/a.json"])
@pytest.mark.parametrize("size", [0, 1, 512, 0o77777777777, 1 << 33])
def test_headers_are_those_of_the_standard_library(name, size):
    expected = tarfile.TarInfo(name)
    expected.size = size
    assert tar_header(name, size) == expected.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


# Archives of more than half a MiB are mapped into memory.
@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=300),
            st.binary(max_size=1100),
        ),
        max_size=5,
    ),
    st.sampled_from([0, 1 << 20]),
)
def test_any_members_make_the_round_trip(tmp_path_factory, members, more):
    path = tmp_path_factory.getbasetemp() / "any.tar"
    members = [*members, ("last", bytes(more))]
    write_members(path, members)
    assert members_of(path) == members


FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


@both_ways
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("headers", [{}, {"mtime": 1.5, "uname": "ü"}])
def test_tars_of_python_are_read_in_every_format(tar, format, headers, strict):
    long = "p" * 90 + "/" + "n" * 90 if format == tarfile.USTAR_FORMAT else "n" * 300
    members = [(long, b"x" * 700), ("b.json", b""), ("c", bytes(512)), ("/data/one.wav", b"d"), ("./dot.wav", b"c")]
    if format != tarfile.USTAR_FORMAT:
        members.append(("größe" * 30, b"y"))
        members.insert(0, ("inner", tar_bytes(members)))
    assert read(tar, tar_bytes(members, format, **headers), strict=strict) == (members, None)


@both_ways
def test_a_size_in_a_pax_header_counts(tar, strict):
    info = tarfile.TarInfo("a")
    info.size = 3
    info.pax_headers = {"size": "3", "comment": "ü" * 200}
    data = info.tobuf(tarfile.PAX_FORMAT) + b"abc".ljust(512, b"\0") + bytes(1024)
    assert read(tar, data, strict=strict) == ([("a", b"abc")], None)


@both_ways
@pytest.mark.parametrize("format", FORMATS[1:])
def test_a_walk_may_begin_at_any_member_and_end_before_any(format, strict):
    data = tar_bytes(MEMBERS, format)
    members = list(map(TarMember._make, walk(data, strict=strict)))
    for number, member in enumerate(members):
        assert list(walk(data, member.header, strict=strict)) == members[number:]
        assert list(walk(data, 0, member.header, strict=strict)) == members[:number]
        with pytest.raises(TarDamage, match="sharmill sidecars"):
            list(walk(data, 0, member.header + 1, strict=strict))


@pytest.mark.skipif(not shutil.which("tar"), reason="needs GNU tar")
@pytest.mark.parametrize("format", ["gnu", "posix", "ustar", "v7"])
def test_what_is_no_regular_file_is_passed_over_or_damage(format, tmp_path):
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "1.wav").write_bytes(b"1" * 700)
    os.link(folder / "1.wav", folder / "2_hard.wav")
    (folder / "3_link.wav").symlink_to("1.wav")
    os.mkfifo(folder / "4_fifo.wav")
    with (folder / "5_sparse.wav").open("wb") as stream:
        # Make so many holes that their map takes further headers.
        for number in range(60):
            stream.seek(number << 16)
            stream.write(b"s" * 4096)
    (folder / "deep/6.wav").write_bytes(b"6" * 5)
    left_out = {"ustar": ["sparse"], "v7": ["sparse", "fifo"]}.get(format, [])
    names = [
        name for name in sorted(path.name for path in folder.iterdir()) if not any(part in name for part in left_out)
    ]
    sparse = ["--sparse"] if format in ("gnu", "posix") else []
    command = ["tar", f"--format={format}", *sparse, "-cf", tmp_path / "a.tar", "-C", folder, *names]
    subprocess.run(command, check=True, capture_output=True)
    data = (tmp_path / "a.tar").read_bytes()
    expected = [("1.wav", b"1" * 700), ("2_hard.wav", b"1" * 700), ("deep/6.wav", b"6" * 5)]
    assert read(tmp_path / "b.tar", data, strict=False) == (expected, None)
    assert "does not belong in a shard" in str(read(tmp_path / "b.tar", data, strict=True)[1])


@both_ways
def test_every_place_to_cut_off_keeps_what_is_before_and_says_so(tar, strict):
    write_members(tar, MEMBERS)
    whole = tar.read_bytes()
    members = list(map(TarMember._make, walk(whole, strict=True)))
    ends = [member.start + member.size for member in members]
    last = len(whole) - 1024
    for position in {*range(0, last, 128), *ends, last - 1, last}:
        kept, damage = read(tar, whole[:position], strict=strict)
        assert [name for name, _ in kept] == [m.name for m, end in zip(members, ends, strict=True) if end <= position]
        assert str(damage).startswith(f"is cut off at byte {position}, ")
        assert damage.header == (members[len(kept)].header if len(kept) < len(members) else last)
    for length in (512, 1000):
        damage = read(tar, whole[: last + length], strict=strict)[1]
        assert ("end marker" in str(damage)) == strict


def header(name=b"a", size=b"%011o\0" % 3, kind=b"0", checksum=None) -> bytes:
    block = bytearray(512)
    block[: len(name)] = name
    block[100:108] = b"0000644\0"
    block[124:136] = size.ljust(12, b"\0")
    block[156:157] = kind
    block[257:265] = b"ustar  \0"
    block[148:156] = b" " * 8
    block[148:156] = checksum or b"%06o\0 " % sum(block)
    return bytes(block)


BODY = b"abc".ljust(512, b"\0")
END = bytes(1024)
GOOD = header() + BODY


def pax(records: bytes) -> bytes:
    return header(size=b"%011o\0" % len(records), kind=b"x") + records.ljust(-(-len(records) // 512) * 512, b"\0")


LONG_NAME = header(size=b"%011o\0" % 3, kind=b"L") + b"abc".ljust(512, b"\0")
NO_HEADER = "is damaged at byte 1024: there is no header"
NO_PAX = "a PAX header cannot be parsed"
CUT_OFF = "within its member 'a'"
# Bytes after a good member, words about their damage, and the number of members that a tolerant walk finds after them.
DAMAGE = [
    (END[:512], "within its end marker", 0),
    (END + b"\1", "data after its end marker", 0),
    (END + GOOD + END, "data after its end marker", 0),
    (header() + BODY[:3] + b"\1" + BODY[4:] + END, "the padding of a member is not empty", 1),
    (header(kind=b"2") + END, "does not belong in a shard", 0),
    (header(kind=b"1") + END, "does not belong in a shard", 0),
    (header(kind=b"5") + END, "does not belong in a shard", 0),
    (header(kind=b"g") + BODY + GOOD + END, "does not belong in a shard", 1),
    (header(kind=b"K") + BODY + GOOD + END, "does not belong in a shard", 1),
    (header(kind=b"7") + BODY + END, "does not belong in a shard", 1),
    (pax(b"22 GNU.sparse.major=1\n") + GOOD + END, "does not belong in a shard", 0),
    (pax(b"12 path=bcd\n") + END, "a header extension has no member", 0),
    (header(kind=b"L") + BODY[:3] + b"\1" + BODY[4:] + GOOD + END, "the padding of a header extension", 1),
    (header(checksum=b"000000\0 ") + BODY + END, NO_HEADER, None),
    (header(size=b"00000000003x") + BODY + END, NO_HEADER, None),
    (header(size=b"-1") + BODY + END, NO_HEADER, None),
    (header(size=b"-1000") + BODY + END, NO_HEADER, None),
    (header(size=b"0o3") + BODY + END, NO_HEADER, None),
    (header(size=b"1_0") + BODY + END, NO_HEADER, None),
    (header(size=b"") + BODY + END, NO_HEADER, None),
    (header(size=b"\xff" * 12) + BODY + END, NO_HEADER, None),
    (header(size=b"\x80" + b"\xff" * 11) + BODY + END, CUT_OFF, None),
    (header(size=b"77777777777\0") + BODY + END, CUT_OFF, None),
    (header(size=b"%011o\0" % (1 << 21), kind=b"L") + END, "a header extension of 2097152 bytes is too large", None),
    (header(size=b"%011o\0" % (1 << 21), kind=b"x") + END, "a header extension of 2097152 bytes is too large", None),
    (pax(b"11 path=bcd\n") + GOOD + END, NO_PAX, None),
    (pax(b"99 path=bcd\n") + GOOD + END, NO_PAX, None),
    (pax(b"path=bcd\n") + GOOD + END, NO_PAX, None),
    (pax(b"11 path b!\n") + GOOD + END, NO_PAX, None),
    (pax(b"5 abc\n"[:5]) + GOOD + END, NO_PAX, None),
    (pax(b"0 path=bcd\n") + GOOD + END, NO_PAX, None),
    (pax(b"9" * 5000 + b" path=a\n") + GOOD + END, NO_PAX, None),
    (pax(b"11 size=-3\n") + GOOD + END, "the size in a PAX header is not a number", None),
    (pax(b"5011 size=" + b"9" * 5000 + b"\n") + GOOD + END, "the size in a PAX header is not a number", None),
]  # fmt: skip


@pytest.mark.parametrize(("data", "words", "num_tolerated"), DAMAGE)
def test_damage_is_found_and_kinds_in_sources_are_tolerated(tar, data, words, num_tolerated):
    kept, damage = read(tar, GOOD + data, strict=True)
    assert (kept, words in str(damage), damage.header in (1024, 2048)) == ([("a", b"abc")], True, True), str(damage)
    kept, damage = read(tar, GOOD + data, strict=False)
    assert len(kept) == 1 + (num_tolerated or 0)
    assert (words in str(damage)) == (num_tolerated is None)
    with raises(DamagedShard, "damaged_shard", str(tar), words):
        ItemTable(tar)


@both_ways
def test_a_thousand_long_names_before_one_member_do_no_harm(tar, strict):
    assert read(tar, LONG_NAME * 2000 + GOOD + END, strict=strict) == ([("abc", b"abc")], None)


@both_ways
@given(data=st.binary(max_size=3000), place=st.integers(0, 4095), value=st.integers(0, 255))
def test_no_bytes_end_a_walk_by_another_exception(tmp_path_factory, strict, data, place, value):
    path = tmp_path_factory.getbasetemp() / "any.tar"
    read(path, data, strict=strict)
    changed = bytearray(tar_bytes(MEMBERS[:3], tarfile.PAX_FORMAT))
    changed[place] = value
    for _, content in read(path, bytes(changed), strict=strict)[0]:
        assert len(content) <= len(changed)


def test_a_flipped_bit_in_a_header_is_damage(tar):
    good = header()
    for position in range(512):
        flipped = bytearray(good)
        flipped[position] ^= 4
        assert read(tar, bytes(flipped) + BODY + END, strict=True)[1] or position in (154, 155), position


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
        [("c" * 150 + ".flac", b"x"), ("c" * 149 + "d.json", b"{}")],
    ],
)
def test_members_that_are_no_pair_are_damage(tar, members):
    write_members(tar, members)
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


def test_a_small_archive_cut_off_while_open_keeps_its_members(tar):
    write_members(tar, MEMBERS)
    table = ItemTable(tar)
    tar.write_bytes(b"")
    assert [table.member(number) for number in range(len(MEMBERS))] == [data for _, data in MEMBERS]


DTYPES = st.sampled_from([np.dtype(name) for name in ("int16", "int32", "int64", "float32", "bool", ">i2")])


@settings(max_examples=examples(100), deadline=None)
@given(
    DTYPES.flatmap(lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0))),
    st.sampled_from("CF"),
)
def test_arrays_come_back(array, order):
    found = array_from_bytes(array_to_bytes(np.asarray(array, order=order)), "x")
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (2, "int16"),
        (1 << 15, "int16"),
        ((1 << 15) + 1, "int32"),
        (1 << 16, "int32"),
        (1 << 31, "int32"),
        ((1 << 31) + 1, "int64"),
        (1 << 63, "int64"),
    ],
)
def test_the_type_is_the_smallest_that_holds_the_codebook(size, dtype):
    assert codes_dtype(size) == np.dtype(dtype)


def test_no_type_holds_more_than_64_bits():
    with raises(ConfigError, "bad_codec"):
        codes_dtype((1 << 63) + 1)
