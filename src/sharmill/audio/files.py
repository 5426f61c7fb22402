"""Reading of audio files: their headers, and their samples as a whole or in part.

By a file's content and never by its name: libsndfile opens what it can, FFmpeg and sph2pipe what they are there
for. What is wrong with a recording becomes a ``RejectRecord``; what is wrong with the machine (say, too many open
files) stays an ``OSError``, so that the unit is tried again.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, BinaryIO, Final

import numpy as np

from sharmill.audio.decoder import MAX_SAMPLES_PER_BYTE, SAMPLES_IN_ANY_SIZE, AudioBytes, AudioInfo, Decoder
from sharmill.audio.ffmpeg import FfmpegDecoder, recognise
from sharmill.audio.libsndfile import SndfileDecoder
from sharmill.audio.samples import to_float
from sharmill.audio.sphere import Sph2pipeDecoder, needs_sph2pipe
from sharmill.errors import RejectRecord
from sharmill.files.storage import NotRegularError, open_regular
from sharmill.manifest import Channel

_NO_SUCH_FILE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_BLOCK_SAMPLES: Final = 1 << 20
# Formats whose headers state the bytes of their samples, so that these need not be read to miss some.
_SIZED: Final = ("wav", "aiff", "au")


def probe(path: str | os.PathLike[str], *, whole: bool = False) -> AudioInfo:
    """Read the header of an audio file; any number of channels.

    An MP3 without a length in its first frame is read as a whole, to count its frames; what FFmpeg decodes is decoded
    once, to count its samples. With ``whole`` WAV, AIFF and AU that end before their headers say are refused.

    Raises:
        RejectRecord: missing_audio, empty_audio, unreadable_audio (not a regular file, no permission, not
            audio, no length in the header); with ``whole`` duration_mismatch.
    """
    with open_recording(path) as recording:
        if whole and recording.info.format in _SIZED:
            recording.check_end()
        return recording.info


def probe_bytes(data: bytes, name: str = "audio data") -> AudioInfo:
    """Read the header of an audio file in memory, as ``probe``; errors call it ``name``."""
    with open_bytes(AudioBytes(name, data)) as recording:
        return recording.info


def decode_bytes(
    data: bytes,
    start: int = 0,
    num_samples: int | None = None,
    channel: Channel = None,
    name: str = "audio data",
) -> tuple[np.ndarray, int]:
    """Decode an audio file in memory, or a part of it, as ``Recording.read`` does; errors call it ``name``.

    Returns:
        float32 samples (samples,) and the sampling rate in Hz.
    """
    with open_bytes(AudioBytes(name, data)) as recording:
        return recording.read(start, num_samples, channel), recording.info.sampling_rate


def decode_blocks(data: bytes, name: str = "audio data") -> Iterator[tuple[np.ndarray, int]]:
    """Decode a mono file in memory block by block, each with the sampling rate; rejects as ``decode_bytes`` does."""
    with open_bytes(AudioBytes(name, data)) as recording:
        for block in recording.blocks():
            yield block, recording.info.sampling_rate


def check_finite(audio: np.ndarray, name: str) -> None:
    """Raise RejectRecord ``non_finite_audio`` where samples are NaN or infinite."""
    # The extremes are NaN where any sample is, and cost less than an array of answers.
    if len(audio) and not (math.isfinite(audio.min()) and math.isfinite(audio.max())):
        raise RejectRecord("non_finite_audio", f"{name} has NaN or infinite samples")


def open_audio(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading without a buffer: its descriptor is libsndfile's to move.

    Raises:
        RejectRecord: missing_audio, unreadable_audio (not a regular file, no permission).
    """
    try:
        return open_regular(path, buffering=0)
    except PermissionError:
        raise RejectRecord("unreadable_audio", f"no permission to read {path}") from None
    except NotRegularError:
        raise RejectRecord("unreadable_audio", f"{path} is not a regular file") from None
    except ValueError as error:
        if isinstance(error.__cause__, OSError):
            raise RejectRecord("missing_audio", f"{path}: {error.__cause__.strerror}") from None
        # a NUL or a lone surrogate
        raise RejectRecord("missing_audio", f"{str(path)!r} cannot be the name of a file") from None
    except OSError as error:
        if error.errno not in _NO_SUCH_FILE:
            raise
        raise RejectRecord("missing_audio", f"{path}: {error.strerror}") from None


