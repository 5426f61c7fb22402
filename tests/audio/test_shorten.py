"""SPHERE compressed with shorten: 16-bit PCM as FFmpeg decodes it, mu-law as libsndfile does, and damage."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
import soundfile as sf
from support.audio import reason_of, speech_like
from support.sphere import number, rice, shorten, shorten_stream, signed, sphere, sphere_header

from sharmill.audio.files import decode_bytes, probe_bytes
from sharmill.audio.shorten import _mu_law_table
from sharmill.errors import RejectRecord

# Compiling the decoder takes some seconds.
pytestmark = pytest.mark.slow

AU1, S16, AU2 = 0, 3, 8
MU_LAW = "ulaw,embedded-shorten-v2.00"
REJECTED = {"unreadable_audio", "duration_mismatch", "empty_audio"}


def linear(codes):
    """The samples of mu-law as libsndfile decodes them, int16."""
    options = {"samplerate": 8000, "channels": 1, "format": "RAW", "subtype": "ULAW"}
    return sf.read(io.BytesIO(np.asarray(codes, np.uint8).tobytes()), dtype="int16", **options)[0]


def stored(codes, kind):
    """The values by which mu-law is stored without a shift: minus zero (127) last of all, or first of the negative."""
    codes = np.asarray(codes, np.int64)
    negative = codes - 127 - (kind == AU2)
    return np.where(codes >= 128, 255 - codes, np.where(codes == 127, -128 if kind == AU1 else -1, negative))


@pytest.mark.parametrize("shape", [(20077,), (20077, 2)])
def test_pcm(shape):
    pcm = (speech_like(20077, 8000) * 32767).astype(np.int16)
    pcm = pcm if len(shape) == 1 else np.stack([pcm, pcm[::-1]], axis=1)
    info = probe_bytes(sphere(pcm, 8000, shortened=True))
    assert (info.sampling_rate, info.num_samples, info.channels, info.format) == (8000, 20077, len(pcm.T.shape), "shn")
    for shortened in (False, True):
        data = sphere(pcm, 8000, shortened=shortened)
        channel = None if len(shape) == 1 else 1
        expected = (pcm if channel is None else pcm[:, 1]).astype(np.float32) / 32768
        np.testing.assert_array_equal(decode_bytes(data, channel=channel)[0], expected)
        np.testing.assert_array_equal(decode_bytes(data, 5000, 4001, channel)[0], expected[5000:9001])


def random_stream(seed, channels, num_means):
    """Blocks of every kind, of 16-bit PCM, and the number of samples; every row of bits is one of the format."""
    chosen = random.Random(seed)
    bits = [number(value) for value in (S16, channels, 33, 3, num_means, 0)]
    count, size = 0, 33
    for _ in range(40):
        if chosen.random() < 0.1:
            # FFmpeg knows no larger blocks behind smaller ones.
            size = chosen.choice([known for known in (7, 24, 33) if known <= size])
            bits += [rice(5, 2), number(size)]
        if chosen.random() < 0.3:
            bits += [rice(6, 2), rice(chosen.randrange(4), 2)]
        for _ in range(channels):
            command = chosen.choice([0, 1, 1, 2, 3, 7, 8])
            bits.append(rice(command, 2))
            if command != 8:
                bits.append(rice(2, 3))
            if command == 7:
                weights = [chosen.randrange(-16, 16) for _ in range(chosen.randrange(1, 4))]
                bits += [rice(len(weights), 2), *(signed(weight, 5) for weight in weights)]
            if command != 8:
                spread = 40 if command == 0 else 3
                bits += [signed(chosen.randrange(-spread, spread + 1), 2) for _ in range(size)]
        count += size
    return shorten_stream(bits), count


@pytest.mark.parametrize(("channels", "num_means"), [(1, 0), (1, 4), (2, 4), (2, 1)])
def test_blocks_of_every_kind_are_those_that_ffmpeg_decodes(channels, num_means):
    av = pytest.importorskip("av")
    for seed in range(10):
        body, count = random_stream(seed, channels, num_means)
        data = sphere_header("pcm,embedded-shorten-v2.00", 8000, channels, count) + body
        with av.open(io.BytesIO(data), format="nistsphere") as container:
            frames = [frame.to_ndarray().reshape(channels, -1) for frame in container.decode(audio=0)]
        expected = np.concatenate(frames, axis=1).astype(np.float32) / 32768
        assert expected.shape == (channels, count)
        for channel in range(channels):
            np.testing.assert_array_equal(decode_bytes(data, channel=channel)[0], expected[channel])


@pytest.mark.parametrize("kind", [AU1, AU2])
def test_mu_law(kind):
    codes = np.random.default_rng(kind).permutation(np.repeat(np.arange(256), 20)).reshape(-1, 2)
    data = sphere_header(MU_LAW, 8000, 2, len(codes)) + shorten(stored(codes, kind), kind)
    info = probe_bytes(data)
    assert (info.sampling_rate, info.num_samples, info.channels, info.format) == (8000, len(codes), 2, "shn")
    for channel in (0, 1):
        expected = linear(codes[:, channel]).astype(np.float32) / 32768
        np.testing.assert_array_equal(decode_bytes(data, channel=channel)[0], expected)
        np.testing.assert_array_equal(decode_bytes(data, 700, 901, channel)[0], expected[700:1601])


@pytest.mark.parametrize(
    ("shift", "codes"),
    [
        (0, {0: 255, 1: 254, 127: 128, -1: 126, -127: 0, -128: 127}),
        (1, {0: 255, 1: 253, 7: 241, 8: 239, 120: 254, -1: 125, -7: 113, -8: 111, -119: 0, -120: 127, -128: 112}),
        (5, {0: 255, 1: 231, 2: 219, 3: 211, 6: 197, -1: 103, -2: 91, -3: 83, -128: 49}),
        (8, {0: 255, 1: 190, 2: 175, 15: 129, 16: 254, -1: 62, -2: 47, -16: 0, -17: 127}),
        (12, {0: 255, 1: 254, 127: 128, -1: 0, -2: 127, -128: 1}),
    ],
)
def test_mu_law_whose_samples_are_multiples_is_stored_by_other_values(shift, codes):
    """Codes that the format has at these shifts."""
    values = np.array(list(codes))
    np.testing.assert_array_equal(_mu_law_table(AU1)[shift, values + 128], linear(list(codes.values())))
    below = {value - 1: code for value, code in codes.items() if -128 < value < 0}
    both = {value: code for value, code in codes.items() if value >= 0} | below | {-1: 127}
    np.testing.assert_array_equal(_mu_law_table(AU2)[shift, np.array(list(both)) + 128], linear(list(both.values())))


def test_a_file_that_is_cut_off_or_claims_too_much():
    pcm = (speech_like(20077, 8000) * 32767).astype(np.int16)
    data = sphere(pcm, 8000, shortened=True)
    for bad in (data[: len(data) // 2], data[:-40], sphere(pcm, 8000, shortened=True, count=20078)):
        assert reason_of(decode_bytes, bad) == "duration_mismatch"
    assert reason_of(probe_bytes, sphere(pcm, 8000, shortened=True, count=1 << 40)) == "unreadable_audio"
    assert reason_of(probe_bytes, sphere(pcm, 8000, shortened=True, count=0)) == "empty_audio"
    for bad in (
        data.replace(b"ajkg\x02", b"ajkg\x03"),
        data.replace(b"sample_rate", b"sample_r8te"),
        data[:1029],
        data.replace(b"sample_rate -i 8000", b"sample_rate -i 8"),
    ):
        assert reason_of(decode_bytes, bad) == "unreadable_audio"


def test_other_samples_say_what_decompresses_them():
    data = sphere_header(MU_LAW, 8000, 1, 256) + shorten(np.zeros((256, 1), np.int64), 2)
    with pytest.raises(RejectRecord, match="type 2 of samples is not read; decompress it with sph2pipe"):
        decode_bytes(data)


def test_no_changed_byte_ends_a_decoder_otherwise_than_by_a_reject():
    changed = random.Random(1)
    data = sphere((speech_like(2000, 8000) * 32767).astype(np.int16), 8000, shortened=True)
    reasons = set()
    for _ in range(300):
        bad = bytearray(data)
        for _ in range(changed.randrange(1, 4)):
            bad[changed.randrange(1024, len(bad))] = changed.randrange(256)
        try:
            assert len(decode_bytes(bytes(bad))[0]) == 2000
        except RejectRecord as reject:
            reasons.add(reject.reason)
    assert reasons <= REJECTED
    assert reasons
