"""Records of a source, read piece by piece as the ranks of ``prepare`` do."""

from __future__ import annotations

import json
from typing import Any

from sharmill.sources import Source, Unreadable


def read(source: Source, size: int = 100) -> list[Any]:
    """The records of pieces of ``size``, as objects, and those that cannot be read; every piece has as many as it says.

    What finds a piece again goes through JSON, as in a plan.
    """
    pieces = list(source.pieces(size))
    rows = [list(source.read(json.loads(json.dumps(piece.params)))) for piece in pieces]
    assert [piece.num_records for piece in pieces] == [len(piece) for piece in rows]
    return [row if isinstance(row, Unreadable) else json.loads(row) for piece in rows for row in piece]
