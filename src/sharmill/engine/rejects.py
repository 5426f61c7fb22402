"""The limit on rejects, and the words in which a stage that is over it names the commonest."""

from collections import Counter
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

from sharmill.engine.stage import StageRun
from sharmill.errors import HARMLESS_REASONS, REMEDIES, FatalError
from sharmill.files.stored import read_records
from sharmill.manifest import Reject


def check_rejects(stage: StageRun, expected_in: int, reasons: Mapping[str, int], num_in: int) -> None:
    """Raise FatalError with the commonest reasons if these are more rejects than the configuration allows.

    Args:
        expected_in: how many records all units of the stage have.
        reasons: how many records were rejected so far, by reason.
        num_in: how many records were read for that.
    """
    reasons = {reason: count for reason, count in reasons.items() if reason not in HARMLESS_REASONS}
    rejected = sum(reasons.values())
    # A quotient, since 0.29 * 100 is less than 29.
    if rejected == 0 or rejected / expected_in <= stage.options.max_reject_fraction:
        return
    # Where nothing is left, a higher limit would only move the error to the next stage.
    remedy = "mend the input" if rejected >= num_in else "mend the input, or raise max_reject_fraction"
    folder = stage.ranks.rejects
    raise FatalError(
        f"{stage.name} stopped: {rejected} of {expected_in} records are rejected, more than "
        f"max_reject_fraction={stage.options.max_reject_fraction:g} allows; {remedy}. The commonest reasons "
        f"(all: {folder}):",
        code="too_many_rejects",
        details=describe_rejects(folder, reasons),
    )


def describe_rejects(folder: Path, reasons: Mapping[str, int]) -> list[str]:
    """Return a line for each of the commonest reasons: its count, the first sentence, and the remedy.

    Args:
        folder: a stage's folder of rejects, one file a unit.
        reasons: how many records were rejected, by reason.
    """
    commonest = Counter(reasons).most_common(3)
    examples = dict.fromkeys((reason for reason, _ in commonest), "")
    for reject in chain.from_iterable(read_records(path, Reject) for path in sorted(folder.glob("*.jsonl"))):
        if examples.get(reject.reason) == "":
            # With the name of its audio where the sentence does not have it.
            name = reject.record.get("audio_filepath") if isinstance(reject.record, dict) else None
            is_named = not isinstance(name, str) or name in reject.detail
            text = reject.detail if is_named else f"{name}: {reject.detail}"
            text = " ".join(text.split())
            # Whole sentences, unless something foreign in them is long.
            examples[reject.reason] = f", the first: {text if len(text) <= 400 else text[:397] + '...'}"
        if all(examples.values()):
            break
    return [f"{reason} {count}{examples[reason]}. To do: {REMEDIES[reason]}" for reason, count in commonest]
