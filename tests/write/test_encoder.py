"""What is stored of a segment: the file itself where that is what is wanted, else its samples, encoded once."""

from __future__ import annotations

import shutil
from unittest import mock

import numpy as np
import pytest
import soundfile as sf
from lhotse import Recording
from support.shar import put, voice

from sharmill.audio.files import decode_bytes, probe_bytes
from sharmill.audio.roots import AudioRoots
from sharmill.audio.segments import SegmentReader
from sharmill.errors import RejectRecord
from sharmill.manifest import Segment
from sharmill.write.config import WriteConfig
from sharmill.write.encoder import SegmentEncoder

SAMPLES = voice(1.0)


@pytest.fixture
def root(tmp_path):
    for name in ("a.flac", "a.wav", "a.mp3", "a.aiff", "a.ogg", "a.opus"):
        put(tmp_path / name, SAMPLES)
    put(tmp_path / "float.wav", SAMPLES, subtype="FLOAT")
    put(tmp_path / "fast.flac", voice(1.0, 44100), 44100)
    put(tmp_path / "stereo.flac", np.stack([SAMPLES, SAMPLES], axis=1))
    shutil.copy(tmp_path / "a.flac", tmp_path / "misnamed.wav")
    return tmp_path


def whole(name: str, seconds: float = 1.0) -> Segment:
    return Segment(0, name, 0.0, seconds, whole_file=True)


def part(name: str, offset: float, duration: float) -> Segment:
    return Segment(0, name, offset, duration, whole_file=False)


def store(root, segment, *, format="flac", rate=None):
    config = WriteConfig(audio_format=format, sampling_rate=rate)
    return SegmentEncoder(config, SegmentReader(AudioRoots.of([root])), [segment])(segment)


@pytest.mark.parametrize(
    ("name", "format", "rate", "extension"),
    [
        ("a.flac", "flac", None, "flac"),
        ("a.flac", "flac", 16000, "flac"),
        ("a.wav", "wav", None, "wav"),
        ("float.wav", "wav", None, "wav"),
        ("misnamed.wav", "flac", None, "flac"),
        ("a.mp3", "mp3", None, "mp3"),
        ("a.opus", "opus", 16000, "opus"),
        ("a.flac", "original", None, "flac"),
        ("a.aiff", "original", None, "aiff"),
        ("a.ogg", "original", 16000, "ogg"),
        ("fast.flac", "original", None, "flac"),
    ],
)
def test_a_file_that_is_what_is_wanted_is_copied(root, name, format, rate, extension):
    stored = store(root, whole(name), format=format, rate=rate)
    assert stored.data == (root / name).read_bytes()
    assert stored.extension == extension
    samples, found_rate = decode_bytes(stored.data)
    assert (stored.num_samples, stored.sampling_rate) == (len(samples), found_rate)


def test_a_segment_that_is_the_whole_file_is_copied_too(root):
    assert store(root, part("a.flac", 0.0, 1.0)).data == (root / "a.flac").read_bytes()


@pytest.mark.parametrize(
    ("segment", "format", "rate"),
    [
        (part("a.flac", 0.0, 0.9), "flac", None),
        (part("a.flac", 0.1, 0.9), "flac", None),
        (part("a.flac", 0.0, 15999 / 16000), "original", None),
        (whole("a.flac"), "wav", None),
        (whole("misnamed.wav"), "wav", None),
        (whole("a.wav"), "flac", None),
        (whole("a.flac"), "flac", 8000),
        (whole("fast.flac"), "original", 16000),
    ],
)
def test_anything_else_is_encoded(root, segment, format, rate):
    stored = store(root, segment, format=format, rate=rate)
    assert stored.data != (root / segment.audio_filepath).read_bytes()
    info = probe_bytes(stored.data)
    assert (info.num_samples, info.sampling_rate) == (stored.num_samples, stored.sampling_rate)
    assert info.format == ("flac" if format == "original" else format)


@pytest.mark.parametrize(("name", "expected"), [("a.mp3", "mp3"), ("a.opus", "opus"), ("a.wav", "wav")])
def test_original_keeps_the_format_of_what_has_to_be_encoded(root, name, expected):
    assert store(root, part(name, 0.1, 0.5), format="original").extension == expected


