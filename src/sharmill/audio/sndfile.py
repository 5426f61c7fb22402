"""Decoding by libsndfile, which reads WAV, FLAC, MP3, Ogg and other formats, detected by content.

Checks are added for faults that libsndfile ignores: headers with a wrong number of samples, and some kinds of damage.
``ffmpeg.py`` decodes all other formats.
"""

import fcntl
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import soundfile as sf

from sharmill.audio.audio_bytes import AudioBytes
from sharmill.audio.decoder import MAX_SAMPLES_PER_BYTE, AudioInfo, Decoder
from sharmill.audio.extent import STREAMED_BYTES, count_mpeg_samples
from sharmill.audio.flac import decode_flac, has_another_flac, has_unstated_flac
from sharmill.audio.ogg import OGG_BEGIN, is_intact, is_plain_ogg, page_bytes
from sharmill.errors import RejectRecord
from sharmill.files.messages import anonymous_file

log = logging.getLogger(__name__)

# Our names for formats; all other formats have libsndfile's name in lower case.
_OTHER_NAMES: Final = {"OPUS": "opus", "WAVEX": "wav"}
# Subtypes whose samples do not depend on earlier samples, so that decoding after a seek gives the same values as
# decoding the whole file.
_MEMORYLESS: Final = ("PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW")
_UNKNOWN_LENGTH: Final = (1 << 63) - 1  # libsndfile's SF_COUNT_MAX
# If a chunk extends beyond the end of the file, libsndfile shortens it and only mentions that in its log.
_SHORTENED_CHUNK: Final = re.compile(
    r"^\s*(?:data|SSND|Data Size|Riff size|riff)\s*: (\d+) \(should be (\d+)\)", re.MULTILINE
)
_MPEG: Final = re.compile(rb"ID3|\xff[\xe0-\xff]", re.DOTALL)


