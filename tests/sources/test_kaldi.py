"""Kaldi data directories as they come: with and without segments, unsorted, damaged, in other encodings."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.errors import raises
from support.manifests import config_for, run_prepare, write_tone
from support.source_rows import read

from sharmill.errors import ConfigError
from sharmill.sources import Unreadable
from sharmill.sources.kaldi import KaldiSource

GOOD = {
    "wav_scp": "r1 one.wav\nr2 two.wav\n",
    "segments": "u1 r1 0.5 2.25\nu2 r2 0 1\nu3 r1 3 -1\n",
    "text": "u1 GOOD DAY\nu2 YES\nu3 NO\n",
    "utt2spk": "u1 anna\nu2 bob\nu3 anna\n",
}


@pytest.fixture
def directory(tmp_path):
    """Returns a function: files by name, keys -> the source of the directory that has them."""

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
         "audio_filepath": "one.wav", "offset": 3.0},
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


def test_a_channel_of_a_segment(directory):
    assert read(directory(wav_scp="r a.wav\n", segments="u r 0 1 1\n"))[0]["channel"] == 1


@pytest.mark.parametrize(
    ("changes", "reason", "says"),
    [
        ({"wav_scp": "r1 touch x |\nr2 two.wav\n"}, "outside_root", "has the command"),
        ({"wav_scp": "r1 sox one.wav -r 8000 -t wav - | \nr2 two.wav\n"}, "outside_root", "has the command"),
        ({"wav_scp": "r1 sph2pipe -c 1 one.sph |\nr2 two.wav\n", "segments": "u1 r1 0 1 1\nu2 r2 0 1\n"},
         "unsupported_channels", "leaves one channel"),
        ({"wav_scp": "r1 raw.ark:1712\nr2 two.wav\n"}, "unreadable_audio", "archive"),
        ({"wav_scp": "r2 two.wav\n"}, "missing_audio", "no recording 'r1'"),
        ({"wav_scp": "r1\nr2 two.wav\n"}, "missing_audio", "no path of 'r1'"),
        ({"wav_scp": "r1 one.wav\nr1 two.wav\nr2 two.wav\n"}, "malformed", "2 different lines of 'r1'"),
        ({"segments": "u1 r1 0.5\nu2 r2 0 1\n"}, "malformed", "a begin and an end"),
        ({"segments": "u1 r1 a b\nu2 r2 0 1\n"}, "malformed", "no numbers"),
        ({"segments": "u1 r1 0 nan\nu2 r2 0 1\n"}, "malformed", "not finite"),
        ({"segments": "u1\nu2 r2 0 1\n"}, "malformed", "a begin and an end"),
        ({"segments": "u1 r1 0 1\nu2 r2 0 1\nu1 r1 1 2\n"}, "malformed", "2 different lines of 'u1'"),
        ({"text": "u1 ONE\nu2 YES\nu1 TWO\n"}, "malformed", "text has 2 different lines of 'u1'"),
        ({"text": "u1 gr\u00fcn\nu2 YES\n".encode("latin-1")}, "malformed", "not utf-8; set encoding"),
        ({"segments": "u\u00fc1 r1 0 1\nu2 r2 0 1\n".encode("latin-1")}, "malformed", "not utf-8"),
    ],
)  # fmt: skip
def test_a_bad_line_is_a_reject_and_the_rest_goes_on(changes, reason, says, directory):
    rows = read(directory(**GOOD | changes))
    bad = [row for row in rows if isinstance(row, Unreadable) and row.reason == reason]
    assert bad[0].detail.count(says) == 1
    assert next(row["utterance_id"] for row in rows if isinstance(row, dict)) == "u2"


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
    assert "store what others make as files" in row.detail


def test_a_file_of_a_command_has_to_be_below_the_audio_root(directory, tmp_path):
    write_tone(tmp_path / "audio/one.wav", 2.0)
    write_tone(tmp_path / "secret.wav", 2.0)
    names = ("one.wav", "../secret.wav", tmp_path / "secret.wav", tmp_path / "audio/one.wav")
    scp = "".join(f"u{number} cat {name} |\n" for number, name in enumerate(names))
    source = directory(wav_scp=scp, text="".join(f"u{number} YES\n" for number in range(4)))
    entry = {"type": "kaldi", "data_dir": source.data_dir, "audio_root": str(tmp_path / "audio"), "speaker": "x"}
    prepared = run_prepare(config_for(tmp_path, [entry]))
    assert [utterance.audio_filepath for utterance in prepared.kept] == ["one.wav"]
    assert [reject["reason"] for reject in prepared.rejects] == ["outside_root", "outside_root", "duplicate_id"]


def test_latin_1(directory):
    files = {name: text.replace("anna", "\u00c5sa").encode("latin-1") for name, text in GOOD.items()}
    rows = read(directory(**files, spk2gender="\u00c5sa f\n".encode("latin-1"), encoding="latin-1"))
    assert (rows[0]["speaker"], rows[0]["gender"]) == ("\u00c5sa", "f")


def test_prepare_rejects_what_does_not_fit_the_audio(directory, tmp_path):
    write_tone(tmp_path / "audio/one.wav", 4.0)
    write_tone(tmp_path / "audio/two.wav", 2.0)
    segments = "u1 r1 0 1.5\nu2 r2 1 3\nu3 r1 3 -1\nu4 r1 2 1\nu5 r1 -1 1\nu6 r9 0 1\nu7 r1 1 2\nu1 r1 0 1.5\n"
    text = "".join(f"u{number} YES\n" for number in range(1, 7)) + "u8 NEVER SAID\n"
    source = directory(**GOOD | {"segments": segments, "text": text})
    entry = {"type": "kaldi", "data_dir": source.data_dir, "audio_root": str(tmp_path / "audio"), "speaker": "x"}
    prepared = run_prepare(config_for(tmp_path, [entry]))
    assert [(u.cut_id, u.text, u.duration) for u in prepared.kept] == [
        ("cut-rec-one-0.00-1.50", "YES", 1.5), ("cut-rec-one-3.00-1.00", "YES", 1.0),
    ]  # fmt: skip
    assert [reject["reason"] for reject in prepared.rejects] == [
        "duration_mismatch", "malformed", "malformed", "missing_audio", "missing_field", "duplicate_id",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("files", "code", "says"),
    [
        ({"text": "u1 YES\n"}, "missing_input", "has no wav.scp"),
        ({"wav_scp": ""}, "bad_manifest", "wav.scp"),
        ({**GOOD, "segments": " \n"}, "bad_manifest", "segments"),
        ({**GOOD, "text": ""}, "bad_manifest", "text"),
        ({**GOOD, "text": "u1 YES\n".encode("utf-16")}, "bad_manifest", "UTF-16"),
    ],
)
def test_a_directory_that_is_refused_before_any_work(files, code, says, directory):
    with raises(ConfigError, code, says):
        directory(**files).check()


def test_a_missing_directory(tmp_path):
    with raises(ConfigError, "missing_input", "none", "data_dir"):
        KaldiSource(data_dir=str(tmp_path / "none"), audio_root="audio").check()


@pytest.mark.parametrize("keys", [{"data_dir": " "}, {"encoding": "utf-16"}])
def test_keys_that_make_no_sense(keys):
    with pytest.raises(ValueError, match=r"."):
        KaldiSource(**{"data_dir": "d", "audio_root": "audio"} | keys)


def test_a_template_with_a_key_that_no_record_has(directory):
    source = directory(**GOOD)
    replace(source, speaker="{utterance_id}").check_speaker()
    with raises(ConfigError, "unknown_key", "'utteranceid'", "did you mean 'utterance_id'?"):
        replace(source, speaker="{utteranceid}").check_speaker()
