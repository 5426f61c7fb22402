"""Audio from a stranger: a small file cannot ask for much memory, whatever rate, length or size it claims."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from support import odd_audio as odd
from support.shar import voice

from sharmill.audio.files import read
from sharmill.audio.roots import AudioRoots
from sharmill.audio.segments import SegmentReader
from sharmill.errors import RejectRecord
from sharmill.manifest import AudioNotes, Segment
from sharmill.shar.items import Item
from sharmill.validate.levels import measure

RATE = 655350


@pytest.fixture(scope="module")
def bomb(tmp_path_factory) -> Path:
    """A minute of silence at the highest rate of FLAC: 157 MB of samples in some 140 KB."""
    path = tmp_path_factory.mktemp("bomb") / "bomb.flac"
    with sf.SoundFile(path, "w", RATE, 1, "PCM_16") as sound:
        for _ in range(60):
            sound.write(np.zeros(RATE, np.int16))
    assert path.stat().st_size < 200_000
    return path


@pytest.fixture
def peak():
    """The most memory that numpy and Python hold at once, in MB, from the beginning of the test."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()


def segment(name: str, duration: float, size: int = -1) -> Segment:
    return Segment(0, name, 0.0, duration, True, AudioNotes(size))


def test_samples_for_which_a_file_has_no_bytes_are_not_decoded(bomb, peak):
    with pytest.raises(RejectRecord, match=r"unreadable_audio.*too few for 39321000 samples"):
        read(bomb)
    with pytest.raises(RejectRecord, match="too few for 39321000 samples"):
        measure(Item("x", "flac", bomb.read_bytes(), {}))
    assert peak() < 10


def test_a_part_of_such_a_file_is_read(bomb):
    assert len(read(bomb, RATE, 1000)[0]) == 1000


def test_a_file_longer_than_its_record_says_is_not_decoded(tmp_path, peak):
    (tmp_path / "a.wav").write_bytes(odd.wav(bytes(2 * 16000 * 600)))
    reader = SegmentReader(AudioRoots.of([tmp_path]), duration_tolerance=0.1)
    tracemalloc.reset_peak()
    with pytest.raises(RejectRecord, match="duration_mismatch: the manifest says 3 s, the audio has 600 s"):
        reader.read(segment("a.wav", 3.0))
    with pytest.raises(RejectRecord, match="changed_audio"):
        reader.read(segment("a.wav", 3.0, size=96044))
    ((_, reject),) = reader.read_or_copy([segment("a.wav", 3.0)], lambda location: True)
    assert reject.reason == "duration_mismatch"
    assert peak() < 5


def test_a_huge_file_with_few_samples_is_not_copied(tmp_path):
    path = tmp_path / "a.wav"
    path.write_bytes(odd.container())
    os.truncate(path, 1 << 40)
    reader = SegmentReader(AudioRoots.of([tmp_path]))
    ((_, reject),) = reader.read_or_copy([segment("a.wav", 2.0)], lambda location: True)
    assert reject.reason == "unreadable_audio"
    assert "1099511627776 bytes are too many for 32000 samples" in reject.detail


def test_levels_of_long_audio_are_those_of_its_blocks(peak):
    """Twelve million samples, 48 MB of them, in blocks of one."""
    second = voice(1.0)
    data = odd.wav((np.tile(np.concatenate([second, 0 * second, np.ones(16000), 0 * second]), 190) * 32767)
                   .astype("<i2").tobytes())  # fmt: skip
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0] / 1e6
    levels = measure(Item("x", "wav", data, {}))
    assert (levels.num_samples, levels.sampling_rate) == (4 * 190 * 16000, 16000)
    assert levels.silence == pytest.approx(0.5, abs=1e-3)
    assert levels.clipping == pytest.approx(0.25, abs=1e-3)
    assert peak() - before < 60  # the bytes once more, and some blocks
