"""Tables as they come: forms of corpora, quotes, encodings, line ends, and rows that cannot be read."""

from __future__ import annotations

import csv
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.errors import raises

from sharmill.errors import ConfigError
from sharmill.sources import Unreadable
from sharmill.sources.table import TableSource


@pytest.fixture
def table(tmp_path):
    """Returns a function: content, keys -> the source of a table."""

    def make(content, name="t.csv", **keys):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return TableSource(table=str(path), audio_root="audio", **keys)

    return make


def read(source, size=100):
    pieces = list(source.pieces(size))
    rows = [list(source.read(piece.params)) for piece in pieces]
    assert [piece.num_records for piece in pieces] == [len(piece) for piece in rows]
    return [row if isinstance(row, Unreadable) else json.loads(row) for piece in rows for row in piece]


def test_ljspeech(table):
    text = 'LJ1|Said "no, 5.|said no five\r\nLJ2|A|a\r\n'
    source = table(text, delimiter="|", quotes=False, header=["id", "raw", "text"], audio="wavs/{id}.wav")
    source.check()
    assert read(source) == [
        {"id": "LJ1", "raw": 'Said "no, 5.', "text": "said no five", "audio_filepath": "wavs/LJ1.wav"},
        {"id": "LJ2", "raw": "A", "text": "a", "audio_filepath": "wavs/LJ2.wav"},
    ]


def test_f5_tts(table):
    source = table(
        "audio_file|text\n/data/a.wav|Hello, you.\n", delimiter="|", columns={"audio_filepath": "audio_file"}
    )
    source.check()
    assert read(source) == [{"audio_filepath": "/data/a.wav", "text": "Hello, you."}]


def test_quotes_delimiters_and_newlines_in_cells(table):
    source = table('audio_filepath,text\r\n"a, b.wav","one ""two""\r\nthree"\r\n\r\n ,\nc.wav,\n')
    assert read(source) == [
        {"audio_filepath": "a, b.wav", "text": 'one "two"\r\nthree'},
        {"audio_filepath": "c.wav", "text": ""},
    ]


def test_numbers(table):
    head = "audio_filepath\tduration\toffset\tchannel\tcer\tyear\n"
    rows = "a\t1.5\t\t1\t1e-2\t1984\nb\t2,5\tnan\tdownmix\t-3\t1_0\n"
    assert read(table(head + rows, delimiter="\t", numbers=["cer"])) == [
        {"audio_filepath": "a", "duration": 1.5, "offset": None, "channel": 1, "cer": 0.01, "year": "1984"},
        {"audio_filepath": "b", "duration": "2,5", "offset": "nan", "channel": "downmix", "cer": -3, "year": "1_0"},
    ]


def test_columns_are_renamed_and_others_keep_their_names(table):
    source = table("path,text,sentence,x\na,raw,said,1\n",
                   columns={"audio_filepath": "path", "text": "sentence", "normalized_text": "sentence"})  # fmt: skip
    assert read(source) == [{"audio_filepath": "a", "text": "said", "normalized_text": "said", "x": "1"}]


def test_latin_1(table):
    content = "audio_filepath,text\na.wav,grün\nb.wav,plain\n".encode("latin-1")
    assert read(table(content, encoding="latin-1"))[0]["text"] == "grün"
    bad, good = read(table(content))
    assert (bad.reason, "not utf-8" in bad.detail, bad.record) == ("malformed", True, "a.wav,gr\ufffdn")
    assert good == {"audio_filepath": "b.wav", "text": "plain"}


def test_a_byte_order_mark_is_no_part_of_a_name(table):
    assert read(table(b"\xef\xbb\xbfaudio_filepath,text\na,b\n")) == [{"audio_filepath": "a", "text": "b"}]


@pytest.mark.parametrize(
    ("row", "detail"),
    [
        ('a,"b" c', "the row is no CSV"),
        ('a,"never ends', "the row is no CSV"),
        ('a,"' + "x" * 200_000, "the row is no CSV"),
        ("a,b,c", "the row has 3 cells, and there are 2 columns"),
        ("a", "the row has 1 cells, and there are 2 columns"),
    ],
)
def test_a_bad_row_is_one_reject_and_the_rest_goes_on(row, detail, table):
    rows = read(table(f"audio_filepath,text\n1,x\n{row}\n2,y\n3,z\n"), size=1)
    bad = [row for row in rows if isinstance(row, Unreadable)]
    assert [(found.reason, found.detail[: len(detail)]) for found in bad] == [("malformed", detail)]
    assert [row["audio_filepath"] for row in rows if not isinstance(row, Unreadable)] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("content", "keys", "code", "names"),
    [
        ("file,text\n", {}, "unknown_key", ["audio_filepath", "file"]),
        ("file|text\n", {"columns": {"audio_filepath": "file"}}, "unknown_key", ["'|'", "delimiter"]),
        ("audio_filepath,txt\n", {"columns": {"text": "text"}}, "unknown_key", ["columns.text", "did you mean 'txt'"]),
        ("id,text\n", {"audio": "{idd}.wav"}, "unknown_key", ["{idd}.wav", "did you mean 'id'"]),
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


@pytest.mark.parametrize(
    "keys",
    [{"delimiter": "||"}, {"delimiter": '"'}, {"encoding": "utf-16"}, {"encoding": "none"}, {"audio": "{"},
     {"header": []}, {"header": ["a", "a"]}],
)  # fmt: skip
def test_keys_that_make_no_sense(keys):
    with pytest.raises(ValueError, match=r"."):
        TableSource(table="t.csv", audio_root="audio", **keys)


CELLS = st.text(st.sampled_from('ab ,"\n\r|é;'), max_size=5)


@given(rows=st.lists(st.tuples(CELLS, CELLS), max_size=8), size=st.integers(1, 4))
def test_every_table_that_csv_writes_is_read_back(rows, size, tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "t.csv"
    stream = io.StringIO(newline="")
    csv.writer(stream).writerows([("audio_filepath", "text"), *rows])
    path.write_bytes(stream.getvalue().encode())
    source = TableSource(table=str(path), audio_root="audio")
    found = [(row["audio_filepath"], row["text"]) for row in read(source, size)]
    assert found == [row for row in rows if "".join(row).strip(", \t")]


def test_a_template_with_a_key_that_no_row_has(table):
    content = "audio_filepath,text,client\na.wav,good,anna\n"
    table(content, speaker="{client}").check_speaker()
    with raises(ConfigError, "unknown_key", "'clint'", "did you mean 'client'?"):
        table(content, speaker="{clint}").check_speaker()
