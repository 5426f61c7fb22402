"""Kaldi data directories: ``wav.scp`` and optionally ``segments``, ``text``, ``utt2spk`` and others.

lhotse is not used to read them, because it would run the commands in ``wav.scp`` and read all audio in advance.
"""

import math
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec

from sharmill.errors import RejectRecord, refuse, refuse_record
from sharmill.files.location import Location
from sharmill.sources import EncodedSource, LineSource
from sharmill.sources.files import KeyedLines, check_text, decode_text, identify_files

_AUDIO: Final = "wav.scp"
_SEGMENTS: Final = "segments"
# Files with one value per utterance, and the record's key for this value.
_VALUE_FILES: Final = {"text": "text", "utt2spk": "speaker", "utt2lang": "language"}
_GENDERS: Final = "spk2gender"
_FILE: Final = r" (?P<file>(?!-)\S+)"
_FLAC_OPTIONS: Final = r"(?: -[cds]+| --decode| --stdout| --silent)*+"
# Patterns for the arguments of programs that only decode a file. These programs count channels from 1.
_ARGUMENTS: Final = {
    "sph2pipe": rf"(?: -p| -f (?:wav|rif)| -c (?P<channel>[12]))*+{_FILE}",
    "flac": rf"(?=.* (?:-[cs]*d[cs]*|--decode)(?: |$)){_FLAC_OPTIONS}{_FILE}{_FLAC_OPTIONS}",
    "sox": rf"{_FILE} -t wav -(?: remix (?P<channel>[1-9][0-9]?))?",
    "cat": _FILE,
}


@dataclass(frozen=True, kw_only=True)
class KaldiSource(LineSource, EncodedSource):
    """Records of a Kaldi data directory: its segments, or its recordings if there is no ``segments`` file."""

    file_keys: ClassVar[tuple[str, ...]] = ("data_dir",)
    type: str = "kaldi"
    data_dir: str
    """Directory with ``wav.scp`` and optionally ``segments``, ``text``, ``utt2spk``, ``utt2lang`` and
    ``spk2gender``."""

    def check(self) -> None:
        """Raise ConfigError if the directory does not exist, or one of its files is not a text file."""
        refuse(
            (
                isinstance(self._folder, Path) and not self._folder.is_dir(),
                f"the data directory {self._folder} does not exist; correct data_dir in sources",
            ),
            (
                not (self._folder / _AUDIO).exists(),
                f"the data directory {self._folder} has no wav.scp; correct data_dir in sources",
            ),
            code="missing_input",
        )
        for file in self._files:
            check_text(file, file.name)

    def identity(self) -> dict[str, Any]:
        """Return the size and checksum of every file."""
        self.check()
        return identify_files(self._files)

    def shown(self, entry: bytes) -> str:
        """Return the text of a line."""
        return entry.decode(self.encoding, "replace")

    def record(self, entry: bytes) -> bytes:
        """Return the record of a line of ``segments``, or of ``wav.scp`` if there is no such file."""
        utterance, *rest = _without_bom(entry).split()
        lines_of = self.files[0].name
        # Raise an error if an utterance has several lines, since its text could belong to any of them.
        self._value(lines_of, utterance)
        record: dict[str, Any] = {"utterance_id": self._decode(utterance)}
        for name, key in _VALUE_FILES.items():
            if (value := self._value(name, utterance)) is not None:
                record[key] = value
        if "speaker" in record and (gender := self._value(_GENDERS, record["speaker"].encode(self.encoding))):
            record["gender"] = gender
        if lines_of == _AUDIO:
            return msgspec.json.encode(record | self._audio(utterance))
        is_segment = len(rest) in (3, 4)
        refuse_record(
            (not is_segment, "malformed", "a line of segments must contain utterance, recording, start and end")
        )
        audio, times = self._audio(rest[0]), _times(rest[1:])
        is_other = "channel" in audio and times.get("channel", 0)
        problem = "the command in wav.scp selects one channel, but the segment names another"
        refuse_record((is_other, "unsupported_channels", problem))
        return msgspec.json.encode(record | times | audio)

    def _audio(self, recording: bytes) -> dict[str, Any]:
        """Return ``audio_filepath`` and possibly ``channel`` for a recording."""
        path = self._value(_AUDIO, recording)
        if not path:
            found = "has no path for" if path == "" else "has no recording"
            raise RejectRecord("missing_audio", f"wav.scp {found} {self._decode(recording)[:80]!r}")
        if path.rstrip().endswith("|"):
            return read_command(path)
        is_archive = re.search(r"\.ark(\.gz)?:\d+(\[[^][]*\])?$", path)
        refuse_record(
            (
                is_archive,
                "unreadable_audio",
                "the audio is in a Kaldi archive, which is not supported; extract it into audio files",
            )
        )
        return {"audio_filepath": path}

    def _value(self, name: str, key: bytes) -> str | None:
        """Return the rest of the line that begins with ``key`` in a file; None if the line or file does not exist."""
        index = self._indices.get(name)
        lines = set(index.find(key)) if index is not None else set()
        if len(lines) > 1:
            raise RejectRecord("malformed", f"{name} has {len(lines)} different lines for {self._decode(key)[:80]!r}")
        return next((self._decode(b"".join(_without_bom(line).split(None, 1)[1:])) for line in lines), None)

    def _decode(self, text: bytes) -> str:
        return decode_text(text, self.encoding, "a line of the utterance")

    @property
    def _folder(self) -> Location:
        return self.path_of(self.data_dir)

    @property
    def _files(self) -> list[Location]:
        names = (_AUDIO, _SEGMENTS, *_VALUE_FILES, _GENDERS)
        return [self._folder / name for name in names if (self._folder / name).exists()]

    @cached_property
    def files(self) -> list[Location]:
        """The file whose lines become records."""
        segments = self._folder / _SEGMENTS
        return [segments if segments.exists() else self._folder / _AUDIO]

    @cached_property
    def _indices(self) -> dict[str, KeyedLines]:
        return {file.name: KeyedLines([file], file.name, _first_word) for file in self._files}


