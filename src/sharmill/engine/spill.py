"""Tables of hashes that do not fit in memory, and the search for equal ones in them."""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

import numpy as np

# A hash of 128 bits.
HASH: Final = np.dtype(("<u8", 2))

_NUMBERED: Final = np.dtype([("number", "<u4"), ("hash", HASH)])

_MAX_ROWS: Final = 1 << 32
# Rows that are sorted at once, which takes some 60 bytes of memory each, and read at once.
_SORTED_AT_ONCE: Final = 1 << 22
_READ_AT_ONCE: Final = 1 << 20
# Into so many ranges of hashes each part of a table is divided on disk.
_RANGES: Final = 1 << 10


class _Spill:
    """The holder of a temporary file without a name, as long as the context lasts.

    Args:
        folder: where the file lies.
    """

    def __init__(self, folder: Path) -> None:
        self._file: BinaryIO = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()


class SpilledRows(_Spill):
    """Rows of a table in a temporary file, which is gone when this is closed.

    Args:
        folder: where the file lies; it is made on the first use, so the folder has to be there.
        dtype: of a row, with fields that have hashes of 64 bits.
    """

    def __init__(self, folder: Path, dtype: np.dtype) -> None:
        super().__init__(folder)
        self._dtype = dtype
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, rows: np.ndarray) -> None:
        """Add rows (n,) behind those that are there."""
        self._file.seek(0, 2)
        self._file.write(np.ascontiguousarray(rows, self._dtype).data)
        self._count += len(rows)
        assert self._count < _MAX_ROWS

    def in_ranges(self, key: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the rows in parts that fit in memory, equal keys together: their numbers (n,) uint32 and rows (n,).

        Within a part the rows are in their order. The file is gone through once for each part.

        Args:
            key: the field of the rows that has a hash of 64 bits.
        """
        passes = max(1, -(-self._count // _SORTED_AT_ONCE))
        width = -(-(1 << 64) // passes)
        for low in range(0, 1 << 64, width):
            high = min(low + width, 1 << 64) - 1
            chosen = []
            for begin, part in self._parts():
                inside = np.flatnonzero((part[key] >= np.uint64(low)) & (part[key] <= np.uint64(high)))
                chosen.append(((begin + inside).astype(np.uint32), part[inside]))
            if any(len(numbers) for numbers, _ in chosen):
                numbers = np.concatenate([numbers for numbers, _ in chosen])
                rows = np.concatenate([rows for _, rows in chosen])
                del chosen
                yield numbers, rows

    def _parts(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the number of the first row of each part of the file, and its rows."""
        self._file.seek(0)
        for begin in range(0, self._count, _READ_AT_ONCE):
            data = self._file.read(self._dtype.itemsize * min(_READ_AT_ONCE, self._count - begin))
            yield begin, np.frombuffer(data, self._dtype)


class FirstEqual(_Spill):
    """The search for the first of equal hashes of 128 bits, of which any number may be equal.

    Of a part of them, what is equal is found in memory; one of each goes to a temporary file, sorted, where that is
    done once more for a range of hashes of all parts at a time. The file is written once and read once. In memory are
    4 bytes for each hash, and what is sorted at once.

    Args:
        folder: where the file lies.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._first = array("I")
        self._waiting: list[np.ndarray] = []
        self._num_waiting = 0
        # For each part on disk the rows at which its ranges begin, and its end.
        self._bounds: list[np.ndarray] = []

    def append(self, hashes: np.ndarray) -> None:
        """Add hashes (n, 2) behind those that are there."""
        self._waiting.append(np.ascontiguousarray(hashes, np.uint64))
        self._num_waiting += len(hashes)
        if self._num_waiting >= _READ_AT_ONCE:
            self._spill()

    def find(self) -> np.ndarray:
        """Return for each hash (N,) uint32 the number of the first one that is equal."""
        self._spill()
        first = np.frombuffer(self._first, np.uint32)
        for rows in self._in_ranges():
            order, begins = _sort_equal(rows["hash"])
            numbers = rows["number"][order]
            # Of equal hashes, the part with the lowest numbers comes first.
            first[numbers] = numbers[begins][np.cumsum(begins) - 1]
        # What had an equal one in its own part takes over what that one has found.
        for begin in range(0, len(first), _READ_AT_ONCE):
            first[begin : begin + _READ_AT_ONCE] = first[first[begin : begin + _READ_AT_ONCE]]
        return first

    def _spill(self) -> None:
        if not self._waiting:
            return
        hashes = np.concatenate(self._waiting)
        self._waiting, self._num_waiting = [], 0
        order, begins = _sort_equal(hashes)
        first = np.empty(len(hashes), np.uint32)
        first[order] = (len(self._first) + order[begins])[np.cumsum(begins) - 1]
        rows = np.empty(int(begins.sum()), _NUMBERED)
        rows["number"] = len(self._first) + order[begins]
        rows["hash"] = hashes[order[begins]]
        self._first.frombytes(first.tobytes())
        assert len(self._first) < _MAX_ROWS
        limits = np.arange(1, _RANGES, dtype=np.uint64) * np.uint64((1 << 64) // _RANGES)
        inner = np.searchsorted(rows["hash"][:, 0], limits)
        begin = int(self._bounds[-1][-1]) if self._bounds else 0
        self._bounds.append(begin + np.array([0, *inner, len(rows)]))
        self._file.write(rows.view(np.uint8).data)

    def _in_ranges(self) -> Iterator[np.ndarray]:
        """Yield the rows of as many ranges as are sorted at once; equal hashes in the order of their numbers."""
        if not self._bounds:
            return
        bounds = np.stack(self._bounds)
        ends = np.cumsum(np.diff(bounds).sum(axis=0))
        begin = 0
        while begin < _RANGES:
            before = ends[begin - 1] if begin else 0
            end = max(begin + 1, int(np.searchsorted(ends, before + _SORTED_AT_ONCE, side="right")))
            rows = np.empty(int(ends[end - 1] - before), _NUMBERED)
            position = 0
            for low, high in bounds[:, [begin, end]].tolist():
                self._file.seek(low * _NUMBERED.itemsize)
                self._file.readinto(rows[position : position + high - low].view(np.uint8).data)  # type: ignore[attr-defined]
                position += high - low
            yield rows
            begin = end


def _sort_equal(hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return an order (n,) of hashes (n, 2) by their high half, and in it (n,) bool where another hash begins.

    Equal ones stay in their order.
    """
    order = np.argsort(hashes[:, 0], kind="stable")
    high, low = hashes[order, 0], hashes[order, 1]
    same_half, same_other = high[1:] == high[:-1], low[1:] == low[:-1]
    if (same_half & ~same_other).any():
        # Almost never: half of a hash is enough to tell most from each other.
        order = np.lexsort((hashes[:, 1], hashes[:, 0]))
        high, low = hashes[order, 0], hashes[order, 1]
        same_half, same_other = high[1:] == high[:-1], low[1:] == low[:-1]
    return order, np.concatenate([np.ones(min(1, len(order)), bool), ~(same_half & same_other)])
