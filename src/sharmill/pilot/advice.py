"""The advice of a pilot: which ``match.min_similarity`` to set, and why.

It rests on estimates of the yield of a threshold, and of the wrong speakers that it lets through. Numbers in, numbers
out; nothing is known of audio or of true speakers. Labels may be wrong, so that an utterance may stand in a group of
another speaker, and a group may hold several. What a wrong speaker looks like is taken from utterances of *other*
groups:

1. An utterance that stands in a wrong group finds the best of a group that is not its own. So each utterance is tried
   in every other group of the pilot, with as many candidates as it has in its own. The share of utterances that do
   stand in a wrong group is estimated from ranks: one that is at home finds its best context there, while for one that
   is not, its own group is one among all, below the middle as often as above it. This is the estimator of the share of
   true null hypotheses of J. D. Storey, "A direct approach to false discovery rates", 2002, with one added to the
   count, so that a small pilot never proves more than its size can.
2. An utterance at home may have candidates in its group that are not. Their share follows from its least similar
   candidates: half of all wrong ones are below the median of other groups, where hardly any right one is. Each of them
   is the context with the probability that one of an other group is more similar than what was found.

Where there is one group only, an encoder's own reference takes the place of other groups: quantiles of similarities of
different speakers, measured once. Candidates are then taken for independent of one another.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np

# An own group that more than this share of the others beat is taken for a wrong one. Less would take utterances that
# are merely hard for misplaced ones, more would leave few to count.
_BEATEN = 0.25
_MIDDLE = 0.5
# Higher thresholds are taken as long as no more of the yield is lost than this part.
_FREE = 0.005
_STEPS = 100
# So much of the yield is given, beyond the threshold that is expected to do, to be certain of it.
_FOR_SAFETY = 0.1
# A bound so much above the lowest is as good as it, where that takes contexts.
_NEARLY = 1.25
# No threshold is recommended that takes more of the yield than this part.
_MOST_LOST = 0.5


@dataclass(frozen=True, kw_only=True)
class Voices:
    """Utterances of a pilot.

    Attributes:
        embeddings: (N, D), rows of length 1 or 0.
        groups: (N,) numbers of speaker groups.
        speakers: (N,) numbers of speakers, as labelled; groups of one speaker are no other voices to each other.
        candidates: (N,) booleans, of those long enough to be a context.
        best: (N,) similarity of the context that each would get, whatever it is; -inf for none.
        weights: (N,) shares of all records, of which these are a part.
        reference: of similarities of different speakers, in increasing order, with the share that is lower; or nothing.
    """

    embeddings: np.ndarray
    groups: np.ndarray
    speakers: np.ndarray
    candidates: np.ndarray
    best: np.ndarray
    weights: np.ndarray
    reference: Sequence[tuple[float, float]] = ()

    @cached_property
    def similarities(self) -> np.ndarray:
        """(N, N) cosines."""
        return self.embeddings @ self.embeddings.T

    @cached_property
    def is_within(self) -> np.ndarray:
        """(N, N) booleans: the column is a candidate of the row's own group, and another utterance."""
        same = self.groups[:, None] == self.groups[None, :]
        np.fill_diagonal(same, val=False)
        return same & self.candidates

    @cached_property
    def is_across(self) -> np.ndarray:
        """(N, N) booleans: the column is a candidate of another group and, by its label, of another speaker."""
        other = self.groups[:, None] != self.groups[None, :]
        return other & (self.speakers[:, None] != self.speakers[None, :]) & self.candidates

    @cached_property
    def matched(self) -> np.ndarray:
        """(N,) booleans: there is a context, be it as unlike as it may."""
        return np.isfinite(self.best)

    @property
    def has_others(self) -> bool:
        """Return True if every utterance with a context has other groups to be tried in."""
        return bool(self.is_across[self.matched].any(axis=1).all())


