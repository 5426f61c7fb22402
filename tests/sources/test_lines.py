"""Lines of plain files and of files in gzip: pieces in any order, several members, damage, and lines found by keys."""

from __future__ import annotations

import gzip

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from support.errors import raises

from sharmill.errors import ConfigError
from sharmill.sources.lines import KeyedLines, LineReader, check_json_lines, iterate_checked


@pytest.mark.parametrize("packed", [False, True])
def test_lines_from_any_place(packed, tmp_path):
    path, lines = tmp_path / "lines", [b'{"n": %d}' % number for number in range(1000)]
    halves = [b"".join(line + b"\r\n\n" for line in part) for part in (lines[:500], lines[500:])]
    # gzip files may be put one behind the other.
    path.write_bytes(b"".join(gzip.compress(half) if packed else half for half in halves))
    reader = LineReader([path], "lines")
    pieces = list(reader.pieces(1))
    for number in (0, 999, 17, 18, 500):
        assert list(reader.read(pieces[number].params, lambda line: [line])) == [lines[number]]
    (whole,) = reader.pieces(1000)
    assert list(reader.read(whole.params, lambda line: [line])) == lines


def test_a_reader_of_several_files(tmp_path):
    for name in "ab":
        (tmp_path / name).write_bytes(gzip.compress(name.encode() * 3 + b"\n"))
    reader = LineReader([tmp_path / "a", tmp_path / "b"], "lines")
    a, b = (piece.params for piece in reader.pieces(2))
    found = [next(reader.read(piece, lambda line: [line])) for piece in (a, b, b, a)]
    assert found == [b"aaa", b"bbb", b"bbb", b"aaa"]


def test_a_line_of_more_than_64_mib(tmp_path):
    (tmp_path / "a").write_bytes(gzip.compress(b"x" * ((64 << 20) + 2), 1))
    with raises(ConfigError, "bad_manifest", "64 MiB"):
        list(iterate_checked(tmp_path / "a", "lines"))


def test_gzip_only_where_it_is_allowed(tmp_path):
    (tmp_path / "a").write_bytes(gzip.compress(b"{}\n"))
    check_json_lines(tmp_path / "a", "lines", "remedy", compressed=("gzip",))
    with raises(ConfigError, "bad_manifest", "compressed (gzip)"):
        check_json_lines(tmp_path / "a", "lines", "remedy")


def first_word(line):
    return None if line.startswith(b"#") else line.split()[0]


def write(folder, parts):
    """Writes the lines of each part to a file, every other one in gzip."""
    files = []
    for number, lines in enumerate(parts):
        data = b"".join(lines)
        files.append(folder / f"{number}.txt")
        files[-1].write_bytes(gzip.compress(data) if number % 2 else data)
    return KeyedLines(files, "lines", first_word)


LINES = st.lists(
    st.sampled_from([b"a 1\n", b"a 2\r\n", b"b 3\n", b"#a\n", b"\n", b" c  4 \n", b"b " + b"x" * 999 + b"\n"])
)


@given(parts=st.lists(LINES, min_size=1, max_size=3))
def test_lines_are_those_that_a_search_finds(parts, tmp_path_factory):
    index = write(tmp_path_factory.mktemp("lines"), parts)
    lines = [line.strip() for part in parts for line in part if line.strip()]
    for key in (b"a", b"b", b"c", b"d"):
        assert index.find(key) == [line for line in lines if first_word(line) == key]


def test_many_lines_in_any_order(tmp_path):
    lines = [b"%d %s\n" % (number, b"x" * (number % 300)) for number in range(5000)]
    index = write(tmp_path, [lines[:2500], lines[2500:]])
    for number in (4999, 0, 2500, 2499, 1, 4000, 3999):
        assert index.find(b"%d" % number) == [lines[number].strip()]


@pytest.mark.parametrize("part", [0, 1])
def test_keys_of_one_hash_are_told_apart(part, tmp_path, monkeypatch):
    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", lambda key: 7)
    parts = [[], []]
    parts[part] = [b"a 1\n", b"b 2\n", b"a 3\n"]
    assert write(tmp_path, parts).find(b"a") == [b"a 1", b"a 3"]
