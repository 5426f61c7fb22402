"""Reading of audio files: headers, whole files and parts, in all formats, including damaged and unusual files."""

import os
import resource
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from hypothesis import given, settings, strategies as st
from support.audio import FORMATS, FORMS, container, encode, read, reason_of, recording, speech_like, write

from sharmill.audio import files
from sharmill.audio.decoder import AudioInfo
from sharmill.audio.files import decode_bytes, open_recording, probe, probe_bytes
from sharmill.errors import RejectRecord
from sharmill.manifest import Member


@pytest.mark.parametrize(("name", "format", "subtype"), FORMATS)
def test_probe_finds_the_format_by_content(tmp_path, name, format, subtype):
    data = container(speech_like(4321, 16000), 16000, format, subtype)
    for extension in ("wav", "raw", "vox", "txt"):
        assert probe(write(tmp_path / f"a.{extension}", data)) == AudioInfo(16000, 4321, 1, name)
    assert probe_bytes(data) == AudioInfo(16000, 4321, 1, name)


# Format, subtype, damage, and the reason of the reject.
DAMAGED = [
    *((form, subtype, damage, "duration_mismatch") for form, subtype in (
        ("WAV", "PCM_16"), ("WAV", "FLOAT"), ("WAVEX", "PCM_24"), ("AIFF", "PCM_16"), ("AU", "PCM_16"),
        ("W64", "PCM_16"), ("RF64", "PCM_16"), ("MP3", "MPEG_LAYER_III"), ("OGG", "OPUS"), ("OGG", "VORBIS"),
    ) for damage in ("half", "last byte")),
    *(("FLAC", "PCM_16", damage, "unreadable_audio") for damage in ("half", "last byte", "zeros")),
    # libsndfile conceals lost pages; in Opus even the number of samples can be right.
    ("OGG", "OPUS", "zeros", "unreadable_audio"),
    ("OGG", "VORBIS", "zeros", "unreadable_audio"),
    ("MP3", "MPEG_LAYER_III", "zeros", "unreadable_audio"),
]  # fmt: skip


@pytest.mark.parametrize(("format", "subtype", "damage", "reason"), DAMAGED)
def test_damaged_audio_is_rejected(format, subtype, damage, reason):
    data = container(speech_like(48000, 16000), 16000, format, subtype)
    middle = len(data) // 2
    zeros = data[:middle] + bytes(2000) + data[middle + 2000 :]
    damaged = {"half": data[: middle | 1], "last byte": data[:-1], "zeros": zeros}
    assert reason_of(decode_bytes, damaged[damage]) == reason


@pytest.mark.parametrize("rate", [16000, 22050, 44100])
def test_mp3_without_length_is_counted(rate):
    data = container(
        speech_like(3 * rate, rate),
        rate,
        "MP3",
        "MPEG_LAYER_III",
        bitrate_mode="CONSTANT",
        compression_level=0.5,
    )
    bare = data[data.find(data[:3], 4) :]
    samples_per_frame = 1152 if rate == 44100 else 576
    id3v2 = b"ID3\x03\0\0\0\0\x07\x76" + bytes(7 * 128 + 0x76)
    for dressed in (bare, bare + b"TAG" + b"a" * 125, id3v2 + bare, bare[:-1]):
        num_samples = probe_bytes(dressed).num_samples
        assert num_samples % samples_per_frame == 0
        assert 3 * rate <= num_samples + samples_per_frame <= 3 * rate + 5 * samples_per_frame
        assert len(decode_bytes(dressed)[0]) == num_samples


