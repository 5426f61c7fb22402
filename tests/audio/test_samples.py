"""Samples of 16 bits, which are the same as int16 and as floats, all the way from a file to a stored segment."""

from __future__ import annotations

import io

import numpy as np
import pytest
import soundfile as sf
from support.audio import container, speech_like, write

from sharmill.audio.decoder import AudioBytes
from sharmill.audio.encoding import ENCODERS, encode
from sharmill.audio.files import open_bytes
from sharmill.audio.roots import AudioRoots
from sharmill.audio.samples import to_float, to_int16
from sharmill.audio.segments import SegmentAudio, SegmentReader
from sharmill.errors import RejectRecord
from sharmill.files.storage import checksum_bytes
from sharmill.manifest import Segment
from sharmill.write.config import WriteConfig
from sharmill.write.encoder import SegmentEncoder

EVERY_VALUE = np.arange(-32768, 32768).astype(np.int16)
HOLDING_16_BITS = [
    (format, endian)
    for format in sorted(sf.available_formats())
    for endian in ("FILE", "LITTLE", "BIG")
    if sf.check_format(format, "PCM_16", endian) and format not in ("RAW", "SD2")  # without a header in the file
]


def test_every_value_of_16_bits_is_a_float_and_comes_back():
    floats = to_float(EVERY_VALUE)
    assert floats.dtype == np.float32
    np.testing.assert_array_equal(floats, np.arange(-32768, 32768) / 32768)
    np.testing.assert_array_equal(to_int16(floats), EVERY_VALUE)
    assert to_float(floats) is floats


@pytest.mark.parametrize("format", ENCODERS)
def test_both_forms_of_every_value_are_encoded_to_the_same_bytes(format):
    assert encode(EVERY_VALUE, 16000, format) == encode(to_float(EVERY_VALUE), 16000, format)


@pytest.mark.parametrize(("format", "endian"), HOLDING_16_BITS)
def test_16_bits_are_decoded_as_such_to_the_floats_of_libsndfile(format, endian):
    data = container(EVERY_VALUE, 16000, format, "PCM_16", endian=endian)
    expected, _ = sf.read(io.BytesIO(data), dtype="float32")
    with open_bytes(AudioBytes("a", data)) as recording:
        stored = recording.read_stored()
        assert stored.dtype == np.int16
        np.testing.assert_array_equal(to_float(stored), expected)
        np.testing.assert_array_equal(recording.read(100, 5000), expected[100:5100])
        np.testing.assert_array_equal(np.concatenate(list(recording.blocks())), expected)


@pytest.mark.parametrize("subtype", ["PCM_24", "PCM_32", "FLOAT", "PCM_U8", "ULAW"])
def test_other_depths_are_floats(subtype):
    with open_bytes(AudioBytes("a", container(speech_like(16000, 16000), 16000, "WAV", subtype))) as recording:
        assert recording.read_stored().dtype == np.float32


def test_a_channel_keeps_16_bits_and_a_mix_does_not():
    samples = np.stack([EVERY_VALUE, np.roll(EVERY_VALUE, 7)], axis=1)
    data = container(samples, 16000, "WAV", "PCM_16")
    expected, _ = sf.read(io.BytesIO(data), dtype="float32")
    with open_bytes(AudioBytes("a", data)) as recording:
        one, mixed = recording.read_stored(channel=1), recording.read_stored(channel="downmix")
    np.testing.assert_array_equal(one, samples[:, 1])
    assert (one.dtype, mixed.dtype) == (np.int16, np.float32)
    np.testing.assert_array_equal(mixed, expected.mean(axis=1, dtype=np.float32))


def segment(offset: float, duration: float) -> Segment:
    return Segment(0, "a.wav", offset, duration, whole_file=duration == 1.0)


@pytest.mark.parametrize(("offset", "duration"), [(0.0, 1.0), (0.25, 0.5)])
def test_notes_do_not_depend_on_the_form_of_the_samples(tmp_path, offset, duration):
    write(tmp_path / "a.wav", container(speech_like(16000, 16000), 16000, "WAV", "PCM_16"))
    floats, _ = sf.read(tmp_path / "a.wav", dtype="float32")
    reader, part = SegmentReader(AudioRoots.of([tmp_path])), segment(offset, duration)
    ((_, found),) = reader.read_or_copy([part], lambda location: False)
    assert isinstance(found, SegmentAudio)
    read = reader.read(part)
    assert (found.samples.dtype, read.samples.dtype) == (np.int16, np.float32)
    np.testing.assert_array_equal(to_float(found.samples), read.samples)
    assert (found.notes, found.content) == (read.notes, read.content)
    if duration < 1:
        assert found.notes.checksum == checksum_bytes(floats[4000:12000].tobytes())


@pytest.mark.parametrize("rate", [None, 16000, 8000])
@pytest.mark.parametrize("format", ["flac", "wav", "opus"])
def test_a_segment_of_16_bits_is_stored_as_its_floats_are(tmp_path, format, rate):
    config, part = WriteConfig(audio_format=format, sampling_rate=rate), segment(0.25, 0.5)
    samples = speech_like(16000, 16000)
    write(tmp_path / "a.wav", container(samples, 16000, "WAV", "PCM_16"))
    stored = SegmentEncoder(config, SegmentReader(AudioRoots.of([tmp_path])), [part])(part)
    floats, _ = sf.read(tmp_path / "a.wav", dtype="float32")
    write(tmp_path / "a.wav", container(floats, 16000, "WAV", "FLOAT"))
    assert SegmentEncoder(config, SegmentReader(AudioRoots.of([tmp_path])), [part])(part) == stored


@pytest.mark.parametrize(("value", "level"), [(0, "is zero"), (-32, "is -60 dB of full scale"), (1, "is -90 dB")])
def test_silence_is_rejected_in_the_same_words(tmp_path, value, level):
    write(tmp_path / "a.wav", container(np.full(16000, value, np.int16), 16000, "WAV", "PCM_16"))
    ((_, found),) = SegmentReader(AudioRoots.of([tmp_path])).read_or_copy([segment(0.0, 1.0)], lambda location: False)
    assert isinstance(found, RejectRecord)
    assert found.reason == "silent_audio"
    assert level in found.detail


def test_the_lowest_value_is_loud(tmp_path):
    write(tmp_path / "a.wav", container(np.full(16000, -32768, np.int16), 16000, "WAV", "PCM_16"))
    audio = SegmentReader(AudioRoots.of([tmp_path])).read(segment(0.0, 1.0))
    np.testing.assert_array_equal(audio.samples, np.full(16000, -1, np.float32))
