"""Tables of hashes that do not fit in memory, and the search for equal ones in them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

import numpy as np

# A hash of 128 bits.
HASH: Final = np.dtype(("<u8", 2))

_MAX_ROWS: Final = 1 << 32
# Rows that are sorted at once, which takes some 60 bytes of memory each, and read at once.
_SORTED_AT_ONCE: Final = 1 << 23
_READ_AT_ONCE: Final = 1 << 20


class SpilledRows:
    """Rows of a table in a temporary file, which is gone when this is closed.

    Args:
        folder: where the file lies; it is made on the first use, so the folder has to be there.
        dtype: of a row.
    """

    def __init__(self, folder: Path, dtype: np.dtype) -> None:
        # Of arrays that hold rows, and the shape of a row in them.
        self._base, self._shape = dtype.subdtype or (dtype, ())
        self._row_bytes = dtype.itemsize
        self._file: BinaryIO = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def __len__(self) -> int:
        return self._count

    def append(self, rows: np.ndarray) -> None:
        """Add rows (n, ...) behind those that are there."""
        self._file.seek(0, 2)
        self._file.write(np.ascontiguousarray(rows, self._base).data)
        self._count += len(rows)
        assert self._count < _MAX_ROWS

    def in_ranges(self, key: str | None = None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the rows in parts that fit in memory, equal keys together: their numbers (n,) uint32 and rows (n,).

        Within a part the rows are in their order. The file is gone through once for each part.

        Args:
            key: the field of the rows that has a hash of 64 bits; None for rows that are hashes of 128 bits.
        """
        passes = max(1, -(-self._count // _SORTED_AT_ONCE))
        width = -(-(1 << 64) // passes)
        for low in range(0, 1 << 64, width):
            high = min(low + width, 1 << 64) - 1
            chosen = []
            for begin, part in self._parts():
                keys = part[:, 0] if key is None else part[key]
                inside = np.flatnonzero((keys >= np.uint64(low)) & (keys <= np.uint64(high)))
                chosen.append(((begin + inside).astype(np.uint32), part[inside]))
            if any(len(numbers) for numbers, _ in chosen):
                numbers = np.concatenate([numbers for numbers, _ in chosen])
                rows = np.concatenate([rows for _, rows in chosen])
                del chosen
                yield numbers, rows

    def first_equal(self) -> np.ndarray:
        """Return for each row (N,) uint32 the number of the first row that has the same hash of 128 bits."""
        first = np.empty(self._count, np.uint32)
        for numbers, keys in self.in_ranges():
            # Stable: of rows with the same hash, the first one stays the first.
            order = np.lexsort((keys[:, 1], keys[:, 0]))
            numbers, keys = numbers[order], keys[order]
            begins = np.ones(len(numbers), bool)
            begins[1:] = (keys[1:] != keys[:-1]).any(axis=1)
            first[numbers] = numbers[begins][np.cumsum(begins) - 1]
        return first

    def _parts(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the number of the first row of each part of the file, and its rows."""
        self._file.seek(0)
        for begin in range(0, self._count, _READ_AT_ONCE):
            data = self._file.read(self._row_bytes * min(_READ_AT_ONCE, self._count - begin))
            yield begin, np.frombuffer(data, self._base).reshape(-1, *self._shape)
