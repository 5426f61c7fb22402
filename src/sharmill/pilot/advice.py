"""The advice of a pilot: which ``match.min_similarity`` to set, and why."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from sharmill.pilot.voices import Voices, WrongSpeakers, estimate_wrong_speakers

# Higher thresholds are taken as long as no more of the yield is lost than this part.
_FREE = 0.005
_STEPS = 100
# So much of the yield is given, beyond the threshold that is expected to do, to be certain of it.
_FOR_SAFETY = 0.1
# A bound so much above the lowest is as good as it, where that takes contexts.
_NEARLY = 1.25
# No threshold is recommended that takes more of the yield than this part.
_MOST_LOST = 0.5


class Threshold(msgspec.Struct, frozen=True, kw_only=True):
    """A ``min_similarity``, and what it does.

    Attributes:
        context_share: of all records, those that get a context.
        wrong_share: of these, those whose context is expected to be another speaker; None where it cannot be told.
        wrong_bound: so large may that share be, at 95 % confidence, as far as a pilot of this size can tell.
    """

    min_similarity: float
    context_share: float
    wrong_share: float | None
    wrong_bound: float | None = None


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """The thresholds from 0 to 1, and the one to set.

    Attributes:
        misplaced: share of the utterances that stand in a group of another speaker; None where it cannot be told.
        foreign: share of the candidates of the others that are of another speaker.
        recommended: one of ``thresholds``; None where there is no advice.
        reason: of the recommendation, or why there is none; in one sentence.
    """

    thresholds: list[Threshold]
    misplaced: float | None
    foreign: float | None
    recommended: Threshold | None
    reason: str


def advise(voices: Voices, max_wrong: float) -> Advice:
    """Return what each threshold does, and the lowest that surely lets through no more than a share of wrong speakers.

    From there it goes up as long as that costs next to nothing: a pilot does not see every error of the labels.
    """
    grid = np.arange(_STEPS) / _STEPS
    wrong = estimate_wrong_speakers(voices, grid)
    nothing = np.full(_STEPS, np.nan)
    shares, bounds = (nothing, nothing) if wrong is None else (wrong.shares, wrong.bounds)
    thresholds = [
        Threshold(
            min_similarity=float(value), context_share=round(voices.yields(value), 9), wrong_share=_known(share),
            wrong_bound=_known(bound),
        )
        for value, share, bound in zip(grid, shares, bounds, strict=True)
    ]  # fmt: skip
    recommended, reason = _recommend(thresholds, wrong, max_wrong, int(voices.matched.sum()))
    return Advice(
        thresholds=thresholds,
        misplaced=None if wrong is None else wrong.misplaced,
        foreign=None if wrong is None else wrong.foreign,
        recommended=recommended,
        reason=reason,
    )


def _known(share: float) -> float | None:
    return None if np.isnan(share) else float(share)


def _recommend(
    thresholds: Sequence[Threshold], wrong: WrongSpeakers | None, max_wrong: float, num_matched: int
) -> tuple[Threshold | None, str]:
    if not thresholds[0].context_share:
        return None, "no utterance of the pilot has a context, however low the threshold: look at the rejects"
    if wrong is None:
        return None, (
            "wrong speakers cannot be told: the pilot has one speaker group only, or groups of one speaker, and no "
            "similarities of strangers were measured for this encoder; calibrate it on data with labels first"
        )
    least = (1 - _MOST_LOST) * thresholds[0].context_share
    usable = [one for one in thresholds if one.context_share >= least]
    likely = [one for one in usable if one.wrong_share is not None and one.wrong_share <= max_wrong]
    affordable = _costing(likely, likely[0], _FOR_SAFETY) if likely else []
    if safe := [one for one in affordable if _bound(one) <= max_wrong]:
        lowest = safe[0]
        chosen = max(_costing(safe, lowest, _FREE), key=lambda one: one.min_similarity)
        limit = f"from {lowest.min_similarity:g} on, at most {max_wrong:.1%} of the contexts are another speaker"
        if chosen is lowest:
            return chosen, f"{limit}, and a higher threshold costs contexts"
        return chosen, f"{limit}, and up to {chosen.min_similarity:g} that costs less than {_FREE:.1%} of the contexts"
    if affordable:
        lowest_bound = min(map(_bound, affordable))
        chosen = next(one for one in affordable if _bound(one) <= _NEARLY * lowest_bound)
        return chosen, (
            f"{chosen.wrong_share:.1%} of the contexts are expected to be another speaker, but with {num_matched} "
            f"utterances up to {_bound(chosen):.1%} cannot be ruled out: a larger pilot can tell more (--records)"
        )
    return min(usable, key=_bound), (
        f"no threshold keeps wrong speakers below {max_wrong:.1%} and leaves half of the contexts; this one comes "
        "nearest: mend the labels, or make finer groups"
    )


def _bound(one: Threshold) -> float:
    return np.inf if one.wrong_bound is None else one.wrong_bound


def _costing(thresholds: Sequence[Threshold], lowest: Threshold, part: float) -> list[Threshold]:
    """Return those that leave all but a part of the contexts of the lowest."""
    return [one for one in thresholds if one.context_share >= lowest.context_share * (1 - part)]
