"""Writing of tar archives with reproducible bytes, and reading of the headers of archives, strictly or tolerantly.

The readable formats are ustar, GNU long names, and PAX paths and sizes (POSIX.1-2001). Written headers contain neither
time nor owner. In a shard, which is read strictly, anything but regular members followed by an end marker is damage.
Archives of other tools may also contain folders, symbolic links, devices and sparse files, which are skipped, and hard
links to earlier members.
"""

import errno
import mmap
import os
import re
import struct
import tarfile
import zlib
from collections.abc import Iterator
from typing import BinaryIO, Final, NamedTuple

from sharmill.errors import DamagedShard
from sharmill.files.location import Location, open_location

BLOCK: Final = 512
EMPTY: Final = bytes(BLOCK)
# The end marker; an archive without it counts as cut off.
END: Final = bytes(2 * BLOCK)
# Smaller archives are read as a whole, which is faster than mapping and unmapping their pages.
_MAX_READ_BYTES: Final = 1 << 19
# The number of bytes to read at once: enough for a header, the short text that follows it, and the next header.
_WINDOW_BYTES: Final = 4096
# The maximum size of a header extension. Names and PAX records are short; a larger one is damage, or an attempt to
# exhaust memory.
_MAX_EXTENSION_BYTES: Final = 1 << 20
_GNU_LONG_NAME: Final = b"L"
_GNU_LONG_LINK: Final = b"K"
_PAX_HEADER: Final = b"x"
# Types of headers that describe the next header. Archives that are not shards may also have GNU long links, and Sun's
# or global PAX headers.
_SHARD_EXTENSIONS: Final = (_GNU_LONG_NAME, _PAX_HEADER)
_EXTENSIONS: Final = (*_SHARD_EXTENSIONS, _GNU_LONG_LINK, b"X", b"g")
_SHARD_REGULAR: Final = (b"0", b"\0")
_CONTIGUOUS: Final = b"7"
_SPARSE: Final = b"S"
_HARD_LINK: Final = b"1"
# Types of members without data, regardless of the size in their headers: links, devices, folders and FIFOs.
_WITHOUT_DATA: Final = (_HARD_LINK, b"2", b"3", b"4", b"5", b"6")
_PAX_LENGTH: Final = re.compile(rb"([0-9]{1,7}) ")
_DECIMAL: Final = re.compile(rb"[0-9]{1,19}")
_OCTAL: Final = re.compile(rb"[0-7]+")


def _sum_fixed(header: bytes) -> int:
    """Return the byte sum of a header without name and size; the checksum counts as spaces, as the format requires."""
    return sum(header) - sum(header[124:135]) - sum(header[148:156]) + 8 * ord(" ")


# The longest name and the largest size that fit into a header of one block.
_MAX_NAME: Final = 100
_MAX_SIZE: Final = 0o77777777777
# Headers with empty names in the two forms that sharmill and lhotse write.
_TEMPLATE, _USTAR_TEMPLATE = (tarfile.TarInfo("").tobuf(form) for form in (tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT))
_TEMPLATE_SUM: Final = _sum_fixed(_TEMPLATE)
# Splits a header into name, mode and owner, digits of the size, time, digits of the checksum, and the rest.
_split_header: Final = struct.Struct("100s24s11s13s6s358s").unpack
# The parts that all headers of one form share, and the sum of their bytes.
_GNU, _USTAR = (
    ((header[100:124], header[135:148], header[154:]), _sum_fixed(header)) for header in (_TEMPLATE, _USTAR_TEMPLATE)
)


def write_member(stream: BinaryIO, name: str, data: bytes) -> int:
    """Append a member to an archive, and return the size of its header in bytes.

    The same members always give the same bytes. The caller must complete the archive with ``END``.
    """
    header = tar_header(name, len(data))
    stream.write(header)
    stream.write(data)
    stream.write(EMPTY[: -len(data) % BLOCK])
    return len(header)


def padded(size: int) -> int:
    """Return the number of bytes that data of this size occupies in an archive, including the padding."""
    return size + -size % BLOCK


