"""Checksums of files and bytes (xxh3-64), and a hash of texts."""

import hashlib
from pathlib import Path
from typing import Any, BinaryIO, cast

import xxhash

from sharmill.files.regular import open_regular


def checksum(path: Path) -> str:
    """Return the xxh3-64 of a regular file in hexadecimal; raises the errors of ``open_regular``."""
    with open_regular(path, buffering=0) as stream:
        return checksum_stream(stream)


def checksum_stream(stream: BinaryIO) -> str:
    """Return the xxh3-64 of the rest of a stream in hexadecimal."""
    return hashlib.file_digest(cast("Any", stream), xxhash.xxh3_64).hexdigest()


def checksum_bytes(data: bytes) -> str:
    """Return the xxh3-64 of ``data`` in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


def hash_text(text: str) -> int:
    """Return the xxh3-64 of a text as an integer; the text may contain unpaired surrogates, as JSON may."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))