# libsndfile's format and subtype, rate, channels.
WRITTEN = {
    " ".join(map(str, row)): row
    for row in [
        ("WAV", "PCM_U8", 8000, 1),
        ("WAV", "PCM_16", 16000, 2),
        ("WAV", "PCM_24", 44100, 1),
        ("WAV", "PCM_32", 192000, 1),
        ("WAV", "FLOAT", 48000, 1),
        ("WAV", "DOUBLE", 11025, 1),
        ("WAV", "ALAW", 8000, 2),
        ("WAV", "ULAW", 8000, 1),
        ("WAV", "GSM610", 8000, 1),
        ("WAV", "IMA_ADPCM", 16000, 1),
        ("FLAC", "PCM_S8", 8000, 1),
        ("FLAC", "PCM_16", 96000, 2),
        ("FLAC", "PCM_24", 192000, 1),
        ("AIFF", "PCM_S8", 8000, 1),
        ("AIFF", "FLOAT", 22050, 1),
        ("AU", "ULAW", 8000, 1),
        ("AU", "ALAW", 8000, 1),
        ("CAF", "PCM_24", 24000, 1),
        ("CAF", "ALAC_16", 24000, 1),
        ("W64", "PCM_32", 32000, 1),
        ("RF64", "PCM_16", 16000, 1),
        ("NIST", "PCM_16", 16000, 2),
        ("NIST", "ULAW", 8000, 2),
        ("OGG", "VORBIS", 16000, 1),
        ("OGG", "OPUS", 48000, 2),
        ("MP3", "MPEG_LAYER_III", 16000, 1),
        ("MP3", "MPEG_LAYER_III", 44100, 2),
    ]
}
FORM = {form.name: form for form in FORMS}


@cache
def make(name: str) -> bytes:
    """Write the audio file for a row of the table above."""
    if name in FORM:
        return encode(FORM[name])
    format, subtype, rate, channels = WRITTEN[name]
    number = min(3 * rate, 100_000) + 78  # even, since libsndfile reads the padding of 8-bit AIFF as a sample
    parts = [speech_like(number, rate, seed) for seed in range(channels)]
    return container(parts[0] if channels == 1 else np.stack(parts, axis=1), rate, format, subtype)


@pytest.mark.parametrize("name", [*WRITTEN, *FORM])
def test_parts_equal_slices_of_the_whole(tmp_path, name, monkeypatch):
    if name in FORM:
        pytest.importorskip("av")
    monkeypatch.setattr(files, "_BLOCK_SAMPLES", 5000)
    data = make(name)
    path = write(tmp_path / "a", data)
    inside = write(tmp_path / "b", b"before" + data + b"behind")
    channel = 1 if probe(path).channels > 1 else None
    whole, rate = decode_bytes(data, channel=channel)
    assert whole.dtype == np.float32
    np.testing.assert_array_equal(read(path, channel=channel)[0], whole)
    if name in WRITTEN:
        expected, expected_rate = sf.read(path, dtype="float32")
        np.testing.assert_array_equal(whole, expected if channel is None else expected[:, channel])
        assert rate == expected_rate

    @settings(max_examples=8, deadline=None, derandomize=True)
    @given(st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(1, 20000)), min_size=1, max_size=6))
    def check(parts: list[tuple[int, int]]) -> None:
        for opened in (open_recording(path), open_recording(inside, Member("a", "bytes", 6, len(data)))):
            with opened as recording:
                for start, length in sorted(parts):
                    part = recording.read(start, min(length, len(whole) - start), channel)
                    np.testing.assert_array_equal(part, whole[start : start + length])

    check()


@pytest.mark.parametrize("name", [*WRITTEN, *FORM])
def test_the_whole_file_may_be_read_after_a_part(tmp_path, name):
    if name in FORM:
        pytest.importorskip("av")
    data = make(name)
    path = write(tmp_path / "a", data)
    channel = 1 if probe(path).channels > 1 else None
    whole, _ = decode_bytes(data, channel=channel)
    with open_recording(path) as recording:
        np.testing.assert_array_equal(recording.read(0, 5000, channel), whole[:5000])
        np.testing.assert_array_equal(recording.read(0, None, channel), whole)
        np.testing.assert_array_equal(recording.read(3000, 4000, channel), whole[3000:7000])


