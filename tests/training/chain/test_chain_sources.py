"""WeNet's lists and lines of text as sources of a chain: what examples have, and what bad input becomes."""

from __future__ import annotations

import json
import os

import pytest
from support.errors import raises
from support.manifests import write_manifest
from support.tars import tar_bytes, voice_bytes, write_tar

from sharmill.errors import ConfigError, DamagedShard
from sharmill.training import Chain, RawList, ShardList, TextLines
from sharmill.training.chain.features import decode_wav

VOICE = voice_bytes(0.2)
GOOD = {"key": "a", "wav": "/data/a.wav", "txt": "one"}


def raw(tmp_path, lines, **options):
    return RawList(write_manifest(tmp_path / "data.list", lines), **options)


def shards(tmp_path, names, **options):
    path = tmp_path / "data.shards.list"
    path.write_text("".join(f"{name}\n" for name in names))
    return ShardList(path, **{"root": tmp_path} | options)


def test_raw_lines_keep_all_their_keys(tmp_path):
    lines = [GOOD | {"speaker": 7}, b"", {"key": "b", "wav": "/data/x/../b.wav", "start": 1, "end": 2.5}]
    assert list(Chain(raw(tmp_path, lines))) == [
        GOOD | {"speaker": 7},
        {"key": "b", "wav": "/data/b.wav", "start": 1, "end": 2.5},
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"key": "a", "wav"', "not JSON"),
        (b'["a"]', "not a JSON object"),
        (b'{"key": "caf\xe9", "wav": "/a.wav"}', "not JSON"),
        ({"key": "a", "txt": "no audio"}, "'wav'"),
        ({"wav": "/a.wav", "txt": "no key"}, "'key'"),
        (GOOD | {"txt": None}, "'txt'"),
        (GOOD | {"start": 2, "end": 1}, "start and end"),
        (GOOD | {"start": "0", "end": "1"}, "start and end"),
        (GOOD | {"wav": "pipe:touch marker"}, "command"),
        (GOOD | {"wav": "relative.wav"}, "relative"),
        (GOOD | {"wav": "https://host/a.wav"}, "URL"),
        (GOOD | {"wav": "/a\0.wav"}, "null character"),
    ],
)
def test_a_bad_line_is_an_error_or_left_out(line, words, tmp_path):
    source = raw(tmp_path, [GOOD, line, GOOD | {"key": "c"}])
    with raises(DamagedShard, "damaged_shard", "data.list, record 2", words):
        list(Chain(source))
    chain = Chain(source, on_error="skip")
    assert [example["key"] for example in chain] == ["a", "c"]
    assert chain.state_dict()["readers"][0]["num_damaged"] == 1


def test_paths_stay_below_the_audio_root(tmp_path):
    (tmp_path / "audio").mkdir()
    (tmp_path / "secret.wav").write_bytes(VOICE)
    (tmp_path / "audio/link.wav").symlink_to(tmp_path / "secret.wav")
    names = ["a.wav", "../secret.wav", "link.wav", str(tmp_path / "secret.wav")]
    source = raw(tmp_path, [GOOD | {"wav": name} for name in names], audio_root=tmp_path / "audio")
    assert [example["wav"] for example in Chain(source, on_error="skip")] == [str(tmp_path / "audio/a.wav")]


def test_files_that_are_no_lists_are_refused(tmp_path):
    with raises(ConfigError, "missing_input", "gone.list"):
        RawList(tmp_path / "gone.list")
    with raises(ConfigError, "missing_input", "gone.txt"):
        TextLines(tmp_path / "gone.txt")
    with raises(ConfigError, "bad_manifest", "empty"):
        raw(tmp_path, [])
    with raises(ConfigError, "bad_manifest", "data_type: raw"):
        ShardList(write_manifest(tmp_path / "data.list", [GOOD]))
    (tmp_path / "packed.list").write_bytes(b"\x1f\x8b\x08 and more")
    with raises(ConfigError, "bad_manifest", "gzip"):
        RawList(tmp_path / "packed.list")
    with raises(ConfigError, "bad_config_value", "https://host/speech"):
        raw(tmp_path, [GOOD], audio_root="https://host/speech")


def test_members_belong_together_by_the_begin_of_their_names(tmp_path):
    members = [("a/b.1.wav", VOICE), ("a/b.1.txt", " größe\n".encode()), ("a/b.1.lang", b"de"), ("c.FLAC", VOICE)]
    write_tar(tmp_path / "one.tar", members)
    assert list(Chain(shards(tmp_path, ["one.tar"]))) == [
        {"key": "a/b.1", "wav": VOICE, "txt": "größe", "lang": b"de"},
        {"key": "c", "wav": VOICE},
    ]


