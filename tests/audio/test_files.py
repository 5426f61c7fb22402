"""Reading of audio files: headers, whole files and segments, in every format, damaged and odd ones included."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from support.audio import FORMATS, container, read, reason_of, speech_like, write
from support.paths import DATA

from sharmill.audio import mp3
from sharmill.audio.decoder import AudioInfo
from sharmill.audio.files import decode_bytes, probe, probe_bytes


@pytest.mark.parametrize(("name", "format", "subtype"), FORMATS)
def test_probe_names_format_by_content_not_by_extension(tmp_path, name, format, subtype):
    data = container(speech_like(4321, 16000), 16000, format, subtype)
    for extension in ("wav", "raw", "vox", "txt"):
        assert probe(write(tmp_path / f"a.{extension}", data)) == AudioInfo(16000, 4321, 1, name)
    assert probe_bytes(data) == AudioInfo(16000, 4321, 1, name)


def test_probe_accepts_several_channels():
    data = container(np.zeros((100, 2)), 8000, "WAV", "PCM_16")
    assert probe_bytes(data) == AudioInfo(8000, 100, 2, "wav")


def test_extensible_wav_is_wav():
    assert probe_bytes(container(np.zeros(100), 8000, "WAVEX", "PCM_24")).format == "wav"


def test_missing_audio(tmp_path):
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    file = write(tmp_path / "file", b"x")
    paths = ["absent.wav", "broken", "circle", "x" * 300, "nul\0.wav", "\ud800.wav", f"{file.name}/a.wav"]
    assert {reason_of(probe, tmp_path / path) for path in paths} == {"missing_audio"}
    assert reason_of(read, tmp_path / "absent.wav") == "missing_audio"


@pytest.mark.timeout(20)
def test_what_is_no_regular_file_is_unreadable_and_never_opened(tmp_path):
    os.mkfifo(tmp_path / "fifo.wav")
    for path in (tmp_path, tmp_path / "fifo.wav", Path("/dev/zero")):
        assert reason_of(probe, path) == "unreadable_audio"


@pytest.mark.parametrize("name", ["a.wav", "a.raw", "a.vox", "a.gsm", "a.au", "a.mp3"])
def test_what_is_no_audio_is_unreadable_whatever_its_name(tmp_path, name):
    assert reason_of(probe, write(tmp_path / name, b"not audio at all\n" * 100)) == "unreadable_audio"


def test_file_without_permission_is_unreadable(tmp_path):
    path = write(tmp_path / "a.wav", container(np.zeros(100), 8000, "WAV", "PCM_16"))
    path.chmod(0)
    # In a process of its own, since root may read everything and has to become nobody.
    script = f"""
import os
from sharmill.audio.files import probe
from sharmill.errors import RejectRecord
if os.geteuid() == 0:
    os.setuid(65534)
if os.access({str(path)!r}, os.R_OK, effective_ids=True):
    print("readable")
    raise SystemExit
try:
    probe({str(path)!r})
except RejectRecord as error:
    print(error.reason)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    if result.stdout.strip() == "readable":
        pytest.skip("a user with the capability to read everything")
    assert result.stdout.strip() == "unreadable_audio"


def test_flac_without_length_is_unreadable():
    data = with_flac_length(container(speech_like(5000, 16000), 16000, "FLAC", "PCM_16"), 0)
    assert reason_of(probe_bytes, data) == "unreadable_audio"


def test_absurd_sampling_rate_is_unreadable():
    data = container(np.zeros(100), 1_000_000, "WAV", "PCM_16")
    assert reason_of(probe_bytes, data) == "unreadable_audio"


def test_empty_audio(tmp_path):
    assert reason_of(probe, write(tmp_path / "bytes.wav", b"")) == "empty_audio"
    assert reason_of(probe_bytes, b"") == "empty_audio"
    no_samples = container(np.zeros(0), 16000, "WAV", "PCM_16")
    assert reason_of(probe, write(tmp_path / "samples.wav", no_samples)) == "empty_audio"
    some = write(tmp_path / "some.wav", container(np.zeros(9), 16000, "WAV", "PCM_16"))
    assert reason_of(read, some, 3, 0) == "empty_audio"


