"""NeMo manifests: shards, pieces, and files that are no manifest."""

from __future__ import annotations

import gzip
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.errors import raises

from sharmill.errors import ConfigError
from sharmill.sources.nemo import NemoSource, expand_shards
from sharmill.storage import checksum

LINE = b'{"audio_filepath": "a.wav"}\n'


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("m.json", ["m.json"]),
        ("m_{0..3}.json", ["m_0.json", "m_1.json", "m_2.json", "m_3.json"]),
        ("m__OP_8..10_CL_.json", ["m_8.json", "m_9.json", "m_10.json"]),
        ("m_{08..10}.json", ["m_08.json", "m_09.json", "m_10.json"]),
        ("m_{000..002}.json", ["m_000.json", "m_001.json", "m_002.json"]),
        ("m_{5..5}.json", ["m_5.json"]),
        ("{0..1}/m_{2..3}.json", ["0/m_2.json", "0/m_3.json", "1/m_2.json", "1/m_3.json"]),
        ("m_OP_x_CL_{y}.json", ["m_OP_x_CL_{y}.json"]),
    ],
)
def test_names_of_shards(pattern, names):
    assert expand_shards(pattern) == names


def test_sixty_four_shards():
    names = expand_shards("manifest__OP_0..63_CL_.json")
    assert (len(names), names[0], names[63]) == (64, "manifest_0.json", "manifest_63.json")


@pytest.mark.parametrize("pattern", ["m_{3..0}.json", "m_{0..99999999999}.json"])
def test_ranges_that_make_no_sense(pattern):
    with raises(ConfigError, "bad_config_value", pattern):
        expand_shards(pattern)


def test_shards_are_read_in_order(tmp_path):
    for number in range(3):
        (tmp_path / f"m_{number}.json").write_bytes(b'{"n": %d}\n' % number * 2)
    source = NemoSource(manifest=str(tmp_path / "m_{0..2}.json"), audio_root="audio")
    lines = [json.loads(line)["n"] for piece in source.pieces(10) for line in source.read(piece.params)]
    assert lines == [0, 0, 1, 1, 2, 2]


def test_identity_is_size_and_checksum_of_every_shard(tmp_path):
    files = [tmp_path / f"m_{number}.json" for number in range(2)]
    for number, file in enumerate(files):
        file.write_bytes(LINE * (number + 1))
    identity = NemoSource(manifest=str(tmp_path / "m__OP_0..1_CL_.json"), audio_root="audio").identity()
    assert identity == {str(file): [len(LINE) * (n + 1), checksum(file)] for n, file in enumerate(files)}


def test_missing_shard_is_named(tmp_path):
    (tmp_path / "m_0.json").write_bytes(LINE)
    with raises(ConfigError, "missing_input", "m_1.json"):
        NemoSource(manifest=str(tmp_path / "m_{0..1}.json"), audio_root="audio").identity()


@given(
    lines=st.lists(st.sampled_from([b"", b"  ", b"\t\r", b'{"a": 1}', b"x" * 30, b'{"b": "\xc3\xa9"}\r'])),
    size=st.integers(1, 5),
    last_newline=st.booleans(),
)
def test_pieces_hold_every_line_once_and_count_it(lines, size, last_newline, tmp_path_factory):
    path = tmp_path_factory.mktemp("pieces") / "m.json"
    path.write_bytes(b"\n".join(lines) + b"\n" * last_newline)
    source = NemoSource(manifest=str(path), audio_root="audio")
    pieces = list(source.pieces(size))
    read = [list(source.read(piece.params)) for piece in pieces]
    assert [line for piece in read for line in piece] == [line.strip() for line in lines if line.strip()]
    assert [piece.num_records for piece in pieces] == [len(piece) for piece in read]
    assert all(piece.num_records == size for piece in pieces[:-1])


