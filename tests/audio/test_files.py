import hashlib
import io
import os
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import ROUND_HALF_UP
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paths import DATA

from sharmill.audio import files as audio
from sharmill.audio import ogg
from sharmill.audio.files import AudioInfo
from sharmill.errors import ConfigError, RejectRecord

RATES = (8000, 11025, 16000, 22050, 24000, 32000, 44100, 48000)
FORMATS = [
    ("wav", "WAV", "PCM_16"),
    ("flac", "FLAC", "PCM_16"),
    ("mp3", "MP3", "MPEG_LAYER_III"),
    ("opus", "OGG", "OPUS"),
    ("ogg", "OGG", "VORBIS"),
    ("aiff", "AIFF", "PCM_16"),
]


def speech_like(num_samples: int, sampling_rate: int, seed: int = 0) -> np.ndarray:
    """A gliding tone that comes and goes over noise, so that every position of a file sounds different."""
    t = np.arange(num_samples) / sampling_rate
    noise = np.random.default_rng(seed).standard_normal(num_samples)
    tone = np.sin(2 * np.pi * (200 + 40 * np.sin(t)) * t) * (np.sin(3 * t) > -0.5)
    return (0.3 * tone + 0.02 * noise).astype(np.float32)


def container(samples: np.ndarray, rate: int, format: str, subtype: str, **options) -> bytes:
    buffer = io.BytesIO()
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    with sf.SoundFile(
        buffer, "w", samplerate=rate, channels=channels, format=format, subtype=subtype, **options
    ) as sound:
        for start in range(0, len(samples), 4096):  # libsndfile's Vorbis encoder crashes on long writes
            sound.write(samples[start : start + 4096])
    return buffer.getvalue()


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def reason_of(function, *arguments) -> str:
    with pytest.raises(RejectRecord) as caught:
        function(*arguments)
    assert caught.value.detail
    assert "0x" not in caught.value.detail
    return caught.value.reason


def one_torch_thread(function, *arguments):
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return function(*arguments)
    finally:
        torch.set_num_threads(before)


# --- probe


@pytest.mark.parametrize(("name", "format", "subtype"), FORMATS)
def test_probe_names_format_by_content_not_by_extension(tmp_path, name, format, subtype):
    data = container(speech_like(4321, 16000), 16000, format, subtype)
    for extension in ("wav", "raw", "vox", "txt"):
        assert audio.probe(write(tmp_path / f"a.{extension}", data)) == AudioInfo(16000, 4321, 1, name)
    assert audio.probe_bytes(data) == AudioInfo(16000, 4321, 1, name)


def test_probe_accepts_several_channels():
    data = container(np.zeros((100, 2)), 8000, "WAV", "PCM_16")
    assert audio.probe_bytes(data) == AudioInfo(8000, 100, 2, "wav")


def test_extensible_wav_is_wav():
    assert audio.probe_bytes(container(np.zeros(100), 8000, "WAVEX", "PCM_24")).format == "wav"


def test_missing_audio(tmp_path):
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    file = write(tmp_path / "file", b"x")
    paths = ["absent.wav", "broken", "circle", "x" * 300, "nul\0.wav", "\ud800.wav", f"{file.name}/a.wav"]
    assert {reason_of(audio.probe, tmp_path / path) for path in paths} == {"missing_audio"}
    assert reason_of(audio.read, tmp_path / "absent.wav") == "missing_audio"


@pytest.mark.timeout(20)
def test_what_is_no_regular_file_is_unreadable_and_never_opened(tmp_path):
    os.mkfifo(tmp_path / "fifo.wav")
    for path in (tmp_path, tmp_path / "fifo.wav", Path("/dev/zero")):
        assert reason_of(audio.probe, path) == "unreadable_audio"


@pytest.mark.parametrize("name", ["a.wav", "a.raw", "a.vox", "a.gsm", "a.au", "a.mp3"])
def test_what_is_no_audio_is_unreadable_whatever_its_name(tmp_path, name):
    assert reason_of(audio.probe, write(tmp_path / name, b"not audio at all\n" * 100)) == "unreadable_audio"


