"""Sentences about rejects, for the message of a stage that stops: the first of each reason, and what mends it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from sharmill.engine.stored import decode_stored, read_stored_lines
from sharmill.errors import REMEDIES

_MAX_REASONS = 3
_MAX_CHARACTERS = 160


class _Reject(msgspec.Struct):
    """The keys of a reject that are shown."""

    reason: str
    detail: str
    record: msgspec.Raw


class _Record(msgspec.Struct):
    audio_filepath: str


def describe_rejects(folder: Path, reasons: Mapping[str, int]) -> list[str]:
    """Return a line for each of the commonest reasons: its count, the first sentence, and the remedy.

    Args:
        folder: a stage's folder of rejects, one file a unit.
        reasons: how many records were rejected, by reason.
    """
    commonest = Counter(reasons).most_common(_MAX_REASONS)
    examples = _first_examples(folder, {reason for reason, _ in commonest})
    lines = []
    for reason, count in commonest:
        example = f", the first: {examples[reason]}" if reason in examples else ""
        lines.append(f"{reason} {count}{example}. To do: {REMEDIES[reason]}")
    return lines


def _first_examples(folder: Path, reasons: set[str]) -> dict[str, str]:
    """Return the first sentence for each of ``reasons``, in the order of the units."""
    found: dict[str, str] = {}
    for reject in _read_rejects(folder):
        if reject.reason in reasons and reject.reason not in found:
            found[reject.reason] = _describe(reject)
        if len(found) == len(reasons):
            break
    return found


def _read_rejects(folder: Path) -> Iterator[_Reject]:
    for path in sorted(folder.glob("*.jsonl")):
        for line in read_stored_lines(path):
            yield decode_stored(path, line, _Reject)


def _describe(reject: _Reject) -> str:
    """Return the sentence of a reject, with the name of its audio where the sentence does not have it."""
    try:
        name = msgspec.json.decode(reject.record, type=_Record).audio_filepath
    except msgspec.DecodeError:
        name = ""
    text = reject.detail if name in reject.detail else f"{name}: {reject.detail}"
    text = " ".join(text.split())
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 3]}..."
