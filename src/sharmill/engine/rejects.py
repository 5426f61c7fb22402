"""The limit on rejects, and sentences about those there are: the first of each reason, and what mends it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from sharmill.engine.stage import Stage
from sharmill.engine.unit import Unit
from sharmill.errors import HARMLESS_REASONS, REMEDIES, FatalError
from sharmill.files.stored import decode_stored, read_stored_lines

_MAX_REASONS = 3
_MAX_CHARACTERS = 160


class _Reject(msgspec.Struct):
    """The keys of a reject that are shown."""

    reason: str
    detail: str
    record: Any


def check_rejects(stage: Stage, units: Iterable[Unit], reasons: Mapping[str, int], num_in: int) -> None:
    """Raise FatalError with the commonest reasons if these are more rejects than the configuration allows.

    Args:
        units: all those of the stage.
        reasons: how many records were rejected so far, by reason.
        num_in: how many records were read for that.
    """
    reasons = {reason: count for reason, count in reasons.items() if reason not in HARMLESS_REASONS}
    rejected = sum(reasons.values())
    expected_in = sum(unit.size for unit in units)
    # A quotient, since 0.29 * 100 is less than 29.
    if rejected == 0 or rejected / expected_in <= stage.max_reject_fraction:
        return
    # Where nothing is left, a higher limit would only move the error to the next stage.
    remedy = "mend the input" if rejected >= num_in else "mend the input, or raise max_reject_fraction"
    folder = stage.dir.rejects_of_units
    summary = (
        f"{stage.name} stopped: {rejected} of {expected_in} records are rejected, more than "
        f"max_reject_fraction={stage.max_reject_fraction:g} allows; {remedy}. The commonest reasons (all: {folder}):"
    )
    raise FatalError(summary, code="too_many_rejects", details=describe_rejects(folder, reasons))


def describe_rejects(folder: Path, reasons: Mapping[str, int]) -> list[str]:
    """Return a line for each of the commonest reasons: its count, the first sentence, and the remedy.

    Args:
        folder: a stage's folder of rejects, one file a unit.
        reasons: how many records were rejected, by reason.
    """
    commonest = Counter(reasons).most_common(_MAX_REASONS)
    examples = dict.fromkeys((reason for reason, _ in commonest), "")
    rejects = (
        decode_stored(path, line, _Reject)
        for path in sorted(folder.glob("*.jsonl"))
        for line in read_stored_lines(path)
    )
    for reject in rejects:
        if examples.get(reject.reason) == "":
            examples[reject.reason] = f", the first: {_describe(reject)}"
        if all(examples.values()):
            break
    return [f"{reason} {count}{examples[reason]}. To do: {REMEDIES[reason]}" for reason, count in commonest]


def _describe(reject: _Reject) -> str:
    """Return the sentence of a reject, with the name of its audio where the sentence does not have it."""
    name = reject.record.get("audio_filepath", "") if isinstance(reject.record, dict) else ""
    text = reject.detail if str(name) in reject.detail else f"{name}: {reject.detail}"
    text = " ".join(text.split())
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 3]}..."
