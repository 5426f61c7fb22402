"""Reading of audio files: their headers, and their samples as a whole or in part.

Everything goes through libsndfile, by a file's content and never by its name. What is wrong with a recording
becomes a ``RejectRecord``; what is wrong with the machine (say, too many open files) stays an ``OSError``, so
that the unit is tried again.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import soundfile as sf

from sharmill.audio import mp3, ogg
from sharmill.errors import RejectRecord
from sharmill.manifest import Channel

# Our names where they are not libsndfile's format in lower case.
_OTHER_NAMES: Final = {"OPUS": "opus", "MPEG_LAYER_I": "mp1", "MPEG_LAYER_II": "mp2", "WAVEX": "wav"}

# Subtypes without memory between samples: a seek lands on the same values as a decode from the start.
_MEMORYLESS: Final = ("PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW")
_NO_SUCH_FILE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_BLOCK_SAMPLES: Final = 1 << 20
_MIN_SAMPLING_RATE: Final = 1000  # below, no speech is left
_MAX_SAMPLING_RATE: Final = 655350  # of FLAC
_UNKNOWN_LENGTH: Final = (1 << 63) - 1  # libsndfile's SF_COUNT_MAX
# No frame of MPEG audio, ADPCM or GSM holds more; beyond it a header is corrupt and must not size an array.
_MAX_SAMPLES_PER_BYTE: Final = 100
# FLAC holds silence in next to nothing. More samples than these, 128 MiB of them, need bytes as well.
_SAMPLES_IN_ANY_SIZE: Final = 1 << 25
# Writers to a pipe leave 0xFFFFFFFF (ffmpeg) or 0x7FFFF000 (sox) for a size that they cannot know.
_STREAMED_BYTES: Final = 0x7FFF0000
# libsndfile shortens a chunk that goes beyond the end of the file, and says so only in its log.
_SHORTENED_CHUNK: Final = re.compile(
    r"^\s*(?:data|SSND|Data Size|Riff size|riff)\s*: (\d+) \(should be (\d+)\)", re.MULTILINE
)


@dataclass(frozen=True)
class AudioInfo:
    """The header of an audio file.

    Args:
        sampling_rate: in Hz.
        num_samples: per channel.
        channels: number of channels.
        format: "flac", "wav", "mp3", "opus", "ogg" (Vorbis), "aiff", ...: by content.
        exact_seeks: a part decodes to the same samples wherever the decoder starts, on every kind of CPU.
    """

    sampling_rate: int
    num_samples: int
    channels: int
    format: str
    exact_seeks: bool = field(default=True, compare=False)


def probe(path: str | os.PathLike[str]) -> AudioInfo:
    """Read the header of an audio file; any number of channels.

    Only an MP3 without a length in its first frame is read as a whole, to count its frames.

    Raises:
        RejectRecord: missing_audio, empty_audio, unreadable_audio (not a regular file, no permission, not
            audio, no length in the header).
    """
    with open_regular(path) as source, _open_sound(source, str(path)) as sound:
        return _header(sound, source, str(path))


def probe_bytes(data: bytes, name: str = "audio data") -> AudioInfo:
    """Read the header of an audio file in memory, as ``probe``; errors call it ``name``."""
    source = io.BytesIO(data)
    with _open_sound(source, name) as sound:
        return _header(sound, source, name)


def read(
    path: str | os.PathLike[str], start: int = 0, num_samples: int | None = None, channel: Channel = None
) -> tuple[np.ndarray, int]:
    """Decode a mono file, or ``num_samples`` of it (by default all that follow) from sample ``start`` on.

    Of a file with several channels ``channel`` is decoded, or the mean of all for "downmix".

    Equal to a slice of ``soundfile.read(path, dtype="float32")``, sample for sample. libsndfile's seeks are
    not exact in MP3, Vorbis and Opus: what precedes the segment is decoded too, and held in memory in MP3.

    A whole file must hold what its header promises; of a segment only the segment itself is looked at.

    Returns:
        float32 samples (samples,) and the sampling rate in Hz.

    Raises:
        RejectRecord: what ``probe`` raises, and unsupported_channels, unreadable_audio (decoding fails),
            non_finite_audio, duration_mismatch (fewer samples than the header promised or were asked for).
        ValueError: ``start`` or ``num_samples`` is negative.
    """
    if start < 0 or (num_samples is not None and num_samples < 0):
        raise ValueError(f"negative segment: start {start}, num_samples {num_samples}")
    with open_regular(path) as source:
        return _decode(source, str(path), start, num_samples, channel)


def decode(
    data: bytes,
    start: int = 0,
    num_samples: int | None = None,
    channel: Channel = None,
    name: str = "audio data",
) -> tuple[np.ndarray, int]:
    """Decode an audio file in memory, or a part of it, as ``read`` does a file; errors call it ``name``."""
    return _decode(io.BytesIO(data), name, start, num_samples, channel)


def decode_blocks(data: bytes, name: str = "audio data") -> Iterator[tuple[np.ndarray, int]]:
    """Decode a mono file in memory block by block, each with the sampling rate; rejects as ``decode`` does."""
    return _decode_blocks(io.BytesIO(data), name, 0, None, None)


def check_finite(audio: np.ndarray, name: str) -> None:
    """Raise RejectRecord ``non_finite_audio`` where samples are NaN or infinite."""
    if not np.isfinite(audio).all():
        raise RejectRecord("non_finite_audio", f"{name} has NaN or infinite samples")


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading without a buffer: its descriptor is libsndfile's to move.

    Raises:
        RejectRecord: missing_audio, unreadable_audio (not a regular file, no permission).
    """
    path = Path(path)
    try:
        # Before opening: opening a FIFO would wait for its writer, opening a device may do anything.
        if not stat.S_ISREG(path.stat().st_mode):
            raise RejectRecord("unreadable_audio", f"{path} is not a regular file")
        return path.open("rb", buffering=0)
    except PermissionError:
        raise RejectRecord("unreadable_audio", f"no permission to read {path}") from None
    except ValueError:  # a NUL or a lone surrogate
        raise RejectRecord("missing_audio", f"{str(path)!r} cannot be the name of a file") from None
    except OSError as error:
        if error.errno not in _NO_SUCH_FILE:
            raise
        raise RejectRecord("missing_audio", f"{path}: {error.strerror}") from None


