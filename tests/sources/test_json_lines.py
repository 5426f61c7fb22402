"""JSON lines in plain files and in gzip: reading from any place, several members, and damage."""

from __future__ import annotations

import gzip

import pytest
from support.errors import raises

from sharmill.errors import ConfigError
from sharmill.sources.json_lines import LineReader, check_json_lines, iterate_checked


@pytest.mark.parametrize("packed", [False, True])
def test_lines_from_any_place(packed, tmp_path):
    path, lines = tmp_path / "lines", [b'{"n": %d}' % number for number in range(1000)]
    halves = [b"".join(line + b"\r\n\n" for line in part) for part in (lines[:500], lines[500:])]
    # gzip files may be put one behind the other.
    path.write_bytes(b"".join(gzip.compress(half) if packed else half for half in halves))
    ends = [0] + [end for end, _ in iterate_checked(path, "lines")]
    reader = LineReader()
    for number in (0, 999, 17, 18, 500):
        assert next(reader.lines(path, ends[number])) == lines[number]
    assert list(reader.lines(path, 0)) == lines


def test_a_reader_of_several_files(tmp_path):
    for name in "ab":
        (tmp_path / name).write_bytes(gzip.compress(name.encode() * 3 + b"\n"))
    reader = LineReader()
    found = [next(reader.lines(tmp_path / name, 0)) for name in "abba"]
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
