"""Segments of files, containers and long recordings, and the types of their samples."""

import io
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import soundfile as sf
from support.audio import container, speech_like, write
from support.project import raises, write_tone

from sharmill.audio import files
from sharmill.audio.audio_bytes import AudioBytes
from sharmill.audio.decoder import to_float
from sharmill.audio.encoding import ENCODERS, encode
from sharmill.audio.files import Recording, open_bytes
from sharmill.audio.resample import resample
from sharmill.audio.roots import AudioRoots
from sharmill.audio.segments import SegmentReader
from sharmill.errors import RejectRecord
from sharmill.manifest import Member, Segment
from sharmill.match.embed import Embedder
from sharmill.prepare.check import PrepareConfig, RecordCheck
from sharmill.sources.nemo import NemoSource
from sharmill.stages.speaker_key import make_speaker_key
from sharmill.write.audio import store_segments
from sharmill.write.config import WriteConfig

RATE = 16000


@pytest.fixture
def noise(tmp_path):
    """The samples of ``a.wav``, one second of noise."""
    sf.write(tmp_path / "a.wav", 0.1 * np.random.default_rng(0).normal(size=RATE), RATE)
    return sf.read(tmp_path / "a.wav", dtype="float32")[0]


@pytest.fixture
def reader(noise, tmp_path):
    return SegmentReader(AudioRoots.of([tmp_path]))


def segment(offset, duration, *, whole_file=False):
    return Segment(0, "a.wav", offset, duration, whole_file)


# Offset, duration, True for a whole file, and the expected samples.
PLACES = [
    (0.0, 1.0, False, slice(0, 16000)),
    (0.25, 0.5, False, slice(4000, 12000)),
    (0.123456, 0.1, False, slice(1975, 3575)),
    (0.95, 0.1, False, slice(15200, 16000)),  # ends after the file, within the tolerance of prepare
    (0.5, 1 / RATE, False, slice(8000, 8001)),
    *((0.0, duration, True, slice(0, 16000)) for duration in (0.9, 1.0, 1.1)),
    *((offset, duration, False, None) for offset, duration in ((1.0, 0.1), (5.0, 1.0), (0.5, 0.0), (0.5, 1e-6))),
]


@pytest.mark.parametrize(("offset", "duration", "whole_file", "samples"), PLACES)
def test_samples_of_a_segment(offset, duration, whole_file, samples, reader, noise):
    place = segment(offset, duration, whole_file=whole_file)
    if samples is None:
        with pytest.raises(RejectRecord, match="empty_audio"):
            reader.read(place)
        return
    audio = reader.read(place)
    assert audio.sampling_rate == RATE
    np.testing.assert_array_equal(audio.samples, noise[samples])


EVERY_VALUE = np.arange(-32768, 32768).astype(np.int16)


HOLDING_16_BITS = [
    (format, endian)
    for format in sorted(sf.available_formats())
    for endian in ("FILE", "LITTLE", "BIG")
    if sf.check_format(format, "PCM_16", endian) and format not in ("RAW", "SD2")  # formats without a header
]


@pytest.mark.parametrize("format", ENCODERS)
def test_int16_and_float_values_give_the_same_bytes(format):
    assert encode(EVERY_VALUE, 16000, format) == encode(to_float(EVERY_VALUE), 16000, format)


@pytest.mark.parametrize(("format", "endian"), HOLDING_16_BITS)
def test_int16_samples_equal_the_floats_of_libsndfile(format, endian):
    data = container(EVERY_VALUE, 16000, format, "PCM_16", endian=endian)
    expected, _ = sf.read(io.BytesIO(data), dtype="float32")
    with open_bytes(AudioBytes("a", data)) as recording:
        stored = recording.read_stored()
        assert stored.dtype == np.int16
        np.testing.assert_array_equal(to_float(stored), expected)
        np.testing.assert_array_equal(recording.read(100, 5000), expected[100:5100])


def test_a_channel_is_int16_and_a_mix_is_float():
    samples = np.stack([EVERY_VALUE, np.roll(EVERY_VALUE, 7)], axis=1)
    data = container(samples, 16000, "WAV", "PCM_16")
    expected, _ = sf.read(io.BytesIO(data), dtype="float32")
    with open_bytes(AudioBytes("a", data)) as recording:
        one, mixed = recording.read_stored(channel=1), recording.read_stored(channel="downmix")
    np.testing.assert_array_equal(one, samples[:, 1])
    assert (one.dtype, mixed.dtype) == (np.int16, np.float32)
    np.testing.assert_array_equal(mixed, expected.mean(axis=1, dtype=np.float32))