@contextmanager
def _open_sound(source: BinaryIO, name: str) -> Iterator[sf.SoundFile]:
    """Open ``source`` with libsndfile; its errors inside the block become rejects."""
    if _size(source) == 0:
        raise RejectRecord("empty_audio", f"{name} has no bytes")
    # Not the path: libsndfile takes anything called .raw, .vox, .gsm or .au for audio.
    target = source if isinstance(source, io.BytesIO) else source.fileno()
    try:
        with sf.SoundFile(target, closefd=False) as sound:
            yield sound
    except sf.LibsndfileError as error:
        # Not str(error), which may hold the address of an object.
        raise RejectRecord("unreadable_audio", f"{name}: {error.error_string}") from None


def _header(sound: sf.SoundFile, source: BinaryIO, name: str) -> AudioInfo:
    num_samples = sound.frames
    if not _MIN_SAMPLING_RATE <= sound.samplerate <= _MAX_SAMPLING_RATE:
        raise RejectRecord("unreadable_audio", f"{name} claims a sampling rate of {sound.samplerate} Hz")
    if num_samples == _UNKNOWN_LENGTH:
        raise RejectRecord("unreadable_audio", f"{name} was written to a pipe and does not state its length")
    if sound.subtype == "MPEG_LAYER_III":
        num_samples = mp3.count_samples(partial(_bytes_from, source), name, num_samples)
    if num_samples <= 0:
        raise RejectRecord("empty_audio", f"{name} has no samples")
    format = _OTHER_NAMES.get(sound.subtype) or _OTHER_NAMES.get(sound.format) or sound.format.lower()
    return AudioInfo(sound.samplerate, num_samples, sound.channels, format, _has_exact_seeks(sound))


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


def _decode(
    source: BinaryIO, name: str, start: int, num_samples: int | None, channel: Channel
) -> tuple[np.ndarray, int]:
    blocks, rate = [np.empty(0, dtype=np.float32)], 0
    for block, rate in _decode_blocks(source, name, start, num_samples, channel):  # noqa: B007
        blocks.append(block)
    return np.concatenate(blocks), rate


