"""Benchmarks: ``python tests/bench`` runs all rows, ``python tests/bench ROW...`` some of them.

A module has the rows of one area; importing it registers them in ``rows.ROWS``.
"""

from bench import encode, match, read, start, write
from bench.rows import ROWS as ALL_ROWS

__all__ = ["ALL_ROWS", "encode", "match", "read", "start", "write"]
