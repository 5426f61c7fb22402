"""Files of sources: patterns for several files, lines of plain and compressed files, and lines found by key."""

import gzip
import resource
import tracemalloc

import pytest
from hypothesis import given, strategies as st
from support.project import raises
from support.sources import PACKED, pack

from sharmill.errors import ConfigError, FatalError
from sharmill.sources.files import KeyedLines, expand_shards, find_files, identify_files, iterate_lines
from sharmill.sources.nemo import NemoSource
from sharmill.sources.tars import WebDatasetSource


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
        ("_OP_a,b_CL_x_OP_c,d_CL_", ["axc", "axd", "bxc", "bxd"]),
    ],
)
def test_names_of_shards(pattern, names):
    assert expand_shards(pattern) == names


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("m_{3..0}.json", "m_{3..0}.json is descending"),
        ("m_{0..99999999999999999999}.json", "more than 18 digits"),
        ("{0..9999}/<0..9999>.json", "{0..9999}/<0..9999>.json name 100,000,000 files"),
        (f"m_{{{'0' * 5000}..1}}.json", "more than 18 digits"),
        (f"m_{{0..{'9' * 5000}}}.json", "more than 18 digits"),
        ("m_{1..3,5}.json", "m_{1..3,5}.json contains a range"),
    ],
    ids=["backwards", "large", "many", "zeros", "nines", "in a list"],
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


@pytest.mark.parametrize(
    "pattern",
    [
        "Corpus(v1,final)/m_0.json", "Corpus(v1,final)/m_*.json", "Corpus(v1,final)/m_{0..0}.json",
        "C*(v1,final)/m_<0,0>.json", "{Corpus,x}(v1,final)/m_0.json",
    ],
)  # fmt: skip
def test_a_folder_that_is_called_like_a_list_is_that_folder(pattern, tmp_path):
    for name in ("Corpus(v1,final)", "Corpusv1", "x(v1,final)"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "m_0.json").touch()
    assert find_files([str(tmp_path / pattern)])[0] == tmp_path / "Corpus(v1,final)/m_0.json"


def test_a_folder_that_is_called_like_a_list_names_what_is_in_it(tmp_path):
    folder = tmp_path / "Corpus(v1,final)"
    folder.mkdir()
    assert NemoSource(manifest=f"{folder}/m.json", audio_root=".").stem == "m"
    assert WebDatasetSource(tars=f"{folder}/s_{{0..1}}.tar").audio_root == str(folder)


@pytest.mark.parametrize("end", PACKED)
def test_other_bytes_after_a_compressed_stream_are_damage(end, tmp_path):
    path = tmp_path / "m.json"
    first, second = (pack(end, b'{"a": 1}\n' * 3000) for _ in range(2))
    path.write_bytes(first + second)
    assert sum(1 for _ in iterate_lines(path, "manifest")) == 6000
    for wrong in (b"\xff\xff" + second[2:], b"more"):
        path.write_bytes(first + wrong)
        with raises(ConfigError, "bad_manifest", "m.json is damaged"):
            list(iterate_lines(path, "manifest"))


@pytest.fixture
def small_disk():
    """Limit file sizes to 64 KiB, so that writing more fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


UNPACKED = b'{"audio_filepath": "a"}\n' * 100_000
UNPACKING = {
    "pieces": lambda path: list(NemoSource(manifest=str(path), audio_root=".").pieces(10)),
    "lines by keys": lambda path: KeyedLines([path], "lines", first_word).find(b"a"),
}


@pytest.mark.parametrize(("how", "end"), [("pieces", ".zst"), ("lines by keys", ".zst"), ("lines by keys", ".xz")])
def test_what_unpacks_names_tmpdir_where_there_is_no_room(how, end, tmp_path, small_disk):
    (tmp_path / "m").write_bytes(pack(end, UNPACKED))
    with raises(FatalError, "disk", "set TMPDIR"):
        UNPACKING[how](tmp_path / "m")


def test_a_check_of_zstd_needs_no_room(tmp_path, small_disk):
    (tmp_path / "m").write_bytes(pack(".zst", UNPACKED))
    NemoSource(manifest=str(tmp_path / "m"), audio_root=".").check()


def test_a_check_does_not_keep_long_lines_of_a_compressed_file(tmp_path):
    (tmp_path / "m").write_bytes(gzip.compress((b'{"a": "%s"}\n' % (b"x" * (8 << 20))) * 20, 1))
    tracemalloc.start()
    NemoSource(manifest=str(tmp_path / "m"), audio_root=".").check()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


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
    """Write the lines of each part to a file, every other one as gzip."""
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
