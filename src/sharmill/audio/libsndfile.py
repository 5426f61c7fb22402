"""Decoding through libsndfile: WAV, FLAC, MP3, Ogg and the other formats that it knows, by content."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import soundfile as sf

from sharmill.audio import mp3, ogg
from sharmill.audio.decoder import MAX_SAMPLES_PER_BYTE, MAX_SAMPLING_RATE, MIN_SAMPLING_RATE, AudioBytes, AudioInfo
from sharmill.errors import RejectRecord

# Our names where they are not libsndfile's format in lower case.
_OTHER_NAMES: Final = {"OPUS": "opus", "MPEG_LAYER_I": "mp1", "MPEG_LAYER_II": "mp2", "WAVEX": "wav"}

# Subtypes without memory between samples: a seek lands on the same values as a decode from the start.
_MEMORYLESS: Final = ("PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW")
_UNKNOWN_LENGTH: Final = (1 << 63) - 1  # libsndfile's SF_COUNT_MAX
# Writers to a pipe leave 0xFFFFFFFF (ffmpeg) or 0x7FFFF000 (sox) for a size that they cannot know.
_STREAMED_BYTES: Final = 0x7FFF0000
# libsndfile shortens a chunk that goes beyond the end of the file, and says so only in its log.
_SHORTENED_CHUNK: Final = re.compile(
    r"^\s*(?:data|SSND|Data Size|Riff size|riff)\s*: (\d+) \(should be (\d+)\)", re.MULTILINE
)


class SndfileDecoder:
    """An audio file that libsndfile has opened.

    Raises:
        RejectRecord: unreadable_audio (libsndfile cannot open it, no length in the header), empty_audio.
    """

    def __init__(self, source: AudioBytes) -> None:
        self._source = source
        # Not the path: libsndfile takes anything called .raw, .vox, .gsm or .au for audio.
        descriptor = source.descriptor
        if descriptor is not None:
            os.lseek(descriptor, 0, os.SEEK_SET)  # where another decoder has left it
        with _rejecting(source.name):
            self._sound = _ForwardSound(source.stream() if descriptor is None else descriptor, closefd=False)
            try:
                self.info = self._read_header()
            except BaseException:
                self._sound.close()
                raise
        self._sought = False

    def _read_header(self) -> AudioInfo:
        sound, source = self._sound, self._source
        # Once: soundfile looks each up in its tables.
        num_samples, kind, subtype = sound.frames, sound.format, sound.subtype
        if not MIN_SAMPLING_RATE <= sound.samplerate <= MAX_SAMPLING_RATE:
            raise RejectRecord("unreadable_audio", f"{source.name} claims a sampling rate of {sound.samplerate} Hz")
        if num_samples == _UNKNOWN_LENGTH:
            raise RejectRecord("unreadable_audio", f"{source.name} was written to a pipe and does not state its length")
        if subtype == "MPEG_LAYER_III":
            num_samples = mp3.count_samples(source.read, source.name, num_samples)
        if num_samples <= 0:
            raise RejectRecord("empty_audio", f"{source.name} has no samples")
        # libsndfile takes several times as long for floats of them.
        self._dtype = "int16" if subtype == "PCM_16" else "float32"
        exact = kind == "FLAC" or subtype in _MEMORYLESS
        # Ogg states its length in its last page, so that it cannot be wrong by much.
        if not exact and kind != "OGG" and num_samples > source.size * MAX_SAMPLES_PER_BYTE:
            raise RejectRecord(
                "unreadable_audio", f"{source.name}: {source.size} bytes cannot hold {num_samples} samples"
            )
        format = _OTHER_NAMES.get(subtype) or _OTHER_NAMES.get(kind) or kind.lower()
        return AudioInfo(sound.samplerate, num_samples, sound.channels, format, exact)

    def seek(self, position: int) -> None:
        with _rejecting(self._source.name):
            self._sound.seek(position)
        self._sought = True

    def read(self, num_samples: int) -> np.ndarray:
        if not self._sought and sf.SoundFile.seekable(self._sound):  # GSM in WAV is not
            # MP3 decodes to other last bits without it, and soundfile.read does it. It decodes: not for a header alone.
            self.seek(0)
        with _rejecting(self._source.name):
            return self._sound.read(num_samples, dtype=self._dtype)

    def check_end(self) -> None:
        """Raise RejectRecord for what libsndfile repairs in silence: an early end, and lost pages in Ogg."""
        name = self._source.name
        if self._sound.format == "OGG":
            stream = self._source.read()
            cut_off = ogg.ends_inside_page(stream)
            if not cut_off and not ogg.is_intact(stream):
                raise RejectRecord("unreadable_audio", f"{name}: a page of the Ogg stream is damaged")
        else:
            sizes = (map(int, pair) for pair in _SHORTENED_CHUNK.findall(self._sound.extra_info))
            cut_off = any(found < declared < _STREAMED_BYTES for declared, found in sizes)
        if cut_off:
            raise RejectRecord("duration_mismatch", f"{name} ends before its header says")

    def close(self) -> None:
        self._sound.close()


class _ForwardSound(sf.SoundFile):
    """A SoundFile whose reads follow each other without seeks between them, after which MP3 decodes to other values."""

    def seekable(self) -> bool:
        return False


@contextmanager
def _rejecting(name: str) -> Iterator[None]:
    try:
        yield
    except sf.LibsndfileError as error:
        # Not str(error), which may hold the address of an object.
        raise RejectRecord("unreadable_audio", f"{name}: {error.error_string}") from None
