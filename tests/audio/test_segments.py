"""Where the samples of a segment lie, and that exactly these are read."""

from __future__ import annotations

import numpy as np
import pytest
import soundfile as sf

from sharmill.audio.roots import AudioRoots
from sharmill.audio.segments import SegmentReader
from sharmill.errors import RejectRecord
from sharmill.manifest import Segment

RATE = 16000


@pytest.fixture
def noise(tmp_path):
    """One second of noise in two roots: ``0/a.wav`` and ``1/a.wav``; returns the samples of both."""
    samples = []
    for source in range(2):
        path = tmp_path / str(source) / "a.wav"
        path.parent.mkdir()
        sf.write(path, 0.1 * np.random.default_rng(source).normal(size=RATE), RATE)
        samples.append(sf.read(path, dtype="float32")[0])
    return samples


@pytest.fixture
def reader(noise, tmp_path):
    return SegmentReader(AudioRoots.of([tmp_path / "0", tmp_path / "1"]))


def segment(offset, duration, *, source=0, whole_file=False, path="a.wav"):
    return Segment(source, path, offset, duration, whole_file)


@pytest.mark.parametrize(
    ("offset", "duration", "start", "stop"),
    [
        (0.0, 1.0, 0, 16000),
        (0.25, 0.5, 4000, 12000),
        (0.123456, 0.1, 1975, 3575),
        (0.95, 0.1, 15200, 16000),  # ends after the file, as the tolerance of prepare allows
        (0.5, 1 / RATE, 8000, 8001),
    ],
)
def test_samples_of_a_segment(offset, duration, start, stop, reader, noise):
    audio = reader.read(segment(offset, duration))
    assert audio.sampling_rate == RATE
    np.testing.assert_array_equal(audio.samples, noise[0][start:stop])


@pytest.mark.parametrize("duration", [0.9, 1.0, 1.1])
def test_whole_file_is_read_whatever_the_manifest_says(duration, reader, noise):
    audio = reader.read(segment(0.0, duration, whole_file=True))
    np.testing.assert_array_equal(audio.samples, noise[0])


def test_each_source_has_its_root(reader, noise):
    np.testing.assert_array_equal(reader.read(segment(0.0, 1.0, source=1)).samples, noise[1])


@pytest.mark.parametrize(
    ("offset", "duration", "whole_file", "expected"),
    [(0.0, 1.0, False, True), (0.0, 1.2, False, True), (0.0, 0.5, True, True), (0.0, 0.5, False, False)],
)
def test_whether_a_segment_is_the_whole_file(offset, duration, whole_file, expected, reader):
    found = reader.read(segment(offset, duration, whole_file=whole_file))
    assert found.location.is_whole_file == expected


@pytest.mark.parametrize(("offset", "duration"), [(1.0, 0.1), (5.0, 1.0), (0.5, 0.0), (0.5, 1e-6)])
def test_segment_without_samples(offset, duration, reader):
    with pytest.raises(RejectRecord) as caught:
        reader.read(segment(offset, duration))
    assert caught.value.reason == "empty_audio"


def test_missing_file(reader):
    with pytest.raises(RejectRecord) as caught:
        reader.read(segment(0.0, 1.0, path="none.wav"))
    assert caught.value.reason == "missing_audio"


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg", "mp3", "opus"])
def test_a_channel_has_the_samples_of_the_file_decoded_whole(suffix, tmp_path):
    rate = 48000
    noise = 0.1 * np.random.default_rng(1).normal(size=(rate, 2))
    path = tmp_path / f"a.{suffix}"
    form = {"opus": {"format": "OGG", "subtype": "OPUS"}}.get(suffix, {})
    sf.write(path, noise, rate, **form)
    whole, _ = sf.read(path, dtype="float32")
    reader = SegmentReader(AudioRoots.of([tmp_path]))
    for channel, expected in ((0, whole[:, 0]), (1, whole[:, 1]), ("downmix", whole.mean(axis=1))):
        all_of_it = reader.read(Segment(0, path.name, 0.0, 1.0, True, channel=channel))
        np.testing.assert_array_equal(all_of_it.samples, expected)
        part = reader.read(Segment(0, path.name, 0.25, 0.5, False, channel=channel))
        np.testing.assert_array_equal(part.samples, expected[12000:36000])


def test_audio_of_several_channels_is_read_only_with_a_channel(tmp_path):
    sf.write(tmp_path / "a.wav", np.full((RATE, 2), 0.5), RATE)
    with pytest.raises(RejectRecord) as caught:
        SegmentReader(AudioRoots.of([tmp_path])).read(segment(0.0, 1.0))
    assert caught.value.reason == "unsupported_channels"
