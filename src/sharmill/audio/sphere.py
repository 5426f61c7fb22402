"""SPHERE files compressed with shorten, as telephone corpora have them: FFmpeg reads 16-bit PCM, sph2pipe mu-law.

sph2pipe is the Linguistic Data Consortium's program; it is looked for on PATH and called without a shell.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tempfile
from typing import Final

import numpy as np
import soundfile as sf

from sharmill.audio.decoder import (
    MAX_SAMPLES_PER_BYTE,
    MAX_SAMPLING_RATE,
    MIN_SAMPLING_RATE,
    SAMPLES_IN_ANY_SIZE,
    AudioBytes,
    AudioInfo,
)
from sharmill.errors import RejectRecord

_SPHERE: Final = b"NIST_1A\n"
_HEAD_BYTES: Final = 1 << 12
_PROGRAM: Final = "sph2pipe"
_MAX_CHANNELS: Final = 64
# It decompresses hours of speech in seconds.
TIMEOUT_SECONDS: Final = 300.0


def needs_sph2pipe(source: AudioBytes) -> bool:
    """Return True if a file is SPHERE with mu-law that shorten has compressed, which FFmpeg does not read."""
    head = source.read(0, _HEAD_BYTES)
    return head.startswith(_SPHERE) and re.search(rb"^sample_coding .*u-?law.*embedded-shorten", head, re.M) is not None


class Sph2pipeDecoder:
    """A SPHERE file that sph2pipe decompresses as a whole when its first samples are wanted.

    Args:
        timeout: seconds that sph2pipe may take.

    Raises:
        RejectRecord: unreadable_audio (damage, no sph2pipe on PATH), duration_mismatch, empty_audio.
    """

    def __init__(self, source: AudioBytes, *, timeout: float = TIMEOUT_SECONDS) -> None:
        self._source = source
        self._timeout = timeout
        rate, count, channels = (self._read_number(key) for key in ("sample_rate", "sample_count", "channel_count"))
        if count == 0:
            raise RejectRecord("empty_audio", f"{source.name} has no samples")
        most = max(SAMPLES_IN_ANY_SIZE, source.size * MAX_SAMPLES_PER_BYTE)
        if not 1 <= channels <= _MAX_CHANNELS or count * channels > most:
            raise self._unreadable("its header claims more than it can have")
        if not MIN_SAMPLING_RATE <= rate <= MAX_SAMPLING_RATE:
            raise self._unreadable(f"it claims a sampling rate of {rate} Hz")
        self.info = AudioInfo(rate, count, channels, "shn", common=False)
        self._samples: np.ndarray | None = None
        self._position = 0

    def seek(self, position: int) -> None:
        self._position = position

    def read(self, num_samples: int) -> np.ndarray:
        if self._samples is None:
            self._samples = self._decompress()
        block = self._samples[self._position : self._position + num_samples]
        self._position += len(block)
        return block

    def check_end(self) -> None:
        """Do nothing: whole files have as many samples as their headers say."""

    def close(self) -> None:
        self._samples = None

    def _read_number(self, key: str) -> int:
        found = re.search(rf"^{key} -i (\d{{1,18}})\s*$".encode(), self._source.read(0, _HEAD_BYTES), re.MULTILINE)
        if found is None:
            raise self._unreadable(f"its header has no {key}")
        return int(found[1])

    def _decompress(self) -> np.ndarray:
        """Return all samples, float32 (samples,) or (samples, channels)."""
        program = shutil.which(_PROGRAM)
        if program is None:
            remedy = "install sph2pipe (Linguistic Data Consortium), so that it is on PATH"
            raise self._unreadable(f"it is mu-law compressed with shorten, which sph2pipe reads; {remedy}")
        # A file of our own: what the user calls it, be it an option or a member of an archive, is no argument.
        with tempfile.NamedTemporaryFile(prefix="sharmill-", suffix=".sph") as file:
            file.write(self._source.read())
            file.flush()
            command = [program, "-p", "-f", "wav", file.name]
            try:
                done = subprocess.run(
                    command, stdin=subprocess.DEVNULL, capture_output=True, timeout=self._timeout, check=False
                )
            except subprocess.TimeoutExpired as error:
                raise self._unreadable(f"sph2pipe has not ended within {self._timeout:g} s") from error
            except OSError as error:
                raise self._unreadable(f"{program} cannot be run: {error.strerror}") from error
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise self._unreadable(f"sph2pipe ended with status {done.returncode}: {''.join(said)}")
        return self._take(done.stdout)

    def _take(self, wave: bytes) -> np.ndarray:
        """Return the samples of what sph2pipe has written."""
        try:
            with sf.SoundFile(io.BytesIO(wave)) as sound:
                samples, form = sound.read(dtype="float32"), (sound.samplerate, sound.channels)
        except (sf.LibsndfileError, TypeError) as error:
            raise self._unreadable("what sph2pipe gives is no WAV") from error
        info = self.info
        if form != (info.sampling_rate, info.channels):
            raise self._unreadable(f"sph2pipe gives {form[1]} channels at {form[0]} Hz, its header says otherwise")
        if len(samples) != info.num_samples:
            what = f"{self._source.name}: sph2pipe gives {len(samples)} of {info.num_samples} samples"
            raise RejectRecord("duration_mismatch", what)
        return samples

    def _unreadable(self, what: str) -> RejectRecord:
        return RejectRecord("unreadable_audio", f"{self._source.name}: {what}")
