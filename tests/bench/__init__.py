"""Benchmarks: ``python tests/bench`` runs the rows of the group reach, ``python tests/bench ROW...`` single rows.

Each module contains the rows of one area; importing it registers them in ``rows.ROWS``.
"""

from bench import encode, feed, match, planning, read, write  # noqa: F401 - their rows
from bench.rows import ROWS as ALL_ROWS

__all__ = ["ALL_ROWS"]
