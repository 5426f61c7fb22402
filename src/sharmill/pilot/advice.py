"""The advice of a pilot: the recommended ``match.min_similarity``, and the reason for it.

The advice rests on two estimates for each threshold: the share of records that get a context, and the share of contexts
that come from a wrong speaker. The true speakers are unknown. Labels may be wrong, so an utterance may be in the group
of another speaker (misplaced), and a group may contain several speakers. Similarities between wrong speakers are
estimated from utterances of *different* groups:

1. A misplaced utterance gets the best context of a group that is not its speaker's. Therefore each utterance is tried
   in every other group of the pilot, with as many candidates as in its own group. All groups are then ranked by the
   best context in each, and the share of misplaced utterances is estimated from the ranks of the utterances' own
   groups. For a correctly labelled utterance, its own group has the best context. For a misplaced utterance, its own
   group is like any other group, so every rank is equally likely. This is the estimator for the share of true null
   hypotheses by J. D. Storey, "A direct approach to false discovery rates", 2002. One is added to the count, so that a
   small pilot does not prove more than its size allows.
2. Even a correctly labelled utterance may have candidates of other speakers in its group (foreign). Their share is
   estimated from its least similar candidates: half of all foreign candidates are less similar than the median
   candidate of other groups, but hardly any candidates of the same speaker are. A foreign candidate becomes the context
   with the probability that a candidate of another group is more similar than the context that was found.

If there is only one group, a reference of the encoder replaces the other groups: quantiles of similarities between
different speakers, which were measured once. Candidates are then assumed to be independent of each other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np

# An utterance counts as misplaced if more than this share of the other groups have a better context for it than its own
# group has. With a lower value, difficult utterances would count as misplaced too; with a higher value, few would be
# left to count.
_BEATEN = 0.25
_MIDDLE = 0.5
# A higher threshold is preferred if it loses at most this share of the contexts.
_FREE = 0.005
_STEPS = 100
# To keep the upper bound on the share of wrong speakers below the limit too, the threshold may be raised as long as at
# most this share of the contexts is lost.
_FOR_SAFETY = 0.1
# An upper bound of at most this factor times the lowest bound counts as equally good, because a lower bound costs
# contexts.
_NEARLY = 1.25
# No threshold is recommended that loses more than this share of the contexts.
_MOST_LOST = 0.5


@dataclass(frozen=True, kw_only=True)
class Voices:
    """Utterances of a pilot.

    Attributes:
        embeddings: (N, D), rows of length 1 or 0.
        groups: (N,), numbers of the speaker groups.
        speakers: (N,), numbers of the labelled speakers; groups of the same speaker do not count as other groups.
        candidates: (N,), True for utterances that are long enough to be a context.
        best: (N,), similarity of the context that each utterance would get without a threshold; -inf for none.
        weights: (N,), the share of all records for which each utterance stands.
        reference: similarities of different speakers in increasing order, each with the share of pairs that are less
            similar; empty if there is no reference.
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
        """Cosine similarities, (N, N)."""
        return self.embeddings @ self.embeddings.T

    @cached_property
    def is_within(self) -> np.ndarray:
        """True if the column is a candidate from the row's own group, but not the row itself; (N, N)."""
        same = self.groups[:, None] == self.groups[None, :]
        np.fill_diagonal(same, val=False)
        return same & self.candidates

    @cached_property
    def is_across(self) -> np.ndarray:
        """True if the column is a candidate from another group and, by its label, of another speaker; (N, N)."""
        other = self.groups[:, None] != self.groups[None, :]
        return other & (self.speakers[:, None] != self.speakers[None, :]) & self.candidates

    @cached_property
    def matched(self) -> np.ndarray:
        """True for utterances that get a context without a threshold; (N,)."""
        return np.isfinite(self.best)

    @property
    def has_others(self) -> bool:
        """Return True if every utterance with a context can also be tried in a group of another speaker."""
        return bool(self.is_across[self.matched].any(axis=1).all())