def _estimate_wrong_speakers(voices: Voices, thresholds: np.ndarray) -> tuple[float, float, np.ndarray] | None:
    """Return an estimate of contexts of another speaker.

    None stands for a pilot without other groups, and an encoder without a reference, or one in which nothing matches.

    Returns:
        The share of the utterances that stand in a group of another speaker; the share of the candidates of the others
        that are of another speaker; and (2, T), of the contexts at each threshold, the share of those that are of
        another speaker, NaN where there is none, and how large a pilot of this size leaves room for it to be.
    """
    if not voices.matched.any() or not (voices.has_others or voices.reference):
        return None
    chance = _OtherGroups(voices) if voices.has_others else _Reference(voices)
    weights = voices.weights * voices.matched
    number = voices.is_within.sum(axis=1)
    size, size_of_low = _effective_size(weights), _effective_size(weights * number)
    beaten = float(weights[chance.beaten > _BEATEN].sum() / weights.sum())
    # Candidates in the own group that are less similar than the median of other groups.
    is_low = voices.is_within & (voices.similarities < chance.medians[:, None])
    low = float((weights * is_low.sum(axis=1)).sum() / (weights * number).sum())
    accepted = chance.accepted(thresholds)

    # Candidates of misplaced utterances are low, too. In the bound they explain as many as in the estimate: were it
    # more, a larger share of misplaced utterances would lower that of the others' foreign candidates.
    explained = min(1.0, beaten / (1 - _BEATEN))

    def expect(beaten: float, low: float, accepted: np.ndarray, one: float) -> tuple[float, float, np.ndarray]:
        """Return the shares of misplaced utterances and foreign candidates, and of wrong contexts by threshold (T,)."""
        misplaced = min(1.0, (beaten + one) / (1 - _BEATEN))
        # Candidates of utterances that are not misplaced themselves.
        of_rest = (low / _MIDDLE - explained) / (1 - explained) if explained < 1 else 1.0
        foreign = float(np.clip(of_rest, 0.0, 1.0))
        return misplaced, foreign, _share_wrong(voices, chance, weights, thresholds, misplaced, foreign, accepted)

    misplaced, foreign, shares = expect(beaten, low, accepted, 1 / size)
    _, _, bounds = expect(
        float(upper_bound(beaten, size)), float(upper_bound(low, size_of_low)), upper_bound(accepted, size), 0.0
    )
    return misplaced, foreign, np.stack([shares, bounds])


def _effective_size(weights: np.ndarray) -> float:
    """Return the size of a sample of equal weights that is worth as much; L. Kish, "Survey Sampling", 1965."""
    return float(weights.sum() ** 2 / (weights**2).sum())


def upper_bound(share: float | np.ndarray, size: float) -> np.ndarray:
    """Return the largest shares that a sample in which it is ``share`` leaves room for, at 95 % confidence.

    C. J. Clopper and E. S. Pearson, "The use of confidence or fiducial limits illustrated in the case of the binomial",
    1934; for means of numbers between 0 and 1, which vary less than counts, it is on the safe side.

    >>> upper_bound(0.0, 100).round(4)
    np.float64(0.0295)
    """
    hits = np.minimum(np.asarray(share) * size, size - 1e-9)
    # Takes half a second to import.
    from scipy.stats import beta

    return beta.ppf(0.95, hits + 1, size - hits)