@pytest.mark.parametrize("rate", [None, 16000, 8000])
@pytest.mark.parametrize("format", ["flac", "wav", "opus"])
def test_int16_segments_are_stored_like_their_floats(tmp_path, format, rate):
    config, part = WriteConfig(audio_format=format, sampling_rate=rate), segment(0.25, 0.5)
    samples = speech_like(16000, 16000)
    write(tmp_path / "a.wav", container(samples, 16000, "WAV", "PCM_16"))
    stored = store_segments(config, SegmentReader(AudioRoots.of([tmp_path])), [part]).get(part)
    floats, _ = sf.read(tmp_path / "a.wav", dtype="float32")
    write(tmp_path / "a.wav", container(floats, 16000, "WAV", "FLOAT"))
    assert store_segments(config, SegmentReader(AudioRoots.of([tmp_path])), [part]).get(part) == stored


@pytest.mark.parametrize(("subtype", "bits"), [("FLOAT", 16), ("DOUBLE", 24), ("DOUBLE", 32)])
@pytest.mark.parametrize("place", [segment(0.0, 1.0, whole_file=True), segment(0.25, 0.5)])
def test_floats_of_integers_are_rejected_or_scaled(subtype, bits, place, noise, tmp_path):
    scale = 1 << bits - 1
    write(tmp_path / "a.wav", container(noise.astype(np.float64) * scale, RATE, "WAV", subtype))
    with raises(RejectRecord, "over_full_scale", "float_scale"):
        SegmentReader(AudioRoots.of([tmp_path])).read(place)
    found = SegmentReader(AudioRoots.of([tmp_path], float_scales=[scale])).read(place).samples
    np.testing.assert_array_equal(found, noise[round(place.offset * RATE) :][: len(found)])


@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24", "ULAW"])
def test_integers_have_no_float_scale(subtype, noise, tmp_path):
    write(tmp_path / "a.wav", container(noise, RATE, "WAV", subtype))
    scaled = SegmentReader(AudioRoots.of([tmp_path], float_scales=[32768])).read(segment(0.0, 1.0)).samples
    np.testing.assert_array_equal(scaled, sf.read(tmp_path / "a.wav", dtype="float32")[0])


@pytest.mark.parametrize(("peak", "is_kept"), [(3.0, True), (16.0, True), (16.1, False), (-16.1, False)])
def test_floats_may_overshoot_by_24_db(peak, is_kept, noise, tmp_path):
    noise[100] = peak
    write(tmp_path / "a.wav", container(noise, RATE, "WAV", "FLOAT"))
    with nullcontext() if is_kept else raises(RejectRecord, "over_full_scale"):
        found = SegmentReader(AudioRoots.of([tmp_path])).read(segment(0.0, 1.0))
        np.testing.assert_array_equal(found.samples, noise)


RECORD = {
    "audio_filepath": "container.bin/one.flac", "duration": 2.0, "text": "one",
    "speaker": "| Language:en Dataset:d Speaker:s |",
}  # fmt: skip


@pytest.fixture
def packed(tmp_path):
    """A folder with one.flac, and container.bin with the same bytes from byte 1000."""
    write_tone(tmp_path / "one.flac")
    data = (tmp_path / "one.flac").read_bytes()
    (tmp_path / "container.bin").write_bytes(b"\1" * 1000 + data + b"\1" * 1000)
    return tmp_path, Member("container.bin", "bytes", 1000, len(data))


def check(root, **options):
    source, key = NemoSource(manifest="m.json", audio_root=str(root)), make_speaker_key("all")
    return RecordCheck(PrepareConfig(**options), [], AudioRoots.of([root]), [source], [source.speaker_rule("d")], key)