def _estimate_wrong_speakers(voices: Voices, thresholds: np.ndarray) -> tuple[float, float, np.ndarray] | None:
    """Estimate the share of contexts that come from another speaker.

    Returns:
        A tuple of the share of misplaced utterances, the share of foreign candidates among the candidates of the other
        utterances, and an array (2, T): for each threshold, the share of contexts that come from another speaker (NaN
        if there are no contexts) and its upper bound. None if no utterance has a context, or if there are neither other
        groups nor a reference of the encoder.
    """
    if not voices.matched.any() or not (voices.has_others or voices.reference):
        return None
    chance = _OtherGroups(voices) if voices.has_others else _Reference(voices)
    weights = voices.weights * voices.matched
    number = voices.is_within.sum(axis=1)
    size, size_of_low = _effective_size(weights), _effective_size(weights * number)
    beaten = float(weights[chance.beaten > _BEATEN].sum() / weights.sum())
    # Find candidates in an utterance's own group that are less similar to it than the median candidate of other groups.
    is_low = voices.is_within & (voices.similarities < chance.medians[:, None])
    low = float((weights * is_low.sum(axis=1)).sum() / (weights * number).sum())
    accepted = chance.accepted(thresholds)

    # Misplaced utterances explain some of these low similarities. Use the same share of misplaced utterances for the
    # upper bounds too; otherwise a higher share would lower the bound on foreign candidates.
    explained = min(1.0, beaten / (1 - _BEATEN))

    def expect(beaten: float, low: float, accepted: np.ndarray, one: float) -> tuple[float, float, np.ndarray]:
        """Return the shares of misplaced utterances, of foreign candidates and, as an array (T,), of wrong contexts."""
        misplaced = min(1.0, (beaten + one) / (1 - _BEATEN))
        # Count only the candidates of utterances that are not misplaced themselves.
        of_rest = (low / _MIDDLE - explained) / (1 - explained) if explained < 1 else 1.0
        foreign = float(np.clip(of_rest, 0.0, 1.0))
        return misplaced, foreign, _share_wrong(voices, chance, weights, thresholds, misplaced, foreign, accepted)

    misplaced, foreign, shares = expect(beaten, low, accepted, 1 / size)
    _, _, bounds = expect(
        float(upper_bound(beaten, size)), float(upper_bound(low, size_of_low)), upper_bound(accepted, size), 0.0
    )
    return misplaced, foreign, np.stack([shares, bounds])


def _effective_size(weights: np.ndarray) -> float:
    """Return the size of a sample with equal weights that is equally precise; L. Kish, "Survey Sampling", 1965."""
    return float(weights.sum() ** 2 / (weights**2).sum())


def upper_bound(share: float | np.ndarray, size: float) -> np.ndarray:
    """Return the upper confidence limit (95 %) of the true share, for a sample of this size with the given share.

    C. J. Clopper and E. S. Pearson, "The use of confidence or fiducial limits illustrated in the case of the binomial",
    1934. For means of numbers between 0 and 1, which vary less than counts do, the limit is conservative.

    >>> upper_bound(0.0, 100).round(4)
    np.float64(0.0295)
    """
    hits = np.minimum(np.asarray(share) * size, size - 1e-9)
    # Import late, because this import takes half a second.
    from scipy.stats import beta

    return beta.ppf(0.95, hits + 1, size - hits)