def _share_wrong(
    voices: Voices, chance: "_OtherGroups | _Reference", weights: np.ndarray, thresholds: np.ndarray,
    misplaced: float, foreign: float, accepted: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Return the share (T,) of wrong speakers among the contexts at each threshold; NaN where there are none."""
    total = weights.sum()
    found = np.array([weights[voices.best >= threshold].sum() for threshold in thresholds])
    num_foreign = foreign * voices.is_within.sum(axis=1)
    at_home = weights * (chance.beaten <= _BEATEN)
    of_rest = np.array([
        (at_home * chance.exceeded(np.maximum(voices.best, threshold), num_foreign)).sum() for threshold in thresholds
    ]) * (1 - misplaced) * total / max(at_home.sum(), total / voices.matched.sum())  # fmt: skip
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(found > 0, np.minimum(1.0, (misplaced * total * accepted + of_rest) / found), np.nan)


class _OtherGroups:
    """Similarities to utterances of other groups, of the pilot itself."""

    def __init__(self, voices: Voices) -> None:
        self._voices = voices
        self._wanted = voices.is_within.sum(axis=1)
        tried = self._try_elsewhere(voices.candidates)
        known = np.isfinite(tried)
        better = np.where(known, tried > voices.best[:, None], False).sum(axis=1)
        # The share of the other groups (N,) in which each utterance finds a better context than in its own.
        self.beaten = np.divide(better, known.sum(axis=1), out=np.zeros(len(better)), where=known.any(axis=1))
        # An utterance in a wrong group has utterances of its own speaker in other groups, which must not count.
        at_home = (self.beaten <= _BEATEN) & voices.candidates
        self._best = self._try_elsewhere(at_home)
        self._sorted = [
            np.sort(row[others & at_home])
            for row, others in zip(voices.similarities, voices.is_across, strict=True)
        ]  # fmt: skip
        # The median similarity to other groups, of each utterance (N,).
        self.medians = np.array([np.median(row) if len(row) else -np.inf for row in self._sorted])

    def _try_elsewhere(self, candidates: np.ndarray) -> np.ndarray:
        """Return the best that each utterance finds in each group (N, G) among ``candidates`` (N,).

        It has as many there as in its own group: the first so many, or those and some of yet other groups. NaN where it
        is no other group, or one of the same speaker, or one without candidates.
        """
        voices = self._voices
        names = np.unique(voices.groups)
        best = np.full((len(voices.groups), len(names)), np.nan)
        mixed = np.random.Generator(np.random.PCG64(0)).permutation(np.flatnonzero(candidates))
        for column, name in enumerate(names):
            members = np.flatnonzero((voices.groups == name) & candidates)
            if not len(members):
                continue
            rows = np.flatnonzero(voices.is_across[:, members].all(axis=1) & (self._wanted > 0))
            most = int(self._wanted[rows].max(initial=0))
            tried = np.concatenate([members, mixed[voices.groups[mixed] != name]])[: max(most, len(members))]
            found = np.where(voices.is_across[np.ix_(rows, tried)], voices.similarities[np.ix_(rows, tried)], -np.inf)
            so_far = np.maximum.accumulate(found, axis=1)
            best[rows, column] = so_far[np.arange(len(rows)), np.minimum(self._wanted[rows], len(tried)) - 1]
        return best

    def accepted(self, thresholds: np.ndarray) -> np.ndarray:
        """Return the probability (T,) that an utterance finds a context in a group that is not its own."""
        usable = np.isfinite(self._best) & ((self.beaten <= _BEATEN) & self._voices.matched)[:, None]
        best, weights = self._best[usable], np.broadcast_to(self._voices.weights[:, None], usable.shape)[usable]
        if not len(best):
            return np.ones(len(thresholds))
        return np.array([weights[best >= threshold].sum() for threshold in thresholds]) / weights.sum()

    def exceeded(self, least: np.ndarray, number: np.ndarray) -> np.ndarray:
        """Return the probability (N,) that one of ``number`` (N,) others is more similar than ``least`` (N,)."""
        below = [
            np.searchsorted(row, value, side="right") / len(row) if len(row) else 1.0
            for row, value in zip(self._sorted, least, strict=True)
        ]
        return 1 - np.array(below) ** number


class _Reference:
    """Similarities of different speakers that an encoder brings."""

    def __init__(self, voices: Voices) -> None:
        self._number = voices.is_within.sum(axis=1)
        self._weights = voices.weights * voices.matched
        self._similarities, self._shares = np.array(voices.reference).T
        # The probability (N,) that as many other speakers would have a better context than was found.
        self.beaten = self.exceeded(voices.best, self._number)
        self.medians = np.full(len(self._number), np.interp(_MIDDLE, self._shares, self._similarities))

    def accepted(self, thresholds: np.ndarray) -> np.ndarray:
        """Return the probability (T,) that an utterance finds a context among other speakers alone."""
        chances = [self.exceeded(np.full(len(self._number), one), self._number) for one in thresholds]
        return np.array([(self._weights * chance).sum() for chance in chances]) / self._weights.sum()

    def exceeded(self, least: np.ndarray, number: np.ndarray) -> np.ndarray:
        """Return the probability (N,) that one of ``number`` (N,) others is more similar than ``least`` (N,)."""
        return 1 - np.interp(least, self._similarities, self._shares) ** number


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


def advise(voices: Voices, max_wrong: float, least: float = 0.0) -> Advice:
    """Return what each threshold does, and the lowest that surely lets through no more than a share of wrong speakers.

    From there it goes up as long as that costs next to nothing: a pilot does not see every error of the labels.
    ``least`` is the present threshold where most records are in one group: none below it is recommended.
    """
    grid = np.arange(_STEPS) / _STEPS
    estimate = _estimate_wrong_speakers(voices, grid)
    misplaced, foreign, known = estimate or (None, None, np.full((2, _STEPS), np.nan))
    shares, bounds = ([None if math.isnan(share) else share for share in row] for row in known.tolist())
    thresholds = [
        Threshold(
            min_similarity=value, context_share=round(float(voices.weights[voices.best >= value].sum()), 9),
            wrong_share=share, wrong_bound=bound,
        )
        for value, share, bound in zip(grid.tolist(), shares, bounds, strict=True)
    ]  # fmt: skip
    recommended, reason = _recommend(thresholds, max_wrong, int(voices.matched.sum()), is_known=estimate is not None)
    if recommended is not None and recommended.min_similarity < least:
        recommended = None
        reason = (
            "most of the records are in one speaker group: check that it is one person, and not a name for many, "
            f"before match.min_similarity is set below {least:g}"
        )
    return Advice(thresholds=thresholds, misplaced=misplaced, foreign=foreign, recommended=recommended, reason=reason)


def _recommend(
    thresholds: Sequence[Threshold], max_wrong: float, num_matched: int, *, is_known: bool
) -> tuple[Threshold | None, str]:
    if not thresholds[0].context_share:
        return None, "no utterance of the pilot has a context, however low the threshold: look at the rejects"
    if not is_known:
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
