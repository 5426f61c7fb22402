"""FLAC decoding by dr_flac: it gives libsndfile's samples, and leaves damaged files to libsndfile."""

import io
import re

import numpy as np
import pytest
import soundfile as sf

from sharmill.shar.reading.decoding import as_floats, decode_samples


def flac(num_samples: int, channels: int = 1, rate: int = 16000, subtype: str = "PCM_16") -> bytes:
    stream = io.BytesIO()
    samples = 0.2 * np.random.default_rng(num_samples).normal(size=(num_samples, channels))
    sf.write(stream, samples, rate, format="FLAC", subtype=subtype)
    return stream.getvalue()


def by_libsndfile(data: bytes) -> np.ndarray:
    with sf.SoundFile(io.BytesIO(data)) as sound:
        return sound.read(dtype=np.float32, always_2d=True).T


def outcome(decoder, data: bytes) -> object:
    """Return shape and bytes of the samples, or "refused"."""
    try:
        samples = decoder(data)
    except (RuntimeError, TypeError):
        return "refused"
    return samples.shape, samples.tobytes()


def decoded(data: bytes) -> np.ndarray:
    return as_floats(decode_samples(data))


@pytest.mark.parametrize("subtype", ["PCM_S8", "PCM_16", "PCM_24"])
@pytest.mark.parametrize(("channels", "rate"), [(1, 16000), (2, 44100), (3, 22050), (8, 96000)])
def test_the_samples_are_those_of_libsndfile(subtype, channels, rate):
    for num_samples in (1, 17, 4096, 20000):
        data = flac(num_samples, channels, rate, subtype)
        found = decoded(data)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, by_libsndfile(data))


def frames_of(data: bytes) -> list[int]:
    """Return where the frames of a mono FLAC begin."""
    return [found.start() for found in re.finditer(rb"\xff\xf8.\x08", data, re.DOTALL)]


def flipped(data: bytes, rng: np.random.Generator) -> bytes:
    damaged = bytearray(data)
    # Flip a bit before the first frame in half of the cases.
    damaged[rng.integers(4, 120 if rng.integers(2) else len(data))] ^= 1 << int(rng.integers(8))
    return bytes(damaged)


def cut_off(data: bytes, rng: np.random.Generator) -> bytes:
    return data[: rng.integers(26, len(data))]


def frames_moved(data: bytes, rng: np.random.Generator) -> bytes:
    """Remove, repeat or swap one frame."""
    starts = frames_of(data)
    frames = [data[at:end] for at, end in zip(starts, [*starts[1:], len(data)], strict=True)]
    one, other = rng.integers(len(frames), size=2)
    kind = rng.integers(4)
    if kind == 0:
        del frames[one]
    elif kind == 1:
        frames.insert(other, frames[one])
    elif kind == 2:
        frames[one], frames[other] = frames[other], frames[one]
    else:
        frames[one] = frames[other]
    return data[: starts[0]] + b"".join(frames)


def other_count(data: bytes, rng: np.random.Generator) -> bytes:
    count = int(rng.choice([1, 4095, 4096, 4097, 8192, 8999, 9001, 12288, int(rng.integers(1, 20000))]))
    return data[:22] + count.to_bytes(4, "big") + data[26:]


def other_metadata(data: bytes, rng: np.random.Generator) -> bytes:
    """Insert a block of any type, claiming any length, after STREAMINFO."""
    length = int(rng.choice([0, 1, 18, 19, 200]))
    claimed = length if rng.integers(4) else int(rng.integers(400))
    block = bytes([int(rng.choice([0, 1, 2, 3, 4, 5, 6, 7, 126, 127]))]) + claimed.to_bytes(3, "big")
    return data[:42] + block + (rng.bytes(length) if rng.integers(2) else bytes(length)) + data[42:]


DAMAGE = (flipped, cut_off, frames_moved, other_count, other_metadata)


def claims_too_much(data: bytes) -> bool:
    """Return True if a file claims so many samples that it is refused before decoding."""
    try:
        return sf.info(io.BytesIO(data)).frames > 1_000_000
    except (sf.LibsndfileError, TypeError):
        return False


@pytest.mark.parametrize("good_first", [True, False])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_refused_or_give_the_right_samples(damage, good_first):
    # Use a different file for each order, so that this process has not decoded it before.
    data = flac(9000 + good_first, rate=16000 + good_first + 2 * DAMAGE.index(damage))
    rng = np.random.default_rng(0)
    if good_first:
        decoded(data)
    compared = 0
    for change in range(150):
        damaged = damage(data, rng)
        if not claims_too_much(damaged):
            # Damage that does not affect the samples, for example in metadata, may pass: their MD5 sum is right.
            allowed = (outcome(by_libsndfile, damaged), outcome(by_libsndfile, data))
            assert outcome(decoded, damaged) in allowed, change
            compared += 1
    assert compared > 50
    np.testing.assert_array_equal(decoded(data), by_libsndfile(data))


def test_samples_of_an_earlier_decoding_are_not_returned(monkeypatch):
    """This happens if the memory of an earlier decoding of the same recording is reused."""
    data = flac(9000)
    before = (by_libsndfile(data).T * 32768).astype(np.int16)
    empty = np.empty
    monkeypatch.setattr(
        np, "empty", lambda shape, dtype, **rest: before.reshape(shape) if dtype == np.int16 else empty(shape, dtype)
    )
    with pytest.raises(sf.LibsndfileError):
        decode_samples(data[:-30])
