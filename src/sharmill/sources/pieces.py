"""A piece of an input: what one unit of ``prepare`` reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Piece:
    """A run of records; ``params`` is JSON-encodable and has a meaning to its source only."""

    num_records: int
    params: dict[str, Any]