def tar_header(name: str, size: int) -> bytes:
    """Return the same header as ``tarfile`` for a member; a header of one block takes a tenth of ``tarfile``'s time."""
    encoded = name.encode("utf-8", "surrogateescape")
    if len(encoded) > _MAX_NAME or size > _MAX_SIZE:
        header = tarfile.TarInfo(name)
        header.size = size
        return header.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
    digits = b"%011o" % size
    checksum = b"%06o" % (_TEMPLATE_SUM + sum(encoded) + sum(digits))
    head = encoded.ljust(_MAX_NAME, b"\0") + _TEMPLATE[_MAX_NAME:124] + digits
    return head + _TEMPLATE[len(head) : 148] + checksum + _TEMPLATE[154:]


def clean_name(name: str) -> str:
    """Return the name of a member without ``.`` components and superfluous slashes, which some tools write.

    >>> clean_name("./one.wav"), clean_name("/data//one.wav")
    ('one.wav', 'data/one.wav')
    """
    return "/".join(part for part in name.split("/") if part not in ("", "."))


class TarMember(NamedTuple):
    """A regular file in an archive.

    Attributes:
        name: as stored in the archive; bytes that are not UTF-8 are escaped as surrogates.
        header: offset of its first header in the archive.
        start: offset of its data in the archive.
        size: size of its data in bytes; -1 for a hard link whose target does not come earlier in the archive.
    """

    name: str
    header: int
    start: int
    size: int


class TarDamage(Exception):
    """Damage beyond which an archive cannot be read; the message begins with a verb whose subject is the archive.

    Attributes:
        name: the name of the member that is cut off, if known.
        header: offset of the first header of the damaged member.
    """

    def __init__(self, what: str, name: str = "") -> None:
        super().__init__(what)
        self.name = name
        self.header = 0


class Window:
    """The bytes of an open file, accessed by slices; slices close to each other share one read."""

    def __init__(self, stream: BinaryIO) -> None:
        self._descriptor = stream.fileno()
        self._size = os.fstat(self._descriptor).st_size
        self._start = 0
        self._bytes = b""

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> bytes:
        begin, end = part.start, part.stop
        if begin < self._start or end > self._start + len(self._bytes):
            self._bytes = os.pread(self._descriptor, max(end - begin, _WINDOW_BYTES), begin)
            self._start = begin
        return self._bytes[begin - self._start : end - self._start]


# The bytes of an archive that is memory-mapped, in memory, or read in parts.
Content = mmap.mmap | bytes | Window


