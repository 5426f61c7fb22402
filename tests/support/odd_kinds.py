"""Builders of the rows of ``odd_inputs``: what a kind is, and kinds of audio, records, lines, names and places."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import odd_audio as odd
from support.manifests import speaker_tag
from support.shar import voice

OUTPUT = "output"
Record = dict[str, Any] | bytes
# What a later stage must not find as ``prepare`` found it.
Spoil = Callable[[Path], object]


@dataclass(frozen=True)
class Kind:
    """One kind: its outcomes, one a record, and a function that makes its files and returns its records.

    ``spoil`` is done to its first file after the stage ``after``.
    """

    name: str
    outcomes: tuple[str, ...]
    make: Callable[[Path, str], list[Record]]
    after: str = ""
    spoil: Spoil = field(default=lambda path: None)

    def file(self, root: Path) -> Path:
        return root / f"{slug(self.name)}.wav"


def slug(name: str) -> str:
    return re.sub(r"\W+", "_", name)


def record(kind: str, **changes: Any) -> dict[str, Any]:
    """A good record of the kind's own file; a change to ``...`` removes the key."""
    # The kind comes first, so that it is in what is left of a record that is cut off.
    good = {"kind": kind, "audio_filepath": f"{slug(kind)}.wav", "duration": odd.SECONDS,
            "text": f"Text of {slug(kind)}.", "speaker": speaker_tag("anna")}  # fmt: skip
    return {key: value for key, value in (good | changes).items() if value is not ...}


def audio(name: str, outcome: str, make: Callable[[], bytes], **changes: Any) -> Kind:
    """A kind of audio file, with a record that does not know of it."""

    def files(root: Path, kind: str) -> list[Record]:
        (root / f"{slug(kind)}.wav").write_bytes(make())
        return [record(kind, **changes)]

    return Kind(name, (outcome,), files)


def entry(name: str, outcome: str, **changes: Any) -> Kind:
    """A kind of record, with a good file."""
    return audio(name, outcome, odd.wav, **changes)


def line(name: str, outcome: str, make: Callable[[bytes], bytes]) -> Kind:
    """A kind of line, made of the line of a good record."""

    def files(root: Path, kind: str) -> list[Record]:
        (root / f"{slug(kind)}.wav").write_bytes(odd.wav())
        return [make(json.dumps(record(kind)).encode())]

    return Kind(name, (outcome,) if outcome else (), files)


def named(name: str, outcome: str, path: str, **changes: Any) -> Kind:
    """A kind of file name, with a good file of that name."""

    def files(root: Path, kind: str) -> list[Record]:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(odd.wav())
        return [record(kind, audio_filepath=path, **changes)]

    return Kind(name, (outcome,), files)


def place(name: str, outcome: str, make: Callable[[Path], object], **changes: Any) -> Kind:
    """A kind of thing in the file system; ``make`` gets the path that the record names."""

    def files(root: Path, kind: str) -> list[Record]:
        make(root / f"{slug(kind)}.wav")
        return [record(kind, **changes)]

    return Kind(name, (outcome,), files)


def pair(name: str, outcomes: tuple[str, str], first: dict[str, Any], second: dict[str, Any]) -> Kind:
    """Two records that have to do with each other."""

    def files(root: Path, kind: str) -> list[Record]:
        both = [record(kind, **first), record(kind, **second)]
        for made in both:
            path = root / made["audio_filepath"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(odd.container(samples=voice(made["duration"] + made.get("offset", 0.0))))
        return both

    return Kind(name, outcomes, files)


def later(name: str, outcome: str, after: str, spoil: Spoil) -> Kind:
    """A good file that changes when a stage has seen it."""
    return Kind(name, (outcome,), entry(name, outcome).make, after, spoil)
