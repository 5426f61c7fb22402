"""Reading of audio files: their headers, and all or some of their samples.

The decoder is chosen by the content of a file, never by its name; see ``ffmpeg.open_decoder``. A fault of the recording
becomes a ``RejectRecord``. A fault of the machine, such as too many open files, stays an ``OSError``, so that the unit
of work is tried again.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from sharmill.audio.arrow import read_audio
from sharmill.audio.audio_bytes import AudioBytes
from sharmill.audio.decoder import (
    MAX_SAMPLES_PER_BYTE,
    MAX_SAMPLING_RATE,
    MIN_SAMPLING_RATE,
    SAMPLES_IN_ANY_SIZE,
    AudioInfo,
    check_finite,
    to_float,
)
from sharmill.audio.ffmpeg import open_decoder
from sharmill.audio.flac import flac_header
from sharmill.errors import RejectRecord
from sharmill.files.location import Location, RemoteLocation, open_location
from sharmill.files.regular import NotRegularError
from sharmill.files.similar import describe_similar
from sharmill.manifest import Channel, Member

_NO_SUCH_FILE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_BLOCK_SAMPLES: Final = 1 << 20
_NO_SAMPLES: Final = np.empty(0, dtype=np.float32)


def probe(path: str | Path, *, whole: bool = False) -> AudioInfo:
    """Read the header of an audio file with any number of channels.

    An MP3 is read completely to count its frames, unless its first frame states the length of the file. Files that need
    FFmpeg are decoded once to count their samples.

    Args:
        path: the path of the file.
        whole: also reject WAV, AIFF and AU files that end earlier than their headers state.

    Raises:
        RejectRecord: missing_audio, empty_audio, unreadable_audio (not a regular file, no permission, not audio),
            duration_mismatch (more audio than the header states).
    """
    with open_recording(path) as recording:
        # The headers of these formats state the size of the samples, so missing samples are detected without reading
        # any.
        if whole and recording.info.format in ("wav", "aiff", "au"):
            recording.check_end()
        return recording.info


def probe_bytes(data: bytes | memoryview, name: str = "audio data") -> AudioInfo:
    """Read the header of an audio file in memory, as ``probe`` does; ``name`` appears in errors."""
    num_samples, channels, rate = flac_header(data) or (0, 0, 0)
    # If the FLAC header is plausible, do not open a decoder, which would take ten times as long.
    if 0 < num_samples <= len(data) * MAX_SAMPLES_PER_BYTE and MIN_SAMPLING_RATE <= rate <= MAX_SAMPLING_RATE:
        return AudioInfo(rate, num_samples, channels, "flac")
    with open_bytes(AudioBytes(name, data)) as recording:
        return recording.info


def decode_bytes(
    data: bytes,
    start: int = 0,
    num_samples: int | None = None,
    channel: Channel = None,
    name: str = "audio data",
) -> tuple[np.ndarray, int]:
    """Decode all or a part of an audio file in memory, as ``Recording.read`` does; ``name`` appears in errors.

    Returns:
        float32 samples (samples,) and the sampling rate in Hz.
    """
    with open_bytes(AudioBytes(name, data)) as recording:
        return recording.read(start, num_samples, channel), recording.info.sampling_rate


def open_audio(path: str | Location) -> BinaryIO:
    """Open a regular file for unbuffered reading, because libsndfile moves the position of its descriptor.

    Raises:
        RejectRecord: missing_audio, unreadable_audio (not a regular file, no permission).
    """
    try:
        return open_location(path, buffering=0)
    except (PermissionError, NotRegularError) as error:
        why = "there is no permission to read it" if isinstance(error, PermissionError) else "it is not a regular file"
        raise RejectRecord("unreadable_audio", f"{path}: {why}") from None
    except ValueError as error:
        if isinstance(error.__cause__, OSError):
            raise RejectRecord("missing_audio", f"{path}: {error.__cause__.strerror}") from None
        # The name contains a NUL or a lone surrogate.
        raise RejectRecord("missing_audio", f"{str(path)!r} is not a valid file name") from None
    except OSError as error:
        if error.errno not in _NO_SUCH_FILE:
            raise
        hint = "" if isinstance(path, RemoteLocation) else describe_similar(path)
        raise RejectRecord("missing_audio", f"{path}: {error.strerror}{hint}") from None


@contextmanager
def open_recording(path: str | Path, member: Member | None = None, name: str = "") -> "Iterator[Recording]":
    """Open an audio file, or a member of a container.

    Args:
        path: the path of the file or the container.
        member: the place of the audio in the container; None for a file.
        name: the name of the member in errors.

    Raises:
        RejectRecord: see ``probe``; also if the container is missing or ends before the member does.
    """
    if member is None:
        with open_audio(path) as file, open_bytes(AudioBytes(str(path), file)) as recording:
            yield recording
    elif member.kind != "bytes":
        with open_bytes(AudioBytes(name, read_audio(Path(path), member))) as recording:
            yield recording
    else:
        with open_audio(path) as file:
            if os.fstat(file.fileno()).st_size < member.start + member.size:
                raise RejectRecord("unreadable_audio", f"{path} ends within the recording at byte {member.start}")
            with open_bytes(AudioBytes(name, file, member.start, member.size)) as recording:
                yield recording


@contextmanager
def open_bytes(source: AudioBytes) -> "Iterator[Recording]":
    """Open the audio file with these bytes; raises the same errors as ``open_recording``."""
    if source.size == 0:
        raise RejectRecord("empty_audio", f"{source.name} has no bytes")
    with closing(Recording(source)) as recording:
        yield recording


class Recording:
    """An open audio file, from which parts are read in the order of their starts; parts may overlap.

    Each part equals a slice of the completely decoded file, sample for sample. Seeks are not exact in MP3, Vorbis, Opus
    and all formats that FFmpeg decodes. In these formats, everything before a part is decoded too, but only once.
    Samples that no later part needs are dropped.
    """

    def __init__(self, source: AudioBytes) -> None:
        self.source = source
        self._decoder = open_decoder(source)
        self._failed: RejectRecord | None = None
        self.info = self._decoder.info
        rate = self.info.sampling_rate
        if not (MIN_SAMPLING_RATE <= rate <= MAX_SAMPLING_RATE):
            raise RejectRecord("unreadable_audio", f"{source.name} claims a sampling rate of {rate} Hz")
        if self.info.num_samples <= 0:
            raise RejectRecord("empty_audio", f"{source.name} has no samples")
        # Number of the first kept sample, and end of the kept samples, which is the position of the decoder.
        self._begin = self._position = 0
        self._kept = _NO_SAMPLES

    def read(self, start: int = 0, num_samples: int | None = None, channel: Channel = None) -> np.ndarray:
        """Decode a part of one channel as float32 (num_samples,).

        The samples equal a slice of ``soundfile.read(path, dtype="float32")``, or of FFmpeg's output. If
        ``num_samples`` is None, the file is also checked against its header.

        Args:
            start: the first sample.
            num_samples: the number of samples; by default all that follow.
            channel: the number of the channel if there are several, or "downmix" for the mean of all channels.

        Raises:
            RejectRecord: unsupported_channels, unreadable_audio (decoding fails), non_finite_audio, empty_audio,
                duration_mismatch (fewer samples than the header states or than requested).
            ValueError: ``start`` or ``num_samples`` is negative, or ``start`` lies before an earlier part in a format
                without exact seeks.
        """
        return to_float(self.read_stored(start, num_samples, channel))

    def read_stored(self, start: int = 0, num_samples: int | None = None, channel: Channel = None) -> np.ndarray:
        """Decode as ``read`` does, but return int16 (num_samples,) for 16-bit files unless channels are mixed."""
        channel = choose_channel(channel, self.info.channels)
        wanted = self._check_claims(start, num_samples)
        try:
            audio = self._take(start, start + wanted, channel)
        except RejectRecord as reject:
            # Otherwise, the next read would return later samples in place of those that failed.
            self._failed = reject
            raise
        if len(audio) < wanted:
            raise RejectRecord(
                "duration_mismatch", f"{self.source.name}: decoded {len(audio)} samples instead of {wanted}"
            )
        check_finite(audio, self.source.name)
        return audio

    def check_end(self) -> None:
        """Raise RejectRecord if the file is damaged or truncated in a way that decoding does not reveal."""
        self._decoder.check_end()

    def _check_claims(self, start: int, num_samples: int | None) -> int:
        """Return the number of samples to read; raise RejectRecord if the recording cannot hold them."""
        name, info = self.source.name, self.info
        if start < 0 or (num_samples is not None and num_samples < 0):
            raise ValueError(f"negative segment: start {start}, num_samples {num_samples}")
        wanted = max(info.num_samples - start, 1) if num_samples is None else num_samples
        end, size = start + wanted, self.source.size
        if num_samples == 0:
            raise RejectRecord("empty_audio", f"the segment of {name} has no samples")
        if end > info.num_samples:
            raise RejectRecord(
                "duration_mismatch", f"{name} has {info.num_samples} samples, but the segment needs {end}"
            )
        if num_samples is None:
            self.check_end()
        if wanted > max(SAMPLES_IN_ANY_SIZE, size * MAX_SAMPLES_PER_BYTE):
            raise RejectRecord("unreadable_audio", f"{name}: {size} bytes cannot hold {wanted} samples of speech")
        return wanted

    def _take(self, start: int, end: int, channel: Channel) -> np.ndarray:
        """Return the samples from ``start`` to ``end``, or fewer if the decoder stops early."""
        self._go_to(start)
        parts = [self._kept]
        # Blocks are read one by one, so that a wrong header cannot demand more memory than the audio takes. With more
        # than 8 channels, a block has fewer samples, so that its size in bytes stays the same.
        block_samples = _BLOCK_SAMPLES * 8 // max(8, self.info.channels)
        found = 1
        try:
            while self._position < end and found:
                if self._failed is not None:
                    raise RejectRecord(self._failed.reason, self._failed.detail)
                parts.append(self._decoder.read(min(block_samples, end - self._position)))
                found = len(parts[-1])
                self._position += found
                if self._position <= start:
                    parts.clear()
        finally:
            parts = [part for part in parts if len(part)]
            self._kept = np.concatenate(parts) if len(parts) > 1 else parts[0] if parts else _NO_SAMPLES
            self._begin = self._position - len(self._kept)
        audio = self._kept[max(0, start - self._begin) : max(0, end - self._begin)]
        if channel is None or not len(audio):
            return audio
        return to_float(audio).mean(axis=1, dtype=np.float32) if channel == "downmix" else audio[:, channel]

    def close(self) -> None:
        self._decoder.close()

    def _go_to(self, start: int) -> None:
        if self._failed is not None and self.info.exact_seeks:  # the audio after the damage may be readable
            self._decoder.close()
            self._decoder = open_decoder(self.source)
            self._failed, self._begin, self._position = None, -1, -1
        if self.info.exact_seeks and not self._begin <= start <= self._position:
            self._kept = _NO_SAMPLES
            self._decoder.seek(start)
            self._begin = self._position = start
        elif start < self._begin:
            raise ValueError(f"sample {start} of {self.source.name} is no longer kept: read parts in ascending order")
        self._kept = self._kept[start - self._begin :]
        self._begin = self._position - len(self._kept)


def choose_channel(wanted: Any, channels: int) -> Channel:
    """Return the channel to read from audio with ``channels`` channels; None for mono, which needs no choice.

    Raises:
        RejectRecord: ``unsupported_channels`` if the channel does not exist, or several exist and none was chosen.
    """
    is_there = wanted in (None, "downmix") or (type(wanted) is int and 0 <= wanted < channels)
    if wanted is None and channels > 1:
        raise RejectRecord(
            "unsupported_channels",
            f"the audio has {channels} channels; choose one with channel: 0 or another number, or all with downmix",
        )
    if not is_there:
        raise RejectRecord("unsupported_channels", f"there is no channel {str(wanted)[:40]} in audio with {channels}")
    return None if channels == 1 else wanted
