"""WeNet's lists: records of data.list and of archives, and what becomes of bad lines."""

from __future__ import annotations

import gzip
import json
import os

import pytest
from support.errors import raises
from support.manifests import config_for, run_prepare, write_manifest, write_tone
from support.tars import tar_bytes, voice_bytes, write_tar

from sharmill.errors import ConfigError
from sharmill.sources import Located, Unreadable
from sharmill.sources.wenet import WenetSource


def read(made, records_per_piece=2):
    pieces = list(made.pieces(records_per_piece))
    found = [list(made.read(piece.params)) for piece in pieces]
    assert [len(records) for records in found] == [piece.num_records for piece in pieces]
    return [
        (raw.reason, raw.detail)
        if isinstance(raw, Unreadable)
        else json.loads(raw.record if isinstance(raw, Located) else raw)
        for records in found
        for raw in records
    ]


def raw(tmp_path, lines, **keys):
    path = write_manifest(tmp_path / "data.list", lines)
    made = WenetSource(data_list=str(path), audio_root=str(tmp_path / "audio"), **keys)
    made.check()
    return made


def shards(tmp_path, lines, **keys):
    path = tmp_path / "shards.list"
    path.write_text("".join(f"{line}\n" for line in lines))
    made = WenetSource(data_list=str(path), data_type="shard", **{"audio_root": str(tmp_path)} | keys)
    made.check()
    return made


def test_lines_of_raw_lists_become_records(tmp_path):
    lines = [
        {"key": "84-1", "wav": "a.wav", "txt": "text a", "lang": "zh"},
        {"key": "84-1-2", "wav": "/data/b.wav", "txt": "text b", "start": 1.5, "end": 4},
    ]
    assert read(raw(tmp_path, lines)) == [
        {"key": "84-1", "lang": "zh", "audio_filepath": "a.wav", "text": "text a"},
        {"key": "84-1-2", "audio_filepath": "/data/b.wav", "text": "text b", "offset": 1.5, "duration": 2.5},
    ]


def test_the_key_gives_the_speaker_by_a_pattern(tmp_path):
    lines = [{"key": key, "wav": "a.wav", "txt": "t"} for key in ("BAC009S0002W0122", "other", 3)]
    found = read(raw(tmp_path, lines, key_pattern="BAC[0-9]+(?P<speaker>S[0-9]+)W"))
    assert [record.get("speaker") for record in found] == ["S0002", None, None]


BAD = [
    ({"wav": "a.wav", "start": 1.0}, "malformed", "start and end"),
    ({"wav": "a.wav", "start": 1.0, "end": 1.0}, "malformed", "start and end"),
    ({"wav": "a.wav", "start": "0", "end": "1"}, "malformed", "start and end"),
    ({"wav": "a.wav", "start": -1, "end": 1}, "malformed", "start and end"),
    (b'{"wav": "a.wav"', "malformed", "JSON"),
    (b'"a.wav"', "malformed", "JSON object"),
]


@pytest.mark.parametrize(("line", "reason", "words"), BAD)
def test_a_bad_line_is_one_reject(line, reason, words, tmp_path):
    bad, good = read(raw(tmp_path, [line, {"wav": "a.wav"}]))
    assert bad[0] == reason
    assert words in bad[1]
    assert good == {"audio_filepath": "a.wav"}


