"""NeMo manifests: shards, pieces, and files that are no manifest."""

from __future__ import annotations

import gzip
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.errors import raises
from support.manifests import config_for, make_record, run_prepare, write_tone

from sharmill.errors import ConfigError
from sharmill.files.storage import checksum
from sharmill.sources.nemo import NemoSource

LINE = b'{"audio_filepath": "a.wav"}\n'


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
    assert identity["manifest"] == {
        f"{n} {file.name}": [len(LINE) * (n + 1), checksum(file)] for n, file in enumerate(files)
    }


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


# The format that a file seems to have is named, where there is one.
NO_MANIFESTS = [
    (spoil_empty, ""),
    (spoil_blank, ""),
    (spoil_binary, "UTF-16"),
    (spoil_gzip, "gzip"),
    (spoil_table, "CSV"),
    (spoil_text, "JSON"),
    (spoil_indented, "JSON"),
    (spoil_utf16, "UTF-16"),
    (spoil_utf16_without_mark, "UTF-16"),
    (spoil_mark, "UTF-8"),
    (spoil_truncated, "JSON"),
    (spoil_truncated_in_a_letter, "JSON"),
    (spoil_array, "JSON"),
    (spoil_folder, ""),
    (spoil_fifo, ""),
]


@pytest.mark.parametrize(("spoil", "name"), NO_MANIFESTS, ids=lambda value: getattr(value, "__name__", None))
def test_what_is_no_manifest_is_refused_in_one_line(spoil, name, tmp_path):
    path = tmp_path / "m.json"
    spoil(path)
    with raises(ConfigError, "bad_manifest", str(path), name) as caught:
        NemoSource(manifest=str(path), audio_root="audio").identity()
    assert "\n" not in str(caught.value)


def test_moved_manifests_have_the_same_identity(tmp_path):
    for number in range(2):
        (tmp_path / f"here/{number}").mkdir(parents=True)
        (tmp_path / f"here/{number}/m.json").write_bytes(LINE * (number + 1))

    def identity(folder):
        return NemoSource(manifest=f"{tmp_path}/{folder}/{{0..1}}/m.json", audio_root="audio").identity()

    before = identity("here")
    (tmp_path / "here").rename(tmp_path / "there")
    assert identity("there") == before
    assert len(before["manifest"]) == 2


def test_missing_manifest(tmp_path):
    with raises(ConfigError, "missing_input", str(tmp_path / "m.json")):
        NemoSource(manifest=str(tmp_path / "m.json"), audio_root="audio").identity()


def test_a_missing_manifest_with_a_relative_path_says_what_it_is_relative_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with raises(ConfigError, "missing_input", "data/m.json", f"the path is relative to {tmp_path}"):
        NemoSource(manifest="data/m.json", audio_root="audio").identity()


def test_lists_shards_and_stars_are_read_in_order(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("z", "m_0", "m_1", "b.x", "a.x"):
        (tmp_path / f"{name}.json").write_bytes(b'{"n": "%s"}\n' % name.encode())
    manifest = [str(tmp_path / "z.json"), "~/m_[0..1].json", "~/*.x.json"]
    source = NemoSource(manifest=manifest, audio_root="audio")
    source.check()
    found = [json.loads(line)["n"] for piece in source.pieces(10) for line in source.read(piece.params)]
    assert found == ["z", "m_0", "m_1", "a.x", "b.x"]
    assert [json.loads(line)["n"] for line in source.records()] == found


@pytest.mark.parametrize("manifest", ["", " ", [], ["a.json", ""]])
def test_manifest_must_not_be_empty(manifest):
    with pytest.raises(ValueError, match="manifest"):
        NemoSource(manifest=manifest, audio_root="audio")


@pytest.mark.parametrize("root", ["", [], ["a", " "]])
def test_audio_root_must_not_be_empty(root):
    with pytest.raises(ValueError, match="audio_root"):
        NemoSource(manifest="m.json", audio_root=root)


def test_a_template_of_an_unknown_key_is_refused_with_the_nearest_one(tmp_path):
    path = tmp_path / "m.json"
    path.write_bytes(b"no json\n" + b'{"audio_filepath": "a.wav", "speaker_id": 1}\n' * 3)
    with raises(ConfigError, "unknown_key", "'speakerid'", "did you mean 'speaker_id'?"):
        NemoSource(manifest=str(path), audio_root="audio", speaker="{speakerid}").check_speaker()
    NemoSource(manifest=str(path), audio_root="audio", speaker="{speaker_id}_{path[0]}").check_speaker()


def test_windows_line_ends_do_no_harm_and_a_latin_1_line_is_one_reject(tmp_path):
    write_tone(tmp_path / "a.wav")
    good = [
        json.dumps(make_record(text=text, offset=offset, duration=1.0)).encode() for offset, text in enumerate("ab")
    ]
    latin_1 = json.dumps(make_record(text="gr\u00fcn"), ensure_ascii=False).encode("latin-1")
    (tmp_path / "m.json").write_bytes(b"\r\n".join([good[0], latin_1, b"", good[1], b""]))
    prepared = run_prepare(config_for(tmp_path, [(tmp_path / "m.json", tmp_path)]))
    assert [utterance.text for utterance in prepared.kept] == ["a", "b"]
    assert [reject["reason"] for reject in prepared.rejects] == ["malformed"]


def test_a_first_line_that_is_no_record_is_left_to_prepare(tmp_path):
    (tmp_path / "m.json").write_bytes(b"a,b,c\n" + LINE)
    NemoSource(manifest=str(tmp_path / "m.json"), audio_root="audio").check()


def test_last_line_needs_no_newline(tmp_path):
    (tmp_path / "m.json").write_bytes(LINE + LINE.rstrip())
    source = NemoSource(manifest=str(tmp_path / "m.json"), audio_root="audio")
    source.identity()
    assert [piece.num_records for piece in source.pieces(10)] == [2]
