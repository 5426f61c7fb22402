"""Untrusted audio: a small file cannot use much memory, whatever rate, length or size it claims."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from lhotse.audio import AudioLoadingError
from support import audio as odd

from sharmill.audio.files import decode_bytes
from sharmill.audio.roots import AudioRoots
from sharmill.audio.segments import SegmentReader
from sharmill.errors import RejectRecord
from sharmill.manifest import AudioNotes, Segment
from sharmill.shar.reading.cuts import read_item
from sharmill.shar.reading.decoding import _decode_recording

RATE = 655350


@pytest.fixture(scope="module")
def bomb(tmp_path_factory) -> Path:
    """A minute of silence at the highest rate of FLAC: 157 MB of samples in about 140 KB."""
    path = tmp_path_factory.mktemp("bomb") / "bomb.flac"
    with sf.SoundFile(path, "w", RATE, 1, "PCM_16") as sound:
        for _ in range(60):
            sound.write(np.zeros(RATE, np.int16))
    assert path.stat().st_size < 200_000
    return path


@pytest.fixture
def peak():
    """Return the peak memory of numpy and Python in MB since the beginning of the test."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()


def segment(name: str, duration: float, size: int = -1) -> Segment:
    return Segment(0, name, 0.0, duration, True, AudioNotes(size))


def test_samples_for_which_a_file_has_no_bytes_are_not_decoded(bomb, peak):
    with pytest.raises(RejectRecord, match=r"unreadable_audio.*cannot hold 39321000 samples"):
        odd.read(bomb)
    with pytest.raises(RejectRecord, match="cannot hold 39321000 samples"):
        decode_bytes(bomb.read_bytes())
    assert peak() < 10


def test_a_file_longer_than_its_record_says_is_not_decoded(tmp_path, peak):
    (tmp_path / "a.wav").write_bytes(odd.wav(bytes(2 * 16000 * 600)))
    reader = SegmentReader(AudioRoots.of([tmp_path]), duration_tolerance=0.1)
    tracemalloc.reset_peak()
    with pytest.raises(RejectRecord, match="duration_mismatch: the manifest states 3 s, but the audio has 600 s"):
        reader.read(segment("a.wav", 3.0))
    with pytest.raises(RejectRecord, match="changed_audio"):
        reader.read(segment("a.wav", 3.0, size=96044))
    ((_, reject),) = reader.read_or_copy([segment("a.wav", 3.0)], lambda location: True)
    assert reject.reason == "duration_mismatch"
    assert peak() < 5


def metadata(num_samples: int, rate: int = RATE) -> dict:
    """Return the metadata of a recording in a tar, as sharmill writes it."""
    return {"id": "r", "sources": [{"type": "shar", "channels": [0], "source": ""}], "sampling_rate": rate,
            "num_samples": num_samples, "duration": num_samples / rate, "channel_ids": [0]}  # fmt: skip


def with_transforms(num_samples: int) -> dict:
    return {**metadata(num_samples), "transforms": [{"name": "Volume", "kwargs": {"factor": 0.5}}]}


@pytest.mark.parametrize("make", [metadata, with_transforms], ids=["as written", "left to lhotse"])
@pytest.mark.parametrize("load", [lambda r: r.load_audio(), _decode_recording], ids=["lhotse", "ahead"])
def test_a_reader_decodes_no_samples_without_bytes(bomb, peak, make, load):
    recording = read_item(make(60 * RATE), "flac", bomb.read_bytes())
    with pytest.raises(AudioLoadingError, match="too few for 39321000 samples"):
        load(recording)
    for claims in (0, 2**36 - 1):
        recording = read_item(make(60 * RATE), "flac", odd.flac_claiming(claims))
        with pytest.raises(AudioLoadingError, match="too few for"):
            load(recording)
    assert peak() < 10


@pytest.mark.parametrize("says", [1.0, 0, "x", -1, [4.0]], ids=str)
def test_a_reader_decodes_no_more_than_the_recording_says(says):
    second = read_item(metadata(RATE) | {"duration": says}, "flac", odd.container(np.zeros(4 * RATE), RATE, "FLAC"))
    with pytest.raises(AudioLoadingError, match="the audio lasts 4 s, but its recording states"):
        _decode_recording(second)
    if says == 1.0:
        assert second.load_audio(offset=0.0, duration=0.5).shape == (1, RATE // 2)