def _decode_blocks(
    source: BinaryIO, name: str, start: int, num_samples: int | None, channel: Channel
) -> Iterator[tuple[np.ndarray, int]]:
    found = 0
    with _open_sound(source, name) as sound:
        info = _header(sound, source, name)
        channel = choose_channel(channel, info.channels)
        if num_samples == 0:
            raise RejectRecord("empty_audio", f"the segment of {name} has no samples")
        wanted = max(info.num_samples - start, 1) if num_samples is None else num_samples
        if start + wanted > info.num_samples:
            detail = f"{name} has {info.num_samples} samples, the segment needs {start + wanted}"
            raise RejectRecord("duration_mismatch", detail)
        if num_samples is None:
            _check_container(sound, source, name)
        for block in _read_blocks(sound, start, wanted, _size(source), name, channel):
            check_finite(block, name)
            found += len(block)
            yield block, info.sampling_rate
    if found < wanted:
        raise RejectRecord("duration_mismatch", f"{name}: {found} samples decoded instead of {wanted}")


def _has_exact_seeks(sound: sf.SoundFile) -> bool:
    return sound.format == "FLAC" or sound.subtype in _MEMORYLESS


def _read_blocks(
    sound: sf.SoundFile, start: int, wanted: int, size: int, name: str, channel: Channel
) -> Iterator[np.ndarray]:
    """Decode ``wanted`` samples from ``start`` on, or fewer where the decoder gives up."""
    end = start + wanted
    if wanted > max(_SAMPLES_IN_ANY_SIZE, size * _MAX_SAMPLES_PER_BYTE):
        raise RejectRecord("unreadable_audio", f"{name}: {size} bytes are too few for {wanted} samples of speech")
    seekable = _has_exact_seeks(sound)
    # Blocks, so that a wrong header cannot ask for more memory than there is audio. But soundfile seeks after
    # every block, after which MP3 decodes to other values: it is read at one go.
    in_blocks = seekable or sound.format == "OGG"
    if not in_blocks and end > size * _MAX_SAMPLES_PER_BYTE:
        raise RejectRecord("unreadable_audio", f"{name}: {size} bytes cannot hold {end} samples")
    position = start if seekable else 0
    sound.seek(position)  # also for 0: MP3 decodes to other last bits without it, and soundfile.read does it
    # Of many channels fewer samples, so that a block is as large.
    block_samples = _BLOCK_SAMPLES * 8 // max(8, sound.channels)
    while position < end:
        asked = min(block_samples, end - position) if in_blocks else end
        got = sound.read(asked, dtype="float32")
        if position + len(got) > start:
            block = got[max(0, start - position) :]
            if channel is not None:
                block = block.mean(axis=1, dtype=np.float32) if channel == "downmix" else block[:, channel].copy()
            yield block
        position += len(got)
        if len(got) < asked:
            break


def _check_container(sound: sf.SoundFile, source: BinaryIO, name: str) -> None:
    """Reject what libsndfile repairs in silence: an early end, and in Ogg lost pages, which Opus conceals."""
    if sound.format == "OGG":
        stream = _bytes_from(source, 0)
        cut_off = ogg.ends_inside_page(stream)
        if not cut_off and not ogg.is_intact(stream):
            raise RejectRecord("unreadable_audio", f"{name}: a page of the Ogg stream is damaged")
    else:
        sizes = (map(int, pair) for pair in _SHORTENED_CHUNK.findall(sound.extra_info))
        cut_off = any(found < declared < _STREAMED_BYTES for declared, found in sizes)
    if cut_off:
        raise RejectRecord("duration_mismatch", f"{name} ends before its header says")


def _bytes_from(source: BinaryIO, start: int, size: int | None = None) -> bytes:
    """Read bytes of ``source``, apart from its position, which is libsndfile's."""
    size = _size(source) if size is None else size
    if isinstance(source, io.BytesIO):
        return bytes(source.getbuffer()[start : start + size])
    return os.pread(source.fileno(), size, start)


def _size(source: BinaryIO) -> int:
    return source.getbuffer().nbytes if isinstance(source, io.BytesIO) else os.fstat(source.fileno()).st_size
