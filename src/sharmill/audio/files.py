"""Audio files and arrays: look at, decode, cut, resample, encode.

Everything goes through libsndfile, by a file's content and never by its name. What is wrong with a recording
becomes a ``RejectRecord``; what is wrong with the machine (say, too many open files) stays an ``OSError``, so
that the unit is tried again.
"""

from __future__ import annotations

import errno
import io
import math
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

import numpy as np
import soundfile as sf

from sharmill.audio import ogg
from sharmill.errors import ConfigError, RejectRecord

if TYPE_CHECKING:
    import torch

# Our name -> libsndfile's format and subtype, and the sampling rates that can be written (None: any).
_ENCODINGS: Final[dict[str, tuple[str, str, tuple[int, ...] | None]]] = {
    "flac": ("FLAC", "PCM_16", None),
    "wav": ("WAV", "PCM_16", None),
    "mp3": ("MP3", "MPEG_LAYER_III", (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)),
    "opus": ("OGG", "OPUS", (8000, 12000, 16000, 24000, 48000)),
}
ENCODERS: Final[tuple[str, ...]] = tuple(_ENCODINGS)
# Our names where they are not libsndfile's format in lower case.
_OTHER_NAMES: Final = {"OPUS": "opus", "MPEG_LAYER_I": "mp1", "MPEG_LAYER_II": "mp2", "WAVEX": "wav"}

# Subtypes without memory between samples: a seek lands on the same values as a decode from the start.
_MEMORYLESS: Final = ("PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW")
_NO_SUCH_FILE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_BLOCK_SAMPLES: Final = 1 << 20
_OGG_SERIAL: Final = 1
_FLAC_MAX_ANY_RATE: Final = 65535  # beyond, only multiples of 10 Hz
_MAX_FILTER_SIZE: Final = 1 << 23
_MIN_SAMPLING_RATE: Final = 1000  # below, no speech is left
_MAX_SAMPLING_RATE: Final = 655350  # of FLAC
_UNKNOWN_LENGTH: Final = (1 << 63) - 1  # libsndfile's SF_COUNT_MAX
# No frame of MPEG audio, ADPCM or GSM holds more; beyond it a header is corrupt and must not size an array.
_MAX_SAMPLES_PER_BYTE: Final = 100
# Writers to a pipe leave 0xFFFFFFFF (ffmpeg) or 0x7FFFF000 (sox) for a size that they cannot know.
_STREAMED_BYTES: Final = 0x7FFF0000
# libsndfile shortens a chunk that goes beyond the end of the file, and says so only in its log.
_SHORTENED_CHUNK: Final = re.compile(
    r"^\s*(?:data|SSND|Data Size|Riff size|riff)\s*: (\d+) \(should be (\d+)\)", re.MULTILINE
)

# Bit rates in kbit/s by index, and sampling rates, by the version bits of a frame header: MPEG 1, 2 and 2.5.
_MPEG1_KBPS: Final = (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_MPEG2_KBPS: Final = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
_MP3_RATES: Final = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}
_MP3_TRAILERS: Final = (b"TAG", b"APETAGEX", b"LYRICSBEGIN", b"ID3")


@dataclass(frozen=True)
class AudioInfo:
    """What the header of an audio file says.

    Args:
        sampling_rate: in Hz.
        num_samples: per channel.
        channels: number of channels.
        format: "flac", "wav", "mp3", "opus", "ogg" (Vorbis), "aiff", ...: by content.
    """

    sampling_rate: int
    num_samples: int
    channels: int
    format: str


def probe(path: str | os.PathLike[str]) -> AudioInfo:
    """The header of an audio file; any number of channels.

    Only an MP3 without a length in its first frame is read as a whole, to count its frames.

    Raises:
        RejectRecord: missing_audio, empty_audio, unreadable_audio (not a regular file, no permission, not
            audio, no length in the header).
    """
    with _open_file(path) as source, _open_sound(source, str(path)) as sound:
        return _header(sound, source, str(path))


