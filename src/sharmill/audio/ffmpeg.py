"""Decoding through FFmpeg (PyAV) of what libsndfile does not know: AAC and ALAC, WMA, WebM, AMR, shorten.

FFmpeg gets the bytes of one file and the name of one demuxer, which was recognised by the first bytes: so it never
guesses, and playlists and the like never reach it. It opens nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import closing, contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sharmill.audio.decoder import MAX_SAMPLING_RATE, MIN_SAMPLING_RATE, AudioBytes, AudioInfo
from sharmill.errors import RejectRecord

if TYPE_CHECKING:
    import av

# Opus that sends nothing in pauses comes near. A container may say that many packets lie at the same bytes.
_MAX_SAMPLES_PER_BYTE: Final = 1000
_ALWAYS_ALLOWED_SAMPLES: Final = 10_000_000
# Containers round times to milliseconds and more, and count the encoder's delay in different ways.
_ROUNDED_SECONDS: Final = 0.25

# FFmpeg's name of a demuxer -> bytes that its files have, and where.
_SIGNATURES: Final[tuple[tuple[str, int, tuple[bytes, ...]], ...]] = (
    ("mov", 4, (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")),
    ("matroska", 0, (b"\x1a\x45\xdf\xa3",)),
    ("asf", 0, (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11\xa6\xd9\x00\xaa\x00\x62\xce\x6c",)),
    ("amr", 0, (b"#!AMR\n", b"#!AMR-WB\n")),
    ("caf", 0, (b"caff",)),
    ("nistsphere", 0, (b"NIST_1A\n",)),
)
_ADTS_FRAMES: Final = 3
_HEAD_BYTES: Final = 1 << 16

# FFmpeg's name of a codec -> ours, where they differ.
_OTHER_NAMES: Final = {
    **dict.fromkeys(("wmav1", "wmav2", "wmapro", "wmalossless", "wmavoice"), "wma"),
    **dict.fromkeys(("amr_nb", "amr_wb"), "amr"),
    "aac_latm": "aac",
    "shorten": "shn",
}
# The decoders that may be used at all.
_DECODERS: Final = (
    *("aac", "aac_latm", "alac", "amrnb", "amrwb", "wmav1", "wmav2", "wmapro", "wmalossless", "wmavoice"),
    *("opus", "vorbis", "flac", "shorten", "mp2float", "mp3float", "ac3", "eac3"),
    *("pcm_u8", "pcm_s8", "pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_s24be", "pcm_s32le", "pcm_s32be"),
    *("pcm_f32le", "pcm_f32be", "pcm_f64le", "pcm_f64be", "pcm_alaw", "pcm_mulaw"),
)

_COUNTS_KEPT: Final = 1 << 16
# The numbers of samples, by the identity of the bytes.
_counts: Final[OrderedDict[Hashable, int]] = OrderedDict()
_lock: Final = Lock()


def recognise(source: AudioBytes) -> str | None:
    """Return the demuxer for a file, by its first bytes; None where FFmpeg is not asked."""
    head = source.read(0, _HEAD_BYTES)
    for demuxer, position, signatures in _SIGNATURES:
        if any(head.startswith(signature, position) for signature in signatures):
            return demuxer
    return "aac" if _is_adts(source, head) else None


def _is_adts(source: AudioBytes, head: bytes) -> bool:
    """Return True where ADTS frames follow each other, be it behind an ID3 tag."""
    position = 0
    if head[:3] == b"ID3" and len(head) >= 10:
        position = 10 + sum((byte & 0x7F) << shift for byte, shift in zip(head[6:10], (21, 14, 7, 0), strict=True))
    for number in range(_ADTS_FRAMES):
        header = source.read(position, 7)
        if len(header) < 7:
            return number > 0 and not header
        size = (header[3] & 3) << 11 | header[4] << 3 | header[5] >> 5
        if header[0] != 0xFF or header[1] & 0xF6 != 0xF0 or size < 7:
            return False
        position += size
    return True


class FfmpegDecoder:
    """An audio file that FFmpeg has opened, decoded from its begin on; of several audio streams the first.

    Containers say only roughly how long they are. So all samples are decoded once to count them, and the number is
    remembered.

    Raises:
        RejectRecord: unreadable_audio (PyAV is not installed, no audio, a codec that is not allowed, damage),
            duration_mismatch (the file is cut off), empty_audio.
    """

    def __init__(self, source: AudioBytes, demuxer: str) -> None:
        num_samples = _count_samples(source, demuxer)
        self._frames = _Frames(source, demuxer)
        try:
            self._next = self._frames.next()
            if self._next is None:
                raise RejectRecord("empty_audio", f"{source.name} has no samples")
        except BaseException:
            self._frames.close()
            raise
        rate, channels = self._frames.sampling_rate, self._next.shape[1]
        self.info = AudioInfo(rate, num_samples, channels, self._frames.codec, exact_seeks=False, common=False)

    def seek(self, position: int) -> None:
        raise NotImplementedError("FFmpeg's seeks are not exact")

    def read(self, num_samples: int) -> np.ndarray:
        blocks = [np.empty((0, self.info.channels), dtype=np.float32)]
        wanted = num_samples
        while wanted > 0 and self._next is not None:
            block = self._next[:wanted]
            blocks.append(block)
            wanted -= len(block)
            self._next = self._next[len(block) :] if len(block) < len(self._next) else self._frames.next()
        samples = np.concatenate(blocks)
        return samples[:, 0] if self.info.channels == 1 else samples

    def check_end(self) -> None:
        """Do nothing: damage has shown when the samples were counted."""

    def close(self) -> None:
        self._frames.close()


class _Frames:
    """The decoded frames of the first audio stream of a file."""

    def __init__(self, source: AudioBytes, demuxer: str) -> None:
        self._source = source
        self._demuxer = demuxer
        self.sampling_rate = 0
        self._container, self._stream = self._open()
        codec = self._stream.codec_context.codec.canonical_name
        self.codec = _OTHER_NAMES.get(codec, codec)
        self._blocks = self._decode()

    def _open(self) -> tuple[av.container.InputContainer, av.AudioStream]:
        name = self._source.name
        try:
            import av
        except ImportError:
            raise RejectRecord(
                "unreadable_audio",
                f'{name} is audio that libsndfile does not read; pip install "sharmill[formats]" brings FFmpeg for it',
            ) from None
        with _rejecting(name):
            container = av.open(
                self._source.stream(),
                "r",
                format=self._demuxer,
                options={"codec_whitelist": ",".join(_DECODERS)},
                metadata_errors="replace",
                io_open=_refuse,
            )
        try:
            if not container.streams.audio:
                raise RejectRecord("unreadable_audio", f"{name} has no audio, only other streams")
            stream = container.streams.audio[0]
            context: Any = stream.codec_context
            if context is None or context.name not in _DECODERS:
                codec = "one that FFmpeg does not know, or encrypted" if context is None else context.name
                raise RejectRecord("unreadable_audio", f"the audio codec of {name} is not read: {codec}")
            context.thread_count = 1
        except BaseException:
            container.close()
            raise
        return container, stream

    def next(self) -> np.ndarray | None:
        """Return the next block, float32 (samples, channels); None at the end."""
        with _rejecting(self._source.name):
            return next(self._blocks, None)

    def count(self) -> int:
        """Decode all, and return the number of samples; reject a file that is cut off."""
        counted = 0
        while (block := self.next()) is not None:
            counted += len(block)
        # Only SPHERE states a number of samples, which is exact.
        tolerance = 0.5 / self.sampling_rate if self._demuxer == "nistsphere" and counted else _ROUNDED_SECONDS
        if counted and counted / self.sampling_rate < self._claimed_seconds() - tolerance:
            raise RejectRecord("duration_mismatch", f"{self._source.name} ends before its header says")
        return counted

    def close(self) -> None:
        self._container.close()

    def _decode(self) -> Iterator[np.ndarray]:
        name, size = self._source.name, self._source.size
        most = max(size * _MAX_SAMPLES_PER_BYTE, _ALWAYS_ALLOWED_SAMPLES)
        num_samples = channels = 0
        for packet in self._container.demux(self._stream):
            if packet.is_corrupt:
                raise RejectRecord("duration_mismatch", f"{name} is cut off or damaged")
            for frame in packet.decode():
                rate, block = frame.sample_rate, _samples(frame)
                if not MIN_SAMPLING_RATE <= rate <= MAX_SAMPLING_RATE:
                    raise RejectRecord("unreadable_audio", f"{name} claims a sampling rate of {rate} Hz")
                if num_samples == 0:
                    self.sampling_rate, channels = rate, block.shape[1]
                if (rate, block.shape[1]) != (self.sampling_rate, channels):
                    raise RejectRecord("unreadable_audio", f"{name} changes its sampling rate or channels on the way")
                num_samples += len(block)
                if num_samples > most:
                    raise RejectRecord("unreadable_audio", f"{name}: {size} bytes cannot hold {num_samples} samples")
                if len(block):
                    yield block

    def _claimed_seconds(self) -> float:
        """Return the duration that the container states, 0 where FFmpeg estimates it from the size."""
        if self._demuxer not in ("mov", "matroska", "nistsphere"):
            return 0.0
        stream = self._stream
        if stream.duration is not None and stream.time_base is not None:
            return float(stream.duration * stream.time_base)
        only_stream = len(self._container.streams) == 1
        return (self._container.duration or 0) / 1_000_000 if only_stream else 0.0


def _count_samples(source: AudioBytes, demuxer: str) -> int:
    """Decode a recording to count its samples; the numbers of those that were counted last are kept."""
    identity = source.identity
    with _lock:
        if (known := _counts.get(identity)) is not None:
            return known
    with closing(_Frames(source, demuxer)) as frames:
        counted = frames.count()
    with _lock:
        _counts[identity] = counted
        if len(_counts) > _COUNTS_KEPT:
            _counts.popitem(last=False)
    return counted


def _samples(frame: av.AudioFrame) -> np.ndarray:
    """Return the samples of a frame as float32 (samples, channels), full scale being 1."""
    values = frame.to_ndarray()
    channels = frame.layout.nb_channels
    values = values.T if frame.format.is_planar else values.reshape(-1, channels)
    if values.dtype == np.uint8:
        return (values.astype(np.float32) - 128) / 128
    if values.dtype.kind == "i":
        return (values / float(1 << (8 * values.itemsize - 1))).astype(np.float32)
    return np.ascontiguousarray(values, dtype=np.float32)


def _refuse(url: str, flags: int, options: dict[str, str]) -> Any:
    raise RejectRecord("unreadable_audio", f"the recording names another file, {url[:100]!r}, which is not opened")


@contextmanager
def _rejecting(name: str) -> Iterator[None]:
    """Turn FFmpeg's errors into rejects. What goes wrong in reading the file comes as the OSError that it is."""
    from av.error import FFmpegError

    try:
        yield
    except FFmpegError as error:
        raise RejectRecord("unreadable_audio", f"{name}: FFmpeg cannot decode it: {error.strerror}") from None