@pytest.mark.parametrize(("name", "format", "subtype"), FORMATS)
@pytest.mark.parametrize("rate", [16000, 24000])
def test_segments_equal_slices_of_the_full_decode(tmp_path, name, format, subtype, rate):
    path = write(tmp_path / "a", container(speech_like(12 * rate + 7, rate), rate, format, subtype))
    full, _ = sf.read(path, dtype="float32")
    assert len(full) == 12 * rate + 7
    whole, read_rate = read(path)
    assert (whole.dtype, read_rate) == (np.float32, rate)
    np.testing.assert_array_equal(whole, full)
    np.testing.assert_array_equal(decode_bytes(path.read_bytes())[0], full)
    starts = np.random.default_rng(1).integers(0, len(full) - 3000, 12)
    for start, count in [(0, 500), (len(full) - 37, 37), *((int(s), 3000) for s in starts)]:
        np.testing.assert_array_equal(read(path, start, count)[0], full[start : start + count])
    np.testing.assert_array_equal(read(path, len(full) - 99)[0], full[-99:])


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "IMA_ADPCM"])
def test_wav_subtypes(tmp_path, subtype):
    samples = speech_like(4000, 16000)
    path = write(tmp_path / "a.wav", container(samples, 16000, "WAV", subtype))
    full = read(path)[0]
    np.testing.assert_array_equal(full, sf.read(path, dtype="float32")[0])
    tolerance = {"PCM_U8": 0.01, "ULAW": 0.02, "IMA_ADPCM": 0.2, "FLOAT": 0, "DOUBLE": 0, "PCM_24": 2e-7}
    np.testing.assert_allclose(full[:4000], samples, rtol=0, atol=tolerance.get(subtype, 4e-5))
    np.testing.assert_array_equal(read(path, 1500, 300)[0], full[1500:1800])


def test_float_wav_keeps_values_beyond_one():
    samples = np.array([0.0, 1.5, -2.0], dtype=np.float32)
    np.testing.assert_array_equal(decode_bytes(container(samples, 8000, "WAV", "FLOAT"))[0], samples)


def test_several_channels_are_unsupported(tmp_path):
    path = write(tmp_path / "a.flac", container(np.zeros((100, 2)), 8000, "FLAC", "PCM_16"))
    assert reason_of(read, path) == "unsupported_channels"
    assert reason_of(decode_bytes, path.read_bytes()) == "unsupported_channels"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_audio(tmp_path, value):
    samples = speech_like(1000, 8000)
    samples[500] = value
    path = write(tmp_path / "a.wav", container(samples, 8000, "WAV", "FLOAT"))
    assert reason_of(read, path) == "non_finite_audio"
    np.testing.assert_array_equal(read(path, 0, 500)[0], samples[:500])


def test_segment_beyond_the_end_is_a_mismatch(tmp_path):
    path = write(tmp_path / "a.wav", container(speech_like(1000, 8000), 8000, "WAV", "PCM_16"))
    for start, count in [(0, 1001), (999, 2), (1000, 1), (1000, None), (5000, 10)]:
        assert reason_of(read, path, start, count) == "duration_mismatch"
    assert len(read(path, 999, 1)[0]) == 1


def test_negative_segment_is_a_mistake_of_the_caller(tmp_path):
    path = tmp_path / "a.wav"
    path.write_bytes(container(speech_like(100, 8000), 8000, "WAV", "PCM_16"))
    with pytest.raises(ValueError, match="negative"):
        read(path, -1)


@pytest.mark.parametrize("damage", ["half", "last byte", "zeros"])
def test_damaged_flac_is_unreadable(damage):
    assert reason_of(decode_bytes, damaged("FLAC", "PCM_16", damage)) == "unreadable_audio"


@pytest.mark.parametrize(
    ("format", "subtype"),
    [
        ("WAV", "PCM_16"),
        ("WAV", "FLOAT"),
        ("WAVEX", "PCM_24"),
        ("AIFF", "PCM_16"),
        ("AU", "PCM_16"),
        ("W64", "PCM_16"),
        ("RF64", "PCM_16"),
        ("MP3", "MPEG_LAYER_III"),
        ("OGG", "OPUS"),
        ("OGG", "VORBIS"),
    ],
)
@pytest.mark.parametrize("damage", ["half", "last byte"])
def test_truncated_file_is_a_mismatch(format, subtype, damage):
    assert reason_of(decode_bytes, damaged(format, subtype, damage)) == "duration_mismatch"


@pytest.mark.parametrize("subtype", ["OPUS", "VORBIS"])
def test_ogg_with_a_damaged_page_is_unreadable(subtype):
    """libsndfile makes up for lost pages: in Opus even the number of samples can be right."""
    data = damaged("OGG", subtype, "zeros")
    assert reason_of(decode_bytes, data) == "unreadable_audio"