def test_prepare_makes_utterances_of_a_list_with_windows_line_ends(tmp_path):
    write_tone(tmp_path / "audio/a.wav")
    lines = [{"key": "84_1", "wav": "a.wav", "txt": "one"}, {"key": "84_2", "wav": "a.wav", "start": 0.5, "end": 1.0}]
    lines += [{"key": "84_3", "wav": "pipe:touch marker"}, {"key": "84_4", "txt": "no wav"}, {"wav": "../a.wav"}]
    latin_1 = [b'{"wav": "a.wav", "txt": "caf\xe9"}\r']
    raw(tmp_path, [json.dumps(line | {"txt": "t"}).encode() + b"\r" for line in lines] + latin_1)
    entry = {"type": "wenet", "data_list": str(tmp_path / "data.list"), "audio_root": str(tmp_path / "audio"),
             "speaker": "{key:prefix}"}  # fmt: skip
    prepared = run_prepare(config_for(tmp_path / "out", [entry]))
    assert [(u.offset, u.duration, u.text, u.speaker) for u in prepared.kept] == [
        (0.0, 2.0, "t", "| Language:und Dataset:small Speaker:84 |"),
        (0.5, 0.5, "t", "| Language:und Dataset:small Speaker:84 |"),
    ]
    assert [reject["reason"] for reject in prepared.rejects] == [
        "outside_root", "missing_field", "outside_root", "malformed",
    ]  # fmt: skip


SAMPLE = [("a.wav", b"audio"), ("a.txt", " größe\n".encode())]


def test_archives_of_a_list_are_read_in_order(tmp_path):
    write_tar(tmp_path / "one/s.tar", [*SAMPLE, ("deep/b.1.flac", b""), ("deep/b.1.txt", b"t"), ("b.2.lang", b"zh")])
    write_tar(tmp_path / "s.tar", SAMPLE)
    found = read(shards(tmp_path, ["one/s.tar\r", "", f"{tmp_path}/./s.tar"]))
    assert found == [
        {"audio_filepath": "one/s.tar/a.wav", "key": "a", "text": "größe"},
        {"audio_filepath": "one/s.tar/deep/b.1.flac", "key": "deep/b.1", "text": "t"},
        ("missing_audio", "the sample has no audio; its members end in .lang"),
        {"audio_filepath": "s.tar/a.wav", "key": "a", "text": "größe"},
    ]


def test_bad_archives_are_rejected_and_named_and_the_rest_goes_on(tmp_path):
    write_tar(tmp_path / "s.tar", SAMPLE)
    (tmp_path / "cut.tar").write_bytes(tar_bytes(SAMPLE)[:1540])
    (tmp_path / "text.tar").write_text("no archive\n" * 100)
    (tmp_path / "folder.tar").mkdir()
    os.mkfifo(tmp_path / "fifo.tar")
    (tmp_path / "out.tar").symlink_to(os.devnull)
    names = ["none.tar", "cut.tar", "text.tar", "folder.tar", "fifo.tar", "out.tar", "../x.tar", "/etc/x.tar",
             "pipe:cat s.tar", "cat s.tar |", "http://host/s.tar", "s.tar"]  # fmt: skip
    found = read(shards(tmp_path, names))
    assert [item[0] for item in found[:-1]] == [
        "missing_audio", "unreadable_audio", "unreadable_audio", "unreadable_audio", "unreadable_audio",
        "outside_root", "outside_root", "outside_root", "outside_root", "outside_root", "outside_root",
    ]  # fmt: skip
    assert "cut.tar is cut off at byte 1540, within its member 'a.txt'" in found[1][1]
    assert "is damaged at byte 0, where no header is" in found[2][1]
    assert "is an address; copy the archive" in found[10][1]
    assert found[-1]["key"] == "a"


def test_two_members_of_one_name_are_rejected(tmp_path):
    write_tar(tmp_path / "s.tar", [("a.wav", b"1"), ("a.wav", b"2"), ("a.txt", b"t"), ("b.wav", b"3")])
    write_tar(tmp_path / "t.tar", [*SAMPLE, ("c.wav", b"3"), *SAMPLE])
    found = read(shards(tmp_path, ["s.tar", "t.tar"]))
    assert [record[0] if isinstance(record, tuple) else record["key"] for record in found] == [
        "ambiguous_audio", "b", "a", "c", "ambiguous_audio",
    ]  # fmt: skip


