"""The advice of a pilot: which ``match.min_similarity`` to set, and why."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from sharmill.pilot.voices import Voices, WrongSpeakers, estimate_wrong_speakers

# Higher thresholds are taken as long as no more of the yield is lost than this part.
_FREE = 0.005
_STEPS = 100
# Below so many utterances a share is rough.
_FEW = 5


class Threshold(msgspec.Struct, frozen=True, kw_only=True):
    """A ``min_similarity``, and what it does.

    Attributes:
        context_share: of all records, those that get a context.
        wrong_share: of these, those whose context is expected to be another speaker; None where it cannot be told.
    """

    min_similarity: float
    context_share: float
    wrong_share: float | None


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
    """Return what each threshold does, and the lowest that lets through no more than a share of wrong speakers.

    From there it goes up as long as that costs next to nothing: a pilot does not see every error of the labels.
    """
    grid = np.arange(_STEPS) / _STEPS
    wrong = estimate_wrong_speakers(voices, grid)
    shares = [None] * _STEPS if wrong is None else [None if np.isnan(share) else float(share) for share in wrong.shares]
    thresholds = [
        Threshold(min_similarity=float(value), context_share=round(voices.yields(value), 9), wrong_share=share)
        for value, share in zip(grid, shares, strict=True)
    ]
    recommended, reason = _recommend(thresholds, wrong, max_wrong)
    if recommended is not None and max_wrong * (num := int(voices.matched.sum())) < _FEW:
        reason += f"; with {num} utterances that can have a context, {max_wrong:.1%} is rough: draw more (--records)"
    return Advice(
        thresholds=thresholds,
        misplaced=None if wrong is None else wrong.misplaced,
        foreign=None if wrong is None else wrong.foreign,
        recommended=recommended,
        reason=reason,
    )


def _recommend(
    thresholds: Sequence[Threshold], wrong: WrongSpeakers | None, max_wrong: float
) -> tuple[Threshold | None, str]:
    if not thresholds[0].context_share:
        return None, "no utterance of the pilot has a context, however low the threshold: look at the rejects"
    if wrong is None:
        return None, (
            "wrong speakers cannot be told: the pilot has one speaker group only, or groups of one speaker, and no "
            "similarities of strangers were measured for this encoder; calibrate it on data with labels first"
        )
    usable = [one for one in thresholds if one.context_share and one.wrong_share is not None]
    good = [one for one in usable if one.wrong_share is not None and one.wrong_share <= max_wrong]
    if not good:
        best = min(usable, key=lambda one: (one.wrong_share, -one.context_share))
        return best, (
            f"no threshold keeps wrong speakers below {max_wrong:.1%} of the contexts; this one comes nearest: "
            "mend the labels, or make finer groups"
        )
    lowest = good[0]
    least = lowest.context_share * (1 - _FREE)
    chosen = max((one for one in good if one.context_share >= least), key=lambda one: one.min_similarity)
    limit = f"at most {max_wrong:.1%} of the contexts are expected to be another speaker from {lowest.min_similarity:g}"
    if chosen is lowest:
        return chosen, f"{limit} on, and a higher threshold costs contexts"
    return chosen, f"{limit} on, and up to {chosen.min_similarity:g} that costs less than {_FREE:.1%} of the contexts"