def _times(words: list[bytes]) -> dict[str, Any]:
    """Return offset, duration and possibly channel of a segment; an end of -1 means the end of the recording."""
    try:
        begin, end = (float(word) for word in words[:2])
        channel = {"channel": int(words[2])} if len(words) == 3 else {}
    except ValueError as error:
        raise RejectRecord("malformed", "the times of the segment are not numbers") from error
    is_finite = math.isfinite(begin) and math.isfinite(end)
    refuse_record((not is_finite, "malformed", "the times of the segment are not finite"))
    duration = {} if end == -1 else {"duration": round(end - begin, 8)}  # rounded as lhotse does
    return {"offset": begin} | duration | channel


def _first_word(line: bytes) -> bytes:
    # A line that consists only of a byte order mark has no word.
    return next(iter(_without_bom(line).split(None, 1)), b"")


def _without_bom(line: bytes) -> bytes:
    return line.removeprefix(b"\xef\xbb\xbf")


def read_command(command: str) -> dict[str, Any]:
    """Return ``audio_filepath`` and possibly ``channel`` for a command that ends in ``|`` and only decodes a file.

    The command is never run.

    >>> read_command("sph2pipe -f wav -p -c 2 calls/en_4156.sph |")
    {'audio_filepath': 'calls/en_4156.sph', 'channel': 1}

    Raises:
        RejectRecord: ``outside_root`` for any other command.
    """
    text = command.rstrip().removesuffix("|")
    program, *words = text.split() or [""]
    found = re.fullmatch(_ARGUMENTS.get(program.rpartition("/")[2], "$."), "".join(f" {word}" for word in words))
    # File names with characters that are special in a shell are not accepted.
    if found is None or re.search(r"[|&;<>()$`\\\"'*?\[\]#~!{}\n]", text):
        raise RejectRecord(
            "outside_root",
            f"wav.scp has the command {command[:100]!r}; commands are never run, and only commands like "
            "`sph2pipe -f wav -p -c 1 a.sph |`, `flac -c -d -s a.flac |`, `sox a.wav -t wav - |` and `cat a.wav |` are "
            "understood; save the output of other commands as audio files, and name the files in wav.scp",
        )
    channel = found.groupdict().get("channel")
    return {"audio_filepath": found["file"]} | ({} if channel is None else {"channel": int(channel) - 1})
