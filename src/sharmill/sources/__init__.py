"""Input formats: each module turns one kind of manifest into raw records, in pieces that can be read in parallel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from sharmill.config import SourceConfig
from sharmill.sources.nemo import NemoSource
from sharmill.sources.pieces import Piece


class Source(Protocol):
    """One input of a dataset."""

    def pieces(self, records_per_piece: int) -> Iterator[Piece]:
        """The pieces in the order of the input.

        Raises:
            ConfigError: the input as a whole cannot be used.
        """

    def check(self) -> None:
        """Raises ConfigError where the input as a whole cannot be used; reads little of it."""

    def identity(self) -> dict[str, Any]:
        """Files with their sizes and checksums, for the plan's identity."""

    def read(self, piece: dict[str, Any]) -> Iterator[bytes]:
        """The raw records of a piece, one JSON text each."""


def open_source(config: SourceConfig) -> Source:
    """The source of a configuration entry; nothing is read yet."""
    return NemoSource(config.manifest)
