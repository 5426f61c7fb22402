"""Seeded mutations of data: of bytes, and of the values of JSON, which bytes rarely survive as."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TOKENS = (
    b"\0", b"\xff", b"\n", b"\r\n", b'"', b"{", b"[", b"]}", b"-1", b"1e999", b"NaN", b"null", b"true", b"../../x",
    b"/etc",    b"9" * 400, b"\xed\xa0\x80", b"\\ud800", b"a" * 5000, b"[" * 2000, b"0", b"18446744073709551616",
    b"-9223372036854775809",    b"\x1b[2J", b"9007199254740993", b"1e308", b"253402300800",
)  # fmt: skip
_DEEP: Any = json.loads("[" * 200 + "]" * 200)
_COMMAND = {"id": "r", "sources": [{"type": "command", "channels": [0], "source": "touch ran"}],
            "sampling_rate": 16000, "num_samples": 16000, "duration": 1.0}  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, -(2**70), 1e308, -0.5, "", "x", "../../etc/passwd", "/etc", "a\0b", "\x1b[2J\n",
    "a" * 5000, [], {}, [[]], [0], ["shar"], {"a": None}, {"width": 1}, {"shape": [1]}, {"array": {}},
    {"storage_type": "s3", "shape": [1]}, _COMMAND, {"type": "command", "channels": [0], "source": "touch ran"},
    {"name": "Speed", "kwargs": {"factor": 0.0}}, [{"name": "Nothing"}], _DEEP,
    [{"name": "Speed", "kwargs": {"factor": None}}], [{"name": "Speed", "kwargs": {"factor": "x"}}], 10**15,
    {**_COMMAND, "sources": [{"type": "shar", "channels": [0], "source": ""}], "sampling_rate": 10**15,
     "transforms": [{"name": "Speed", "kwargs": {"factor": "x"}}]},
)  # fmt: skip


def mutate(data: bytes, draws: random.Random) -> bytes:
    """Return data with one to six places changed."""
    changed = bytearray(data)
    for _ in range(draws.randint(1, 6)):
        place, kind = draws.randrange(len(changed) + 1), draws.randrange(7)
        length = min(draws.choice((1, 1, 2, 8, 64, 600)), len(changed) - place)
        if kind == 0 and place < len(changed):
            changed[place] ^= 1 << draws.randrange(8)
        elif kind == 1:
            changed[place:place] = draws.choice(TOKENS)
        elif kind == 2:
            changed[place : place + length] = draws.choice(TOKENS)
        elif kind == 3:
            del changed[place : place + length]
        elif kind == 4:
            del changed[place:]
        elif kind == 5:
            start = draws.randrange(len(changed) + 1)
            changed[place:place] = changed[start : start + length]
        elif digits := [n for n, byte in enumerate(changed) if 48 <= byte <= 57]:  # a number becomes another
            place = draws.choice(digits)
            changed[place : place + 1] = draws.choice(TOKENS)
    return bytes(changed)


@dataclass(frozen=True)
class Target:
    """A format: good data of it, what reads such data, and how it is changed."""

    name: str
    data: bytes
    read: Callable[[bytes], object]
    change: Callable[[bytes, random.Random], bytes] = mutate


def mutate_values(data: bytes, draws: random.Random) -> bytes:
    """Return lines of JSON in which one to three values were changed, removed, or put elsewhere."""
    lines = data.splitlines()
    for _ in range(draws.randint(1, 3)):
        number = draws.randrange(len(lines))
        value = json.loads(lines[number])
        lines[number] = json.dumps(_change(value, draws)).encode()
    return b"\n".join(lines) + b"\n"


def _change(root: Any, draws: random.Random) -> Any:
    places: list[tuple[Any, Any]] = []
    pending = [root]
    while pending:
        value = pending.pop()
        keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        places += [(value, key) for key in keys]
        pending += [value[key] for key in keys]
    if not places or draws.random() < 0.02:
        return draws.choice(VALUES)
    holder, key = draws.choice(places)
    kind = draws.randrange(5)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[draws.choice(("type", "id", "transforms", "features", "custom", "recording", "tracks", "x"))] = (
            draws.choice(VALUES)
        )
    elif kind == 2:
        other, place = draws.choice(places)
        holder[key] = json.loads(json.dumps(other[place])) if other is not holder else draws.choice(VALUES)
    else:
        holder[key] = draws.choice(VALUES)
    return root