@pytest.mark.parametrize("name", ["FLAC PCM_16 96000 2", "MP3 MPEG_LAYER_III 16000 1"])
def test_damage_affects_parts_equally_in_open_and_new_recordings(tmp_path, name):
    """Reading a part of an open recording gives the same result as in a newly opened one."""
    data = make(name)
    middle = len(data) // 2
    path = write(tmp_path / "a", data[:middle] + bytes(3000) + data[middle + 3000 :])
    channel = 1 if probe(path).channels > 1 else None

    def outcome(recording, start):
        try:
            return recording.read(start, 4000, channel).tobytes()
        except RejectRecord as reject:
            return reject.reason, reject.detail

    found = []
    with open_recording(path) as recording:
        for start in range(0, recording.info.num_samples - 4000, 4000):
            found.append(outcome(recording, start))
            with open_recording(path) as alone:
                assert outcome(alone, start) == found[-1]
    assert {type(one) for one in found} == {bytes, tuple}


def test_warnings_of_libmpg123_are_logged_with_the_name(tmp_path, capfd, caplog):
    data = recording("MP3", "MPEG_LAYER_III")
    path = write(tmp_path / "a.mp3", data[: len(data) // 2] + bytes(500) + data[len(data) // 2 :])
    with suppress(RejectRecord):
        decode_bytes(path.read_bytes(), name="in memory")
    probe(path)
    logged = [record.getMessage() for record in caplog.records if record.name == "sharmill.audio.sndfile"]
    assert {line.partition(": ")[0] for line in logged} == {"in memory", str(path)}
    assert all("Xing" in line for line in logged)
    assert capfd.readouterr().err == ""


# A program whose recording runs code while libmpg123 reads it; its output goes to a log.
IN_LIBMPG123 = """
import ctypes, io, os, signal, sys
from pathlib import Path
from sharmill.audio.audio_bytes import AudioBytes
from sharmill.audio.sndfile import SndfileDecoder
from sharmill.files.output import redirect_output

class Stream(io.BytesIO):
    def readinto(self, buffer):
        {what}
        return super().readinto(buffer)
    def read(self, size=-1):
        {what}
        return super().read(size)

class Acting(AudioBytes):
    def stream(self):
        return Stream(self.read())

redirect_output(Path(sys.argv[1]))
SndfileDecoder(Acting("a.mp3", Path(sys.argv[2]).read_bytes()))
"""


@pytest.mark.parametrize(
    ("what", "begin"),
    [("ctypes.string_at(0)", "Fatal Python error"), ("os.kill(os.getpid(), signal.SIGUSR1)", "Current thread")],
)
def test_stacks_are_logged_while_libmpg123_works(what, begin, tmp_path):
    path = write(tmp_path / "a.mp3", recording("MP3", "MPEG_LAYER_III"))
    command = [sys.executable, "-c", IN_LIBMPG123.format(what=what), tmp_path / "rank.log", path]
    subprocess.run(command, check=False)
    assert (tmp_path / "rank.log").read_text().startswith(begin)


@pytest.mark.parametrize(("close", "redirect"), [("os.close(2)", ""), ("", "2>&-")])
def test_mp3_is_read_after_standard_error_was_closed(close, redirect, tmp_path):
    path = write(tmp_path / "a.mp3", recording("MP3", "MPEG_LAYER_III"))
    code = f"import os; from sharmill.audio.files import probe; {close}\nprint(probe({str(path)!r}).num_samples)"
    command = ["sh", "-c", f'exec "$0" -c "$1" {redirect}', sys.executable, code]
    assert subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout == b"32000\n"


def test_mp3_leaks_no_descriptor_when_they_run_out(tmp_path):
    data = recording("MP3", "MPEG_LAYER_III")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before + 20, hard), hard))
    taken = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        os.close(taken.pop())
        with pytest.raises(OSError, match="Too many open files"):
            probe_bytes(data)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
