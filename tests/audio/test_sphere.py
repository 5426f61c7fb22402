"""SPHERE compressed with shorten: 16-bit PCM by FFmpeg, mu-law by sph2pipe, of which there is a stand-in here."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from support.audio import read, reason_of, speech_like
from support.sphere import shorten, sphere, sphere_header

from sharmill.audio.decoder import AudioBytes
from sharmill.audio.files import decode_bytes, probe_bytes
from sharmill.audio.sphere import Sph2pipeDecoder
from sharmill.errors import RejectRecord

RATE, COUNT = 8000, 20077
STAND_IN = """#!/bin/sh
# A stand-in for sph2pipe: it copies a WAV, and notes its arguments.
echo "$@" > {folder}/arguments
[ "$1 $2 $3" = "-p -f wav" ] && [ -f "$4" ] || exit 9
{does}
"""


@pytest.fixture
def mu_law() -> bytes:
    """A SPHERE file of mu-law in shorten's type 8; the stand-in does not look into it."""
    codes = np.zeros((COUNT, 1), np.int64)
    return sphere_header("ulaw,embedded-shorten-v2.00", RATE, 1, COUNT) + shorten(codes, 8)


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Returns a function: shell commands -> puts a stand-in for sph2pipe on PATH, and returns the samples it gives."""
    samples = (speech_like(COUNT, RATE) * 32767).astype(np.int16)
    sf.write(tmp_path / "decompressed.wav", samples, RATE)

    def make(does: str = "cat {folder}/decompressed.wav") -> np.ndarray:
        program = tmp_path / "bin/sph2pipe"
        program.parent.mkdir(exist_ok=True)
        program.write_text(STAND_IN.format(folder=tmp_path, does=does.format(folder=tmp_path)))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
        return samples.astype(np.float32) / 32768

    return make


def test_mu_law_goes_through_sph2pipe(mu_law, stand_in, tmp_path):
    expected = stand_in()
    info = probe_bytes(mu_law)
    assert (info.sampling_rate, info.num_samples, info.channels, info.format) == (RATE, COUNT, 1, "shn")
    assert not (tmp_path / "arguments").exists()
    np.testing.assert_array_equal(decode_bytes(mu_law)[0], expected)
    np.testing.assert_array_equal(decode_bytes(mu_law, 5000, 4001)[0], expected[5000:9001])


@pytest.mark.parametrize("name", ["-f.sph", "$(touch x).sph", "a b;c.sph"])
def test_the_name_of_a_file_is_no_argument(mu_law, stand_in, tmp_path, monkeypatch, name):
    expected = stand_in()
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(mu_law)
    np.testing.assert_array_equal(read(Path(name))[0], expected)
    assert name not in (tmp_path / "arguments").read_text()
    assert not (tmp_path / "x").exists()


def test_without_sph2pipe_the_record_is_rejected_with_the_remedy(mu_law, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RejectRecord, match="install sph2pipe") as caught:
        decode_bytes(mu_law)
    assert caught.value.reason == "unreadable_audio"


@pytest.mark.parametrize(
    ("does", "reason", "said"),
    [
        ("echo cannot read >&2; exit 3", "unreadable_audio", "ended with status 3: cannot read"),
        ("echo no audio", "unreadable_audio", "no WAV"),
        ("true", "unreadable_audio", "no WAV"),
        ("head -c 30000 {folder}/decompressed.wav", "duration_mismatch", f"of {COUNT} samples"),
    ],
)
def test_what_goes_wrong_in_it_rejects_the_record(mu_law, stand_in, does, reason, said):
    stand_in(does)
    with pytest.raises(RejectRecord, match=said) as caught:
        decode_bytes(mu_law)
    assert caught.value.reason == reason


def test_one_that_does_not_end_is_ended(mu_law, stand_in):
    stand_in("exec sleep 60")
    decoder = Sph2pipeDecoder(AudioBytes("a.sph", mu_law), timeout=0.5)
    with pytest.raises(RejectRecord, match=r"within 0\.5 s"):
        decoder.read(COUNT)


def test_the_real_sph2pipe_gives_the_samples_of_mu_law():
    if shutil.which("sph2pipe") is None:
        pytest.skip("there is no sph2pipe on PATH: it comes as source from the Linguistic Data Consortium")
    codes = np.arange(COUNT) % 256
    expected = sf.read(
        io.BytesIO(codes.astype(np.uint8).tobytes()), samplerate=RATE, channels=1, format="RAW", subtype="ULAW",
        dtype="float32",
    )[0]  # fmt: skip
    negative = codes.astype(np.int64) - 128
    stored = np.where(codes >= 128, 255 - codes, np.where(codes == 127, -1, negative))
    data = sphere_header("ulaw,embedded-shorten-v2.00", RATE, 1, COUNT) + shorten(stored[:, None], 8)
    np.testing.assert_array_equal(decode_bytes(data)[0], expected)


@pytest.mark.parametrize("channels", [1, 2])
def test_pcm_goes_through_ffmpeg(channels):
    pytest.importorskip("av")
    pcm = (speech_like(COUNT, RATE) * 32767).astype(np.int16)
    pcm = pcm if channels == 1 else np.stack([pcm, pcm[::-1]], axis=1)
    data = sphere(pcm, RATE, shortened=True)
    info = probe_bytes(data)
    assert (info.sampling_rate, info.num_samples, info.channels, info.format) == (RATE, COUNT, channels, "shn")
    channel = None if channels == 1 else 1
    expected = (pcm if channel is None else pcm[:, 1]).astype(np.float32) / 32768
    np.testing.assert_array_equal(decode_bytes(data, channel=channel)[0], expected)
    np.testing.assert_array_equal(decode_bytes(data, 5000, 4001, channel)[0], expected[5000:9001])


def test_damaged_pcm_is_rejected():
    pytest.importorskip("av")
    data = sphere((speech_like(COUNT, RATE) * 32767).astype(np.int16), RATE, shortened=True)
    assert reason_of(decode_bytes, data[: len(data) // 2]) in ("unreadable_audio", "duration_mismatch")
