"""Decoding of audio that libsndfile cannot read completely: AAC, ALAC, WMA, WebM, AMR, shorten, some MP3, Ogg and WAV.

FFmpeg (through PyAV) gets the bytes of one file and the name of one demuxer, which is chosen by the first bytes. FFmpeg
therefore never guesses the format, never sees a playlist, and opens no other file.

Telephone corpora contain SPHERE files compressed with shorten. FFmpeg reads those with 16-bit PCM. Those with mu-law
are read by sph2pipe, a program of the Linguistic Data Consortium, which is looked up on PATH and called without a
shell.
"""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sharmill.audio.audio_bytes import AudioBytes
from sharmill.audio.decoder import (
    MAX_SAMPLES_PER_BYTE,
    MAX_SAMPLING_RATE,
    MIN_SAMPLING_RATE,
    SAMPLES_IN_ANY_SIZE,
    AudioInfo,
    Decoder,
)
from sharmill.audio.extent import check_chunks, skip_tags
from sharmill.audio.ogg import is_intact
from sharmill.audio.sndfile import SndfileDecoder
from sharmill.errors import RejectRecord, refuse_record

if TYPE_CHECKING:
    import av

# Maximum number of samples per byte, nearly reached by Opus with discontinuous transmission. A corrupt container may
# exceed it, because many packets can refer to the same bytes.
_MAX_SAMPLES_PER_BYTE: Final = 1000
_ALWAYS_ALLOWED_SAMPLES: Final = 10_000_000
# Tolerance in seconds for stated durations. Containers round times to milliseconds or more, and differ in how they
# treat the encoder's delay.
_ROUNDED_SECONDS: Final = 0.25

