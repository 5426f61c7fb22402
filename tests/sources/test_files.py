"""Files of sources: patterns that stand for several, lines of plain files and of gzip, and lines found by keys."""

import gzip

import pytest
from hypothesis import given, strategies as st
from support.project import raises

from sharmill.errors import ConfigError
from sharmill.sources.files import KeyedLines, expand_shards, find_files, identify_files, iterate_lines


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("m.json", ["m.json"]),
        ("m_{0..3}.json", ["m_0.json", "m_1.json", "m_2.json", "m_3.json"]),
        ("m_(0..1).json", ["m_0.json", "m_1.json"]),
        ("m_[0..1].json", ["m_0.json", "m_1.json"]),
        ("m_<0..1>.json", ["m_0.json", "m_1.json"]),
        ("m__OP_8..10_CL_.json", ["m_8.json", "m_9.json", "m_10.json"]),
        ("m_{08..10}.json", ["m_08.json", "m_09.json", "m_10.json"]),
        ("m_{000..002}.json", ["m_000.json", "m_001.json", "m_002.json"]),
        ("m_{5..5}.json", ["m_5.json"]),
        ("{0..1}/m_[2..3].json", ["0/m_2.json", "0/m_3.json", "1/m_2.json", "1/m_3.json"]),
        ("m_OP_x_CL_{y}.json", ["m_OP_x_CL_{y}.json"]),
        ("m_{0..1].json", ["m_{0..1].json"]),
        ("m_{1,03}.json", ["m_1.json", "m_03.json"]),
        ("m_{dev-clean,test}_<1,2>.json", [f"m_{a}_{b}.json" for a in ("dev-clean", "test") for b in (1, 2)]),
        ("m__OP_1,3_CL__[4,5].json", ["m_1_4.json", "m_1_5.json", "m_3_4.json", "m_3_5.json"]),
        ("m_(1,3) and {a, b}.json", ["m_1 and {a, b}.json", "m_3 and {a, b}.json"]),
    ],
)
def test_names_of_shards(pattern, names):
    assert expand_shards(pattern) == names


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("m_{3..0}.json", "m_{3..0}.json runs backwards"),
        ("m_{0..99999999999999999999}.json", "more than 18 digits"),
        ("{0..9999}/<0..9999>.json", "{0..9999}/<0..9999>.json name 100,000,000 files"),
        (f"m_{{{'0' * 5000}..1}}.json", "more than 18 digits"),
        (f"m_{{0..{'9' * 5000}}}.json", "more than 18 digits"),
    ],
    ids=["backwards", "large", "many", "zeros", "nines"],
)
def test_ranges_that_make_no_sense(pattern, says):
    with raises(ConfigError, "bad_config_value", says):
        expand_shards(pattern)


def test_stars_find_files_sorted_unless_a_file_is_called_so(tmp_path):
    for name in ("b.json", "a.json", "[x]/c1.json", "d/e/f.json", "a*.txt", "ab.txt", "of (1,2).txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    def found(pattern):
        return [path.relative_to(tmp_path).as_posix() for path in find_files([str(tmp_path / pattern)])]

    assert found("*.json") == ["a.json", "b.json"]
    assert found("[x]/c?.json") == ["[x]/c1.json"]
    assert found("**/f.json") == ["d/e/f.json"]
    assert found("a*.txt") == ["a*.txt"]
    assert found("of (1,2).txt") == ["of (1,2).txt"]


def test_a_line_of_more_than_64_mib(tmp_path):
    (tmp_path / "a").write_bytes(gzip.compress(b"x" * ((64 << 20) + 2), 1))
    with raises(ConfigError, "bad_manifest", "64 MiB"):
        list(iterate_lines(tmp_path / "a", "lines"))


def test_a_file_of_another_name_is_another_input(tmp_path):
    one, other = tmp_path / "one.json", tmp_path / "two.json"
    one.touch()
    before = identify_files([one])
    assert identify_files([one.rename(other)]) != before


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
