"""Estimates of wrong speakers, on made-up voices whose speakers are known, and the advice that follows from them."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from sharmill.pilot import voices as estimates
from sharmill.pilot.advice import advise
from sharmill.pilot.voices import Voices, estimate_wrong_speakers, upper_bound

NUM_SPEAKERS, EACH, SIZE = 40, 10, 16
GRID = np.arange(100) / 100


def make_voices(labels=None, *, seed=0, speakers=None, reference=(), part=None):
    """Return voices of 40 speakers with 10 utterances each, in the groups of ``labels``, and which contexts are wrong.

    ``part`` takes some of them.
    """
    generator = np.random.default_rng(seed)
    true = np.repeat(np.arange(NUM_SPEAKERS), EACH)
    rows = generator.normal(size=(NUM_SPEAKERS, SIZE))[true] + 0.5 * generator.normal(size=(len(true), SIZE))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    true, rows = (true, rows) if part is None else (true[part], rows[part])
    groups = true if labels is None else labels(true, generator)
    similarity = np.where(groups[:, None] == groups[None, :], rows @ rows.T, -np.inf)
    np.fill_diagonal(similarity, -np.inf)
    voices = Voices(
        embeddings=rows, groups=groups, speakers=groups if speakers is None else speakers,
        candidates=np.ones(len(true), dtype=bool), best=similarity.max(axis=1),
        weights=np.full(len(true), 1 / len(true)), reference=reference,
    )  # fmt: skip
    return voices, true != true[similarity.argmax(axis=1)]


def exchange(share):
    def labels(true, generator):
        found = true.copy()
        rows = generator.permutation(len(true))[: int(share * len(true))]
        count = true.max() + 1
        found[rows] = (true[rows] + generator.integers(1, count, len(rows))) % count
        return found

    return labels


def true_share(voices, wrong, threshold):
    return wrong[voices.best >= threshold].mean()


def strangers():
    """Return the reference of an encoder that makes these voices."""
    voices, _ = make_voices(seed=99)
    shares = np.concatenate([np.linspace(0, 0.99, 100), [0.999, 1.0]])
    found = np.quantile(voices.similarities[np.triu(voices.is_across, 1)], shares)
    return tuple(zip(found.tolist(), shares.tolist(), strict=True))


def test_right_labels_let_next_to_nothing_through():
    voices, _ = make_voices()
    found = estimate_wrong_speakers(voices, GRID)
    assert found.misplaced < 0.005
    assert found.foreign == 0
    assert np.nanmax(found.shares) < 0.005


@pytest.mark.parametrize("share", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("seed", [0, 1])
def test_wrong_labels_are_estimated(share, seed):
    voices, wrong = make_voices(exchange(share), seed=seed)
    found = estimate_wrong_speakers(voices, GRID)
    assert abs(found.misplaced - share) < 0.03
    for threshold in (30, 50, 60, 70):
        assert abs(found.shares[threshold] - true_share(voices, wrong, threshold / 100)) < 0.035


def test_two_speakers_under_one_name_are_estimated():
    voices, wrong = make_voices(lambda true, generator: true // 2)
    found = estimate_wrong_speakers(voices, GRID)
    assert 0.35 < found.foreign < 0.6  # 10 of 19 candidates
    assert abs(found.shares[50] - true_share(voices, wrong, 0.5)) < 0.02


def test_one_group_takes_the_reference_of_the_encoder():
    voices, wrong = make_voices(lambda true, generator: np.zeros_like(true), reference=strangers())
    found = estimate_wrong_speakers(voices, GRID)
    assert found.foreign > 0.9
    assert abs(found.shares[60] - true_share(voices, wrong, 0.6)) < 0.05


def test_one_group_without_a_reference_gives_no_advice():
    voices, _ = make_voices(lambda true, generator: np.zeros_like(true))
    advice = advise(voices, 0.01)
    assert advice.recommended is None
    assert "one speaker group only" in advice.reason
    assert advice.thresholds[0].context_share == pytest.approx(1)
    assert advice.thresholds[0].wrong_share is None


def test_groups_of_one_speaker_are_no_other_voices():
    # Two groups of each speaker: were they strangers to each other, half of all would look misplaced.
    true = np.repeat(np.arange(NUM_SPEAKERS), EACH)
    voices, _ = make_voices(lambda true, generator: 2 * true + np.arange(len(true)) % 2, speakers=true)
    assert estimate_wrong_speakers(voices, GRID).misplaced < 0.005


def test_advice_keeps_what_it_promises():
    voices, wrong = make_voices(exchange(0.1))
    advice = advise(voices, 0.01)
    chosen = advice.recommended
    assert chosen.wrong_share <= 0.01
    assert true_share(voices, wrong, chosen.min_similarity) <= 0.02
    assert chosen.context_share > 0.85  # of the 90 % that have a right one


@pytest.mark.parametrize(("share", "size", "expected"), [(0.0, 100, 0.0295), (0.1, 100, 0.1637), (1.0, 50, 1.0)])
def test_upper_bounds_are_those_of_clopper_and_pearson(share, size, expected):
    assert upper_bound(share, size) == pytest.approx(expected, abs=1e-4)


def test_the_bound_of_wrong_candidates_counts_utterances_by_their_candidates():
    # One group of 60 has 3,540 pairs, 40 groups of 2 have 80: nearly all that is known is from 60 utterances.
    rows = np.arange(140)
    voices, _ = make_voices(lambda true, generator: np.where(rows < 60, 0, rows // 2), part=rows)
    with mock.patch.object(estimates, "upper_bound", wraps=upper_bound) as bound:
        estimate_wrong_speakers(voices, GRID)
    assert [call.args[1] for call in bound.call_args_list] == pytest.approx([140, 3620**2 / (60 * 59**2 + 80), 140])


def test_a_smaller_pilot_leaves_more_room_for_wrong_speakers():
    large, _ = make_voices(exchange(0.1))
    part = np.arange(len(large.groups)) < 10 * EACH
    small, _ = make_voices(exchange(0.1), part=part)
    ours, theirs = estimate_wrong_speakers(large, GRID), estimate_wrong_speakers(small, GRID)
    assert (ours.bounds >= ours.shares)[ours.thresholds < 0.9].all()
    middle = 60
    assert theirs.bounds[middle] > ours.bounds[middle]


@pytest.mark.parametrize("seed", range(5))
def test_advice_of_a_small_pilot_is_on_the_safe_side_and_says_what_it_cannot_rule_out(seed):
    part = np.arange(NUM_SPEAKERS * EACH) < 10 * EACH
    voices, wrong = make_voices(exchange(0.1), seed=seed, part=part)
    advice = advise(voices, 0.01)
    chosen = advice.recommended
    assert true_share(voices, wrong, chosen.min_similarity) <= chosen.wrong_bound <= 0.03
    right = (~wrong & np.isfinite(voices.best)).mean()
    assert chosen.context_share > 0.85 * right
    assert (chosen.wrong_bound <= 0.01) != ("cannot be ruled out: a larger" in advice.reason)


def test_no_context_at_all_gives_no_advice():
    voices, _ = make_voices(lambda true, generator: np.arange(len(true)))
    advice = advise(voices, 0.01)
    assert advice.recommended is None
    assert "look at the rejects" in advice.reason


def test_labels_at_random_have_no_good_threshold():
    voices, _ = make_voices(lambda true, generator: generator.permutation(true))
    advice = advise(voices, 0.001)
    assert advice.misplaced > 0.7
    assert "mend the labels" in advice.reason
