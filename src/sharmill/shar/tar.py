"""Tar archives as Shar uses them: a deterministic writer, and a strict reader that maps large files into memory.

Formats read: ustar, GNU long names, PAX paths and sizes (POSIX.1-2001). Headers written carry no time and no owner.
"""

from __future__ import annotations

import mmap
import os
import struct
import tarfile
import zlib
from bisect import bisect_right
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from sharmill.errors import DamagedShard
from sharmill.files.storage import open_regular
from sharmill.shar.tar_headers import (
    BLOCK,
    EMPTY,
    GNU_LONG_NAME,
    MAX_EXTENSION_BYTES,
    PAX_HEADER,
    iterate_pax,
    parse_number,
    parse_pax_size,
    plain_name,
)

_END = bytes(2 * BLOCK)
# Smaller archives are read as a whole, in less time than the system takes to map and unmap their pages.
_MAX_READ_BYTES: Final = 1 << 19
# The place in a header.
_CHECKSUM: Final = slice(148, 156)
_REGULAR = (b"0", b"\0")


class TarWriter:
    """Writer of members, one after the other. The same members make the same bytes."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def add(self, name: str, data: bytes) -> None:
        """Append a member."""
        self._stream.write(tar_header(name, len(data)))
        self._stream.write(data)
        self._stream.write(EMPTY[: -len(data) % BLOCK])

    def finish(self) -> None:
        """Write the end marker; without it the archive counts as cut off."""
        self._stream.write(_END)


def tar_header(name: str, size: int) -> bytes:
    """Return the header of a member as ``tarfile`` makes it, in a tenth of the time where it is a single block."""
    encoded = name.encode("utf-8", "surrogateescape")
    if len(encoded) > _MAX_NAME or size > _MAX_SIZE:
        header = tarfile.TarInfo(name)
        header.size = size
        return header.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
    digits = b"%011o" % size
    checksum = b"%06o" % (_TEMPLATE_SUM + sum(encoded) + sum(digits))
    head = encoded.ljust(_MAX_NAME, b"\0") + _TEMPLATE[_MAX_NAME:124] + digits
    return head + _TEMPLATE[len(head) : 148] + checksum + _TEMPLATE[154:]


def _sum_fixed(header: bytes) -> int:
    """Return the sum of a header without name and size, with blanks for the checksum as the format wants it."""
    return sum(header) - sum(header[124:135]) - sum(header[148:156]) + 8 * ord(" ")


# What fits into a header of one block.
_MAX_NAME: Final = 100
_MAX_SIZE: Final = 0o77777777777
# A header without a name.
_TEMPLATE: Final = tarfile.TarInfo("").tobuf(tarfile.GNU_FORMAT)
_TEMPLATE_SUM: Final = _sum_fixed(_TEMPLATE)
# A header as name, mode and owner, digits of the size, time, digits of the checksum, and rest.
_split_header: Final = struct.Struct("100s24s11s13s6s358s").unpack_from
_OCTAL_DIGITS: Final = b"01234567"
# The fixed parts of sharmill's headers, and of lhotse's: mode and owner, time, rest; and the sum of their bytes.
_GNU, _USTAR = (
    ((header[100:124], header[135:148], header[154:]), _sum_fixed(header))
    for header in (tarfile.TarInfo("").tobuf(form) for form in (tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT))
)


class TarTable:
    """The names and places of all members of an archive, which stays open for taking their bytes in any order.

    Args:
        path: of the archive.
        salvage: of a damaged archive, take the members before the damage.

    Attributes:
        names: of the members, in order.
        offsets: the position of the first header of each member.
        size: the number of bytes of the file.
        damage: with ``salvage``, what is wrong behind the last member; else None.

    Raises:
        DamagedShard: there is no such file, or anything is not as it should be: a checksum, a size, a missing end
            marker, data after it. The bytes of a member have no checksum in a tar archive and are not looked at.
    """

    def __init__(self, path: Path, *, salvage: bool = False) -> None:
        with open_field(path, buffering=0) as stream:
            size = stream.seek(0, 2)
            if size < len(_END):
                raise DamagedShard(f"{path}: {size} bytes are too few for a tar archive")
            self._data = _load(stream, size)
        try:
            parser = _Parser(path, self._data)
            self.damage = parser.read_all()
            if self.damage and not salvage:
                raise self.damage
        except BaseException:
            self.close()
            raise
        self.names, self.offsets = parser.names, parser.offsets
        self.size = len(self._data)
        self._starts, self._ends = parser.starts, parser.ends

    def __len__(self) -> int:
        return len(self.names)

    def __enter__(self) -> TarTable:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def read(self, index: int) -> bytes:
        """Return a copy of the bytes of a member."""
        return self._data[self._starts[index] : self._ends[index]]

    def place(self, index: int) -> tuple[int, int]:
        """Return the position of the first byte of a member in the file, and its number of bytes."""
        return self._starts[index], self._ends[index] - self._starts[index]

    def view(self, index: int) -> memoryview:
        """Return the bytes of a member as they lie in the file; the archive must not be closed while it is in use."""
        return memoryview(self._data)[self._starts[index] : self._ends[index]]

    def close(self) -> None:
        """Close the file."""
        if isinstance(self._data, mmap.mmap):
            self._data.close()


def _load(stream: BinaryIO, size: int) -> mmap.mmap | bytes:
    """Return the bytes of an open file of ``size`` bytes."""
    if size <= _MAX_READ_BYTES:
        data = os.pread(stream.fileno(), size, 0)
        if len(data) == size:  # a file system may give less at once
            return data
    return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


class _Parser:
    """A walk over the blocks of one archive.

    Attributes:
        names: of the members that it has passed.
        offsets: the positions of their first headers.
        starts: the positions of their first bytes.
        ends: the positions behind their last bytes.
    """

    def __init__(self, path: Path, data: mmap.mmap | bytes, position: int = 0) -> None:
        self._path = path
        self._data = data
        self._position = position
        self._headers: list[int] = []
        # Lists of what Python's garbage collector does not look at: a tuple for each member would double its work.
        self.names: list[str] = []
        self.offsets: list[int] = []
        self.starts: list[int] = []
        self.ends: list[int] = []

    def read_all(self) -> DamagedShard | None:
        """Pass all members; of a damaged archive those before the damage, which is returned."""
        damage = None
        try:
            self._read(None)
        except DamagedShard as error:
            damage = error
        try:
            self._check_headers()
        except DamagedShard as error:
            # A wrong checksum is the cause of whatever else is wrong with a header.
            number = bisect_right(self.starts, self._position)
            for column in (self.names, self.offsets, self.starts, self.ends):
                del column[number:]
            return error
        return damage

    def members_until(self, end: int | None) -> list[tuple[str, int, int]]:
        """Return (name, position of the first byte, number of bytes) of the members that lie before ``end``.

        Raises:
            DamagedShard: the last of them does not end there.
        """
        self._read(end)
        self._check_headers()
        if end is not None and self._position != end:
            raise self._damage("no member ends where the index says; write it anew with sharmill sidecars")
        sizes = [behind - start for start, behind in zip(self.starts, self.ends, strict=True)]
        return list(zip(self.names, self.starts, sizes, strict=True))

    def _read(self, end: int | None) -> None:
        """Pass the members that begin before ``end``; None stands for the end marker."""
        is_end = False
        while not is_end and (end is None or self._position < end):
            self._read_plain(end)
            if end is None or self._position < end:
                is_end = self._read_member()

    def _read_plain(self, end: int | None) -> None:
        """Pass the next members, as long as each has one header in the form that sharmill and lhotse write.

        This takes a third of the time of ``_read_member``, which knows all that there may be, and names what is wrong.
        """
        data, position = self._data, self._position
        last = len(data) - BLOCK if end is None else min(len(data) - BLOCK, end - 1)
        names, offsets, starts, ends = self.names, self.offsets, self.starts, self.ends
        form, fixed_sum = _GNU if data[position + 154 : position + BLOCK] == _GNU[0][2] else _USTAR
        while position <= last:
            name, owner, digits, time, checksum, rest = _split_header(data, position)
            if (owner, time, rest) != form or digits.strip(_OCTAL_DIGITS):
                break
            # The sum of so few bytes is the lower half of Adler-32, which begins with 1.
            if checksum != b"%06o" % (fixed_sum - 1 + (zlib.adler32(digits, zlib.adler32(name)) & 0xFFFF)):
                break
            size = int(digits, 8)
            start = position + BLOCK
            behind = start + size
            following = behind + -size % BLOCK
            if following > len(data) or data[behind:following] != EMPTY[: following - behind]:
                break
            names.append(name.rstrip(b"\0").decode("utf-8", "surrogateescape"))
            offsets.append(position)
            starts.append(start)
            ends.append(behind)
            position = following
        self._position = position

    def _read_member(self) -> bool:
        """Pass a member with all of its headers, or the end marker; return True for that."""
        offset = self._position
        name: bytes | None = None
        size: int | None = None
        while (header := self._take(BLOCK, "a header")) != EMPTY:
            self._headers.append(self._position - BLOCK)
            kind = header[156:157]
            length = parse_number(header[124:136])
            if length is None:
                raise self._damage("a size field is not a number")
            if kind in (GNU_LONG_NAME, PAX_HEADER):
                if length > MAX_EXTENSION_BYTES:
                    raise self._damage(f"a header extension of {length} bytes is too large")
                start, length = self._skip_padded(length)
                extension = self._data[start : start + length]
                if kind == GNU_LONG_NAME:
                    name = extension.rstrip(b"\0")
                else:
                    name, size = self._pax(extension, name, size)
                continue
            if kind not in _REGULAR:
                raise self._damage(f"a member of type {kind!r} does not belong in a shard")
            start, length = self._skip_padded(length if size is None else size)
            self.names.append((name or plain_name(header)).decode("utf-8", "surrogateescape"))
            self.offsets.append(offset)
            self.starts.append(start)
            self.ends.append(start + length)
            return False
        if self._position - BLOCK > offset:
            raise self._damage("a header extension has no member")
        self._check_end()
        return True

    def _take(self, length: int, what: str) -> bytes:
        block = self._data[self._position : self._position + length]
        if len(block) < length:
            raise self._damage(f"the file ends within {what}; it is cut off")
        self._position += length
        return block

    def _skip_padded(self, length: int) -> tuple[int, int]:
        """Move to behind a member and return its position and length."""
        start = self._position
        end = start + length
        padded = end + -length % BLOCK
        if padded > len(self._data):
            raise self._damage("the file ends within a member; it is cut off")
        if self._data[end:padded] != EMPTY[: padded - end]:
            raise self._damage("the padding of a member is not empty")
        self._position = padded
        return start, length

    def _check_headers(self) -> None:
        """Verify the checksums of all headers that ``_read_member`` has come to, all at once."""
        if not self._headers:
            return
        blocks = np.frombuffer(self._data, np.uint8, len(self._data) // BLOCK * BLOCK).reshape(-1, BLOCK)
        headers = blocks[np.array(self._headers, np.int64) // BLOCK]  # a copy
        del blocks  # or the file could not be closed
        fields = headers[:, _CHECKSUM]
        found = headers.sum(axis=1, dtype=np.int64) - fields.sum(axis=1, dtype=np.int64) + 8 * ord(" ")
        for position, expected, field in zip(self._headers, found.tolist(), fields, strict=True):
            if parse_number(field.tobytes()) != expected:
                self._position = position
                raise self._damage("the checksum of a header is wrong")

    def _check_end(self) -> None:
        rest = self._data[self._position :]
        if len(rest) < BLOCK:
            raise self._damage("the end marker is incomplete; the file is cut off")
        if rest.strip(b"\0"):
            raise self._damage("there is data after the end marker")

    def _pax(self, records: bytes, name: bytes | None, size: int | None) -> tuple[bytes | None, int | None]:
        """Return the path and size of a PAX header; other keywords do not matter here."""
        try:
            for keyword, value in iterate_pax(records):
                if keyword == b"path":
                    name = value
                elif keyword == b"size":
                    size = parse_pax_size(value)
                elif keyword.startswith(b"GNU.sparse."):
                    raise self._damage("a sparse member does not belong in a shard")
        except ValueError as error:
            raise self._damage(str(error)) from error
        return name, size

    def _damage(self, what: str) -> DamagedShard:
        return DamagedShard(f"{self._path} at byte {self._position}: {what}")


def parse_members(path: Path, data: mmap.mmap | bytes, begin: int, end: int | None) -> list[tuple[str, int, int]]:
    """Parse a part of an archive that is open already, without going through what is before or behind it.

    Args:
        path: of the archive, for messages.
        data: the bytes of the whole archive.
        begin: position of a header.
        end: position of the header of the first member that is left out; None for all up to the end marker.

    Returns:
        Name, position of the first byte and number of bytes of each member.

    Raises:
        DamagedShard: the part is not whole members.
    """
    return _Parser(path, data, begin).members_until(end)


def open_field(path: Path, *, buffering: int = -1) -> BinaryIO:
    """Open a file of a shard for reading.

    Raises:
        DamagedShard: it is not there, or not a regular file.
    """
    try:
        return open_regular(path, buffering=buffering)
    except ValueError as error:
        raise DamagedShard(f"{path}: {error}") from error
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise DamagedShard(f"{path}: {error.strerror}") from error
