"""Checksums of files and of bytes (xxh3-64), and a hash of texts."""

import hashlib
from pathlib import Path
from typing import Any, BinaryIO, cast

import xxhash

from sharmill.files.regular import open_regular


def checksum(path: Path) -> str:
    """xxh3-64 of the bytes of a regular file, in hexadecimal; raises as ``open_regular``."""
    with open_regular(path, buffering=0) as stream:
        return checksum_stream(stream)


def checksum_stream(stream: BinaryIO) -> str:
    """xxh3-64 of what is left of a stream, in hexadecimal."""
    return hashlib.file_digest(cast("Any", stream), xxhash.xxh3_64).hexdigest()


def checksum_bytes(data: bytes) -> str:
    """xxh3-64 of ``data``, in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


def hash_text(text: str) -> int:
    """xxh3-64 of a text, which may have halves of characters (surrogates) as JSON may."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))