_ASF: Final = b"\x30\x26\xb2\x75\x8e\x66\xcf\x11\xa6\xd9\x00\xaa\x00\x62\xce\x6c"
# FFmpeg's demuxer, the position of its signature in a file, and the possible signatures.
_SIGNATURES: Final[tuple[tuple[str, int, tuple[bytes, ...]], ...]] = (
    ("mov", 4, (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")),
    ("matroska", 0, (b"\x1a\x45\xdf\xa3",)),
    ("asf", 0, (_ASF,)),
    ("amr", 0, (b"#!AMR\n", b"#!AMR-WB\n")),
    ("caf", 0, (b"caff",)),
    ("nistsphere", 0, (b"NIST_1A\n",)),
)
# Beginning of a WAV whose format tag belongs to one of ``_WAV_DECODERS``.
_TELEPHONY_WAV: Final = re.compile(
    rb".{8}WAVEfmt .{4}(?:\x8f\x02|[\x14\x40\x42\x44\x45\x64\x65]\x00|\x11\x01|\x00\xa1)", re.DOTALL
)
_ADTS_FRAMES: Final = 3
# Maximum size of the header of a SPHERE file in bytes, and maximum number of channels.
_SPHERE_BYTES: Final = 1 << 12
_MAX_CHANNELS: Final = 64
# Time limit for sph2pipe, which decompresses hours of speech in seconds.
TIMEOUT_SECONDS: Final = 300.0
_HEAD_BYTES: Final = 1 << 16
_MOST_KNOWN: Final = 1 << 16
# Headers of files that were decoded before, by demuxer and ``AudioBytes.identity``.
_known: Final[dict[Hashable, AudioInfo]] = {}

# FFmpeg's name of a codec -> our name, if they differ.
_OTHER_NAMES: Final = {
    **dict.fromkeys(("wmav1", "wmav2", "wmapro", "wmalossless", "wmavoice"), "wma"),
    **dict.fromkeys(("amr_nb", "amr_wb"), "amr"),
    **{f"adpcm_{name}": name for name in ("g722", "g726")},
    "aac_latm": "aac",
    "shorten": "shn",
}
# The only decoders that FFmpeg may use.
_DECODERS: Final = (
    *("aac", "aac_latm", "alac", "amrnb", "amrwb", "wmav1", "wmav2", "wmapro", "wmalossless", "wmavoice"),
    *("opus", "vorbis", "flac", "shorten", "mp2", "mp2float", "mp3float", "ac3", "eac3"),
    *("pcm_u8", "pcm_s8", "pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_s24be", "pcm_s32le", "pcm_s32be"),
    *("pcm_f32le", "pcm_f32be", "pcm_f64le", "pcm_f64be", "pcm_alaw", "pcm_mulaw"),
)
# The only decoders for WAV: telephony formats. libsndfile reads all other WAV files unless they are damaged.
_WAV_DECODERS: Final = ("g722", "g723_1", "g726")


def open_decoder(source: AudioBytes) -> Decoder:
    """Open an audio file with libsndfile if it reads all of the audio, otherwise with sph2pipe or FFmpeg.

    Raises:
        RejectRecord: no decoder can read the whole file, or the file holds more audio than its header states.
    """
    try:
        head, start, stop = check_chunks(source.read, source.size, source.name)
        sound = SndfileDecoder(source.with_head(head, start, stop) if head else source)
        if not sound.demuxer:
            if head:  # other readers would trust the wrong header
                sound.info = replace(sound.info, common=False)
            return sound
    except RejectRecord as reject:
        if reject.reason != "unreadable_audio":
            raise
        head = source.read(0, _SPHERE_BYTES)
        # FFmpeg does not read mu-law compressed with shorten.
        is_sphere = head.startswith(b"NIST_1A\n")
        if is_sphere and re.search(rb"^sample_coding .*u-?law.*embedded-shorten", head, re.MULTILINE):
            return Sph2pipeDecoder(source)
        recognised = _recognise(source)
        if recognised is None:
            raise
        return FfmpegDecoder(source, recognised)
    sound.close()
    decoder = FfmpegDecoder(source, sound.demuxer, sound.starts)
    found, least = decoder.info, sound.info
    rounded = _ROUNDED_SECONDS * max(1, len(sound.starts))
    is_part = found.num_samples / found.sampling_rate < least.num_samples / least.sampling_rate - rounded
    refuse_record((is_part, "duration_mismatch", f"{source.name} is damaged: FFmpeg skips a part of it"))
    return decoder


def _recognise(source: AudioBytes) -> str | None:
    """Return FFmpeg's demuxer for a file, chosen by its first bytes; None if FFmpeg does not decode such files."""
    head = source.read(0, _HEAD_BYTES)
    for demuxer, position, signatures in _SIGNATURES:
        if any(head.startswith(signature, position) for signature in signatures):
            return demuxer
    if _TELEPHONY_WAV.match(head):
        return "wav"
    return "aac" if _is_adts(source) else None


def _is_adts(source: AudioBytes) -> bool:
    """Return True if the file begins with ADTS frames (AAC), after an optional ID3 tag."""
    position = skip_tags(source.read, 0)
    for number in range(_ADTS_FRAMES):
        header = source.read(position, 7)
        if len(header) < 7:
            return number > 0 and not header
        size = (header[3] & 3) << 11 | header[4] << 3 | header[5] >> 5
        if header[0] != 0xFF or header[1] & 0xF6 != 0xF0 or size < 7:
            return False
        position += size
    return True


class FfmpegDecoder(Decoder):
    """An audio file that FFmpeg decodes from the beginning, without seeks.

    Containers state their length only roughly. All samples are therefore decoded once to count them, and the resulting
    header is remembered.

    Args:
        source: the bytes of the file.
        demuxer: FFmpeg's name of the demuxer.
        starts: the positions of the streams if several are concatenated.

    Raises:
        RejectRecord: unreadable_audio (PyAV is missing, no or several audio streams, a codec that is not allowed,
            damage, concatenated streams that differ), duration_mismatch (the file is truncated, or a second file
            follows), empty_audio.
    """

    def __init__(self, source: AudioBytes, demuxer: str, starts: Sequence[int] = ()) -> None:
        parts = [source.with_head(b"", *place) for place in pairwise([*(starts or [0]), source.size])]
        found = [_inspect_once(part, demuxer) for part in parts]
        self.info = replace(found[0], num_samples=sum(info.num_samples for info in found))
        is_one = len({(info.sampling_rate, info.channels, info.format) for info in found}) == 1
        refuse_record((not is_one, "unreadable_audio", f"{source.name} changes its sampling rate or channels"))
        self._blocks = (block for part in parts for _, block in _decode(part, *_open(part, demuxer)))
        self._left = self._nothing = np.empty((0, self.info.channels), np.float32)

    def read(self, num_samples: int) -> np.ndarray:
        if not len(self._left):
            self._left = next(self._blocks, self._nothing)
        samples = self._left[:num_samples]
        self._left = self._left[num_samples:]
        return samples[:, 0] if self.info.channels == 1 else samples

    def close(self) -> None:
        self._blocks.close()


def _open(source: AudioBytes, demuxer: str) -> "tuple[av.container.InputContainer, av.AudioStream]":
    """Open a file, and return its container and its audio stream."""
    name, allowed = source.name, _WAV_DECODERS if demuxer == "wav" else _DECODERS
    try:
        import av
    except ImportError:
        raise RejectRecord(
            "unreadable_audio",
            f'libsndfile cannot read {name} completely; install FFmpeg with pip install "sharmill[formats]"',
        ) from None
    with _rejecting(name):
        container = av.open(
            source.stream(),
            "r",
            format=demuxer,
            options={"codec_whitelist": ",".join(allowed)},
            metadata_errors="replace",
            io_open=_refuse,
        )
    try:
        number = len(container.streams.audio)
        refuse_record(
            (number == 0, "unreadable_audio", f"{name} has no audio stream"),
            (number > 1, "unreadable_audio", f"{name} has {number} audio streams; store each in its own file"),
        )
        stream = container.streams.audio[0]
        context: Any = stream.codec_context
        codec = "unknown to FFmpeg, or encrypted" if context is None else context.name
        refuse_record(
            (codec not in allowed, "unreadable_audio", f"the audio codec of {name} is not supported: {codec}")
        )
        context.thread_count = 1
    except BaseException:
        container.close()
        raise
    return container, stream


def _decode(
    source: AudioBytes, container: "av.container.InputContainer", stream: "av.AudioStream"
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the sampling rate and each block of samples, float32 (samples, channels), and finally close the file."""
    from av.error import InvalidDataError

    name, size = source.name, source.size
    most = max(size * _MAX_SAMPLES_PER_BYTE, _ALWAYS_ALLOWED_SAMPLES)
    num_samples, form = 0, (0, 0)
    with container, _rejecting(name):
        for packet in container.demux(stream):
            refuse_record((packet.is_corrupt, "duration_mismatch", f"{name} is truncated or damaged"))
            try:
                frames = packet.decode()
            except InvalidDataError:
                if container.format.name != "mp3":  # FFmpeg returns tags between MP3 frames as packets
                    raise
                frames = []
            for frame in frames:
                rate, block = frame.sample_rate, _samples(frame)
                if num_samples == 0:
                    form = rate, block.shape[1]
                num_samples += len(block)
                is_rate = MIN_SAMPLING_RATE <= rate <= MAX_SAMPLING_RATE
                is_same = (rate, block.shape[1]) == form
                refuse_record(
                    (not is_rate, "unreadable_audio", f"{name} claims a sampling rate of {rate} Hz"),
                    (not is_same, "unreadable_audio", f"{name} changes its sampling rate or channels"),
                    (num_samples > most, "unreadable_audio", f"{name}: {size} bytes cannot hold {num_samples} samples"),
                )
                if len(block):
                    yield rate, block


def _inspect_once(source: AudioBytes, demuxer: str) -> AudioInfo:
    """Return the result of ``_inspect``, which is remembered for the same bytes."""
    identity = demuxer, source.identity
    if identity not in _known:
        _known[identity] = _inspect(source, demuxer)
        if len(_known) > _MOST_KNOWN:
            _known.pop(next(iter(_known)), None)
    return _known[identity]


def _inspect(source: AudioBytes, demuxer: str) -> AudioInfo:
    """Decode a recording to count its samples.

    Raises:
        RejectRecord: empty_audio; duration_mismatch, if the recording ends earlier than its container states or a
            second file follows; also see ``FfmpegDecoder``.
    """
    is_damaged = demuxer == "ogg" and not is_intact(source.read())
    refuse_record(
        (is_damaged, "unreadable_audio", f"{source.name}: a page of the Ogg stream is damaged"),
        (
            _has_second_file(source, demuxer),
            "duration_mismatch",
            f"{source.name} contains a second file after the first",
        ),
    )
    counted, rate, channels, claimed = 0, 1, 0, 0.0
    container, stream = _open(source, demuxer)
    codec = stream.codec_context.codec.canonical_name
    # For all containers but these, FFmpeg estimates the duration from the size.
    if demuxer in ("mov", "matroska", "nistsphere", "wav"):
        if stream.duration is not None and stream.time_base is not None:
            claimed = float(stream.duration * stream.time_base)
        elif len(container.streams) == 1:
            claimed = (container.duration or 0) / 1_000_000
    for sampling_rate, block in _decode(source, container, stream):
        counted += len(block)
        rate, channels = sampling_rate, block.shape[1]
    # Only SPHERE states the exact number of samples.
    rounded = 0.5 / rate if demuxer == "nistsphere" else _ROUNDED_SECONDS
    refuse_record(
        (not counted, "empty_audio", f"{source.name} has no samples"),
        (counted / rate < claimed - rounded, "duration_mismatch", f"{source.name} ends earlier than its header states"),
    )
    return AudioInfo(rate, counted, channels, _OTHER_NAMES.get(codec, codec), exact_seeks=False, common=False)


def _has_second_file(source: AudioBytes, demuxer: str) -> bool:
    """Return True if a second MP4 or ASF file follows the first; FFmpeg would ignore it."""
    begins, position = 0, 0
    while demuxer in ("mov", "asf") and len(head := source.read(position, 24)) == 24:
        size = int.from_bytes(head[:4], "big")
        if demuxer == "asf":
            size = int.from_bytes(head[16:], "little")
        elif size == 1:
            size = int.from_bytes(head[8:16], "big")
        begins += head.startswith(_ASF) or head[4:8] == b"moov"
        position += max(size, 8)
    return begins > 1


def _samples(frame: "av.AudioFrame") -> np.ndarray:
    """Return the samples of a frame as float32 (samples, channels) with a full scale of 1."""
    values = frame.to_ndarray()
    values = values.T if frame.format.is_planar else values.reshape(-1, frame.layout.nb_channels)
    if values.dtype == np.uint8:
        return (values.astype(np.float32) - 128) / 128
    if values.dtype.kind == "i":
        return (values / float(1 << (8 * values.itemsize - 1))).astype(np.float32)
    return np.ascontiguousarray(values, dtype=np.float32)


def _refuse(url: str, flags: int, options: dict[str, str]) -> Any:
    raise RejectRecord("unreadable_audio", f"the recording refers to another file, {url[:100]!r}, which is not opened")


@contextmanager
def _rejecting(name: str) -> Iterator[None]:
    """Turn FFmpeg's errors into rejects. An OSError from reading the file is passed on."""
    from av.error import FFmpegError

    try:
        yield
    except FFmpegError as error:
        raise RejectRecord("unreadable_audio", f"{name}: FFmpeg cannot decode it: {error.strerror}") from None


class Sph2pipeDecoder(Decoder):
    """A SPHERE file that sph2pipe decompresses as a whole on the first read.

    Args:
        source: the bytes of the file.
        timeout: the time limit for sph2pipe in seconds.

    Raises:
        RejectRecord: unreadable_audio (damage, or no sph2pipe on PATH), duration_mismatch, empty_audio.
    """

    def __init__(self, source: AudioBytes, *, timeout: float = TIMEOUT_SECONDS) -> None:
        self._source = source
        self._timeout = timeout
        numbers = []
        for key in ("sample_rate", "sample_count", "channel_count"):
            found = re.search(rf"^{key} -i (\d{{1,18}})\s*$".encode(), source.read(0, _SPHERE_BYTES), re.MULTILINE)
            if found is None:
                raise self._unreadable(f"its header has no {key}")
            numbers.append(int(found[1]))
        rate, count, channels = numbers
        most = max(SAMPLES_IN_ANY_SIZE, source.size * MAX_SAMPLES_PER_BYTE)
        if not 1 <= channels <= _MAX_CHANNELS or count * channels > most:
            raise self._unreadable("its header claims more than the file can hold")
        self.info = AudioInfo(rate, count, channels, "shn", common=False)

    def seek(self, position: int) -> None:
        self._wave.seek(position)

    def read(self, num_samples: int) -> np.ndarray:
        return self._wave.read(num_samples)

    def close(self) -> None:
        if "_wave" in self.__dict__:
            self._wave.close()

    @cached_property
    def _wave(self) -> SndfileDecoder:
        """The decompressed audio, opened as WAV."""
        source, info = self._source, self.info
        program = shutil.which("sph2pipe")
        if program is None:
            raise self._unreadable(
                "it is mu-law compressed with shorten, which only sph2pipe reads; install sph2pipe (Linguistic Data "
                "Consortium) on PATH"
            )
        # Use a temporary file with a safe name: the recording's name may look like an option, or the recording may be a
        # member of an archive.
        with tempfile.NamedTemporaryFile(prefix="sharmill-", suffix=".sph") as file:
            file.write(source.read())
            file.flush()
            command = [program, "-p", "-f", "wav", file.name]
            try:
                done = subprocess.run(
                    command, stdin=subprocess.DEVNULL, capture_output=True, timeout=self._timeout, check=False
                )
            except subprocess.TimeoutExpired as error:
                raise self._unreadable(f"sph2pipe did not finish within {self._timeout:g} s") from error
            except OSError as error:
                raise self._unreadable(f"{program} cannot be run: {error.strerror}") from error
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise self._unreadable(f"sph2pipe failed with status {done.returncode}: {''.join(said)}")
        wave = SndfileDecoder(AudioBytes(f"{source.name} (decompressed by sph2pipe)", done.stdout))
        found = wave.info
        refuse_record(
            (
                (found.sampling_rate, found.channels) != (info.sampling_rate, info.channels),
                "unreadable_audio",
                f"{source.name}: sph2pipe returned {found.channels} channels at {found.sampling_rate} Hz, unlike "
                "its header",
            ),
            (
                found.num_samples != info.num_samples,
                "duration_mismatch",
                f"{source.name}: sph2pipe returned {found.num_samples} of {info.num_samples} samples",
            ),
        )
        return wave

    def _unreadable(self, what: str) -> RejectRecord:
        return RejectRecord("unreadable_audio", f"{self._source.name}: {what}")
