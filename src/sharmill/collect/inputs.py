"""Inputs of ``sharmill manifest``: a folder, a table or manifest, or a corpus, listed once and then read in pieces.

What is listed lies in the plan of the run, so that one which was interrupted goes on without listing anything again.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from sharmill.collect.corpora import REJECTED, Corpus, corpus_records, write_records
from sharmill.engine.identity import identify_folder
from sharmill.errors import ConfigError
from sharmill.sources import Located, Piece, SpeechSource, Unreadable
from sharmill.sources.files import FileSource
from sharmill.sources.folder import FolderSource
from sharmill.sources.nemo import NemoSource
from sharmill.staging import check_name
from sharmill.storage import open_stored

_REJECTED_LINE: Final = f'{{"{REJECTED}":'.encode()
# Name of the warnings of a recipe in the folder of the plan.
RECIPE_LOG: Final = "recipe.log"
_END: Final = b"\0"  # no path has it in its name


@dataclass(frozen=True, kw_only=True)
class Input(ABC):
    """One input of a manifest.

    Attributes:
        source: the rules for speakers and channels, and the audio root.
        prefix: path of its audio root below that of the manifest; "" where they are the same.
        dataset: for the speaker tags of records that name none.
    """

    source: SpeechSource
    prefix: str = ""
    dataset: str

    @abstractmethod
    def identity(self, state: Path) -> dict[str, Any]:
        """Return what the manifest depends on. A folder is not listed for it: the plan has the list."""

    @abstractmethod
    def pieces(self, folder: Path, number: int, records_per_piece: int) -> Iterator[tuple[str, Piece]]:
        """List the input and yield its pieces, each with its split ("" where there are none).

        Args:
            folder: of the plan; the input may write files there whose names have its ``number``.

        Raises:
            ConfigError: the input cannot be used, or has no records.
        """

    @abstractmethod
    def read(self, folder: Path, piece: dict[str, Any]) -> Iterator[bytes | Unreadable]:
        """Yield the raw records of a piece; ``folder`` is that of the plan."""

    def _identify(self, state: Path) -> dict[str, Any]:
        root = identify_folder(Path(str(self.source.audio_root)), state)
        return self.source.settings() | {"audio_root": root, "prefix": self.prefix, "dataset": self.dataset}


@dataclass(frozen=True, kw_only=True)
class FolderInput(Input):
    """All audio files below a folder."""

    source: FolderSource

    def identity(self, state: Path) -> dict[str, Any]:
        texts = self.source.text_root
        return self._identify(state) | ({} if texts is None else {"text_root": identify_folder(Path(texts), state)})

    def pieces(self, folder: Path, number: int, records_per_piece: int) -> Iterator[tuple[str, Piece]]:
        root, name = str(self.source.audio_root), f"files-{number}"
        begin = end = count = 0
        with (folder / name).open("wb") as listing:
            for path in self._list():
                end += listing.write(os.fsencode(path) + _END)
                count += 1
                if count == records_per_piece:
                    yield "", Piece(count, {"files": name, "begin": begin, "end": end})
                    begin, count = end, 0
        if count:
            yield "", Piece(count, {"files": name, "begin": begin, "end": end})
        if not end:
            suffixes = ", ".join(self.source.audio_suffixes)
            raise ConfigError(
                f"there is no audio below {root} whose name ends in {suffixes}; name another folder, or the ends of "
                "its names with --audio-suffix",
                code="missing_input",
            )

    def _list(self) -> Iterator[str]:
        """Yield the path of every audio file, and that of a folder that cannot be listed, with a slash at its end."""
        refused: list[str] = []

        def note(folder: str, error: PermissionError) -> None:
            if not folder:
                raise ConfigError(
                    f"this user may not list {self.source.audio_root}; permit it, or name another folder",
                    code="missing_input",
                ) from error
            refused.append(f"{folder}/")

        for folder, names in self.source.walk(note):
            yield from refused
            refused.clear()
            for name in names:
                yield f"{folder}/{name}" if folder else name
        yield from refused

    def read(self, folder: Path, piece: dict[str, Any]) -> Iterator[bytes | Unreadable]:
        check_name(piece["files"])
        with open_stored(folder / piece["files"]) as listing:
            listing.seek(piece["begin"])
            paths = listing.read(piece["end"] - piece["begin"])
        for path in map(os.fsdecode, paths.split(_END)[:-1]):
            parent, _, name = path.rpartition("/")
            if name:
                yield self.source.record(parent, name)
            else:
                shown = os.fsencode(path).decode("utf-8", "replace")
                yield Unreadable("unreadable_audio", "this user may not list the folder", shown)


@dataclass(frozen=True, kw_only=True)
class FileInput(Input):
    """The records of tables or manifests."""

    source: FileSource

    def identity(self, state: Path) -> dict[str, Any]:
        return self._identify(state) | {"input": self.source.identity()}

    def pieces(self, folder: Path, number: int, records_per_piece: int) -> Iterator[tuple[str, Piece]]:
        self.source.check_speaker()
        count = 0
        for piece in self.source.pieces(records_per_piece):
            count += piece.num_records
            yield "", piece
        if not count:
            names = ", ".join(map(str, self.source.files))
            raise ConfigError(f"{names} has no records; name a file that has some", code="bad_manifest")

    def read(self, folder: Path, piece: dict[str, Any]) -> Iterator[bytes | Unreadable]:
        for raw in self.source.read(piece):
            assert not isinstance(raw, Located), "tables and manifests name files"
            yield raw


@dataclass(frozen=True, kw_only=True)
class CorpusInput(Input):
    """A corpus in the form in which it is published.

    Attributes:
        options: further arguments of its recipe.
        splits: names or patterns of the splits that are wanted, none for all.
    """

    corpus: Corpus
    options: dict[str, Any] = field(default_factory=dict)
    splits: tuple[str, ...] = ()

    def identity(self, state: Path) -> dict[str, Any]:
        wanted = {"recipe": self.corpus.recipe, "options": self.options, "splits": list(self.splits)}
        return self._identify(state) | wanted

    def pieces(self, folder: Path, number: int, records_per_piece: int) -> Iterator[tuple[str, Piece]]:
        directory = Path(str(self.source.audio_root))
        channel, log = self.source.channel, folder / RECIPE_LOG
        found = corpus_records(self.corpus, directory, self.options, self.splits, channel, log)
        for place, (split, records) in enumerate(found):
            name = f"records-{number}-{place}"
            write_records(folder / name, records)
            for piece in self._records(folder / name).pieces(records_per_piece):
                yield split, Piece(piece.num_records, {"records": name, **piece.params})

    def read(self, folder: Path, piece: dict[str, Any]) -> Iterator[bytes | Unreadable]:
        for line in self._records(folder / piece["records"]).read(piece):
            if line.startswith(_REJECTED_LINE):
                record = msgspec.json.decode(line)
                reason, sentence = record[REJECTED]
                yield Unreadable(reason, sentence, record["audio_filepath"])
            else:
                yield line

    def _records(self, path: Path) -> NemoSource:
        return NemoSource(manifest=str(path), audio_root=self.source.audio_root)
