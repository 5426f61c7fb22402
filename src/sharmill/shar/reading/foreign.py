"""Shards in a folder without ``shards.jsonl``, as lhotse and the published context-Shar scripts leave them.

Two layouts are known: lhotse's own, with all files in one folder (``cuts.000000.jsonl.gz``, ``recording.000000.tar``),
and the published one with a folder per field (``cuts/cuts.000000.jsonl.gz``, ``target_audio/recording.000000.tar``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sharmill.errors import ConfigError
from sharmill.shar.layout import CUTS

# Without a number where lhotse was told to make a single shard.
# More folders than a dataset has fields, however it is nested.
_MAX_FOLDERS = 10_000
_SHARD_FILE = re.compile(r"([^.]+)(?:\.([0-9]+))?\.(tar|jsonl|jsonl\.gz)")
_COMPRESSED_ARCHIVE = re.compile(r"[^.]+(?:\.[0-9]+)?\.(?:tar\.(?:gz|bz2|xz|zst)|tgz)")


@dataclass(frozen=True, slots=True)
class ForeignShard:
    """One shard: its number, and its file of each field.

    A field is called like the folder its files are in (``cuts``, ``target_audio``, ``codes_x/target_codes``), in
    lhotse's own layout like the files (``cuts``, ``recording``).
    """

    index: int
    files: dict[str, Path]


def find_shards(directory: Path, *, complete: bool = True) -> list[ForeignShard]:
    """Find the shards of a folder, ordered by their numbers as numbers: 2 comes before 10.

    With ``complete`` false a shard may lack fields, and a field may have shards of its own: the checker says so itself.

    What is not named like a shard's file (``.idx`` beside one, notes) is left alone, and so is what begins with a dot.

    Raises:
        ConfigError: there are no cuts, a shard lacks a field that others have, or two files claim to be the same.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a folder", code="bad_layout")
    fields: dict[str, dict[int, Path]] = {}
    numbered = _are_numbered(directory)
    for field, path in _candidates(directory):
        match = _SHARD_FILE.fullmatch(path.name)
        if match is None:
            if _COMPRESSED_ARCHIVE.fullmatch(path.name):
                raise ConfigError(f"{path}: compressed archives are not read; decompress it to .tar", code="bad_layout")
            continue
        if (match[2] is not None) != numbered:
            continue
        index = int(match[2] or 0)
        taken = fields.setdefault(field, {}).setdefault(index, path)
        if taken != path:
            raise ConfigError(
                f"{taken} and {path.name} are both shard {index} of {field}; remove one", code="bad_layout"
            )
    if CUTS not in fields:
        raise ConfigError(
            f"{directory} has no cuts: neither cuts.000000.jsonl.gz nor a folder cuts with such files",
            code="bad_layout",
        )
    for field, files in fields.items() if complete else ():
        if odd := sorted(files.keys() ^ fields[CUTS].keys()):
            has, lacks = (field, CUTS) if odd[0] in files else (CUTS, field)
            raise ConfigError(f"{directory}: {has} has a shard {odd[0]} and {lacks} does not", code="bad_layout")
    return [
        ForeignShard(index, {field: files[index] for field, files in sorted(fields.items()) if index in files})
        for index in sorted(set().union(*fields.values()))
    ]


def _cuts_files(folder: Path) -> list[re.Match[str]]:
    """Return the parsed names of the files with cuts in a folder."""
    if not folder.is_dir():
        return []
    matches = (_SHARD_FILE.fullmatch(path.name) for path in folder.iterdir())
    return [match for match in matches if match and match[1] == CUTS and match[3] != "tar"]


def _are_numbered(directory: Path) -> bool:
    """Return True if the files of cuts have numbers; only files that are like them in this belong to them."""
    found = _cuts_files(directory) + _cuts_files(directory / CUTS)
    kinds = {match[2] is not None for match in found}
    if len(kinds) > 1:
        raise ConfigError(f"{directory} has files of cuts with and without a number; remove either", code="bad_layout")
    return kinds != {False}


def _candidates(directory: Path) -> Iterator[tuple[str, Path]]:
    """Yield (field, file) of all files where shards may be, in the order of their names."""
    flat, nested = _cuts_files(directory), _cuts_files(directory / CUTS)
    if flat and nested:
        raise ConfigError(
            f"{directory} has files of cuts both in itself and in its folder cuts; remove either", code="bad_layout"
        )
    if flat:
        for path in sorted(directory.iterdir()):
            if path.is_file() and not path.name.startswith("."):
                yield path.name.partition(".")[0], path
        return
    seen: set[tuple[int, int]] = set()
    for root, folders, names in os.walk(directory, followlinks=True):
        try:
            status = Path(root).stat()
        except OSError as error:
            raise ConfigError(f"{root} cannot be looked at: {error.strerror}", code="bad_layout") from error
        if (status.st_dev, status.st_ino) in seen:  # links that lead in a circle
            folders[:] = []
            continue
        if len(seen) == _MAX_FOLDERS:
            raise ConfigError(
                f"{directory} has more than {_MAX_FOLDERS:,} folders, as no dataset has; does a link in it lead "
                f"elsewhere? The last one is {root}",
                code="bad_layout",
            )
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        field = Path(root).relative_to(directory).as_posix()
        for name in sorted(names):
            # Files in the folder itself belong to no field here.
            if field != "." and not name.startswith("."):
                yield field, Path(root, name)