class SndfileDecoder(Decoder):
    """An audio file that libsndfile decodes.

    Raises:
        RejectRecord: unreadable_audio (libsndfile cannot open the file), duration_mismatch (the file holds more audio
            than its header states).
    """

    def __init__(self, source: AudioBytes) -> None:
        self._source = source
        self._is_mpeg = _MPEG.match(source.read(0, 3)) is not None
        # libsndfile does not get the path, because it would accept any file named .raw, .vox, .gsm or .au as audio.
        descriptor = source.descriptor
        if descriptor is not None:
            os.lseek(descriptor, 0, os.SEEK_SET)  # another decoder may have moved the position
        with _rejecting(source.name, self._is_mpeg):
            sound = _ForwardSound(source.stream() if descriptor is None else descriptor, closefd=False)
        # soundfile computes each property on every access, so read each of them only once.
        num_samples, kind, subtype = sound.frames, sound.format, sound.subtype
        exact = kind == "FLAC" or subtype in _MEMORYLESS
        # Name of the FFmpeg demuxer that reads all of the audio, if libsndfile reads only a part; otherwise empty.
        self.demuxer = ""
        # Positions of concatenated streams, of which libsndfile reads only the first.
        self.starts: list[int] = []
        if num_samples == _UNKNOWN_LENGTH or subtype in ("MPEG_LAYER_I", "MPEG_LAYER_II"):
            num_samples, self.demuxer = 0, "flac" if kind == "FLAC" else "mp3"
        elif subtype.startswith("MPEG"):
            num_samples, self.starts = count_mpeg_samples(source.read, source.size, source.name, sound.frames)
            self.demuxer = "mp3" if num_samples > sound.frames or len(self.starts) > 1 else ""
        elif kind == "OGG" and not is_plain_ogg(source.read, source.size, sound.samplerate):
            self.demuxer = "ogg"
        # libsndfile takes several times as long if it converts 16-bit samples to floats.
        self._dtype = "int16" if subtype == "PCM_16" else "float32"
        # The length of an Ogg file comes from its last page, so it cannot be wrong by much.
        is_bounded = not exact and kind not in ("OGG", "FLAC")
        if is_bounded and num_samples > source.size * MAX_SAMPLES_PER_BYTE:
            raise RejectRecord(
                "unreadable_audio", f"{source.name}: {source.size} bytes cannot hold {num_samples} samples"
            )
        format = _OTHER_NAMES.get(subtype) or _OTHER_NAMES.get(kind) or kind.lower()
        self.info = AudioInfo(sound.samplerate, num_samples, sound.channels, format, exact)
        self._sound = sound
        self._sought = exact
        # All samples, if ``check_end`` has decoded them, and the position at which the next read starts.
        self._whole: np.ndarray | None = None
        self._position = 0

    def seek(self, position: int) -> None:
        self._position = position
        with _rejecting(self._source.name, self._is_mpeg):
            self._sound.seek(position)
        self._sought = True

    def read(self, num_samples: int) -> np.ndarray:
        if not self._sought and sf.SoundFile.seekable(self._sound):  # GSM in WAV is not seekable
            # Seek before the first read, as soundfile.read does: a seek changes the last bits of MP3 samples. Reading
            # only the header does not seek, because a seek would decode audio.
            self.seek(0)
        if self._whole is not None:
            found = self._whole[self._position : self._position + num_samples]
        else:
            with _rejecting(self._source.name, self._is_mpeg):
                found = self._sound.read(num_samples, dtype=self._dtype)
        self._position += len(found)
        return found

    def check_end(self) -> None:
        """Raise RejectRecord for faults that libsndfile ignores: an early end, lost Ogg pages, or excess audio."""
        name = self._source.name
        if self._sound.format == "OGG":
            stream = self._source.read()
            last = stream.rfind(b"OggS")
            size = page_bytes(stream, last)
            cut_off = last >= 0 and (size == 0 or last + size > len(stream))
            if stream.find(OGG_BEGIN, 1) >= 0:
                raise RejectRecord("unreadable_audio", f"{name} has several Ogg streams with the same serial number")
            if not cut_off and not is_intact(stream):
                raise RejectRecord("unreadable_audio", f"{name}: a page of the Ogg stream is damaged")
        elif self._sound.format == "FLAC":
            cut_off = False  # decoding a truncated FLAC fails
            stream, num_samples = self._source.read(), self.info.num_samples
            whole = decode_flac(stream) if self._dtype == "int16" else None
            if whole is not None:
                self._whole = whole[:, 0] if whole.shape[1] == 1 else whole
            # If the MD5 sum is right, these are all of the samples.
            if has_another_flac(stream) or (whole is None and has_unstated_flac(stream, num_samples)):
                raise RejectRecord("duration_mismatch", f"{name} holds more audio than its header states")
        else:
            sizes = (map(int, pair) for pair in _SHORTENED_CHUNK.findall(self._sound.extra_info))
            cut_off = any(found < declared < STREAMED_BYTES for declared, found in sizes)
        if cut_off:
            raise RejectRecord("duration_mismatch", f"{name} ends earlier than its header states")

    def close(self) -> None:
        self._sound.close()


class _ForwardSound(sf.SoundFile):
    """A SoundFile that does not seek between reads, because an MP3 decodes to other values after a seek."""

    def seekable(self) -> bool:
        return False


@contextmanager
def _rejecting(name: str, is_mpeg: bool) -> Iterator[None]:
    try:
        with _logging_warnings(name, is_mpeg):
            yield
    except sf.LibsndfileError as error:
        # str(error) may contain the address of an object.
        reason = error.error_string
        if reason.startswith(("Unspecified internal error", "File does not exist")):  # errors for a damaged MP3
            reason = "it is damaged, and libsndfile cannot decode it"
        raise RejectRecord("unreadable_audio", f"{name}: {reason}") from None


@contextmanager
def _logging_warnings(name: str, is_mpeg: bool) -> Iterator[None]:
    """Log the messages that libmpg123 writes to the standard error of the process, with the name of the file.

    Messages are intercepted only in the main thread, because all threads share the descriptor.
    """
    if not is_mpeg or not _has_standard_error() or threading.current_thread() is not threading.main_thread():
        yield
        return
    with os.fdopen(anonymous_file(0), "rb") as heard:
        terminal = os.dup(2)
        os.dup2(heard.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
            heard.seek(0)
            for line in heard:
                log.warning("%s: %s", name, line.decode("utf-8", "replace").strip())


def _has_standard_error() -> bool:
    """Return True if descriptor 2 is open for writing; if it was closed, its number may now belong to the recording."""
    try:
        return sys.__stderr__ is not None and fcntl.fcntl(2, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    except OSError:
        return False