def probe_bytes(data: bytes) -> AudioInfo:
    """Like ``probe``, for the content of a file."""
    source = io.BytesIO(data)
    with _open_sound(source, "audio data") as sound:
        return _header(sound, source, "audio data")


def read(path: str | os.PathLike[str], start: int = 0, num_samples: int | None = None) -> tuple[np.ndarray, int]:
    """Decode a mono file, or ``num_samples`` of it (by default all that follow) from sample ``start`` on.

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
    with _open_file(path) as source:
        return _decode(source, str(path), start, num_samples)


def decode(data: bytes) -> tuple[np.ndarray, int]:
    """Like ``read`` for a whole file, given its content."""
    return _decode(io.BytesIO(data), "audio data", 0, None)


def segment_bounds(offset: float, duration: float, sampling_rate: int) -> tuple[int, int]:
    """First sample and number of samples of a segment given in seconds; each is rounded as Lhotse rounds it.

    Raises:
        ValueError: ``offset`` or ``duration`` is negative or not finite.
    """
    if not (0 <= offset < math.inf and 0 <= duration < math.inf):
        raise ValueError(f"not a segment: offset {offset}, duration {duration}")
    return _round_half_up(offset * sampling_rate), _round_half_up(duration * sampling_rate)


def resampled_length(num_samples: int, from_rate: int, to_rate: int) -> int:
    """Number of samples that ``resample`` makes of ``num_samples``; of a handful it can make 0."""
    if from_rate == to_rate:
        return num_samples
    # Through seconds in floating point, since that is how Lhotse's Recording.resample computes it.
    return _round_half_up(num_samples / from_rate * to_rate)


def resample(audio: np.ndarray, from_rate: int, to_rate: int) -> np.ndarray:
    """Resample float32 ``audio`` (samples,) with torchaudio's default windowed sinc; no-op for equal rates.

    The samples and their number are those of Lhotse's ``Recording.resample(to_rate).load_audio()`` in a
    process with one torch thread, such as a DataLoader worker.

    Returns:
        float32 samples (resampled_length(len(audio), from_rate, to_rate),).
    """
    if from_rate == to_rate or len(audio) == 0:
        return audio
    _check_ratio(from_rate, to_rate)
    import torch

    waveform = torch.from_numpy(np.require(audio, np.float32, ["C", "W"]))[None]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the last bits of a convolution depend on the number of threads
    try:
        with torch.no_grad():
            resampled = _resampler(from_rate, to_rate)(waveform)[0].numpy()
    finally:
        torch.set_num_threads(num_threads)
    length = resampled_length(len(audio), from_rate, to_rate)
    if len(resampled) < length:  # torchaudio computes its length in float32: short above some 2**24 samples
        return np.pad(resampled, (0, length - len(resampled)), mode="reflect")
    return resampled[:length]


def check_encoder(format: str, sampling_rate: int) -> None:
    """Check, before any work, that ``encode`` can write this format at this rate.

    Raises:
        ConfigError: it cannot; the message says what to set instead.
    """
    if format not in _ENCODINGS:
        raise ConfigError(f"audio format {format!r} cannot be written; choose one of {', '.join(ENCODERS)}")
    rates = _ENCODINGS[format][2]
    if rates is not None and sampling_rate not in rates:
        raise ConfigError(
            f"{format} cannot hold audio at {sampling_rate} Hz: set sampling_rate to one of "
            f"{', '.join(map(str, rates))}, or audio_format to flac"
        )
    if format == "flac" and sampling_rate > _FLAC_MAX_ANY_RATE and sampling_rate % 10:
        raise ConfigError(f"flac cannot hold audio at {sampling_rate} Hz: set sampling_rate, or audio_format to wav")


def encode(audio: np.ndarray, sampling_rate: int, format: str) -> bytes:
    """Encode mono ``audio`` (samples,) as one of ``ENCODERS``; values outside [-1, 1] are clipped.

    Same samples, same bytes, in every process and at every time (one build of libsndfile, one kind of CPU).
    flac and wav hold 16 bits: what was decoded from 16 bits comes back exactly. All four keep rate and number
    of samples as ``probe_bytes`` and ``decode`` report them: mp3 by the delays in its Info frame, opus by
    pre-skip and last granule position. Other readers may find more samples (mp3) or 48 kHz (opus).

    Raises:
        ConfigError: unknown format, or a sampling rate that it cannot hold.
        RejectRecord: empty_audio, non_finite_audio.
        ValueError: ``audio`` is not one-dimensional.
    """
    check_encoder(format, sampling_rate)
    if audio.ndim != 1:
        raise ValueError(f"expected audio of shape (samples,), got {audio.shape}")
    if len(audio) == 0:
        raise RejectRecord("empty_audio", "there are no samples to encode")
    _check_finite(audio, "audio to encode")
    # libsndfile clips for the 16-bit formats only; MP3 and Opus would keep the overshoot.
    clipped = np.clip(np.asarray(audio, dtype=np.float32), -1.0, 1.0)
    container, subtype, _ = _ENCODINGS[format]
    buffer = io.BytesIO()
    sf.write(buffer, clipped, sampling_rate, format=container, subtype=subtype)
    data = buffer.getvalue()
    return ogg.with_serial(data, _OGG_SERIAL) if container == "OGG" else data


def _open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """A regular file, opened for reading without a buffer: its descriptor is libsndfile's to move."""
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
        num_samples = _mp3_length(source, name, num_samples)
    if num_samples <= 0:
        raise RejectRecord("empty_audio", f"{name} has no samples")
    format = _OTHER_NAMES.get(sound.subtype) or _OTHER_NAMES.get(sound.format) or sound.format.lower()
    return AudioInfo(sound.samplerate, num_samples, sound.channels, format)


