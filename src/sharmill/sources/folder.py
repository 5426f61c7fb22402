"""A folder of audio files with text files of the same names, and the folder walk that annotated sources also use."""

import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec
import xxhash

from sharmill.config import require
from sharmill.errors import ConfigError, RejectRecord, refuse
from sharmill.sources import EncodedSource, RunSource, UnreadableRecord
from sharmill.sources.files import decode_text, expand_home, read_small

# Maximum size of a text file, which is read completely. A larger file cannot be the text of an utterance.
_MAX_TEXT_BYTES: Final = 1 << 20
_AUDIO_SUFFIXES: Final = (
    *(".wav", ".flac", ".mp3", ".ogg", ".opus", ".aiff", ".aif", ".sph", ".au"),
    *(".m4a", ".aac", ".wma", ".webm", ".amr", ".3gp", ".caf"),
)


@dataclass(frozen=True, kw_only=True)
class WalkedSource(RunSource, EncodedSource):
    """A source that finds its files by walking one folder."""

    audio_suffixes: list[str] = field(default_factory=lambda: list(_AUDIO_SUFFIXES))
    """Suffixes of audio files, such as ``_mic1.flac``. ``folder`` removes the longest suffix that matches, ignoring
    case; ``annotated`` uses the first one with an existing file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_one = isinstance(self.audio_root, str)
        require(is_one, f"audio_root of {self.type} must be one folder; add a source for each further folder")
        require(all(self.audio_suffixes or [""]), "audio_suffixes must not be empty")

    @abstractmethod
    def file_identities(self) -> Iterator[list[Any]]:
        """Yield [path, size or checksum, ...] for each file, from which the identity is computed."""

    def identity(self) -> dict[str, Any]:
        """Return the number of files and a checksum over the entries of ``file_identities``."""
        self.check()
        digest, count = xxhash.xxh3_64(), 0
        for told in self.file_identities():
            digest.update(msgspec.json.encode(told))
            count += 1
        return {"files": [count, digest.hexdigest()]}

    @property
    def _root(self) -> Path:
        return expand_home(str(self.audio_root))


@dataclass(frozen=True, kw_only=True)
class FolderSource(WalkedSource):
    """Records for the audio files of a folder, with texts beside the audio or in a parallel folder."""

    folder_keys: ClassVar[tuple[str, ...]] = ("text_root",)
    type: str = "folder"
    text_suffixes: list[str] = field(default_factory=lambda: [".txt", ".lab", ".normalized.txt"])
    """Suffixes of text files, which replace the audio suffix; the first existing file is used."""
    text_root: str | None = None
    """Folder of the texts if they are not beside the audio; ``null`` is ``audio_root``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_url_roots()

    def check(self) -> None:
        """Raise ConfigError if the folder of texts does not exist, or there is no audio."""
        refuse(
            (
                self.text_root is not None and not self._texts.is_dir(),
                f"the folder {self._texts} does not exist; correct text_root in sources",
            ),
            (
                self._root.is_dir() and not any(names for _, names in self._walk()),
                f"no file name below {self._root} ends in {', '.join(self.audio_suffixes)}; name "
                "another folder (audio_root) or other suffixes (audio_suffixes, --audio-suffix)",
            ),
            code="missing_input",
        )

    def file_identities(self) -> Iterator[list[Any]]:
        """Yield the path and size of each audio file, and the suffix and size of its text file."""
        for folder, names in self._walk():
            for name in names or ():
                text = self._text_of(folder, name)
                told = [path_to_text(f"{folder}/{name}"), (self._root / folder / name).lstat().st_size]
                yield told + ([text.suffix, text.stat().st_size] if text else [])

    def runs(self, size: int) -> Iterator[tuple[list[Any], int]]:
        """Yield each folder with its number of audio files; a folder that cannot be listed counts as one reject."""
        for folder, names in self._walk():
            yield [path_to_text(folder)], 1 if names is None else len(names)

    def entries(self, place: list[Any], begin: int, end: int) -> Iterator[Any]:
        """Yield (folder, file name) for the audio files of a folder."""
        folder = path_from_text(place[0])
        try:
            names = list_files(self._root / folder, self.audio_suffixes)[0]
        except PermissionError:
            shown = os.fsencode(f"{folder}/").decode("utf-8", "replace")
            yield UnreadableRecord("unreadable_audio", "the folder cannot be listed: permission denied", shown)
        else:
            yield from ((folder, name) for name in names[begin:end])

    @property
    def _texts(self) -> Path:
        return self._root if self.text_root is None else expand_home(self.text_root)

    def _walk(self) -> Iterator[tuple[str, list[str] | None]]:
        return walk_files(self._root, self.audio_suffixes)

    def _text_of(self, folder: str, name: str) -> Path | None:
        """Return the text file of an audio file, or None if there is none."""
        ends = [suffix for suffix in self.audio_suffixes if name.lower().endswith(suffix.lower())]
        stem = name[: -len(max(ends, key=len))]
        paths = (self._texts / folder / f"{stem}{suffix}" for suffix in self.text_suffixes)
        return next((path for path in paths if path.is_file()), None)

    def record(self, entry: tuple[str, str]) -> bytes:
        """Return the record of an audio file; ``entry`` is its folder, relative to the root, and its name."""
        path = os.path.join(*entry)  # noqa: PTH118
        if self.shown(entry) != path:
            raise RejectRecord("malformed", "the file name is not valid UTF-8; rename the file")
        record = {"audio_filepath": path}
        text = self._text_of(*entry)
        if text is not None:
            record["text"] = decode_text(read_small(text, _MAX_TEXT_BYTES), self.encoding, text.name).strip()
        return msgspec.json.encode(record)

    def shown(self, entry: tuple[str, str]) -> str:
        """Return the path of an audio file."""
        return os.fsencode(os.path.join(*entry)).decode("utf-8", "replace")  # noqa: PTH118


def path_to_text(path: str) -> str:
    """Encode any path, even one that is not UTF-8, as text for JSON."""
    return os.fsencode(path).decode("latin-1")


def path_from_text(text: str) -> str:
    """Decode the result of ``path_to_text``."""
    return os.fsdecode(text.encode("latin-1"))


def walk_files(root: Path, suffixes: Iterable[str]) -> Iterator[tuple[str, list[str] | None]]:
    """Yield each folder below a root, in order, with the sorted names of its files that have one of the suffixes.

    Folder paths are relative to the root, whose own path is empty. Folders without such files are left out. For a
    folder that this user may not list, None is yielded in place of the names. Only the names of one folder at a time
    are in memory.

    Raises:
        ConfigError: this user may not list the root.
    """
    left = [""]
    while left:
        folder = left.pop()
        try:
            names, folders = list_files(root / folder, suffixes)
        except PermissionError as error:
            if not folder:
                raise ConfigError(
                    f"cannot list {root}: permission denied; make it readable, or name another folder",
                    code="missing_input",
                ) from error
            yield folder, None
            continue
        if names:
            yield folder, names
        left += [os.path.join(folder, name) for name in reversed(folders)]  # noqa: PTH118


def list_files(folder: Path, suffixes: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the sorted names of a folder's files with one of the suffixes (ignoring case), and of its subfolders.

    Hidden files and folders are left out.
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
