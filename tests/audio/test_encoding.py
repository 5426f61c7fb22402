"""Encoding of samples: round trips, reproducible bytes, and limits of formats."""

import io
import subprocess
import sys
import time

import numpy as np
import pytest
import soundfile as sf
from support.audio import reason_of, speech_like
from support.project import raises

from sharmill.audio.decoder import AudioInfo
from sharmill.audio.encoding import ENCODERS, encode, encoder_problem
from sharmill.audio.files import decode_bytes, probe_bytes
from sharmill.errors import ConfigError


def test_flac_has_the_bytes_of_libsndfile_for_floats():
    edges = (np.arange(-40000, 40000) + 0.5) / 32768
    samples = np.concatenate([edges, np.random.default_rng(3).uniform(-1.2, 1.2, 20000)]).astype(np.float32)
    expected = io.BytesIO()
    sf.write(expected, np.clip(samples, -1, 1), 16000, format="FLAC", subtype="PCM_16")
    assert encode(samples, 16000, "flac") == expected.getvalue()


@pytest.mark.parametrize("format", ENCODERS)
@pytest.mark.parametrize("rate", [8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000])
@pytest.mark.parametrize("num_samples", [1, 100, 16001])
def test_encoders_keep_rate_and_number_of_samples(format, rate, num_samples):
    if encoder_problem(format, rate):
        pytest.skip("a rate that the format cannot hold")
    data = encode(speech_like(num_samples, rate), rate, format)
    assert probe_bytes(data) == AudioInfo(rate, num_samples, 1, format)
    assert len(decode_bytes(data)[0]) == num_samples


@pytest.mark.parametrize("format", ENCODERS)
def test_overshoot_is_clipped(format):
    samples = 3 * speech_like(16000, 16000)
    assert np.abs(samples).max() > 1
    assert encode(samples, 16000, format) == encode(np.clip(samples, -1, 1), 16000, format)
    if format in ("flac", "wav"):
        decoded, _ = decode_bytes(encode(np.array([1.5, -1.5], np.float32), 16000, format))
        np.testing.assert_array_equal(decoded, np.array([32767 / 32768, -1], np.float32))


def test_encoded_bytes_do_not_depend_on_process_and_time():
    script = """
import hashlib, sys, numpy as np
from sharmill.audio.encoding import ENCODERS, encode
samples = np.random.default_rng(0).uniform(-0.5, 0.5, 50000).astype(np.float32)
for format in ENCODERS:
    print(format, hashlib.sha256(encode(samples, 16000, format)).hexdigest())
"""
    outputs = set()
    start = int(time.time())
    for second in range(2):
        while int(time.time()) < start + 2 * second:  # until the next second: a date in a header would differ
            time.sleep(0.05)
        result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        outputs.add(result.stdout)
    assert len(outputs) == 1
    assert [line.split()[0] for line in outputs.pop().splitlines()] == list(ENCODERS)


@pytest.mark.parametrize(
    ("format", "rate", "says"),
    [
        ("opus", 22050, ["22050", "sampling_rate", "8000, 12000, 16000, 24000, 48000"]),
        ("mp3", 96000, ["mp3", "96000"]),
        ("aac", 16000, ["aac", "flac, wav, mp3, opus"]),
    ],
)
def test_unsupported_rates_are_a_configuration_error(format, rate, says):
    with raises(ConfigError, "bad_config_value", *says):
        encode(speech_like(100, rate), rate, format)


def test_unusable_audio_is_refused():
    assert reason_of(encode, np.zeros(0, np.float32), 16000, "flac") == "empty_audio"
    assert reason_of(encode, np.array([0, np.nan], np.float32), 16000, "flac") == "non_finite_audio"
    with pytest.raises(ValueError, match="shape"):
        encode(np.zeros((1, 100), np.float32), 16000, "flac")
