"""Folders: every audio file below the audio root is a record, with the text of a file of the same name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec
import xxhash

from sharmill.errors import ConfigError
from sharmill.files.storage import NotRegularError, open_regular
from sharmill.sources import Piece, Source, Unreadable
from sharmill.sources.files import check_encoding, expand_home

# A text is read as a whole; a larger one is none of an utterance.
_MAX_TEXT_BYTES: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class FolderSource(Source):
    """Records of a folder of audio, with texts in files beside it or at the same place below another folder."""

    folder_keys: ClassVar[tuple[str, ...]] = ("text_root",)
    type: str = "folder"
    audio_suffixes: list[str] = field(
        default_factory=lambda: [
            *(".wav", ".flac", ".mp3", ".ogg", ".opus", ".aiff", ".aif", ".sph", ".au"),
            *(".m4a", ".aac", ".wma", ".webm", ".amr", ".3gp", ".caf"),
        ]
    )
    """Ends of the names of audio files, whatever their case; the longest that fits is taken off, as ``_mic1.flac``."""
    text_suffixes: list[str] = field(default_factory=lambda: [".txt", ".lab", ".normalized.txt"])
    """Ends of the names of texts, in the place of that of the audio; the first file that is there counts."""
    text_root: str | None = None
    """Folder of the texts, where they do not lie beside the audio; ``null`` is ``audio_root``."""
    encoding: str = "utf-8"
    """Encoding of the texts, such as ``latin-1``. A text that cannot be decoded is rejected as ``malformed``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.audio_root, str):
            raise ValueError("audio_root of a folder must be one folder; name several as sources of their own")
        if not all(self.audio_suffixes) or not self.audio_suffixes:
            raise ValueError("audio_suffixes must not be empty")
        self.refuse_url_roots()
        check_encoding(self.encoding)

    def check(self) -> None:
        """Raise ConfigError where the folder of texts is not there, or there is no audio."""
        if self.text_root is not None and not self._texts.is_dir():
            raise ConfigError(f"there is no folder {self._texts}; correct text_root in sources", code="missing_input")
        if self._root.is_dir() and not any(names for _, names in self.walk()):
            raise ConfigError(
                f"there is no audio below {self._root} whose name ends in {', '.join(self.audio_suffixes)}; correct "
                "audio_root or audio_suffixes in sources",
                code="missing_input",
            )

    def identity(self) -> dict[str, Any]:
        """Return the number of audio files, and a checksum of the paths and sizes of audio and texts."""
        self.check()
        return {"files": count_and_sum(self._describe(folder, name) for folder, names in self.walk() for name in names)}

    def _describe(self, folder: str, name: str) -> list[Any]:
        text = self._text_of(folder, name)
        told = [path_to_text(f"{folder}/{name}"), (self._root / folder / name).lstat().st_size]
        return told + ([text.suffix, text.stat().st_size] if text else [])

    def pieces(self, records_per_piece: int) -> Iterator[Piece]:
        """Yield runs of files, each found again by the folders that they are in and their place there."""
        yield from pack_spans(
            (([path_to_text(folder)], len(names)) for folder, names in self.walk()), records_per_piece
        )

    def read(self, piece: dict[str, Any]) -> Iterator[bytes | Unreadable]:
        """Yield the records of the files of a piece."""
        for text, begin, end in piece["spans"]:
            folder = path_from_text(text)
            for name in list_files(self._root / folder, self.audio_suffixes)[0][begin:end]:
                yield self.record(folder, name)

    @property
    def _root(self) -> Path:
        return expand_home(str(self.audio_root))

    @property
    def _texts(self) -> Path:
        return self._root if self.text_root is None else expand_home(self.text_root)

    def walk(self, refused: Callable[[str, PermissionError], None] | None = None) -> Iterator[tuple[str, list[str]]]:
        """Yield each folder below the root with the names of its audio files; see ``walk_files``."""
        return walk_files(self._root, self.audio_suffixes, refused)

    def _text_of(self, folder: str, name: str) -> Path | None:
        """Return the file of the text of an audio file; None where there is none."""
        ends = [suffix for suffix in self.audio_suffixes if name.lower().endswith(suffix.lower())]
        stem = name[: -len(max(ends, key=len))]
        paths = (self._texts / folder / f"{stem}{suffix}" for suffix in self.text_suffixes)
        return next((path for path in paths if path.is_file()), None)

    def record(self, folder: str, name: str) -> bytes | Unreadable:
        """Return the record of an audio file in a folder below the root."""
        path = os.path.join(folder, name)  # noqa: PTH118
        shown = os.fsencode(path).decode("utf-8", "replace")
        if shown != path:
            return Unreadable("malformed", "the name of the file is not UTF-8", shown)
        record = {"audio_filepath": path}
        text = self._text_of(folder, name)
        if text is not None:
            try:
                with open_regular(text) as stream:
                    # No more than there is: a buffer of 1 MiB would take longer to make than the text to read.
                    data = stream.read(min(os.fstat(stream.fileno()).st_size, _MAX_TEXT_BYTES) + 1)
                if len(data) > _MAX_TEXT_BYTES:
                    return Unreadable("malformed", f"the text {text.name} has more than 1 MiB", path)
                record["text"] = data.decode(self.encoding).removeprefix("\ufeff").strip()
            except PermissionError:
                return Unreadable("malformed", f"this user may not read the text {text.name}", path)
            except NotRegularError:
                return Unreadable("malformed", f"the text {text.name} is not a regular file", path)
            except UnicodeDecodeError:
                return Unreadable(
                    "malformed", f"the text {text.name} is not {self.encoding}; set encoding of the source", path
                )
        return msgspec.json.encode(record)