def test_a_piece_is_read_where_the_manifest_lies_now(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    (old / "m.json").write_bytes(LINE)
    (piece,) = NemoSource(manifest=str(old / "m.json"), audio_root="audio").pieces(10)
    old.rename(new)
    moved = NemoSource(manifest=str(new / "m.json"), audio_root="audio")
    assert list(moved.read(piece.params)) == [LINE.strip()]


def spoil_empty(path):
    path.touch()


def spoil_blank(path):
    path.write_bytes(b" \n\n\t\n")


def spoil_binary(path):
    path.write_bytes(bytes(range(256)) * 10)


def spoil_gzip(path):
    path.write_bytes(gzip.compress(LINE * 100, mtime=0))


def spoil_utf16(path):
    path.write_bytes(LINE.decode().encode("utf-16"))


def spoil_utf16_without_mark(path):
    path.write_bytes(LINE.decode().encode("utf-16-le"))


def spoil_mark(path):
    path.write_bytes(b"\xef\xbb\xbf" + LINE)


def spoil_truncated(path):
    path.write_bytes(LINE * 5 + LINE[:10])


def spoil_truncated_in_a_letter(path):
    path.write_bytes(LINE * 5 + b'{"text": "\xc3')


def spoil_array(path):
    path.write_bytes(b"[\n" + LINE.rstrip() + b",\n" + LINE + b"]\n")


def spoil_table(path):
    path.write_bytes(b"audio_filepath,duration,text\na.wav,2.0,Good day.\n")


def spoil_text(path):
    path.write_bytes(b"a.wav\nb.wav\n")


def spoil_indented(path):
    path.write_bytes(json.dumps(json.loads(LINE), indent=2).encode() + b"\n")


def spoil_folder(path):
    path.mkdir()


def spoil_fifo(path):
    os.mkfifo(path)


ONE_PER_LINE = (
    "write each record on a line of its own, as a JSON object with audio_filepath, duration, speaker and text"
)
NO_MANIFESTS = [
    (spoil_empty, "is empty"),
    (spoil_blank, "is empty"),
    (spoil_binary, "is binary or UTF-16, not lines of JSON in UTF-8"),
    (spoil_gzip, "is compressed (gzip); unpack it, and name the unpacked file"),
    (spoil_table, f"is a table (CSV or TSV), not lines of JSON; {ONE_PER_LINE}"),
    (spoil_text, f"is plain text, not lines of JSON; {ONE_PER_LINE}"),
    (spoil_indented, f"is JSON of which a record takes several lines; {ONE_PER_LINE}"),
    (spoil_utf16, "is UTF-16; save it as plain UTF-8"),
    (spoil_utf16_without_mark, "is binary or UTF-16, not lines of JSON in UTF-8"),
    (spoil_mark, "is UTF-8 with a byte order mark; save it as plain UTF-8"),
    (
        spoil_truncated,
        "seems to be cut off: its last line is not complete JSON; copy it again, or remove that line",
    ),
    (
        spoil_truncated_in_a_letter,
        "seems to be cut off: its last line is not complete JSON; copy it again, or remove that line",
    ),
    (spoil_array, f"is one JSON array; {ONE_PER_LINE}"),
    (spoil_folder, "is a folder; name the manifest file in it"),
    (spoil_fifo, "is not a regular file; copy its content into one"),
]


@pytest.mark.parametrize(("spoil", "message"), NO_MANIFESTS, ids=lambda value: getattr(value, "__name__", None))
def test_what_is_no_manifest_is_refused_in_one_line(spoil, message, tmp_path):
    path = tmp_path / "m.json"
    spoil(path)
    with raises(ConfigError, "bad_manifest", f"the manifest {path} {message}") as caught:
        NemoSource(manifest=str(path), audio_root="audio").identity()
    assert "\n" not in str(caught.value)


def test_missing_manifest(tmp_path):
    with raises(ConfigError, "missing_input", str(tmp_path / "m.json")):
        NemoSource(manifest=str(tmp_path / "m.json"), audio_root="audio").identity()


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("~/m.json", "'~' stands for a home folder in shells only; write the whole path"),
        ("shards/*.json", "name numbered files as manifest_{0..63}.json, or list several sources"),
        ("data/m.json", "the path is relative to CWD; correct manifest in sources"),
    ],
)
def test_missing_manifest_with_a_path_that_means_something_else(name, remedy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with raises(ConfigError, "missing_input", name) as caught:
        NemoSource(manifest=name, audio_root="audio").identity()
    assert remedy.replace("CWD", str(tmp_path)) in str(caught.value)


def test_a_first_line_that_is_no_record_is_left_to_prepare(tmp_path):
    (tmp_path / "m.json").write_bytes(b"a,b,c\n" + LINE)
    NemoSource(manifest=str(tmp_path / "m.json"), audio_root="audio").check()


def test_last_line_needs_no_newline(tmp_path):
    (tmp_path / "m.json").write_bytes(LINE + LINE.rstrip())
    source = NemoSource(manifest=str(tmp_path / "m.json"), audio_root="audio")
    source.identity()
    assert [piece.num_records for piece in source.pieces(10)] == [2]
