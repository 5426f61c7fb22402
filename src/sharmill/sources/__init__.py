"""Input formats: each module turns one kind of manifest into raw records, in pieces that can be read in parallel.

A source is a dataclass whose fields are the keys of its entry under ``sources`` in a configuration. A package adds one
by an entry point in the group ``sharmill.sources``, or a configuration names it: ``type: python:package.module:Class``.

>>> import json
>>> from dataclasses import dataclass
>>> from pathlib import Path
>>> @dataclass(frozen=True, kw_only=True)
... class FolderSource(Source):
...     type: str = "folder"
...     audio_root: str
...     speaker: str
...
...     def identity(self):
...         return {path.name: path.stat().st_size for path in self._files()}
...
...     def pieces(self, records_per_piece):
...         for path in self._files():
...             yield Piece(1, {"name": path.name})
...
...     def read(self, piece):
...         yield json.dumps({"audio_filepath": piece["name"], "speaker": self.speaker}).encode()
...
...     def _files(self):
...         return sorted(Path(self.audio_root).glob("*.wav"))
>>> FolderSource(audio_root="recordings", speaker="ada").type
'folder'
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Piece:
    """A run of records that one unit of ``prepare`` reads; ``params`` is JSON-encodable, for its source alone."""

    num_records: int
    params: dict[str, Any]


class Source(ABC):
    """One input of a dataset. A subclass is a frozen, keyword-only dataclass with at least these two fields.

    Attributes:
        type: the name under which a configuration asks for it.
        audio_root: the folder that the audio paths of its records are relative to.
    """

    type: str
    audio_root: str

    def check(self) -> None:  # noqa: B027 (most sources can be checked only by reading them)
        """Raise ConfigError where the input as a whole cannot be used; read little of it."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return files with their sizes and checksums, for the plan's identity."""

    @abstractmethod
    def pieces(self, records_per_piece: int) -> Iterator[Piece]:
        """Yield the pieces in the order of the input.

        Raises:
            ConfigError: the input as a whole cannot be used.
        """

    @abstractmethod
    def read(self, piece: dict[str, Any]) -> Iterator[bytes]:
        """Yield the raw records of a piece, one JSON text each; ``piece`` is the piece's ``params``."""

    def records(self) -> Iterator[bytes]:
        """Yield the raw records of all pieces."""
        for piece in self.pieces(1000):
            yield from self.read(piece.params)

    def stem(self) -> str | None:
        """Return how the manifests made from this source alone are called; None for the name of the dataset."""
        return None

    def paths(self) -> dict[str, str]:
        """Return the keys that are paths, and the paths."""
        return {"audio_root": self.audio_root}
