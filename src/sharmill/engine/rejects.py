"""The limit on rejects, and the error message of a stage that exceeds it."""

from collections import Counter
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

from sharmill.engine.stage import StageRun
from sharmill.errors import HARMLESS_REASONS, REMEDIES, FatalError
from sharmill.files.stored import read_records
from sharmill.manifest import Reject


def check_rejects(stage: StageRun, expected_in: int, reasons: Mapping[str, int], num_in: int) -> None:
    """Raise FatalError with the most common reasons if more records were rejected than the configuration allows.

    Args:
        expected_in: number of records in all units of the stage.
        reasons: number of rejected records so far, by reason.
        num_in: number of records read so far.
    """
    reasons = {reason: count for reason, count in reasons.items() if reason not in HARMLESS_REASONS}
    rejected = sum(reasons.values())
    # Compare quotients, because the product 0.29 * 100 is less than 29.
    if rejected == 0 or rejected / expected_in <= stage.options.max_reject_fraction:
        return
    # If all records were rejected, a higher limit would only move the error to the next stage.
    remedy = "correct the input" if rejected >= num_in else "correct the input, or raise max_reject_fraction"
    folder = stage.ranks.rejects
    raise FatalError(
        f"{stage.name} stopped: {rejected} of {expected_in} records were rejected, more than "
        f"max_reject_fraction={stage.options.max_reject_fraction:g} allows; {remedy}. The most common reasons "
        f"(all rejects: {folder}):",
        code="too_many_rejects",
        details=describe_rejects(folder, reasons),
    )


def describe_rejects(folder: Path, reasons: Mapping[str, int]) -> list[str]:
    """Return one line for each of the three most common reasons: its count, an example, and the remedy.

    Args:
        folder: a stage's folder of rejects, with one file per unit.
        reasons: number of rejected records by reason.
    """
    most_common = Counter(reasons).most_common(3)
    examples = dict.fromkeys((reason for reason, _ in most_common), "")
    for reject in chain.from_iterable(read_records(path, Reject) for path in sorted(folder.glob("*.jsonl"))):
        if examples.get(reject.reason) == "":
            # Prepend the name of the audio if the detail does not mention it.
            name = reject.record.get("audio_filepath") if isinstance(reject.record, dict) else None
            is_named = not isinstance(name, str) or name in reject.detail
            text = reject.detail if is_named else f"{name}: {reject.detail}"
            text = " ".join(text.split())
            # Show the whole detail, unless it is very long because it quotes the input.
            examples[reject.reason] = f", the first: {text if len(text) <= 400 else text[:397] + '...'}"
        if all(examples.values()):
            break
    return [f"{reason} {count}{examples[reason]}. To do: {REMEDIES[reason]}" for reason, count in most_common]
