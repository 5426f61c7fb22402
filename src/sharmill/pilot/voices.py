"""Estimates of how well similarities tell speakers apart: yield of a threshold, and wrong speakers let through.

Numbers in, numbers out; nothing is known of audio or of true speakers. Labels may be wrong, so that an utterance may
stand in a group of another speaker, and a group may hold several. What a wrong speaker looks like is taken from
utterances of *other* groups:

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

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

# An own group that more than this share of the others beat is taken for a wrong one. Less would take utterances that
# are merely hard for misplaced ones, more would leave few to count.
_BEATEN = 0.25
_MIDDLE = 0.5
_CONFIDENCE = 0.95


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

    def yields(self, threshold: float) -> float:
        """Return the share of all records that get a context."""
        return float(self.weights[self.best >= threshold].sum())


@dataclass(frozen=True)
class WrongSpeakers:
    """The estimate of contexts of another speaker.

    Attributes:
        misplaced: share of the utterances that stand in a group of another speaker.
        foreign: share of the candidates of the others that are of another speaker.
        thresholds: (T,).
        shares: (T,) of the contexts at each threshold, those that are of another speaker; NaN where there is none.
        bounds: (T,) of these shares, as large as a pilot of this size leaves room for.
    """

    misplaced: float
    foreign: float
    thresholds: np.ndarray
    shares: np.ndarray
    bounds: np.ndarray


def estimate_wrong_speakers(voices: Voices, thresholds: np.ndarray) -> WrongSpeakers | None:
    """Return the expected share of wrong speakers at each threshold.

    None stands for a pilot without other groups, and an encoder without a reference, or one in which nothing matches.
    """
    if not voices.matched.any() or not (voices.has_others or voices.reference):
        return None
    chance = _OtherGroups(voices) if voices.has_others else _Reference(voices)
    weights = voices.weights * voices.matched
    size, size_of_low = _effective_size(weights), _effective_size(weights * voices.is_within.sum(axis=1))
    beaten = float(weights[chance.beaten() > _BEATEN].sum() / weights.sum())
    low = _share_of_low(voices, chance, weights)
    accepted = chance.accepted(thresholds)

    # Candidates of misplaced utterances are low, too. In the bound they explain as many as in the estimate: were it
    # more, a larger share of misplaced utterances would lower that of the others' foreign candidates.
    explained = min(1.0, beaten / (1 - _BEATEN))

    def expect(beaten: float, low: float, accepted: np.ndarray, one: float) -> tuple[float, float, np.ndarray]:
        """Return the shares of misplaced utterances and foreign candidates, and of wrong contexts by threshold (T,)."""
        misplaced = min(1.0, (beaten + one) / (1 - _BEATEN))
        foreign = _foreign_share(low, explained)
        return misplaced, foreign, _share_wrong(voices, chance, weights, thresholds, misplaced, foreign, accepted)

    misplaced, foreign, shares = expect(beaten, low, accepted, 1 / size)
    _, _, bounds = expect(
        float(upper_bound(beaten, size)), float(upper_bound(low, size_of_low)), upper_bound(accepted, size), 0.0
    )
    return WrongSpeakers(misplaced, foreign, thresholds, shares, bounds)


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

    return beta.ppf(_CONFIDENCE, hits + 1, size - hits)


def _share_wrong(
    voices: Voices, chance: _OtherGroups | _Reference, weights: np.ndarray, thresholds: np.ndarray,
    misplaced: float, foreign: float, accepted: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Return the share (T,) of wrong speakers among the contexts at each threshold; NaN where there are none."""
    total = weights.sum()
    found = np.array([weights[voices.best >= threshold].sum() for threshold in thresholds])
    num_foreign = foreign * voices.is_within.sum(axis=1)
    at_home = weights * (chance.beaten() <= _BEATEN)
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
        self._beaten = np.divide(better, known.sum(axis=1), out=np.zeros(len(better)), where=known.any(axis=1))
        # One that stands in a wrong group has utterances of its own speaker in other groups, which are no strangers.
        at_home = (self._beaten <= _BEATEN) & voices.candidates
        self._best = self._try_elsewhere(at_home)
        self._sorted = [
            np.sort(row[others & at_home])
            for row, others in zip(voices.similarities, voices.is_across, strict=True)
        ]  # fmt: skip

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

    def beaten(self) -> np.ndarray:
        """Return the share of the other groups (N,) in which each utterance finds a better context than in its own."""
        return self._beaten

    def accepted(self, thresholds: np.ndarray) -> np.ndarray:
        """Return the probability (T,) that an utterance finds a context in a group that is not its own."""
        usable = np.isfinite(self._best) & ((self._beaten <= _BEATEN) & self._voices.matched)[:, None]
        best, weights = self._best[usable], np.broadcast_to(self._voices.weights[:, None], usable.shape)[usable]
        if not len(best):
            return np.ones(len(thresholds))
        return np.array([weights[best >= threshold].sum() for threshold in thresholds]) / weights.sum()

    def medians(self) -> np.ndarray:
        """Return the median similarity to other groups, of each utterance (N,)."""
        return np.array([np.median(row) if len(row) else -np.inf for row in self._sorted])

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
        self._voices = voices
        self._number = voices.is_within.sum(axis=1)

    def beaten(self) -> np.ndarray:
        """Return the probability (N,) that as many other speakers would have a better context than was found."""
        return self.exceeded(self._voices.best, self._number)

    def accepted(self, thresholds: np.ndarray) -> np.ndarray:
        """Return the probability (T,) that an utterance finds a context among other speakers alone."""
        weights = self._voices.weights * self._voices.matched
        chances = [self.exceeded(np.full(len(weights), threshold), self._number) for threshold in thresholds]
        return np.array([(weights * chance).sum() for chance in chances]) / weights.sum()

    def medians(self) -> np.ndarray:
        """Return the median similarity of different speakers, for each utterance (N,)."""
        similarities, shares = np.array(self._voices.reference).T
        return np.full(len(self._number), np.interp(_MIDDLE, shares, similarities))

    def exceeded(self, least: np.ndarray, number: np.ndarray) -> np.ndarray:
        """Return the probability (N,) that one of ``number`` (N,) others is more similar than ``least`` (N,)."""
        similarities, shares = np.array(self._voices.reference).T
        return 1 - np.interp(least, similarities, shares) ** number


def _share_of_low(voices: Voices, chance: _OtherGroups | _Reference, weights: np.ndarray) -> float:
    """Return the share of candidates in the own group that are less similar than the median of other groups."""
    low = (voices.is_within & (voices.similarities < chance.medians()[:, None])).sum(axis=1)
    return float((weights * low).sum() / (weights * voices.is_within.sum(axis=1)).sum())


def _foreign_share(low: float, misplaced: float) -> float:
    """Return the share of wrong candidates of utterances that are not misplaced themselves."""
    of_all = low / _MIDDLE
    return float(np.clip((of_all - misplaced) / (1 - misplaced), 0.0, 1.0)) if misplaced < 1 else 1.0