@contextmanager
def open_recording(path: str | os.PathLike[str], start: int = 0, size: int | None = None) -> Iterator[Recording]:
    """Open an audio file, or the range of bytes of a container that is one.

    Raises:
        RejectRecord: as ``probe``.
    """
    with open_audio(path) as file, open_bytes(AudioBytes(str(path), file, start, size)) as recording:
        yield recording


@contextmanager
def open_bytes(source: AudioBytes) -> Iterator[Recording]:
    """Open an audio file of which there are the bytes, as ``open_recording``."""
    if source.size == 0:
        raise RejectRecord("empty_audio", f"{source.name} has no bytes")
    with closing(Recording(source)) as recording:
        yield recording


def _open_decoder(source: AudioBytes) -> Decoder:
    try:
        return SndfileDecoder(source)
    except RejectRecord as reject:
        if reject.reason != "unreadable_audio":
            raise
        if needs_sph2pipe(source):
            return Sph2pipeDecoder(source)
        demuxer = recognise(source)
        if demuxer is None:
            raise
    return FfmpegDecoder(source, demuxer)


class Recording:
    """An audio file that is open. Parts of it are read in the order of their starts; they may overlap.

    They equal slices of the file decoded whole, sample for sample. Seeks are not exact in MP3, Vorbis, Opus and what
    FFmpeg decodes: there all that precedes a part is decoded too, but once only. What no later part needs is dropped.
    """

    def __init__(self, source: AudioBytes) -> None:
        self.source = source
        self._decoder = _open_decoder(source)
        self._failed: RejectRecord | None = None
        self.info = self._decoder.info
        self._begin = self._position = 0  # of the samples that are kept; the decoder is at their end
        self._kept: list[np.ndarray] = []

    def read(self, start: int = 0, num_samples: int | None = None, channel: Channel = None) -> np.ndarray:
        """Decode ``num_samples`` (by default all that follow) from sample ``start`` on: float32 (num_samples,).

        Of several channels ``channel`` is decoded, or the mean of all for "downmix".

        Equal to a slice of ``soundfile.read(path, dtype="float32")``, sample for sample, or of what FFmpeg decodes. A
        whole file must hold what its header promises; of a segment only the segment itself is looked at.

        Raises:
            RejectRecord: unsupported_channels, unreadable_audio (decoding fails), non_finite_audio, empty_audio,
                duration_mismatch (fewer samples than the header promised or were asked for).
            ValueError: ``start`` or ``num_samples`` is negative, or ``start`` is before that of an earlier part, and
                seeks are not exact.
        """
        return to_float(self.read_stored(start, num_samples, channel))

    def read_stored(self, start: int = 0, num_samples: int | None = None, channel: Channel = None) -> np.ndarray:
        """Decode as ``read``, but of a file that holds 16 bits int16 (num_samples,), unless channels are mixed."""
        channel = choose_channel(channel, self.info.channels)
        wanted = self._check_claims(start, num_samples)
        audio = self._take(start, start + wanted, channel)
        self._check_samples(audio, len(audio), wanted)
        return audio

    def blocks(self) -> Iterator[np.ndarray]:
        """Decode all of a mono recording block by block; rejects as ``read`` does."""
        choose_channel(None, self.info.channels)
        num_samples = self._check_claims(0, None)
        for start in range(0, num_samples, _BLOCK_SAMPLES):
            wanted = min(_BLOCK_SAMPLES, num_samples - start)
            block = to_float(self._take(start, start + wanted, None))
            self._check_samples(block, start + len(block), start + wanted)
            yield block

    def check_end(self) -> None:
        """Raise RejectRecord where the file ends before its header says, or its pages are damaged."""
        self._decoder.check_end()

    def _check_claims(self, start: int, num_samples: int | None) -> int:
        """Return how many samples are wanted, where the recording can have them."""
        name, info = self.source.name, self.info
        if start < 0 or (num_samples is not None and num_samples < 0):
            raise ValueError(f"negative segment: start {start}, num_samples {num_samples}")
        if num_samples == 0:
            raise RejectRecord("empty_audio", f"the segment of {name} has no samples")
        wanted = max(info.num_samples - start, 1) if num_samples is None else num_samples
        if start + wanted > info.num_samples:
            detail = f"{name} has {info.num_samples} samples, the segment needs {start + wanted}"
            raise RejectRecord("duration_mismatch", detail)
        if num_samples is None:
            self.check_end()
        size = self.source.size
        if wanted > max(SAMPLES_IN_ANY_SIZE, size * MAX_SAMPLES_PER_BYTE):
            raise RejectRecord("unreadable_audio", f"{name}: {size} bytes are too few for {wanted} samples of speech")
        return wanted

    def _check_samples(self, audio: np.ndarray, found: int, wanted: int) -> None:
        if found < wanted:
            detail = f"{found} samples decoded instead of {wanted}"
            raise RejectRecord("duration_mismatch", f"{self.source.name}: {detail}")
        check_finite(audio, self.source.name)

    def _take(self, start: int, end: int, channel: Channel) -> np.ndarray:
        """Return the samples from ``start`` to ``end``, or fewer where the decoder gives up."""
        self._go_to(start)
        parts = []
        # Blocks, so that a wrong header cannot ask for more memory than there is audio.
        # Of many channels fewer samples, so that a block is as large.
        block_samples = _BLOCK_SAMPLES * 8 // max(8, self.info.channels)
        while self._position < end and self._decode(min(block_samples, end - self._position)):
            self._drop_before(start)
        position = self._begin
        for block in self._kept:
            part = block[max(0, start - position) : max(0, end - position)]
            if channel is not None:
                part = to_float(part).mean(axis=1, dtype=np.float32) if channel == "downmix" else part[:, channel]
            parts.append(part)
            position += len(block)
        parts = [part for part in parts if len(part)]
        if not parts:
            return np.empty(0, dtype=np.float32)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def close(self) -> None:
        self._decoder.close()

    def _go_to(self, start: int) -> None:
        if self._failed is not None and self.info.exact_seeks:  # what follows the damage may be read
            self._decoder.close()
            self._decoder = _open_decoder(self.source)
            self._failed, self._begin, self._position = None, -1, -1
        if self.info.exact_seeks and not self._begin <= start <= self._position:
            self._kept.clear()
            self._seek(start)
        elif start < self._begin:
            raise ValueError(f"sample {start} of {self.source.name} was dropped: parts are read in order")
        self._drop_before(start)

    def _seek(self, start: int) -> None:
        try:
            self._decoder.seek(start)
        except RejectRecord as reject:
            self._failed = reject
            raise
        self._begin = self._position = start

    def _decode(self, num_samples: int) -> bool:
        """Decode the next samples; False at the end."""
        if self._failed is not None:
            raise RejectRecord(self._failed.reason, self._failed.detail)
        try:
            block = self._decoder.read(num_samples)
        except RejectRecord as reject:
            self._failed = reject
            raise
        self._kept.append(block)
        self._position += len(block)
        return len(block) == num_samples

    def _drop_before(self, start: int) -> None:
        while self._kept and self._begin + len(self._kept[0]) <= start:
            self._begin += len(self._kept.pop(0))


def choose_channel(wanted: Any, channels: int) -> Channel:
    """Return the channel to read of audio with so many: None of mono audio, of which channel 0 and the mean are itself.

    Raises:
        RejectRecord: ``unsupported_channels`` where there is no such channel, or none is wanted of several.
    """
    if wanted is None and channels > 1:
        raise RejectRecord(
            "unsupported_channels",
            f"the audio has {channels} channels; channel: 0 or another number takes one of them, downmix their mean",
        )
    if wanted not in (None, "downmix") and (type(wanted) is not int or not 0 <= wanted < channels):
        raise RejectRecord("unsupported_channels", f"there is no channel {str(wanted)[:40]} in audio of {channels}")
    return None if channels == 1 else wanted