def test_prepare_rejects_a_damaged_member_and_goes_on(tmp_path):
    members = [
        ("84-1.wav", voice_bytes(2.0, format="WAV")),
        ("84-1.txt", b"one"),
        ("84-2.wav", b"RIFF"),
        ("84-2.txt", b"t"),
    ]
    write_tar(tmp_path / "data/s.tar", [*members, ("84-3.flac", voice_bytes(seed=2)), ("84-3.txt", b"three")])
    shards(tmp_path, ["data/s.tar", "data/none.tar"])
    entry = {"type": "wenet", "data_list": str(tmp_path / "shards.list"), "data_type": "shard",
             "audio_root": str(tmp_path), "speaker": "{key:prefix}"}  # fmt: skip
    prepared = run_prepare(config_for(tmp_path / "out", [entry]))
    assert [utterance.text for utterance in prepared.kept] == ["one", "three"]
    assert [utterance.speaker.split()[3] for utterance in prepared.kept] == ["Speaker:84"] * 2
    assert [(reject["reason"], "84-2" in str(reject)) for reject in prepared.rejects] == [
        ("unreadable_audio", True), ("missing_audio", False),
    ]  # fmt: skip


def test_a_compressed_archive_is_refused_before_any_work(tmp_path):
    (tmp_path / "s.tar").write_bytes(gzip.compress(tar_bytes(SAMPLE), mtime=0))
    with raises(ConfigError, "bad_manifest", "s.tar", "is compressed (gzip); unpack it"):
        shards(tmp_path, ["s.tar"])


def test_lists_of_which_no_archive_is_there_are_refused(tmp_path):
    with raises(ConfigError, "missing_input", "none of the 2 archives", "audio_root"):
        shards(tmp_path, ["a.tar", "b.tar"])


def test_the_other_kind_of_list_is_refused_with_the_key_to_set(tmp_path):
    with raises(ConfigError, "bad_manifest", "data.list", "set data_type: shard"):
        raw(tmp_path, [b"a.tar"])
    with raises(ConfigError, "bad_manifest", "shards.list", "set data_type: raw"):
        shards(tmp_path, ['{"key": 1}'])


@pytest.mark.parametrize(("content", "words"), [(b"", "empty"), (b"\xff\xfea\0.\0", "UTF-16"), (None, "folder")])
def test_what_is_no_list_is_refused(content, words, tmp_path):
    path = tmp_path / "data.list"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with raises(ConfigError, "bad_manifest", "data_list", words):
        WenetSource(data_list=str(path), audio_root=".").check()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"key_pattern": "("}, "no regular"),
        ({"key_pattern": "a"}, "no named group"),
        ({"encoding": "no"}, "no encoding"),
        ({"data_list": []}, "must not be empty"),
    ],
)
def test_bad_values_are_refused(keys, words):
    with pytest.raises(ValueError, match=words):
        WenetSource(**{"data_list": "data.list", "audio_root": "."} | keys)


def test_a_template_of_an_unknown_key_is_refused_with_the_nearest_one(tmp_path):
    with raises(ConfigError, "unknown_key", "'keys'", "did you mean 'key'?"):
        raw(tmp_path, [{"key": "a", "wav": "a.wav"}], speaker="{keys:prefix}").check_speaker()
    write_tar(tmp_path / "s.tar", SAMPLE)
    with raises(ConfigError, "unknown_key", "'keys'", "did you mean 'key'?"):
        shards(tmp_path, ["s.tar"], speaker="{keys}").check_speaker()


def test_identity_has_the_lists_and_the_sizes_of_their_archives(tmp_path):
    write_tar(tmp_path / "s.tar", SAMPLE)
    identity = shards(tmp_path, ["s.tar", "none.tar"]).identity()
    assert identity["tars"] == {"0 s.tar": 10240, "1 none.tar": None}
    assert list(identity["data_list"]) == ["0 shards.list"]
    assert list(raw(tmp_path, [{"wav": "a"}]).identity()) == ["data_list"]
