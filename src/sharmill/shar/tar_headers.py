"""Headers of tar archives: the meaning of their fields.

The walks over archives are elsewhere: a strict one in ``sharmill.shar.tar``, for sharmill's own, and a tolerant one in
``sharmill.sources.tars``, for those of others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

BLOCK: Final = 512
EMPTY: Final = bytes(BLOCK)
GNU_LONG_NAME: Final = b"L"
PAX_HEADER: Final = b"x"
# Names and PAX records are short; a larger one is damage, or an attempt to fill the memory.
MAX_EXTENSION_BYTES: Final = 1 << 20
_PAX_LENGTH: Final = re.compile(rb"([0-9]{1,7}) ")
_DECIMAL: Final = re.compile(rb"[0-9]{1,19}")
_OCTAL: Final = re.compile(rb"[0-7]+")


def parse_number(field: bytes) -> int | None:
    """Return the number in a field of a header, None where there is none."""
    if field[0] == 0x80:  # GNU's binary sizes, from 8 GiB
        return int.from_bytes(field[1:], "big")
    # Not left to int(), which takes a sign as well: a negative size would lead backwards.
    digits = field.strip(b" \0")
    return int(digits, 8) if _OCTAL.fullmatch(digits) else None


def plain_name(header: bytes) -> bytes:
    """Return the name in a header itself, with the prefix that ustar has."""
    name = header[:100].rstrip(b"\0")
    prefix = header[345:500].rstrip(b"\0") if header[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def iterate_pax(records: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keywords and values of a PAX header.

    Raises:
        ValueError: it cannot be parsed.
    """
    while records:
        match = _PAX_LENGTH.match(records)
        end = int(match[1]) if match else 0
        if match is None or not match.end() < end <= len(records) or records[end - 1 : end] != b"\n":
            raise ValueError("a PAX header cannot be parsed")
        keyword, separator, value = records[match.end() : end - 1].partition(b"=")
        if not separator:
            raise ValueError("a PAX header cannot be parsed")
        yield keyword, value
        records = records[end:]


def parse_pax_size(value: bytes) -> int:
    """Return the size that a PAX header gives; raise ValueError where it is no number."""
    if not _DECIMAL.fullmatch(value):
        raise ValueError("the size in a PAX header is not a number")
    return int(value)