def walk(
    data: Content,
    begin: int = 0,
    end: int | None = None,
    *,
    strict: bool,
    earlier: dict[str, tuple[int, int]] | None = None,
) -> Iterator[tuple[str, int, int, int]]:
    """Yield the regular members of an archive as plain tuples with the values of ``TarMember``, since these are faster.

    A hard link, which tar writes for the second name of a file, is yielded with the offset and size of the earlier
    member's data.

    Args:
        data: all bytes of the archive.
        begin: offset of the first header of a member.
        end: offset where the last member ends; None to read up to the end marker.
        strict: read the archive as a shard: other kinds of members, bytes in the padding, and a wrong end marker are
            damage.
        earlier: offset and size of the data of each earlier member, by clean name; the caller must add every member
            that is yielded. By default, the archive is read again from ``begin`` to find them if it contains a hard
            link.

    Raises:
        TarDamage: a header is damaged, the archive is cut off, or no member ends at ``end``. Tar archives have no
            checksum for the bytes of a member, so these are not checked.
    """
    first, num_bytes = begin, len(data)
    places = {} if earlier is None else earlier
    known = 0  # all members before this offset are in ``places``
    try:
        while end is None or first < end:
            header = data[first : first + BLOCK]
            # Parse the forms that sharmill and lhotse write directly, which takes a fifth of the time of
            # ``_read_headers``.
            name, owner, digits, time, checksum, rest = _split_header(header.ljust(BLOCK))
            form, fixed_sum = _GNU if rest == _GNU[0][2] else _USTAR
            if (
                (owner, time, rest) == form
                and not digits.strip(b"01234567")
                # The same checksum test as in ``has_right_checksum``.
                and checksum == b"%06o" % (fixed_sum - 1 + (zlib.adler32(digits, zlib.adler32(name)) & 0xFFFF))
            ):
                name, start, size, is_regular, link = name.rstrip(b"\0"), first + BLOCK, int(digits, 8), True, b""
            elif header == EMPTY:
                if strict:
                    _check_end(data, first)
                return
            else:
                name, start, size, is_regular, link = _read_headers(data, first, strict=strict)
            text = name.decode("utf-8", "surrogateescape")
            data_end = start + size
            if data_end > num_bytes:
                raise TarDamage(f"is cut off at byte {num_bytes}, within its member {text[:200]!r}", text)
            next_header = padded(data_end)
            if strict and not EMPTY.startswith(data[data_end:next_header]):
                raise TarDamage(f"is damaged at byte {data_end}: the padding of a member is not empty")
            if link:
                if earlier is None:
                    for member, _, *place in walk(data, known, first, strict=False, earlier=places):
                        places[clean_name(member)] = place[0], place[1]
                    known = first
                start, size = places.get(clean_name(link.decode("utf-8", "surrogateescape")), (data_end, -1))
            if (is_regular or link) and (strict or not text.endswith("/")):
                yield text, first, start, size
            first = next_header
        if first != end:
            raise TarDamage("has no member that ends where its index says; write it again with sharmill sidecars")
    except TarDamage as damage:
        damage.header = first
        raise


def _check_end(data: Content, position: int) -> None:
    """Raise TarDamage unless the end marker is complete and nothing follows it."""
    rest = data[position : len(data)]
    if len(rest) < len(END):
        raise TarDamage(f"is cut off at byte {len(data)}, within its end marker")
    if rest.strip(b"\0"):
        raise TarDamage("has data after its end marker")


def _read_headers(data: Content, position: int, *, strict: bool) -> tuple[bytes, int, int, bool, bytes]:
    """Return name, start, size, regular and link of a member of any kind, whose first header is at ``position``.

    The name and ``link`` (the name of the earlier member, if the member is a hard link) are bytes; ``start`` is the
    offset of the member's data; and ``regular`` is True for a regular file.
    """
    long_name: bytes | None = None
    link: bytes | None = None
    pax: dict[bytes, bytes] = {}
    header = _take(data, position, BLOCK)
    while (kind := header[156:157]) in (_SHARD_EXTENSIONS if strict else _EXTENSIONS):
        size = _stored_size(header, position)
        if size > _MAX_EXTENSION_BYTES:
            raise TarDamage(f"is damaged at byte {position}: a header extension of {size} bytes is too large")
        extension = _take(data, position + BLOCK, padded(size))
        if strict and not EMPTY.startswith(extension[size:]):
            raise TarDamage(f"is damaged at byte {position}: the padding of a header extension is not empty")
        if kind == _GNU_LONG_NAME:
            long_name = extension[:size].rstrip(b"\0")
        elif kind == _GNU_LONG_LINK:
            link = extension[:size].rstrip(b"\0")
        elif kind == _PAX_HEADER:
            pax |= _parse_pax(extension[:size], position)
            long_name, link = pax.get(b"path", long_name), pax.get(b"linkpath", link)
        position += BLOCK + len(extension)
        header = _take(data, position, BLOCK)
    if header == EMPTY:
        if strict:
            raise TarDamage(f"is damaged at byte {position}: a header extension has no member")
        return b"", position, 0, False, b""
    size = int(pax.get(b"size", _stored_size(header, position)))
    is_sparse = any(keyword.startswith(b"GNU.sparse.") for keyword in pax)
    is_regular = kind in _SHARD_REGULAR or (kind == _CONTIGUOUS and not strict)
    if strict and (not is_regular or is_sparse):
        raise TarDamage(f"is damaged at byte {position}: a member of type {kind!r} does not belong in a shard")
    start = position + BLOCK
    if kind in _WITHOUT_DATA:
        size = 0
    elif kind == _SPARSE:
        start = _skip_sparse_map(data, header, start)
    link = (link or header[157:257].rstrip(b"\0")) if kind == _HARD_LINK else b""
    return long_name or _plain_name(header), start, size, is_regular and not is_sparse, link


