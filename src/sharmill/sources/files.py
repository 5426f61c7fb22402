"""Files of sources: the paths that stand for several of them, and the check that a file can be read at all.

In a path, ranges name numbered shards, ``*`` and ``?`` find files, and ``~`` is the home folder.
"""

from __future__ import annotations

import glob
import itertools
import math
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, BinaryIO, Final

from sharmill.errors import ConfigError
from sharmill.files.storage import NotRegularError, checksum, open_regular

_RANGE: Final = re.compile(
    r"\{(\d+)\.\.(\d+)\}|\((\d+)\.\.(\d+)\)|\[(\d+)\.\.(\d+)\]|<(\d+)\.\.(\d+)>|_OP_(\d+)\.\.(\d+)_CL_"
)
_MAX_FILES: Final = 1_000_000
_MAX_DIGITS: Final = 18
_COMPRESSED: Final = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}


def identify_files(files: Iterable[Path]) -> dict[str, Any]:
    """Return the size and checksum of every file, by its number and name.

    Without folders: the files may be moved, with the project or alone.
    """
    return {f"{number} {file.name}": [file.stat().st_size, checksum(file)] for number, file in enumerate(files)}


def expand_home(path: str) -> Path:
    """Return a path with ``~`` as the home folder; as it is where there is no such user, for which Path raises."""
    return Path(os.path.expanduser(path))  # noqa: PTH111


def find_files(patterns: Iterable[str]) -> list[Path]:
    """Return the files that patterns stand for: in their order, those found by ``*`` and ``?`` sorted by name.

    Raises:
        ConfigError: a range runs backwards, there are too many files, or ``*`` and ``?`` find none.
    """
    files: list[Path] = []
    for pattern in patterns:
        for shard in expand_shards(str(expand_home(pattern))):
            files += map(Path, _find(shard))
        if len(files) > _MAX_FILES:
            raise ConfigError(
                f"the patterns up to {pattern} name more than {_MAX_FILES:,} files", code="bad_config_value"
            )
    return files


def names_several(pattern: str) -> bool:
    """Return True if a path is a pattern that may stand for several files."""
    return bool(_RANGE.search(pattern)) or "*" in pattern or "?" in pattern


def _find(name: str) -> list[str]:
    # A file may be called like a pattern.
    if not ("*" in name or "?" in name) or os.path.lexists(name):
        return [name]
    found = sorted(glob.glob(name.replace("[", "[[]"), recursive=True))  # noqa: PTH207
    if not found:
        raise ConfigError(
            f"{name} finds no files from {Path.cwd()}; correct the path, or put files there", code="missing_input"
        )
    return found


def expand_shards(pattern: str) -> list[str]:
    """Return the names of ranges ``{a..b}``, ``(a..b)``, ``[a..b]``, ``<a..b>`` and ``_OP_a..b_CL_`` in a pattern.

    >>> expand_shards("m__OP_8..10_CL_.json")
    ['m_8.json', 'm_9.json', 'm_10.json']

    Raises:
        ConfigError: a range runs backwards, or together they name too many files.
    """
    ranges, texts, position = [], [], 0
    for match in _RANGE.finditer(pattern):
        first, last = (text for text in match.groups() if text is not None)
        if max(len(first), len(last)) > _MAX_DIGITS:
            raise ConfigError(
                f"the numbers of a range in {pattern[:100]} have more than {_MAX_DIGITS} digits",
                code="bad_config_value",
            )
        if int(last) < int(first):
            raise ConfigError(
                f"the range {match[0]} in {pattern} runs backwards; write the lower number first",
                code="bad_config_value",
            )
        ranges.append((range(int(first), int(last) + 1), len(first)))
        texts.append(pattern[position : match.start()])
        position = match.end()
    # len() of a range is limited to what an index can be.
    count = math.prod(numbers.stop - numbers.start for numbers, _ in ranges)
    if count > _MAX_FILES:
        raise ConfigError(
            f"the ranges in {pattern} name {count:,} files, more than {_MAX_FILES:,}", code="bad_config_value"
        )
    choices = [[f"{text}{number:0{width}d}" for number in numbers]
               for text, (numbers, width) in zip(texts, ranges, strict=True)]  # fmt: skip
    return ["".join(chosen) + pattern[position:] for chosen in itertools.product(*choices)]


def open_input(path: Path, kind: str) -> BinaryIO:
    """Open a file that a source names; ``kind`` is the key of the source.

    Raises:
        ConfigError: it is missing, or no regular file.
    """
    try:
        return open_regular(path)
    except NotRegularError as error:
        sentence = "is not a regular file; copy its content into one"
        raise bad_file(path, kind, f"is a folder; name the {kind} file in it" if path.is_dir() else sentence) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        where = "" if path.is_absolute() else f"the path is relative to {Path.cwd()}; run from its folder, or "
        raise ConfigError(
            f"cannot read the {kind} {path}: {reason}; {where}correct its path", code="missing_input"
        ) from error


def read_ends(path: Path, kind: str, compressed: Collection[str] = ()) -> tuple[bytes, bytes]:
    """Return the first 64 KiB and the last MiB of a file; ``kind`` is the key of the source that names it.

    Raises:
        ConfigError: it is missing, no regular file, empty, or compressed by another program than ``compressed`` names.
    """
    with open_input(path, kind) as stream:
        head = stream.read(1 << 16)
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - (1 << 20)))
        tail = stream.read()
    if not head.strip():
        raise bad_file(path, kind, "is empty")
    refuse_compressed(path, kind, head, compressed)
    return head, tail


def refuse_compressed(path: Path, kind: str, head: bytes, compressed: Collection[str] = ()) -> None:
    """Raise ConfigError where a file that begins with ``head`` is compressed, but not as ``compressed`` names."""
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic) and name not in compressed:
            raise bad_file(path, kind, f"is compressed ({name}); unpack it, and name the unpacked file")


def bad_file(path: Path, kind: str, sentence: str) -> ConfigError:
    """Return the error about a file that cannot be what its source takes it for."""
    return ConfigError(f"the {kind} {path} {sentence}", code="bad_manifest")


def check_encoding(encoding: str) -> None:
    """Raise ValueError where an encoding is unknown, or its lines do not end as those of ASCII."""
    try:
        if "\n".encode(encoding) != b"\n":
            raise ValueError(f"texts in {encoding} cannot be read: save them as UTF-8")
    except LookupError as error:
        raise ValueError(f"there is no encoding {encoding!r} of texts") from error
