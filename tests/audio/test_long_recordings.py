"""Recordings with many segments in match and write: opened once, read in the order of offsets, the same outcome."""

from __future__ import annotations

import numpy as np
import pytest
from support.audio import container, speech_like, write

from sharmill.audio import files
from sharmill.audio.encoding import encode
from sharmill.audio.files import Recording
from sharmill.audio.resample import resample_for_encoder
from sharmill.audio.roots import AudioRoots
from sharmill.audio.segments import SegmentReader
from sharmill.errors import RejectRecord
from sharmill.manifest import Member, Segment
from sharmill.match.embed import Embedder
from sharmill.write.config import WriteConfig
from sharmill.write.encoder import SegmentEncoder

RATE = 16000
SECONDS = 60


class FirstSamples:
    """An encoder whose embedding is samples of the audio itself."""

    sampling_rate = 8000
    embedding_size = 64
    checksum = "first"

    def embed(self, audio, num_samples):
        return audio[:, 100:164]


@pytest.fixture(params=["flac", "mp3", "ogg", "mp3 in a container", "flac in a container"])
def segments(request, tmp_path) -> list[Segment]:
    """Segments of a minute in no order: some overlap, one is the whole minute, one has nothing but its begin."""
    name, _, place = request.param.partition(" ")
    format, subtype = {"flac": ("FLAC", "PCM_16"), "mp3": ("MP3", "MPEG_LAYER_III"), "ogg": ("OGG", "VORBIS")}[name]
    data = container(speech_like(SECONDS * RATE, RATE), RATE, format, subtype)
    member = Member("a.tar", "bytes", 512, len(data)) if place else None
    write(tmp_path / (member.container if member else "a"), bytes(512 if place else 0) + data + bytes(10))
    audio_filepath = "a.tar/a" if member else "a"
    rng = np.random.default_rng(3)
    times = [(round(o, 2), round(d, 2)) for o, d in zip(rng.uniform(0, 55, 40), rng.uniform(1, 5, 40), strict=True)]
    times += [(0.0, float(SECONDS)), (59.0, 5.0), (70.0, 2.0)]
    return [Segment(0, audio_filepath, offset, duration, False, member=member) for offset, duration in times]


@pytest.fixture
def seen(monkeypatch) -> dict[str, list]:
    """The files that are opened, and the samples at which parts begin."""
    seen: dict[str, list] = {"opened": [], "starts": []}
    open_audio, read = files.open_audio, Recording.read_stored

    def opening(path):
        seen["opened"].append(path)
        return open_audio(path)

    def reading(self, start=0, *arguments):
        seen["starts"].append(start)
        return read(self, start, *arguments)

    monkeypatch.setattr(files, "open_audio", opening)
    monkeypatch.setattr("sharmill.audio.containers.open_audio", opening)
    monkeypatch.setattr(Recording, "read_stored", reading)
    return seen


def test_match_opens_a_recording_once_and_reads_in_order(segments, tmp_path, seen):
    reader = SegmentReader(AudioRoots.of([tmp_path]))
    expected = [read_alone(reader, segment) for segment in segments]
    seen["opened"].clear()
    seen["starts"].clear()
    found = Embedder(FirstSamples(), reader, 30, 2)(segments)
    assert len(seen["opened"]) == 1
    assert seen["starts"] == sorted(seen["starts"])
    assert len(seen["starts"]) == len(segments) - 1
    for one, alone in zip(found, expected, strict=True):
        if isinstance(alone, RejectRecord):
            assert (one.reason, one.detail) == (alone.reason, alone.detail)
            continue
        samples = resample_for_encoder(alone.samples, RATE, 8000, "soxr")
        np.testing.assert_array_equal(one.embedding, samples[100:164])
        assert (one.content, one.notes) == (alone.content, alone.notes)


def test_write_opens_a_recording_once_and_encodes_in_order(segments, tmp_path, seen):
    reader = SegmentReader(AudioRoots.of([tmp_path]))
    parts = [segment for segment in segments if segment.duration < SECONDS]
    expected = [read_alone(reader, segment) for segment in parts]
    seen["opened"].clear()
    seen["starts"].clear()
    stored = SegmentEncoder(WriteConfig(audio_format="flac"), reader, [*parts, *parts[:5]])
    for segment, alone in zip([*parts, *parts[:5]], [*expected, *expected[:5]], strict=True):
        if isinstance(alone, RejectRecord):
            with pytest.raises(RejectRecord, match="no samples"):
                stored(segment)
            continue
        assert stored(segment).data == encode(alone.samples, RATE, "flac")
    assert len(seen["opened"]) == 1
    assert seen["starts"][: len(parts) - 1] == sorted(seen["starts"][: len(parts) - 1])


def test_a_segment_that_is_the_whole_file_is_copied_all_the_same(tmp_path):
    data = container(speech_like(3 * RATE, RATE), RATE, "FLAC", "PCM_16")
    write(tmp_path / "a.flac", data)
    whole = Segment(0, "a.flac", 0.0, 3.0, False)
    part = Segment(0, "a.flac", 1.0, 1.0, False)
    stored = SegmentEncoder(WriteConfig(audio_format="flac"), SegmentReader(AudioRoots.of([tmp_path])), [part, whole])
    assert stored(part).num_samples == RATE
    assert stored(whole).data == data


def test_a_recording_that_is_not_there_rejects_each_of_its_segments(tmp_path):
    reader = SegmentReader(AudioRoots.of([tmp_path]))
    segments = [Segment(0, "a.flac", float(offset), 1.0, False) for offset in range(3)]
    found = Embedder(FirstSamples(), reader, 30, 2)(segments)
    assert [one.reason for one in found] == ["missing_audio"] * 3


def read_alone(reader: SegmentReader, segment: Segment):
    try:
        return reader.read(segment)
    except RejectRecord as reject:
        return reject
