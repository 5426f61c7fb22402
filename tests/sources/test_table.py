"""Tables: formats of corpora, quotes, encodings, line ends, and rows that cannot be read."""

import csv
import gzip
import io
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from support.project import raises, write_config as write_small_config
from support.sources import PACKED, pack, read

from sharmill.errors import ConfigError
from sharmill.sources import UnreadableRecord
from sharmill.sources.table import TableSource


@pytest.fixture
def table(tmp_path):
    """Return a function from content and keys to the source of a table."""

    def make(content, name="t.csv", **keys):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return TableSource(table=str(path), audio_root="audio", **keys)

    return make


# Content of a table, keys of the source, and the records.
TABLES = {
    "LJSpeech": (
        'LJ1|Said "no, 5.|said no five\r\nLJ2|A|a\r\n',
        {"delimiter": "|", "quotes": False, "header": ["id", "raw", "text"], "audio": "wavs/{id}.wav"},
        [{"id": "LJ1", "raw": 'Said "no, 5.', "text": "said no five", "audio_filepath": "wavs/LJ1.wav"},
         {"id": "LJ2", "raw": "A", "text": "a", "audio_filepath": "wavs/LJ2.wav"}],
    ),
    "MLS": (
        "6892_10049_000000\ttext\n",
        {"delimiter": "\t", "header": ["id", "text"], "audio": "{id[0]}/{id[1]}/{id}.opus"},
        [{"id": "6892_10049_000000", "text": "text", "audio_filepath": "6892/10049/6892_10049_000000.opus"}],
    ),
    "F5-TTS": (
        "audio_file|text\n/data/a.wav|Hello, you.\n",
        {"delimiter": "|", "columns": {"audio_filepath": "audio_file"}},
        [{"audio_filepath": "/data/a.wav", "text": "Hello, you."}],
    ),
    "quotes, delimiters and newlines in cells": (
        'audio_filepath,text\r\n"a, b.wav","one ""two""\r\nthree"\r\n\r\n ,\nc.wav,\n',
        {},
        [{"audio_filepath": "a, b.wav", "text": 'one "two"\r\nthree'}, {"audio_filepath": "c.wav", "text": ""}],
    ),
    "numbers": (
        "audio_filepath\tduration\toffset\tchannel\tcer\tyear\na\t1.5\t\t1\t1e-2\t1984\n"
        "b\t2,5\tnan\tdownmix\t-3\t1_0\n",
        {"delimiter": "\t", "numbers": ["cer"]},
        [{"audio_filepath": "a", "duration": 1.5, "offset": None, "channel": 1, "cer": 0.01, "year": "1984"},
         {"audio_filepath": "b", "duration": "2,5", "offset": "nan", "channel": "downmix", "cer": -3, "year": "1_0"}],
    ),
    "tabs and no quoting": (
        'path\tsentence\tup\na\t"I will go there.\t2\nb\tTomorrow, he said."\t2\nc\t""No""\t1\n',
        {"delimiter": "\t", "columns": {"audio_filepath": "path", "text": "sentence"}},
        [{"audio_filepath": "a", "text": '"I will go there.', "up": "2"},
         {"audio_filepath": "b", "text": 'Tomorrow, he said."', "up": "2"},
         {"audio_filepath": "c", "text": '""No""', "up": "1"}],
    ),
    "tabs and quoting": (
        'audio_filepath\ttext\r\na\t"one\t""two""\r\nthree"\r\n',
        {"delimiter": "\t", "quotes": True},
        [{"audio_filepath": "a", "text": 'one\t"two"\r\nthree'}],
    ),
    "a byte order mark before quotes or under a header": (
        '\ufeff"audio_filepath","text"\n"a.wav","said"\n',
        {},
        [{"audio_filepath": "a.wav", "text": "said"}],
    ),
    "letters that end lines elsewhere": (
        "audio_filepath,text\na.wav,wait\x85 \u2028what\x0b\x1d\n",
        {},
        [{"audio_filepath": "a.wav", "text": "wait\x85 \u2028what\x0b\x1d"}],
    ),
    "a long cell": (f"audio_filepath,text\na,{'x' * 200_000}\n", {}, [{"audio_filepath": "a", "text": "x" * 200_000}]),
    "decimal commas": (
        "audio_filepath;duration;offset\na;2,5;1\nb;1.234,5;1.234\n",
        {"delimiter": ";", "decimal": ","},
        [{"audio_filepath": "a", "duration": 2.5, "offset": 1},
         {"audio_filepath": "b", "duration": "1.234,5", "offset": "1.234"}],
    ),
    "delimiters at the ends of rows": (
        "audio_filepath,text,\na,one,\nb,two,\n", {},
        [{"audio_filepath": "a", "text": "one"}, {"audio_filepath": "b", "text": "two"}],
    ),
    "delimiters at the ends of all rows but the first": (
        "audio_filepath,text\na,one,\nb,two,\n", {},
        [{"audio_filepath": "a", "text": "one"}, {"audio_filepath": "b", "text": "two"}],
    ),
    "delimiters at the ends of rows without names": (
        "a|one|\nb|two|\n", {"delimiter": "|", "header": ["audio_filepath", "text"]},
        [{"audio_filepath": "a", "text": "one"}, {"audio_filepath": "b", "text": "two"}],
    ),
    "delimiters at the ends of the first row and some others": (
        'audio_filepath,text,\na,one,\nb,two\nc,"three\nlines"\n', {},
        [{"audio_filepath": "a", "text": "one"}, {"audio_filepath": "b", "text": "two"},
         {"audio_filepath": "c", "text": "three\nlines"}],
    ),
    "delimiters at the ends of some rows": (
        "audio_filepath,text\na,one\nb,two,\n", {},
        [{"audio_filepath": "a", "text": "one"}, {"audio_filepath": "b", "text": "two"}],
    ),
    "a first line of Excel": (
        "\ufeffsep=;\r\naudio_filepath;text\r\na;one\r\nb;two\r\n", {"delimiter": ";"},
        [{"audio_filepath": "a", "text": "one"}, {"audio_filepath": "b", "text": "two"}],
    ),
    "columns are renamed and others keep their names": (
        "path,text,sentence,x\na,raw,said,1\n",
        {"columns": {"audio_filepath": "path", "text": "sentence", "normalized_text": "sentence"}},
        [{"audio_filepath": "a", "text": "said", "normalized_text": "said", "x": "1"}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize("name", TABLES)
def test_records(name, size, table):
    content, keys, expected = TABLES[name]
    source = table(content, **keys)
    source.check()
    assert read(source, size) == expected


def test_a_cell_behind_the_last_column_is_malformed(table):
    rows = read(table("audio_filepath,text,\na,one,\nb,Yes, I will\n"))
    assert (rows[0], rows[1].reason) == ({"audio_filepath": "a", "text": "one"}, "malformed")
    assert "'I will' follows its last column" in rows[1].detail


def bytes_read():
    """Return the number of bytes that this process has read so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("end", PACKED)
def test_compressed_tables_are_read_once(end, table):
    rows = "".join(f"{random.Random(n).random()}\n" for n in range(20_000))
    source = table(pack(end, f"audio_filepath\n{rows}".encode()))
    pieces = list(source.pieces(1000))
    before = bytes_read()
    assert sum(1 for piece in pieces for _ in source.read(piece.params)) == 20_000
    # zstd is read once for unpacking and once from the unpacked file.
    assert bytes_read() - before < 4 * len(rows)


@pytest.mark.parametrize(
    ("content", "keys", "code", "names"),
    [
        ("file,text\n", {}, "unknown_key", ["audio_filepath", "file"]),
        ("file|text\n", {"columns": {"audio_filepath": "file"}}, "unknown_key", ["'|'", "delimiter"]),
        ("audio_filepath,txt\n", {"columns": {"text": "text"}}, "unknown_key", ["columns.text", "did you mean 'txt'"]),
        ("id,text\n", {"audio": "{idd}.wav"}, "unknown_key", ["{idd}.wav", "did you mean 'id'"]),
        ("sep=;\naudio_filepath;text\n", {}, "bad_config_value", ["is sep=;", "set delimiter"]),
        ("a,a\n", {}, "bad_config_value", ["a, a"]),
        ("a,,b\n", {}, "bad_config_value", ["first row"]),
        ("", {}, "bad_manifest", ["is empty"]),
        (b"PK\x03\x04 123", {}, "bad_manifest", ["zip"]),
        ("audio_filepath,text\n".encode("utf-16"), {}, "bad_manifest", ["UTF-16"]),
        ('"audio_filepath,text\n', {}, "bad_manifest", ["first row"]),
    ],
)
def test_what_cannot_be_a_table_is_refused_before_any_work(content, keys, code, names, table):
    with raises(ConfigError, code, *names):
        table(content, **keys).check()


# Rows that a stray quote swallows in a quoted table, and the rows that are still records.
SWALLOWED = [
    ('a,"I will go.,2\nb,The second,2\nc,Tomorrow he said.",1\nd,x,1\n', ["malformed", "b", "c", "d"]),
    ('a,2,"I will go\nb,2,The second\nc,1,Tomorrow"\nd,1,x\n', ["malformed", "b", "c", "d"]),
    ('a,2,"I will go\nb",2,The second\nc,1,x\n', ["malformed", 'b"', "c"]),
    ('a,2,"never ends\nb,2,x\n', ["malformed", "b"]),
]


@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize(("content", "expected"), SWALLOWED)
def test_a_quote_that_is_a_letter_takes_no_rows_along(content, expected, size, table):
    rows = read(table("audio_filepath,text,up\n" + content), size)
    assert [row.reason if isinstance(row, UnreadableRecord) else row["audio_filepath"] for row in rows] == expected
    assert "quotes" in rows[0].detail or "unexpected end" in rows[0].detail
    assert rows[0].record == content.splitlines()[0]


def test_rows_of_tables_are_all_accounted_for(audio_root, call, tmp_path):
    rows = [
        "audio_filepath\ttext\tspeaker",
        'a.wav\t"Good day.\tanna',
        "deep/c.flac\tNo.\tanna",
        'b.wav\t"""No"""\tanna',
    ]
    path = tmp_path / "t.tsv"
    path.write_text("\n".join([*rows, 'none.wav\tHe said."\tanna', "b.wav\tfour\tcells\there"]))
    source = {"type": "table", "table": str(path), "delimiter": "\t", "audio_root": str(audio_root)}
    config = write_small_config(tmp_path, path, audio_root, sources=[source], match=None, encode={"codecs": []})
    status, said, told = call("run", config, "validate.against_sources=true")
    stats = json.loads((tmp_path / "run/stats.json").read_bytes())
    assert (status, stats["records_in"], stats["records_out"]) == (0, 5, 3), told
    assert stats["rejects"] == {"malformed": 1, "missing_audio": 1}
    assert "1 cells look like quoted CSV" in said + told
    lost = path.read_text() + "\nlost.wav\tNo.\tanna\n"
    for table, expected, words in ((path.read_text(), 0, "5 records of the manifests"), (lost, 3, "lost_record")):
        packed = tmp_path / "t.tsv.gz"
        packed.write_bytes(gzip.compress(table.encode()))
        path.write_text(table)
        for against in (path, packed):
            checked = ("--against", against, "--rejects", tmp_path / "run/rejects.jsonl")
            status, said, told = call("validate", tmp_path / "dataset", *checked)
            assert (status, words in said + told) == (expected, True), said + told


CELLS = st.text(st.sampled_from('ab ,"\n\r|é;'), max_size=5)


@given(rows=st.lists(st.tuples(CELLS, CELLS), max_size=8), size=st.integers(1, 4))
def test_every_table_that_csv_writes_is_read_back(rows, size, tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "t.csv"
    stream = io.StringIO(newline="")
    csv.writer(stream).writerows([("audio_filepath", "text"), *rows])
    path.write_bytes(stream.getvalue().encode())
    source = TableSource(table=str(path), audio_root="audio", quotes=True)
    found = [(row["audio_filepath"], row["text"]) for row in read(source, size)]
    assert found == [row for row in rows if "".join(row).strip(", \t")]