def _take(data: Content, position: int, length: int) -> bytes:
    block = data[position : position + length]
    if len(block) < length:
        what = "within a header" if block else "before its end marker"
        raise TarDamage(f"is cut off at byte {len(data)}, {what}")
    return block


def _stored_size(header: bytes, position: int) -> int:
    """Return the size in a header; raise TarDamage if the header is invalid."""
    size = _parse_number(header[124:136])
    if size is None or not has_right_checksum(header):
        raise TarDamage(f"is damaged at byte {position}: there is no header")
    return size


def has_right_checksum(header: bytes) -> bool:
    """Return True if the checksum of a header is correct; it is computed with spaces in place of the checksum."""
    stated = _parse_number(header[148:156])
    # The lower half of Adler-32 is 1 more than the sum of the bytes, modulo 65,521.
    found = zlib.adler32(header[156:], zlib.adler32(header[:148])) & 0xFFFF
    return stated is not None and (stated - 8 * ord(" ") - found + 1) % 65521 == 0


def _parse_number(field: bytes) -> int | None:
    """Return the number in a field of a header, or None if the field contains no number."""
    if field[0] == 0x80:  # GNU's binary form of sizes from 8 GiB on
        return int.from_bytes(field[1:], "big")
    # Do not use int() alone, which also accepts a sign: with a negative size, the reader would go backwards.
    digits = field.strip(b" \0")
    return int(digits, 8) if _OCTAL.fullmatch(digits) else None


def _plain_name(header: bytes) -> bytes:
    """Return the name in a member's own header, including the prefix of ustar."""
    name = header[:100].rstrip(b"\0")
    prefix = header[345:500].rstrip(b"\0") if header[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _parse_pax(records: bytes, position: int) -> dict[bytes, bytes]:
    """Return the values of a PAX header, by keyword."""
    values = {}
    while records:
        match = _PAX_LENGTH.match(records)
        end = int(match[1]) if match else 0
        keyword, separator, value = records[match.end() if match else 0 : end - 1].partition(b"=")
        if not separator or end > len(records) or records[end - 1 : end] != b"\n":
            raise TarDamage(f"is damaged at byte {position}: a PAX header cannot be parsed")
        values[keyword] = value
        records = records[end:]
    if not _DECIMAL.fullmatch(values.get(b"size", b"0")):
        raise TarDamage(f"is damaged at byte {position}: the size in a PAX header is not a number")
    return values


def _skip_sparse_map(data: Content, header: bytes, start: int) -> int:
    """Return where the data of a sparse file begins, after any continuation blocks of its map of holes."""
    goes_on = header[482]
    while goes_on:
        goes_on = _take(data, start, BLOCK)[504]
        start += BLOCK
    return start


def load(path: Location, *, in_parts: bool = False) -> mmap.mmap | bytes:
    """Return the bytes of a shard file, memory-mapped if it is large or will be read only in parts.

    A mapped file stays open as long as its bytes are referenced.

    Raises:
        DamagedShard: the file is missing or not a regular file.
    """
    with open_field(path, buffering=0) as stream:
        size = stream.seek(0, 2)
        if size > (0 if in_parts else _MAX_READ_BYTES):
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        stream.seek(0)
        return stream.read()


def open_field(path: Location, *, buffering: int = -1) -> BinaryIO:
    """Open a file of a shard for reading.

    Raises:
        DamagedShard: the file is missing, not a regular file, or differs on its server from the index entry.
    """
    try:
        return open_location(path, buffering=buffering)
    except ValueError as error:
        raise DamagedShard(f"{path}: {error}") from error
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EREMOTEIO):
            raise
        raise DamagedShard(f"{path}: {error.strerror}") from error