def count_and_sum(described: Iterable[list[Any]]) -> list[Any]:
    """Return how many files are described, and a checksum of their descriptions."""
    digest, count = xxhash.xxh3_64(), 0
    for told in described:
        digest.update(msgspec.json.encode(told))
        count += 1
    return [count, digest.hexdigest()]


def pack_spans(runs: Iterable[tuple[list[Any], int]], records_per_piece: int) -> Iterator[Piece]:
    """Yield pieces of equal numbers of records, the last one aside, from runs of (where they are, how many).

    A piece has ``spans``: where a run is, and the bounds of the piece's records in it.
    """
    spans: list[list[Any]] = []
    count = 0
    for place, total in runs:
        begin = 0
        while begin < total:
            end = min(total, begin + records_per_piece - count)
            spans.append([*place, begin, end])
            count, begin = count + end - begin, end
            if count == records_per_piece:
                yield Piece(count, {"spans": spans})
                spans, count = [], 0
    if spans:
        yield Piece(count, {"spans": spans})


def path_to_text(path: str) -> str:
    """Return a path as a text that JSON can have, also one that is not UTF-8."""
    return os.fsencode(path).decode("latin-1")


def path_from_text(text: str) -> str:
    """Return the path of which ``path_to_text`` made a text."""
    return os.fsdecode(text.encode("latin-1"))


def walk_files(
    root: Path, suffixes: Iterable[str], refused: Callable[[str, PermissionError], None] | None = None
) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder below a root with the names of its files that have one of the suffixes, both sorted.

    Folders are relative to the root, "" for itself, and only those with such files; one folder is in memory.
    ``refused`` is called with a folder that this user may not list, by default an error that is raised.
    """
    left = [""]
    while left:
        folder = left.pop()
        try:
            names, folders = list_files(root / folder, suffixes)
        except PermissionError as error:
            if refused is None:
                raise
            refused(folder, error)
            continue
        if names:
            yield folder, names
        left += [os.path.join(folder, name) for name in reversed(folders)]  # noqa: PTH118


def list_files(folder: Path, suffixes: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the names of the files with one of the suffixes, in any case, and of the folders in a folder, sorted.

    Hidden ones are left out.
    """
    ends = tuple(suffix.lower() for suffix in suffixes)
    names, folders = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
            elif entry.name.lower().endswith(ends):
                names.append(entry.name)
    return sorted(names), sorted(folders)