def test_ogg_with_a_trailer_is_read():
    data = container(speech_like(5000, 16000), 16000, "OGG", "VORBIS")
    np.testing.assert_array_equal(decode_bytes(data + b"TAG" + b"a" * 125)[0], decode_bytes(data)[0])


def test_corrupted_mp3_is_rejected():
    reason = reason_of(decode_bytes, damaged("MP3", "MPEG_LAYER_III", "zeros"))
    assert reason in ("unreadable_audio", "duration_mismatch")


def test_segment_before_the_damage_is_read(tmp_path):
    path = write(tmp_path / "a.wav", damaged("WAV", "PCM_16", "half"))
    np.testing.assert_array_equal(read(path, 5, 100)[0], sf.read(path, dtype="float32")[0][5:105])


def test_wav_from_a_pipe_is_read_to_its_end():
    data = bytearray(container(speech_like(1000, 8000), 8000, "WAV", "PCM_16"))
    for size in (0xFFFFFFFF, 0x7FFFF000):
        data[4:8] = data[40:44] = struct.pack("<I", size)
        assert len(decode_bytes(bytes(data))[0]) == 1000


@pytest.mark.parametrize("promised", [5001, 2**36 - 1])
def test_flac_that_promises_too_much_is_rejected_without_its_memory(promised):
    data = with_flac_length(container(speech_like(5000, 16000), 16000, "FLAC", "PCM_16"), promised)
    assert reason_of(decode_bytes, data) in ("unreadable_audio", "duration_mismatch")


def test_mp3_that_promises_too_much_is_rejected_without_its_memory():
    data = bytearray(container(speech_like(5000, 16000), 16000, "MP3", "MPEG_LAYER_III"))
    tag = max(data.find(b"Xing"), data.find(b"Info"))
    data[tag + 8 : tag + 12] = struct.pack(">I", 2**31 - 1)
    assert reason_of(decode_bytes, bytes(data)) == "unreadable_audio"


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
    bare = without_first_mp3_frame(data)
    samples_per_frame = 1152 if rate == 44100 else 576
    id3v2 = b"ID3\x03\0\0\0\0\x07\x76" + bytes(7 * 128 + 0x76)
    for dressed in (bare, bare + b"TAG" + b"a" * 125, id3v2 + bare, bare[:-1]):
        num_samples = probe_bytes(dressed).num_samples
        assert num_samples % samples_per_frame == 0
        assert 3 * rate <= num_samples + samples_per_frame <= 3 * rate + 5 * samples_per_frame
        assert len(decode_bytes(dressed)[0]) == num_samples


def test_mp3_of_variable_bit_rate_without_length_is_unreadable():
    quiet_then_loud = speech_like(64000, 16000) * np.linspace(0, 2, 64000, dtype=np.float32)
    data = container(quiet_then_loud, 16000, "MP3", "MPEG_LAYER_III", bitrate_mode="VARIABLE", compression_level=0.5)
    assert len(decode_bytes(data)[0]) == 64000
    assert reason_of(decode_bytes, without_first_mp3_frame(data)) == "unreadable_audio"


def damaged(format: str, subtype: str, damage: str) -> bytes:
    data = container(speech_like(48000, 16000), 16000, format, subtype)
    middle = len(data) // 2
    if damage == "half":
        return data[: middle | 1]
    if damage == "last byte":
        return data[:-1]
    return data[:middle] + bytes(2000) + data[middle + 2000 :]


def with_flac_length(data: bytes, num_samples: int) -> bytes:
    """``data`` with another total in the last 36 of the 64 bits at byte 18 (STREAMINFO)."""
    field = int.from_bytes(data[18:26], "big") >> 36 << 36 | num_samples
    return data[:18] + field.to_bytes(8, "big") + data[26:]


def without_first_mp3_frame(data: bytes) -> bytes:
    return data[mp3.read_frame_header(data[:4])[0] :]


@pytest.mark.skipif(not (DATA / "ljspeech_formats").is_dir(), reason="../shared/data is not here")
def test_real_recordings_have_one_length_in_three_formats():
    root = DATA / "ljspeech_formats" / "audio"
    for wav in sorted(root.glob("*.wav")):
        samples, rate = read(wav)
        np.testing.assert_array_equal(read(wav.with_suffix(".flac"))[0], samples)
        mp3, mp3_rate = read(wav.with_suffix(".mp3"))
        assert (rate, mp3_rate) == (22050, 22050)
        assert 0 <= len(mp3) - len(samples) <= 18
        np.testing.assert_array_equal(read(wav.with_suffix(".mp3"), 12345, 999)[0], mp3[12345:13344])
