"""Kaldi data directories: with and without segments, unsorted, damaged, and in other encodings."""

import time

import pytest
from support.sources import read

from sharmill.sources.kaldi import KaldiSource

GOOD = {
    "wav_scp": "r1 one.wav\nr2 two.wav\n",
    "segments": "u1 r1 0.5 2.25\nu2 r2 0 1\nu3 r1 3 -1 1\n",
    "text": "u1 GOOD DAY\nu2 YES\nu3 NO\n",
    "utt2spk": "u1 anna\nu2 bob\nu3 anna\n",
}


@pytest.fixture
def directory(tmp_path):
    """Return a function from files by name and keys to the source of the directory with them."""

    def make(encoding="utf-8", **files):
        folder = tmp_path / "train"
        folder.mkdir()
        for name, content in files.items():
            data = content if isinstance(content, bytes) else content.encode()
            (folder / name.replace("wav_scp", "wav.scp")).write_bytes(data)
        return KaldiSource(data_dir=str(folder), audio_root="audio", encoding=encoding)

    return make


@pytest.mark.parametrize("size", [1, 2, 100])
def test_segments(size, directory):
    source = directory(**GOOD, utt2lang="u1 en\nu2 en\nu3 en\n", spk2gender="anna f\nbob m\n")
    source.check()
    assert read(source, size) == [
        {"utterance_id": "u1", "text": "GOOD DAY", "speaker": "anna", "language": "en", "gender": "f",
         "audio_filepath": "one.wav", "offset": 0.5, "duration": 1.75},
        {"utterance_id": "u2", "text": "YES", "speaker": "bob", "language": "en", "gender": "m",
         "audio_filepath": "two.wav", "offset": 0.0, "duration": 1.0},
        {"utterance_id": "u3", "text": "NO", "speaker": "anna", "language": "en", "gender": "f",
         "audio_filepath": "one.wav", "offset": 3.0, "channel": 1},
    ]  # fmt: skip
    assert list(source.identity()) == [
        "0 wav.scp", "1 segments", "2 text", "3 utt2spk", "4 utt2lang", "5 spk2gender",
    ]  # fmt: skip


def test_recordings_without_segments(directory):
    source = directory(wav_scp="u1 a b.wav\nu2\t/data/two.wav\n", text="u1 yes\n")
    assert read(source) == [
        {"utterance_id": "u1", "text": "yes", "audio_filepath": "a b.wav"},
        {"utterance_id": "u2", "audio_filepath": "/data/two.wav"},
    ]


def test_the_order_of_lines_windows_ends_and_marks_do_no_harm(directory, tmp_path):
    expected = read(directory(**GOOD))
    other = {name: "\r\n".join(reversed(text.splitlines())) + "\r\n\r\n" for name, text in GOOD.items()}
    other["segments"] = "\ufeff" + GOOD["segments"].replace("\n", "\r\n")
    other["wav_scp"] = "\ufeff" + other["wav_scp"]
    (tmp_path / "train").rename(tmp_path / "old")
    assert read(directory(**other)) == expected


@pytest.mark.parametrize(
    ("command", "file", "channel"),
    [
        ("sph2pipe -f wav -p -c 1 calls/a.sph |", "calls/a.sph", 0),
        ("/opt/kaldi/tools/sph2pipe -p -f rif -c 2 /data/a.sph | ", "/data/a.sph", 1),
        ("sph2pipe -f wav a.sph|", "a.sph", None),
        ("flac -c -d -s a.flac |", "a.flac", None),
        ("flac -dcs a.flac |", "a.flac", None),
        ("flac --decode --stdout --silent a.flac |", "a.flac", None),
        ("sox a.wav -t wav - |", "a.wav", None),
        ("sox a.wav -t wav - remix 2 |", "a.wav", 1),
        ("cat a.wav |", "a.wav", None),
    ],
)
def test_a_command_that_only_decodes_is_a_file_and_a_channel(command, file, channel, directory):
    expected = {"utterance_id": "u1", "audio_filepath": file} | ({} if channel is None else {"channel": channel})
    assert read(directory(wav_scp=f"u1 {command}\n")) == [expected]


def test_audio_in_archives_of_kaldi_is_rejected(directory):
    lines = ["a a.ark:5", "b b.ark.gz:17[0:9]", "c " + ".ark:1[" * 150_000]
    started = time.process_time()
    rows = read(directory(wav_scp="\n".join(lines)))
    assert time.process_time() - started < 1.0
    assert [getattr(row, "reason", None) for row in rows] == ["unreadable_audio", "unreadable_audio", None]


@pytest.mark.parametrize(
    "command",
    ["", "touch x", "cat a.wav b.wav", "cat", "cat -", "cat a.wav; touch x", "cat $(touch x)", "cat `touch x`",
     "cat a.wav > b", "cat a.wav | sox - -t wav -", "flac -s a.flac", "flac -d --output-name=x a.flac",
     "sox a.wav -t wav - speed 1.1",
     "sox a.wav -t wav - remix 0", "sox a.wav -t wav out.wav", "sph2pipe -t 1:2 a.sph", "sph2pipe -c 3 a.sph",
     "sph2pipe -f wav a.sph out.wav", "sph2pipe -f", "flac -d '~/a.flac'", "wget http://x/a.wav"],
)  # fmt: skip
def test_other_commands_are_rejected_with_what_to_do(command, directory):
    (row,) = read(directory(wav_scp=f"u1 {command} |\n"))
    assert row.reason == "outside_root"
    assert "save the output of other commands as audio files" in row.detail