def _decode(source: BinaryIO, name: str, start: int, num_samples: int | None) -> tuple[np.ndarray, int]:
    with _open_sound(source, name) as sound:
        info = _header(sound, source, name)
        if info.channels != 1:
            raise RejectRecord("unsupported_channels", f"{name} has {info.channels} channels")
        if num_samples == 0:
            raise RejectRecord("empty_audio", f"the segment of {name} has no samples")
        wanted = max(info.num_samples - start, 1) if num_samples is None else num_samples
        if start + wanted > info.num_samples:
            detail = f"{name} has {info.num_samples} samples, the segment needs {start + wanted}"
            raise RejectRecord("duration_mismatch", detail)
        if num_samples is None:
            _check_container(sound, source, name)
        audio = _decode_samples(sound, start, wanted, _size(source), name)
    if len(audio) < wanted:
        raise RejectRecord("duration_mismatch", f"{name}: {len(audio)} samples decoded instead of {wanted}")
    _check_finite(audio, name)
    return audio, info.sampling_rate


def _decode_samples(sound: sf.SoundFile, start: int, wanted: int, size: int, name: str) -> np.ndarray:
    """Samples (wanted,) from ``start`` on, or fewer where the decoder gives up."""
    end = start + wanted
    seekable = sound.format == "FLAC" or sound.subtype in _MEMORYLESS
    # Blocks, so that a wrong header cannot ask for more memory than there is audio. But soundfile seeks after
    # every block, after which MP3 decodes to other values: it is read at one go.
    in_blocks = seekable or sound.format == "OGG"
    if not in_blocks and end > size * _MAX_SAMPLES_PER_BYTE:
        raise RejectRecord("unreadable_audio", f"{name}: {size} bytes cannot hold {end} samples")
    position = start if seekable else 0
    sound.seek(position)  # also for 0: MP3 decodes to other last bits without it, and soundfile.read does it
    blocks = [np.empty(0, dtype=np.float32)]
    while position < end:
        asked = min(_BLOCK_SAMPLES, end - position) if in_blocks else end
        got = sound.read(asked, dtype="float32")
        if position + len(got) > start:
            blocks.append(got[max(0, start - position) :])
        position += len(got)
        if len(got) < asked:
            break
    return np.concatenate(blocks)


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
    """Bytes of ``source``, read apart from its position, which is libsndfile's."""
    size = _size(source) if size is None else size
    if isinstance(source, io.BytesIO):
        return bytes(source.getbuffer()[start : start + size])
    return os.pread(source.fileno(), size, start)