class TestMembers:
    def test_names_that_lead_out_of_the_root_are_rejected(self, packed):
        root, member = packed
        for name in ("container.bin/../../one.flac", "container.bin/../one.flac", "one.flac", "container.bin2/a"):
            with raises(RejectRecord, "outside_root"):
                check(root)(RECORD | {"audio_filepath": name}, 0, member)

    @pytest.mark.parametrize(
        ("change", "reason"), [({"size": 10**9}, "unreadable_audio"), ({"container": "x"}, "missing_audio")]
    )
    def test_members_beyond_the_end_or_without_container(self, change, reason, packed):
        root, member = packed
        place = Segment(0, "container.bin/one.flac", 0.0, 2.0, True, member=member._replace(**change))
        with raises(RejectRecord, reason, change.get("container", "container.bin")):
            SegmentReader(AudioRoots.of([root]), 0.1).read(place)

    def test_a_changed_container_is_detected(self, packed):
        root, member = packed
        utterance = check(root)(RECORD, 0, member)
        reader = SegmentReader(AudioRoots.of([root]), 0.1)
        utterance.segment = replace(utterance.segment, notes=reader.read(utterance.segment).notes)
        write_tone(root / "other.flac", 1.9)
        other = (root / "other.flac").read_bytes().ljust(member.size, b"\1")
        (root / "container.bin").write_bytes(b"\1" * 1000 + other + b"\1" * 3000)
        with raises(RejectRecord, "changed_audio", "container.bin"):
            reader.read(utterance.segment)


SECONDS = 60


class FirstSamples:
    """An encoder whose embeddings are samples of the audio."""

    sampling_rate = 8000
    embedding_size = 64
    checksum = "first"

    def embed(self, audio, num_samples):
        return audio[:, 100:164]


@pytest.fixture(params=["flac", "mp3", "ogg", "mp3 in a container", "flac in a container"])
def segments(request, tmp_path) -> list[Segment]:
    """Unordered segments of a minute: some overlap, one is the whole minute, one contains only its beginning."""
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
    """Record the files that are opened, and the first samples of parts."""
    seen: dict[str, list] = {"opened": [], "starts": []}
    open_audio, read = files.open_audio, Recording.read_stored

    def opening(path):
        seen["opened"].append(path)
        return open_audio(path)

    def reading(self, start=0, *arguments):
        seen["starts"].append(start)
        return read(self, start, *arguments)

    monkeypatch.setattr(files, "open_audio", opening)
    monkeypatch.setattr(Recording, "read_stored", reading)
    return seen


def read_alone(root, segments, seen):
    """Return a reader, and its audio or reject for each segment alone."""
    reader, found = SegmentReader(AudioRoots.of([root])), []
    for segment in segments:
        try:
            found.append(reader.read(segment))
        except RejectRecord as reject:
            found.append(reject)
    seen["opened"].clear()
    seen["starts"].clear()
    return reader, found


def test_match_opens_a_recording_once_and_reads_in_order(segments, tmp_path, seen):
    reader, expected = read_alone(tmp_path, segments, seen)
    found = Embedder(FirstSamples(), reader, 30)(segments)
    assert len(seen["opened"]) == 1
    assert seen["starts"] == sorted(seen["starts"])
    assert len(seen["starts"]) == len(segments) - 1
    for one, alone in zip(found, expected, strict=True):
        if isinstance(alone, RejectRecord):
            assert (one.reason, one.detail) == (alone.reason, alone.detail)
            continue
        samples = resample(alone.samples, RATE, 8000, "soxr")
        np.testing.assert_array_equal(one.embedding, samples[100:164])
        assert (one.content, one.notes) == (alone.content, alone.notes)


def test_write_opens_a_recording_once_and_encodes_in_order(segments, tmp_path, seen):
    parts = [segment for segment in segments if segment.duration < SECONDS]
    reader, expected = read_alone(tmp_path, parts, seen)
    stored = store_segments(WriteConfig(audio_format="flac"), reader, [*parts, *parts[:5]])
    for segment, alone in zip([*parts, *parts[:5]], [*expected, *expected[:5]], strict=True):
        if isinstance(alone, RejectRecord):
            with pytest.raises(RejectRecord, match="no samples"):
                stored.get(segment)
            continue
        assert stored.get(segment)[0] == encode(alone.samples, RATE, "flac")
    assert len(seen["opened"]) == 1
    assert seen["starts"][: len(parts) - 1] == sorted(seen["starts"][: len(parts) - 1])
