"""The places of members of tar archives: of all kinds of headers, and of archives that are cut off or damaged."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import subprocess
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.errors import raises
from support.tars import tar_bytes, write_tar

from sharmill.errors import ConfigError, RejectRecord
from sharmill.sources.tars import (
    TarDamage,
    check_tar,
    clean_name,
    read_table,
    walk_members,
)

MEMBERS = [
    ("a.flac", b"a" * 1000),
    ("x" * 101 + ".flac", b""),
    ("deep/" * 40 + "y.json", b"{}"),
    ("größe-日本語.wav", b"b" * 512),
    ("./dot.wav", b"c" * 513),
    ("/data/one.wav", b"d"),
]
FORMATS = [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


def found(path, begin=0):
    """The (name, content) pairs of the members, and the damage if there is any."""
    data = path.read_bytes()
    items = list(walk_members(path, begin))
    damage = items.pop() if items and isinstance(items[-1], TarDamage) else None
    return [(item.name, data[item.start : item.start + item.size]) for item in items], damage


@pytest.mark.parametrize("format", [*FORMATS, tarfile.USTAR_FORMAT])
def test_all_kinds_of_names_are_read(format, tmp_path):
    members = [(name, data) for name, data in MEMBERS if format != tarfile.USTAR_FORMAT or len(name) != 106]
    path = write_tar(tmp_path / "a.tar", members, format=format)
    assert found(path) == (members, None)


def test_members_with_further_pax_headers_are_read(tmp_path):
    """As tarfile writes them for files whose times have fractions."""
    path = write_tar(tmp_path / "a.tar", MEMBERS, format=tarfile.PAX_FORMAT, mtime=1.5, uname="ü")
    assert found(path) == (MEMBERS, None)


@pytest.mark.parametrize("format", FORMATS)
def test_a_walk_may_begin_at_any_member(format, tmp_path):
    path = write_tar(tmp_path / "a.tar", MEMBERS, format=format)
    members = list(walk_members(path))
    for number, member in enumerate(members):
        assert list(walk_members(path, member.header)) == members[number:]


@pytest.mark.skipif(not shutil.which("tar"), reason="needs GNU tar")
@pytest.mark.parametrize("format", ["gnu", "posix", "ustar", "v7"])
def test_what_is_no_regular_file_is_passed_over(format, tmp_path):
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "1.wav").write_bytes(b"1" * 700)
    os.link(folder / "1.wav", folder / "2_hard.wav")
    (folder / "3_link.wav").symlink_to("1.wav")
    os.mkfifo(folder / "4_fifo.wav")
    with (folder / "5_sparse.wav").open("wb") as stream:
        # So many holes that the map of them takes further headers.
        for number in range(60):
            stream.seek(number << 16)
            stream.write(b"s" * 4096)
    (folder / "deep/6.wav").write_bytes(b"6" * 5)
    left_out = {"ustar": ["sparse"], "v7": ["sparse", "fifo"]}.get(format, [])
    names = [
        name for name in sorted(path.name for path in folder.iterdir()) if not any(part in name for part in left_out)
    ]
    path = tmp_path / "a.tar"
    sparse = ["--sparse"] if format in ("gnu", "posix") else []
    command = ["tar", f"--format={format}", *sparse, "-cf", path, "-C", folder, *names]
    subprocess.run(command, check=True, capture_output=True)
    assert found(path) == ([("1.wav", b"1" * 700), ("deep/6.wav", b"6" * 5)], None)


def test_every_place_to_cut_off_keeps_what_is_before_and_says_so(tmp_path):
    members = MEMBERS[:3] + MEMBERS[4:]
    path = tmp_path / "a.tar"
    whole = write_tar(path, members).read_bytes()
    spans = list(walk_members(path))
    end = spans[-1].start + 512
    for position in {*range(0, end, 128), *(span.start + span.size for span in spans), end - 1}:
        path.write_bytes(whole[:position])
        kept, damage = found(path)
        assert [name for name, _ in kept] == [span.name for span in spans if span.start + span.size <= position]
        assert damage.sentence.startswith(f"the archive a.tar is cut off at byte {position}, ")
        assert damage.sentence.endswith("; copy it again")
        whole_spans = sum(span.start + span.size <= position for span in spans)
        assert damage.header == (spans[whole_spans].header if whole_spans < len(spans) else end)
    path.write_bytes(whole[: end + 512])
    assert found(path) == (members, None)


def damaged(place, field, data=None):
    """The archive of ``MEMBERS`` with other bytes at a place of the second header."""
    whole = bytearray(tar_bytes([("a", b"a" * 100), ("b", b"b" * 100), ("c", b"c")]) if data is None else data)
    whole[1024 + place : 1024 + place + len(field)] = field
    # The checksum is right for all but the test of the checksum.
    if place != 148:
        block = whole[1024:1536]
        whole[1024 + 148 : 1024 + 156] = b"%06o\0 " % (sum(block) - sum(block[148:156]) + 256)
    return bytes(whole)


HUGE = b"\x80" + (1 << 62).to_bytes(11, "big")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (damaged(148, b"000000\0 "), "damaged at byte 1024, where no header is"),
        (damaged(124, b"77777777777\0"), "within its member 'b'"),
        (damaged(124, HUGE), "within its member 'b'"),
        (damaged(124, b"\xff" * 12), "damaged at byte 1024, where no header is"),
        (damaged(124, b"-0000000777\0"), "damaged at byte 1024, where no header is"),
        (damaged(156, b"L" + b"\0" * 3, damaged(124, b"77777777777\0")), "has a header of 8589934591 bytes"),
        (damaged(156, b"x"), "a PAX header cannot be parsed"),
    ],
)
def test_damaged_headers_and_claimed_sizes_end_the_walk_with_a_sentence(data, words, tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(data)
    kept, damage = found(path)
    assert kept == [("a", b"a" * 100)]
    assert words in damage.sentence
    assert damage.header == 1024


@pytest.mark.parametrize("record", [b"99 path=b\n", b"12 size=-55\n", b"11 path b!\n"])
def test_damaged_pax_records_end_the_walk(record, tmp_path):
    info = tarfile.TarInfo("pax")
    info.type, info.size = b"x", len(record)
    path = tmp_path / "a.tar"
    path.write_bytes(info.tobuf() + record.ljust(512, b"\0") + tar_bytes([("b", b"b")]))
    kept, damage = found(path)
    assert (kept, damage.header) == ([], 0)


def test_a_thousand_long_names_before_one_member_do_no_harm(tmp_path):
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = b"L", 3
    path = tmp_path / "a.tar"
    path.write_bytes((info.tobuf() + b"abc".ljust(512, b"\0")) * 2000 + tar_bytes([("b", b"b")]))
    assert found(path) == ([("abc", b"b")], None)


@pytest.mark.parametrize("data", [b"", bytes(10240)])
def test_an_empty_archive_has_no_members(data, tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(data)
    kept, damage = found(path)
    assert kept == []
    assert (damage is None) == bool(data)
    check_tar(path, "tars")


@given(data=st.binary(max_size=3000))
def test_no_bytes_end_a_walk_by_an_exception(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("any") / "a.tar"
    path.write_bytes(data)
    list(walk_members(path))


@given(place=st.integers(0, 4095), value=st.integers(0, 255))
def test_no_changed_byte_ends_a_walk_by_an_exception(place, value, tmp_path_factory):
    data = bytearray(tar_bytes(MEMBERS[:3], format=tarfile.PAX_FORMAT))
    data[place] = value
    path = tmp_path_factory.mktemp("any") / "a.tar"
    path.write_bytes(data)
    for item in walk_members(path):
        assert isinstance(item, TarDamage) or item.start + item.size <= len(data)


def test_tables_have_clean_names_and_know_which_are_there_twice(tmp_path):
    path = write_tar(tmp_path / "a.tar", [("./a", b"1"), ("b", b"2"), ("/a", b"3"), ("c", b"4")])
    table = read_table(path)
    assert table.members["a"] is None
    assert [table.members[name].name for name in ("b", "c")] == ["b", "c"]
    assert table.damage is None


def test_no_archive_is_a_reject(tmp_path):
    os.mkfifo(tmp_path / "fifo.tar")
    for name, reason in (("none.tar", "missing_audio"), ("fifo.tar", "unreadable_audio"), (".", "unreadable_audio")):
        with pytest.raises(RejectRecord, match=reason):
            read_table(tmp_path / name)


def spoil_folder(path):
    path.mkdir()


def spoil_fifo(path):
    os.mkfifo(path)


def spoil_gzip(path):
    path.write_bytes(gzip.compress(tar_bytes(MEMBERS), mtime=0))


def spoil_bzip2(path):
    with tarfile.open(path, "w:bz2") as archive:
        archive.addfile(tarfile.TarInfo("a"), io.BytesIO())


def spoil_text(path):
    path.write_text("this is no archive\n" * 100)


NO_TARS = [
    (spoil_folder, "is a folder"),
    (spoil_fifo, "is not a regular file"),
    (spoil_gzip, "is compressed (gzip); unpack it"),
    (spoil_bzip2, "is compressed (bzip2); unpack it"),
    (spoil_text, "is no tar archive"),
]


@pytest.mark.parametrize(("spoil", "words"), NO_TARS, ids=lambda value: getattr(value, "__name__", None))
def test_what_is_no_tar_is_refused_in_one_line(spoil, words, tmp_path):
    path = tmp_path / "a.tar"
    spoil(path)
    with raises(ConfigError, "bad_manifest", str(path), words) as caught:
        check_tar(path, "tars")
    assert "\n" not in str(caught.value)


def test_missing_tar_is_refused(tmp_path):
    with raises(ConfigError, "missing_input", str(tmp_path / "a.tar")):
        check_tar(tmp_path / "a.tar", "tars")


@pytest.mark.parametrize(("name", "clean"), [("./a//b", "a/b"), ("/a/./b", "a/b"), ("../a", "../a"), ("/", "")])
def test_clean_names(name, clean):
    assert clean_name(name) == clean