def _size(source: BinaryIO) -> int:
    return source.getbuffer().nbytes if isinstance(source, io.BytesIO) else os.fstat(source.fileno()).st_size


def _mp3_length(source: BinaryIO, name: str, estimate: int) -> int:
    """Samples in an MP3: libsndfile's number where a Xing or Info frame states it, else counted.

    Without such a frame libsndfile extrapolates from the size of the first: wrong by a frame or so at a
    constant bit rate, by any factor at a variable one.
    """
    head = _bytes_from(source, 0, 10)
    first = 0
    if head[:3] == b"ID3" and len(head) == 10:  # 28-bit size, and a footer if flagged
        size = sum((byte & 0x7F) << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=True))
        first = 10 + size + (10 if head[5] & 0x10 else 0)
    if re.search(rb"(?s)(?:Xing|Info)...[\x01\x03\x05\x07\x09\x0b\x0d\x0f]", _bytes_from(source, first, 256)):
        return estimate
    counted = _count_mp3_samples(_bytes_from(source, first).lstrip(b"\0"), name)
    if counted > estimate:  # where libsndfile would stop
        raise RejectRecord("unreadable_audio", f"{name}: MP3 of variable bit rate without a Xing frame")
    return counted


def _count_mp3_samples(data: bytes, name: str) -> int:
    """Samples per channel in the complete layer III frames of ``data``."""
    position = num_samples = 0
    while position + 4 <= len(data):
        size, samples = _mp3_frame(data[position : position + 4])
        if size == 0:
            rest = data[position : position + 16]
            if rest.startswith(_MP3_TRAILERS) or not any(rest):
                break
            raise RejectRecord("unreadable_audio", f"{name}: no MPEG frame where one should begin")
        position += size
        num_samples += samples if position <= len(data) else 0
    return num_samples


def _mp3_frame(header: bytes) -> tuple[int, int]:
    """Bytes and samples per channel of the layer III frame with this 4-byte header; (0, 0) if it is none."""
    version, layer = (header[1] >> 3) & 3, (header[1] >> 1) & 3
    kbps, rate = header[2] >> 4, (header[2] >> 2) & 3
    if header[0] != 0xFF or header[1] < 0xE0 or version == 1 or layer != 1 or kbps in (0, 15) or rate == 3:
        return 0, 0
    samples, kbps_table = (1152, _MPEG1_KBPS) if version == 3 else (576, _MPEG2_KBPS)
    padding = (header[2] >> 1) & 1
    return samples // 8 * kbps_table[kbps - 1] * 1000 // _MP3_RATES[version][rate] + padding, samples


def _check_finite(audio: np.ndarray, name: str) -> None:
    if not np.isfinite(audio).all():
        raise RejectRecord("non_finite_audio", f"{name} has NaN or infinite samples")


def _round_half_up(num_samples: float) -> int:
    """Lhotse's ``compute_num_samples``, which cannot be imported without torch."""
    return int(Decimal(round(num_samples, ndigits=8)).quantize(Decimal(0), rounding=ROUND_HALF_UP))


def _check_ratio(from_rate: int, to_rate: int) -> None:
    """The filter has a phase for every output sample until the two rates meet again: for rates without a common divisor
    that is gigabytes, which one odd recording must not cost."""
    divisor = math.gcd(from_rate, to_rate)
    if (from_rate // divisor) * (to_rate // divisor) > _MAX_FILTER_SIZE:
        raise RejectRecord("unsupported_rate", f"{from_rate} Hz and {to_rate} Hz have no small common ratio")


@lru_cache(maxsize=16)
def _resampler(from_rate: int, to_rate: int) -> torch.nn.Module:
    import torchaudio

    return torchaudio.transforms.Resample(from_rate, to_rate)
