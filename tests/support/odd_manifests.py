"""The kinds of input that end a run before any work, and those of which a run can make nothing."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from support import odd_audio as odd
from support.odd_kinds import record, slug

GOOD_LINE = json.dumps(record("good")).encode() + b"\n"


@dataclass(frozen=True)
class WholeInput:
    """``make`` changes a good manifest or audio root below a folder; ``says`` is part of the one line for the user."""

    name: str
    status: int
    make: Callable[[Path], object]
    says: str


def _manifest(name: str, status: int, data: bytes, says: str) -> WholeInput:
    return WholeInput(name, status, lambda folder: (folder / "odd.json").write_bytes(data), says)


def _instead(name: str, make: Callable[[Path], object], says: str) -> WholeInput:
    """Something that is no file where the manifest should be."""

    def replace(folder: Path) -> None:
        (folder / "odd.json").unlink()
        make(folder / "odd.json")

    return WholeInput(name, 2, replace, says)


def _empty_root(folder: Path) -> None:
    (folder / "audio" / f"{slug('good')}.wav").unlink()


def _root_is_a_file(folder: Path) -> None:
    _empty_root(folder)
    (folder / "audio").rmdir()
    (folder / "audio").write_bytes(odd.wav())


WHOLE_INPUTS = [
    _manifest("a manifest without a byte", 2, b"", "odd.json"),
    _manifest("a manifest of empty lines", 2, b"\n \n\r\n", "odd.json"),
    _manifest("a manifest with a byte order mark", 2, codecs.BOM_UTF8 + GOOD_LINE, "UTF-8"),
    _manifest("a manifest in UTF-16", 2, GOOD_LINE.decode().encode("utf-16"), "UTF-16"),
    _manifest("a manifest that is one JSON list", 2, b"[" + GOOD_LINE + b"]\n", "JSON"),
    _manifest("a manifest that is cut off", 2, GOOD_LINE * 3 + GOOD_LINE[:40], "JSON"),
    _manifest("a manifest that is audio", 2, odd.wav(), "UTF-16"),
    _manifest("a manifest of one endless line", 2, b"{" + b"x" * (65 << 20) + b"\n", "64 MiB"),
    _instead("no manifest", lambda path: None, "No such file or directory"),
    _instead("a directory for a manifest", Path.mkdir, "odd.json"),
    _instead("a FIFO for a manifest", os.mkfifo, "odd.json"),
    _instead("a manifest that may not be read", lambda path: (path.write_bytes(GOOD_LINE), path.chmod(0)),
             "Permission denied"),
    WholeInput("an audio root that is a file", 2, _root_is_a_file, "audio"),
    WholeInput("an empty audio root", 2, _empty_root, "is empty"),
]  # fmt: skip