def test_file_without_permission_is_unreadable(tmp_path):
    path = write(tmp_path / "a.wav", container(np.zeros(100), 8000, "WAV", "PCM_16"))
    path.chmod(0)
    # In a process of its own, since root may read everything and has to become nobody.
    script = f"""
import os
from sharmill.audio import files as audio
from sharmill.errors import RejectRecord
if os.geteuid() == 0:
    os.setuid(65534)
try:
    audio.probe({str(path)!r})
except RejectRecord as error:
    print(error.reason)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "unreadable_audio"


def test_flac_without_length_is_unreadable():
    data = with_flac_length(container(speech_like(5000, 16000), 16000, "FLAC", "PCM_16"), 0)
    assert reason_of(audio.probe_bytes, data) == "unreadable_audio"


def test_absurd_sampling_rate_is_unreadable():
    data = container(np.zeros(100), 1_000_000, "WAV", "PCM_16")
    assert reason_of(audio.probe_bytes, data) == "unreadable_audio"


def test_empty_audio(tmp_path):
    assert reason_of(audio.probe, write(tmp_path / "bytes.wav", b"")) == "empty_audio"
    assert reason_of(audio.probe_bytes, b"") == "empty_audio"
    no_samples = container(np.zeros(0), 16000, "WAV", "PCM_16")
    assert reason_of(audio.probe, write(tmp_path / "samples.wav", no_samples)) == "empty_audio"
    some = write(tmp_path / "some.wav", container(np.zeros(9), 16000, "WAV", "PCM_16"))
    assert reason_of(audio.read, some, 3, 0) == "empty_audio"


# --- read and decode


@pytest.mark.parametrize(("name", "format", "subtype"), FORMATS)
@pytest.mark.parametrize("rate", [16000, 24000])
def test_segments_equal_slices_of_the_full_decode(tmp_path, name, format, subtype, rate):
    path = write(tmp_path / "a", container(speech_like(12 * rate + 7, rate), rate, format, subtype))
    full, _ = sf.read(path, dtype="float32")
    assert len(full) == 12 * rate + 7
    whole, read_rate = audio.read(path)
    assert (whole.dtype, read_rate) == (np.float32, rate)
    np.testing.assert_array_equal(whole, full)
    np.testing.assert_array_equal(audio.decode(path.read_bytes())[0], full)
    starts = np.random.default_rng(1).integers(0, len(full) - 3000, 12)
    for start, count in [(0, 500), (len(full) - 37, 37), *((int(s), 3000) for s in starts)]:
        np.testing.assert_array_equal(audio.read(path, start, count)[0], full[start : start + count])
    np.testing.assert_array_equal(audio.read(path, len(full) - 99)[0], full[-99:])


@pytest.mark.parametrize(("format", "subtype"), [("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("OGG", "OPUS")])
def test_segment_across_blocks(tmp_path, monkeypatch, format, subtype):
    monkeypatch.setattr(audio, "_BLOCK_SAMPLES", 1000)
    path = write(tmp_path / "a", container(speech_like(20000, 16000), 16000, format, subtype))
    full, _ = sf.read(path, dtype="float32")
    np.testing.assert_array_equal(audio.read(path, 2500, 7001)[0], full[2500:9501])
    np.testing.assert_array_equal(audio.read(path)[0], full)


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "IMA_ADPCM"])
def test_wav_subtypes(tmp_path, subtype):
    samples = speech_like(4000, 16000)
    path = write(tmp_path / "a.wav", container(samples, 16000, "WAV", subtype))
    full = audio.read(path)[0]
    np.testing.assert_array_equal(full, sf.read(path, dtype="float32")[0])
    tolerance = {"PCM_U8": 0.01, "ULAW": 0.02, "IMA_ADPCM": 0.2, "FLOAT": 0, "DOUBLE": 0, "PCM_24": 2e-7}
    np.testing.assert_allclose(full[:4000], samples, rtol=0, atol=tolerance.get(subtype, 4e-5))
    np.testing.assert_array_equal(audio.read(path, 1500, 300)[0], full[1500:1800])


def test_float_wav_keeps_values_beyond_one():
    samples = np.array([0.0, 1.5, -2.0], dtype=np.float32)
    np.testing.assert_array_equal(audio.decode(container(samples, 8000, "WAV", "FLOAT"))[0], samples)


def test_several_channels_are_unsupported(tmp_path):
    path = write(tmp_path / "a.flac", container(np.zeros((100, 2)), 8000, "FLAC", "PCM_16"))
    assert reason_of(audio.read, path) == "unsupported_channels"
    assert reason_of(audio.decode, path.read_bytes()) == "unsupported_channels"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_audio(tmp_path, value):
    samples = speech_like(1000, 8000)
    samples[500] = value
    path = write(tmp_path / "a.wav", container(samples, 8000, "WAV", "FLOAT"))
    assert reason_of(audio.read, path) == "non_finite_audio"
    np.testing.assert_array_equal(audio.read(path, 0, 500)[0], samples[:500])


def test_segment_beyond_the_end_is_a_mismatch(tmp_path):
    path = write(tmp_path / "a.wav", container(speech_like(1000, 8000), 8000, "WAV", "PCM_16"))
    for start, count in [(0, 1001), (999, 2), (1000, 1), (1000, None), (5000, 10)]:
        assert reason_of(audio.read, path, start, count) == "duration_mismatch"
    assert len(audio.read(path, 999, 1)[0]) == 1


def test_negative_segment_is_a_mistake_of_the_caller(tmp_path):
    with pytest.raises(ValueError, match="negative"):
        audio.read(tmp_path / "a.wav", -1)


@pytest.mark.parametrize("damage", ["half", "last byte", "zeros"])
def test_damaged_flac_is_unreadable(damage):
    assert reason_of(audio.decode, damaged("FLAC", "PCM_16", damage)) == "unreadable_audio"


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
    assert reason_of(audio.decode, damaged(format, subtype, damage)) == "duration_mismatch"


@pytest.mark.parametrize("subtype", ["OPUS", "VORBIS"])
def test_ogg_with_a_damaged_page_is_unreadable(subtype):
    """libsndfile makes up for lost pages: in Opus even the number of samples can be right."""
    data = damaged("OGG", subtype, "zeros")
    assert reason_of(audio.decode, data) == "unreadable_audio"


def test_ogg_with_a_trailer_is_read():
    data = container(speech_like(5000, 16000), 16000, "OGG", "VORBIS")
    np.testing.assert_array_equal(audio.decode(data + b"TAG" + b"a" * 125)[0], audio.decode(data)[0])


def test_corrupted_mp3_is_rejected():
    reason = reason_of(audio.decode, damaged("MP3", "MPEG_LAYER_III", "zeros"))
    assert reason in ("unreadable_audio", "duration_mismatch")


def test_segment_before_the_damage_is_read(tmp_path):
    path = write(tmp_path / "a.wav", damaged("WAV", "PCM_16", "half"))
    np.testing.assert_array_equal(audio.read(path, 5, 100)[0], sf.read(path, dtype="float32")[0][5:105])


def test_wav_from_a_pipe_is_read_to_its_end():
    data = bytearray(container(speech_like(1000, 8000), 8000, "WAV", "PCM_16"))
    for size in (0xFFFFFFFF, 0x7FFFF000):
        data[4:8] = data[40:44] = struct.pack("<I", size)
        assert len(audio.decode(bytes(data))[0]) == 1000


@pytest.mark.parametrize("promised", [5001, 2**36 - 1])
def test_flac_that_promises_too_much_is_rejected_without_its_memory(promised):
    data = with_flac_length(container(speech_like(5000, 16000), 16000, "FLAC", "PCM_16"), promised)
    assert reason_of(audio.decode, data) in ("unreadable_audio", "duration_mismatch")


def test_mp3_that_promises_too_much_is_rejected_without_its_memory():
    data = bytearray(container(speech_like(5000, 16000), 16000, "MP3", "MPEG_LAYER_III"))
    tag = max(data.find(b"Xing"), data.find(b"Info"))
    data[tag + 8 : tag + 12] = struct.pack(">I", 2**31 - 1)
    assert reason_of(audio.decode, bytes(data)) == "unreadable_audio"


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
        num_samples = audio.probe_bytes(dressed).num_samples
        assert num_samples % samples_per_frame == 0
        assert 3 * rate <= num_samples + samples_per_frame <= 3 * rate + 5 * samples_per_frame
        assert len(audio.decode(dressed)[0]) == num_samples


def test_mp3_of_variable_bit_rate_without_length_is_unreadable():
    quiet_then_loud = speech_like(64000, 16000) * np.linspace(0, 2, 64000, dtype=np.float32)
    data = container(quiet_then_loud, 16000, "MP3", "MPEG_LAYER_III", bitrate_mode="VARIABLE", compression_level=0.5)
    assert len(audio.decode(data)[0]) == 64000
    assert reason_of(audio.decode, without_first_mp3_frame(data)) == "unreadable_audio"


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
    return data[audio._mp3_frame(data[:4])[0] :]


# --- segments


@settings(max_examples=300, deadline=None)
@given(
    offset=st.floats(0, 1e5),
    duration=st.one_of(st.floats(0, 1e4), st.integers(0, 10**7).map(lambda n: n / 1000)),
    rate=st.sampled_from(RATES),
)
def test_segment_bounds_round_like_lhotse(offset, duration, rate):
    from lhotse.utils import compute_num_samples

    expected = tuple(compute_num_samples(seconds, rate, ROUND_HALF_UP) for seconds in (offset, duration))
    assert audio.segment_bounds(offset, duration, rate) == expected


def test_segment_bounds_round_half_up():
    assert audio.segment_bounds(0.5 / 8000, 2.5 / 8000, 8000) == (1, 3)


@pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf")])
def test_segment_bounds_refuse_what_is_no_time(bad):
    with pytest.raises(ValueError, match="not a segment"):
        audio.segment_bounds(bad, 1.0, 8000)
    with pytest.raises(ValueError, match="not a segment"):
        audio.segment_bounds(0.0, bad, 8000)


# --- resample


@pytest.mark.parametrize("from_rate", RATES)
def test_resample_equals_lhotse_bit_for_bit(tmp_path, from_rate):
    from lhotse import Recording

    path = write(tmp_path / "a.wav", container(speech_like(12345, from_rate), from_rate, "WAV", "FLOAT"))
    samples, _ = audio.read(path)
    for to_rate in RATES:
        expected = one_torch_thread(Recording.from_file(path).resample(to_rate).load_audio)[0]
        resampled = audio.resample(samples, from_rate, to_rate)
        assert resampled.dtype == np.float32
        np.testing.assert_array_equal(resampled, expected)


def test_resample_does_not_depend_on_threads():
    import torch

    before = torch.get_num_threads()
    samples = speech_like(30000, 16000)
    results = set()
    try:
        for num_threads in (1, 2, 3, 8):
            torch.set_num_threads(num_threads)
            results.add(hashlib.sha256(b"".join(audio.resample(samples, 16000, r) for r in RATES)).hexdigest())
            assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(audio.resample, samples, 16000, 22050) for _ in range(20)]
        assert len({job.result().tobytes() for job in jobs}) == 1
    assert len(results) == 1


def test_resample_leaves_equal_rates_and_its_input_alone():
    samples = speech_like(1000, 16000)
    assert audio.resample(samples, 16000, 16000) is samples
    samples.flags.writeable = False
    assert len(audio.resample(samples, 16000, 8000)) == 500


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 30000), st.sampled_from(RATES), st.sampled_from(RATES))
def test_resampled_length_is_what_resample_returns(num_samples, from_rate, to_rate):
    resampled = audio.resample(np.zeros(num_samples, dtype=np.float32), from_rate, to_rate)
    assert len(resampled) == audio.resampled_length(num_samples, from_rate, to_rate)


def test_resampled_length_of_long_audio():
    """torchaudio computes its own length in float32: 45,000,000 here."""
    assert audio.resampled_length(30_000_001, 16000, 24000) == 45_000_002


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 10**9), st.sampled_from(RATES), st.sampled_from(RATES))
def test_resampled_length_is_that_of_lhotse(num_samples, from_rate, to_rate):
    from lhotse import Recording

    recording = Recording("a", [], from_rate, num_samples, num_samples / from_rate, channel_ids=[0])
    assert recording.resample(to_rate).num_samples == audio.resampled_length(num_samples, from_rate, to_rate)


# --- encode


def test_16_bit_samples_survive_flac_and_wav():
    every_value = (np.arange(-32768, 32768) / 32768).astype(np.float32)
    source, _ = audio.decode(container(every_value, 16000, "FLAC", "PCM_16"))
    np.testing.assert_array_equal(source, every_value)
    for format in ("flac", "wav"):
        decoded, rate = audio.decode(audio.encode(source, 16000, format))
        assert rate == 16000
        np.testing.assert_array_equal(decoded, every_value)


@pytest.mark.parametrize("format", audio.ENCODERS)
@pytest.mark.parametrize("rate", [8000, 16000, 24000, 48000])
@pytest.mark.parametrize("num_samples", [1, 100, 16001])
def test_encoders_keep_rate_and_number_of_samples(format, rate, num_samples):
    data = audio.encode(speech_like(num_samples, rate), rate, format)
    assert audio.probe_bytes(data) == AudioInfo(rate, num_samples, 1, format)
    assert len(audio.decode(data)[0]) == num_samples


@pytest.mark.parametrize("format", ["mp3", "opus"])
def test_lossy_encoders_keep_the_samples_in_place(format):
    samples = speech_like(32000, 16000)
    decoded, _ = audio.decode(audio.encode(samples, 16000, format))
    middle = slice(8000, 24000)
    products = {lag: float(samples[middle] @ np.roll(decoded, -lag)[middle]) for lag in range(-50, 51)}
    assert max(products, key=products.__getitem__) == 0


@pytest.mark.parametrize("format", audio.ENCODERS)
def test_overshoot_is_clipped(format):
    samples = 3 * speech_like(16000, 16000)
    assert np.abs(samples).max() > 1
    assert audio.encode(samples, 16000, format) == audio.encode(np.clip(samples, -1, 1), 16000, format)
    if format in ("flac", "wav"):
        decoded, _ = audio.decode(audio.encode(np.array([1.5, -1.5], np.float32), 16000, format))
        np.testing.assert_array_equal(decoded, np.array([32767 / 32768, -1], np.float32))


def test_encoders_write_the_same_bytes_in_every_process_and_at_every_time():
    script = """
