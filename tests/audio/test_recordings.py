"""Parts of recordings, read in order while they are open: values, order, blocks, damage."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.audio import container, speech_like, write
from support.compressed import FORMS, encode

from sharmill.audio import files
from sharmill.audio.files import decode_bytes, open_recording
from sharmill.errors import RejectRecord

# libsndfile's format, subtype, rate, channels.
WRITTEN = [
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
ERRORS = {"PCM_U8": 0.01, "PCM_S8": 0.01, "ALAW": 0.03, "ULAW": 0.03, "FLOAT": 1e-6, "DOUBLE": 1e-6}
ERRORS |= {"PCM_16": 4e-5, "PCM_24": 2e-7, "PCM_32": 1e-7, "ALAC_16": 4e-5}
FILES: dict[str, bytes] = {}


def make(name: str) -> bytes:
    """The file of a row of the table; made once."""
    if name not in FILES:
        form = next((form for form in FORMS if form.name == name), None)
        FILES[name] = encode(form) if form else container(samples_of(name), *row_of(name)[2:3], *row_of(name)[:2])
    return FILES[name]


def row_of(name: str) -> tuple[str, str, int, int]:
    return next(row for row in WRITTEN if " ".join(map(str, row)) == name)


def samples_of(name: str) -> np.ndarray:
    _, _, rate, channels = row_of(name)
    number = min(3 * rate, 100_000) + 78  # even: libsndfile takes the padding of 8-bit AIFF for a sample
    parts = [speech_like(number, rate, seed) for seed in range(channels)]
    return parts[0] if channels == 1 else np.stack(parts, axis=1)


NAMES = [" ".join(map(str, row)) for row in WRITTEN]
ALL = [*NAMES, *(form.name for form in FORMS)]


@pytest.mark.parametrize("name", NAMES)
def test_depths_and_rates(name):
    _, subtype, rate, channels = row_of(name)
    samples = samples_of(name)
    channel = None if channels == 1 else 1
    found, found_rate = decode_bytes(make(name), channel=channel)
    assert found_rate == rate
    if subtype in ERRORS:
        assert len(found) == len(samples)
        np.testing.assert_allclose(found, samples if channel is None else samples[:, 1], atol=ERRORS[subtype], rtol=0)
    else:
        assert 0 <= len(found) - len(samples) < 2000


@pytest.mark.parametrize("name", ALL)
def test_parts_at_any_offsets_equal_slices_of_the_whole(tmp_path, name, monkeypatch):
    if name not in NAMES:
        pytest.importorskip("av")
    monkeypatch.setattr(files, "_BLOCK_SAMPLES", 5000)
    data = make(name)
    path = write(tmp_path / "a", data)
    inside = write(tmp_path / "b", b"before" + data + b"behind")
    channel = 1 if decode_channels(path) > 1 else None
    whole = decode_bytes(data, channel=channel)[0]

    @settings(max_examples=8, deadline=None, derandomize=True)
    @given(st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(1, 20000)), min_size=1, max_size=6))
    def check(parts: list[tuple[int, int]]) -> None:
        for opened in (open_recording(path), open_recording(inside, 6, len(data))):
            with opened as recording:
                for start, length in sorted(parts):
                    part = recording.read(start, min(length, len(whole) - start), channel)
                    np.testing.assert_array_equal(part, whole[start : start + length])

    check()


def decode_channels(path) -> int:
    with open_recording(path) as recording:
        return recording.info.channels


def test_parts_must_be_in_order_where_seeks_are_not_exact(tmp_path):
    # Of three blocks: what is within a block is still there.
    data = container(speech_like(3 << 20, 16000), 16000, "MP3", "MPEG_LAYER_III")
    mp3 = write(tmp_path / "a", data)
    with open_recording(mp3) as recording:
        recording.read(2 << 20, 100)
        with pytest.raises(ValueError, match="in order"):
            recording.read(100, 100)


@pytest.mark.parametrize("name", ["FLAC PCM_16 96000 2", "MP3 MPEG_LAYER_III 16000 1"])
def test_damage_spoils_what_it_spoils_alone(tmp_path, name):
    """A part is rejected or read, in a recording that is open, as it is in one that is opened for it."""
    data = make(name)
    middle = len(data) // 2
    path = write(tmp_path / "a", data[:middle] + bytes(3000) + data[middle + 3000 :])
    channel = 1 if decode_channels(path) > 1 else None

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