def test_names_of_members_are_keys_and_no_paths(tmp_path):
    members = [
        ("../../etc/x.wav", VOICE),
        ("../../etc/x.key", b"forged"),
        ("/abs/y.wav", VOICE),
        ("z.tar/..wav", VOICE),
    ]
    write_tar(tmp_path / "one.tar", members)
    assert [example["key"] for example in Chain(shards(tmp_path, ["one.tar"]))] == ["../../etc/x", "abs/y"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.shards.list", "one.tar"]


BAD = {
    "duplicate member": ([("a.wav", VOICE), ("a.wav", VOICE)], "two members .wav"),
    "duplicate key": ([("a.wav", VOICE), ("b.wav", VOICE), ("a.wav", VOICE)], "earlier sample"),
    "no audio": ([("a.txt", b"text")], "no audio"),
    "two audio files": ([("a.wav", VOICE), ("a.flac", VOICE)], "several audio files"),
    "text in another encoding": ([("a.wav", VOICE), ("a.txt", b"caf\xe9")], "utf-8"),
    "text without end": ([("a.wav", VOICE), ("a.lang", b"x"), ("a.lang", b"x")], "two members .lang"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_sample_is_an_error_or_left_out(kind, tmp_path):
    members, words = BAD[kind]
    write_tar(tmp_path / "one.tar", [*members, ("good.wav", VOICE)])
    source = shards(tmp_path, ["one.tar"])
    with raises(DamagedShard, "damaged_shard", "one.tar", words):
        list(Chain(source))
    assert [example["key"] for example in Chain(source, on_error="skip")][-1] == "good"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("gone", "No such file"),
        ("folder", "not a regular file"),
        ("fifo", "not a regular file"),
        ("text", "damaged at byte 0"),
        ("cut", "within its member 'b.wav'"),
        ("header", "within a header"),
        ("../outside", "leaves the audio root"),
        ("pipe:cat", "command"),
        ("https://host/x.tar", "address"),
    ],
)
def test_a_bad_archive_is_an_error_or_left_out(kind, words, tmp_path):
    root = tmp_path / "root"
    data = tar_bytes([("a.wav", VOICE), ("b.wav", VOICE)])
    write_tar(root / "good.tar", [("good.wav", VOICE)])
    (root / "folder").mkdir()
    os.mkfifo(root / "fifo")
    (root / "text").write_text("no archive\n" * 100)
    half = 512 + -(-len(VOICE) // 512) * 512
    (root / "cut").write_bytes(data[: half + 600])
    (root / "header").write_bytes(data[: half + 100])
    source = shards(tmp_path, [kind, "good.tar"], root=root)
    with raises(DamagedShard, "damaged_shard", kind.rpartition("/")[2], words):
        list(Chain(source))
    found = [example["key"] for example in Chain(source, on_error="skip")]
    assert found == (["a", "good"] if kind in ("cut", "header") else ["good"])


def test_an_archive_that_changes_is_damaged(tmp_path):
    write_tar(tmp_path / "one.tar", [("a.wav", VOICE), ("b.wav", VOICE)])
    source = shards(tmp_path, ["one.tar"])
    assert source.count(0) == 2
    state = Chain(source).state_dict()
    write_tar(tmp_path / "one.tar", [("a.wav", VOICE)])
    with raises(DamagedShard, "damaged_shard", "one.tar was changed"):
        list(Chain(source))
    with raises(ConfigError, "wrong_state", "archives"):
        Chain(shards(tmp_path, ["one.tar"])).load_state_dict(state)


def test_compressed_archives_are_refused(tmp_path):
    (tmp_path / "one.tar").write_bytes(b"\x1f\x8b\x08 and more")
    with raises(ConfigError, "bad_manifest", "gzip"):
        shards(tmp_path, ["one.tar"])


def test_audio_that_is_missing_or_none_is_an_error_of_its_example(tmp_path):
    (tmp_path / "text.wav").write_text("no audio\n" * 100)
    os.mkfifo(tmp_path / "fifo.wav")
    (tmp_path / "good.wav").write_bytes(VOICE)
    (tmp_path / "cut.wav").write_bytes(voice_bytes(1.0, format="WAV")[:9000])
    names = ["gone", "text", "fifo", "cut", "good"]
    source = raw(tmp_path, [{"key": name, "wav": f"{name}.wav"} for name in names], audio_root=tmp_path)
    for number, name in enumerate(names[:4], 1):
        lines = json.dumps({"key": name, "wav": f"{tmp_path}/{name}.wav"}) + "\n"
        (tmp_path / "one.list").write_text(lines)
        with raises(DamagedShard, "damaged_shard", "one.list, record 1", f"{name}.wav"):
            list(Chain(RawList(tmp_path / "one.list")).map(decode_wav))
        with raises(DamagedShard, "damaged_shard", f"record {number}", f"max_errors={number - 1}"):
            list(Chain(source, on_error="skip", max_errors=number - 1).map(decode_wav))
    (good,) = Chain(source, on_error="skip").parallel_map(decode_wav, 2)
    assert good["key"] == "good"
    assert good["waveform"].shape == (1, 3200)


def test_lines_of_text(tmp_path):
    (tmp_path / "b0.txt").write_bytes(b"one\n\n  two \r\ncaf\xe9\n")
    (tmp_path / "b1.txt").write_bytes("größe".encode())
    chain = Chain(TextLines(tmp_path / "b{0..1}.txt"), on_error="skip")
    assert list(chain) == [
        {"key": "b0.txt:1", "txt": "one"},
        {"key": "b0.txt:2", "txt": "two"},
        {"key": "b1.txt:1", "txt": "größe"},
    ]


def test_a_state_of_other_lines_of_the_same_size_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n")
    chain = Chain(TextLines(path))
    next(iter(chain))
    path.write_text("one\nsix\n")
    with raises(ConfigError, "wrong_state", "files"):
        Chain(TextLines(path)).load_state_dict(chain.state_dict())