import hashlib, sys, numpy as np
from sharmill.audio import files as audio
samples = np.random.default_rng(0).uniform(-0.5, 0.5, 50000).astype(np.float32)
for format in audio.ENCODERS:
    print(format, hashlib.sha256(audio.encode(samples, 16000, format)).hexdigest())
"""
    outputs = set()
    start = int(time.time())
    for second in range(2):
        while int(time.time()) < start + 2 * second:  # another second of the clock: headers with a date would differ
            time.sleep(0.05)
        result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        outputs.add(result.stdout)
    assert len(outputs) == 1
    assert [line.split()[0] for line in outputs.pop().splitlines()] == list(audio.ENCODERS)


def test_rates_that_a_format_cannot_hold_are_a_configuration_error():
    samples = speech_like(100, 22050)
    with pytest.raises(ConfigError, match="22050 Hz: set sampling_rate to one of 8000, 12000, 16000, 24000, 48000"):
        audio.encode(samples, 22050, "opus")
    with pytest.raises(ConfigError, match="mp3 cannot hold audio at 96000 Hz"):
        audio.check_encoder("mp3", 96000)
    with pytest.raises(ConfigError, match="'aac' cannot be written; choose one of flac, wav, mp3, opus"):
        audio.check_encoder("aac", 16000)
    for rate in audio._ENCODINGS["mp3"][2] or ():
        assert audio.probe_bytes(audio.encode(speech_like(5000, rate), rate, "mp3")).num_samples == 5000


def test_what_cannot_be_encoded():
    assert reason_of(audio.encode, np.zeros(0, np.float32), 16000, "flac") == "empty_audio"
    assert reason_of(audio.encode, np.array([0, np.nan], np.float32), 16000, "flac") == "non_finite_audio"
    with pytest.raises(ValueError, match="shape"):
        audio.encode(np.zeros((1, 100), np.float32), 16000, "flac")


# --- ogg


def test_with_serial_changes_serials_and_checksums_only():
    data = container(speech_like(100000, 16000), 16000, "OGG", "OPUS")
    changed = ogg.with_serial(data, 7)
    assert changed[14:18] == struct.pack("<I", 7)
    assert len(changed) == len(data)
    np.testing.assert_array_equal(audio.decode(changed)[0], audio.decode(data)[0])
    assert ogg.with_serial(changed, struct.unpack("<I", data[14:18])[0]) == data


def test_with_serial_refuses_what_is_not_one_intact_stream():
    data = audio.encode(speech_like(100000, 16000), 16000, "opus")
    other = ogg.with_serial(data, 2)
    flipped = data[:500] + bytes([data[500] ^ 1]) + data[501:]
    for broken, message in [
        (data[:-1], "no complete Ogg page"),
        (data + b"junk", "no complete Ogg page"),
        (data + other, "another logical stream"),
        (flipped, "checksum"),
    ]:
        with pytest.raises(ValueError, match=message):
            ogg.with_serial(broken, 1)


# --- real recordings


@pytest.mark.skipif(not (DATA / "ljspeech_formats").is_dir(), reason="../shared/data is not here")
def test_real_recordings_have_one_length_in_three_formats():
    root = DATA / "ljspeech_formats" / "audio"
    for wav in sorted(root.glob("*.wav")):
        samples, rate = audio.read(wav)
        np.testing.assert_array_equal(audio.read(wav.with_suffix(".flac"))[0], samples)
        mp3, mp3_rate = audio.read(wav.with_suffix(".mp3"))
        assert (rate, mp3_rate) == (22050, 22050)
        assert 0 <= len(mp3) - len(samples) <= 18
        np.testing.assert_array_equal(audio.read(wav.with_suffix(".mp3"), 12345, 999)[0], mp3[12345:13344])