@pytest.mark.parametrize(
    ("segment", "rate"), [(part("a.aiff", 0.1, 0.5), None), (part("a.ogg", 0.1, 0.5), None), (whole("a.opus"), 22050)]
)
def test_original_falls_back_to_flac_where_the_format_cannot_be_written(root, segment, rate):
    stored = store(root, segment, format="original", rate=rate)
    assert (stored.extension, probe_bytes(stored.data).format) == ("flac", "flac")


@pytest.mark.parametrize("format", ["flac", "wav"])
@pytest.mark.parametrize(
    ("offset", "duration"), [(0.0, 0.5), (0.25, 0.5), (1 / 3, 0.2), (0.99995, 0.00005), (0.9, 0.1)]
)
def test_a_segment_is_extracted_to_the_sample(root, format, offset, duration):
    stored = store(root, part("a.wav", offset, duration), format=format)
    start, length = round(offset * 16000), round(duration * 16000)
    np.testing.assert_array_equal(decode_bytes(stored.data)[0], SAMPLES[start : start + length])


def test_a_segment_that_ends_a_little_after_its_file_has_the_samples_that_there_are(root):
    stored = store(root, part("a.wav", 0.5, 0.55))
    np.testing.assert_array_equal(decode_bytes(stored.data)[0], SAMPLES[8000:])


@pytest.mark.parametrize("format", ["mp3", "opus"])
def test_lossy_formats_keep_rate_and_number_of_samples(root, format):
    stored = store(root, part("a.wav", 0.1, 0.7), format=format)
    samples, rate = decode_bytes(stored.data)
    assert (len(samples), rate, stored.num_samples) == (11200, 16000, 11200)
    assert np.corrcoef(samples, SAMPLES[1600:12800])[0, 1] > 0.9


@pytest.mark.parametrize(("from_rate", "to_rate"), [(16000, 24000), (44100, 16000), (22050, 48000), (16000, 8000)])
def test_resampled_samples_are_lhotses(tmp_path, from_rate, to_rate):
    path = put(tmp_path / "x.wav", voice(1.37, from_rate), from_rate)
    stored = store(tmp_path, whole("x.wav"), format="wav", rate=to_rate)
    expected = Recording.from_file(path).resample(to_rate).load_audio()[0]
    # libsndfile takes the next lower of the 16-bit values.
    quantised = np.clip(np.floor(expected.astype(np.float64) * 32768), -32768, 32767)
    np.testing.assert_array_equal(decode_bytes(stored.data)[0].astype(np.float64) * 32768, quantised)


def test_opus_cannot_hold_22050_hz(tmp_path):
    put(tmp_path / "x.wav", voice(0.5, 22050), 22050)
    with pytest.raises(RejectRecord, match=r"^unsupported_rate: .*22050.*sampling_rate"):
        store(tmp_path, whole("x.wav"), format="opus")


def truncate(path):
    path.write_bytes(path.read_bytes()[:-4000])


def with_nan(path):
    samples = SAMPLES.copy()
    samples[8000] = np.nan
    sf.write(path, samples, 16000, format="WAV", subtype="FLOAT")


@pytest.mark.parametrize(
    ("damage", "format", "reasons"),
    [
        (lambda path: path.unlink(), "flac", {"missing_audio"}),
        (lambda path: path.write_bytes(b""), "flac", {"empty_audio"}),
        (lambda path: path.write_text("no audio"), "flac", {"unreadable_audio"}),
        (truncate, "flac", {"unreadable_audio", "duration_mismatch"}),
        (with_nan, "wav", {"non_finite_audio"}),
        (lambda path: put(path, np.stack([SAMPLES] * 2, axis=1)), "flac", {"unsupported_channels"}),
    ],
)
def test_broken_audio_is_rejected_even_where_it_would_be_copied(root, damage, format, reasons):
    damage(root / "a.flac")
    with pytest.raises(RejectRecord) as caught:
        store(root, whole("a.flac"), format=format)
    assert caught.value.reason in reasons


def test_an_error_of_the_machine_is_no_reject(root):
    error = OSError(24, "Too many open files")
    with mock.patch("sharmill.audio.decoder.AudioBytes.read", side_effect=error), pytest.raises(OSError):
        store(root, whole("a.flac"))