def _share_wrong(
    voices: Voices, chance: "_OtherGroups | _Reference", weights: np.ndarray, thresholds: np.ndarray,
    misplaced: float, foreign: float, accepted: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Return the share of contexts that come from wrong speakers, by threshold, (T,); NaN if there are no contexts."""
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
    """Similarities to wrong speakers, estimated from other groups of the pilot."""

    def __init__(self, voices: Voices) -> None:
        self._voices = voices
        self._wanted = voices.is_within.sum(axis=1)
        tried = self._try_elsewhere(voices.candidates)
        known = np.isfinite(tried)
        better = np.where(known, tried > voices.best[:, None], False).sum(axis=1)
        # For each utterance, the share of the other groups in which it finds a better context than in its own group,
        # (N,).
        self.beaten = np.divide(better, known.sum(axis=1), out=np.zeros(len(better)), where=known.any(axis=1))
        # Leave out misplaced utterances, because other groups may contain utterances of their own speaker.
        at_home = (self.beaten <= _BEATEN) & voices.candidates
        self._best = self._try_elsewhere(at_home)
        self._sorted = [
            np.sort(row[others & at_home])
            for row, others in zip(voices.similarities, voices.is_across, strict=True)
        ]  # fmt: skip
        # For each utterance, the median similarity to other groups, (N,).
        self.medians = np.array([np.median(row) if len(row) else -np.inf for row in self._sorted])

    def _try_elsewhere(self, candidates: np.ndarray) -> np.ndarray:
        """Return the similarity of the best context that each utterance finds in each other group, (N, G).

        In each other group, an utterance gets as many candidates as in its own group. If the other group has too few,
        random candidates of further groups are added. The value is NaN for its own group, for groups of the same
        speaker, and for groups without candidates.

        Args:
            candidates: True for the utterances that may be candidates, (N,).
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
        """Return the probability that an utterance finds a context in another group, by threshold, (T,)."""
        usable = np.isfinite(self._best) & ((self.beaten <= _BEATEN) & self._voices.matched)[:, None]
        best, weights = self._best[usable], np.broadcast_to(self._voices.weights[:, None], usable.shape)[usable]
        if not len(best):
            return np.ones(len(thresholds))
        return np.array([weights[best >= threshold].sum() for threshold in thresholds]) / weights.sum()

    def exceeded(self, least: np.ndarray, number: np.ndarray) -> np.ndarray:
        """Return the probability that one of ``number`` wrong candidates is more similar than ``least``.

        All arrays have one item per utterance, (N,).
        """
        below = [
            np.searchsorted(row, value, side="right") / len(row) if len(row) else 1.0
            for row, value in zip(self._sorted, least, strict=True)
        ]
        return 1 - np.array(below) ** number


class _Reference:
    """Similarities to wrong speakers, taken from the reference of an encoder."""

    def __init__(self, voices: Voices) -> None:
        self._number = voices.is_within.sum(axis=1)
        self._weights = voices.weights * voices.matched
        self._similarities, self._shares = np.array(voices.reference).T
        # For each utterance, the probability of finding a better context among as many candidates as its own group has,
        # if all of them were other speakers, (N,).
        self.beaten = self.exceeded(voices.best, self._number)
        self.medians = np.full(len(self._number), np.interp(_MIDDLE, self._shares, self._similarities))

    def accepted(self, thresholds: np.ndarray) -> np.ndarray:
        """Return the probability that an utterance finds a context among other speakers only, by threshold, (T,)."""
        chances = [self.exceeded(np.full(len(self._number), one), self._number) for one in thresholds]
        return np.array([(self._weights * chance).sum() for chance in chances]) / self._weights.sum()

    def exceeded(self, least: np.ndarray, number: np.ndarray) -> np.ndarray:
        """Return the probability that one of ``number`` wrong candidates is more similar than ``least``.

        All arrays have one item per utterance, (N,).
        """
        return 1 - np.interp(least, self._similarities, self._shares) ** number


class Threshold(msgspec.Struct, frozen=True, kw_only=True):
    """A value of ``min_similarity``, and its effect.

    Attributes:
        context_share: the share of all records that get a context.
        wrong_share: the expected share of these contexts that come from another speaker; None if it cannot be
            estimated.
        wrong_bound: the upper confidence limit (95 %) of ``wrong_share`` for a pilot of this size.
    """

    min_similarity: float
    context_share: float
    wrong_share: float | None
    wrong_bound: float | None = None


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """The effects of thresholds from 0 to 1, and the recommended threshold.

    Attributes:
        thresholds: the thresholds.
        misplaced: the share of utterances that are in the group of another speaker; None if it cannot be estimated.
        foreign: the share of candidates from other speakers among the candidates of utterances that are not misplaced;
            None if it cannot be estimated.
        recommended: one of ``thresholds``; None if there is no recommendation.
        reason: one sentence with the reason for the recommendation, or for its absence.
    """

    thresholds: list[Threshold]
    misplaced: float | None
    foreign: float | None
    recommended: Threshold | None
    reason: str


def advise(voices: Voices, max_wrong: float, least: float = 0.0) -> Advice:
    """Return the effect of each threshold, and recommend one.

    The recommendation is the lowest threshold at which the share of wrong speakers is, with 95 % confidence, at most
    ``max_wrong``. It is raised as long as that costs hardly any contexts, because a pilot does not see every wrong
    label.

    Args:
        max_wrong: the highest acceptable share of contexts that come from another speaker.
        least: the lowest threshold that may be recommended. If most records are in one group, this is the present
            threshold.
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
            "most of the records are in one speaker group: check that its name stands for one person only, before you "
            f"set match.min_similarity below {least:g}"
        )
    return Advice(thresholds=thresholds, misplaced=misplaced, foreign=foreign, recommended=recommended, reason=reason)


def _recommend(
    thresholds: Sequence[Threshold], max_wrong: float, num_matched: int, *, is_known: bool
) -> tuple[Threshold | None, str]:
    if not thresholds[0].context_share:
        return None, "no utterance of the pilot gets a context, even without a threshold: look at the rejects"
    if not is_known:
        return None, (
            "the share of wrong speakers cannot be estimated: the pilot has only one speaker group, or only groups of "
            "one speaker, and this encoder has no reference similarities of different speakers; calibrate on data with "
            "speaker labels first"
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
            return chosen, f"{limit}, and a higher threshold would cost contexts"
        return chosen, f"{limit}; raising it to {chosen.min_similarity:g} costs less than {_FREE:.1%} of the contexts"
    if affordable:
        lowest_bound = min(map(_bound, affordable))
        chosen = next(one for one in affordable if _bound(one) <= _NEARLY * lowest_bound)
        return chosen, (
            f"{chosen.wrong_share:.1%} of the contexts are expected to be another speaker, but with {num_matched} "
            f"utterances up to {_bound(chosen):.1%} cannot be ruled out: use a larger pilot (--records) to know more"
        )
    return min(usable, key=_bound), (
        f"no threshold keeps wrong speakers below {max_wrong:.1%} and at least half of the contexts; this one comes "
        "nearest: correct the labels, or use smaller speaker groups"
    )


def _bound(one: Threshold) -> float:
    return np.inf if one.wrong_bound is None else one.wrong_bound


def _costing(thresholds: Sequence[Threshold], lowest: Threshold, part: float) -> list[Threshold]:
    """Return the thresholds that lose at most the share ``part`` of the contexts found with ``lowest``."""
    return [one for one in thresholds if one.context_share >= lowest.context_share * (1 - part)]
