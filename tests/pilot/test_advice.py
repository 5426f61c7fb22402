"""Estimates of wrong speakers on synthetic voices whose speakers are known, and the resulting advice."""

import numpy as np
import pytest

from sharmill.pilot.advice import Voices, advise

NUM_SPEAKERS, EACH, SIZE = 40, 10, 16


def make_voices(labels=None, *, seed=0, speakers=None, reference=(), part=None):
    """Return voices of 40 speakers with 10 utterances each, and a mask of the utterances whose context is wrong.

    Args:
        labels: returns the group of each utterance.
        part: selects some of the utterances.
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


def cross_speaker_reference():
    """Return the reference of an encoder for these voices."""
    voices, _ = make_voices(seed=99)
    shares = np.concatenate([np.linspace(0, 0.99, 100), [0.999, 1.0]])
    found = np.quantile(voices.similarities[np.triu(voices.is_across, 1)], shares)
    return tuple(zip(found.tolist(), shares.tolist(), strict=True))


def in_one_group(true, generator):
    return np.zeros_like(true)


def each_alone(true, generator):
    return np.arange(len(true))


def at_random(true, generator):
    return generator.permutation(true)


def two_under_one_name(true, generator):
    return true // 2


def two_groups_of_each(true, generator):
    return 2 * true + np.arange(len(true)) % 2


# Labels, further arguments for the voices, limits on the shares of misplaced utterances and of foreign candidates,
# thresholds, and the tolerance of the wrong shares at these thresholds.
ESTIMATES = {
    "right labels": (None, {}, (0, 0.005), (0, 0), (0, 30, 50, 70), 0.005),
    **{f"{share:.0%} exchanged, seed {seed}": (
        exchange(share), {"seed": seed}, (share - 0.03, share + 0.03), (0, 1), (30, 50, 60, 70), 0.035,
    ) for share in (0.05, 0.1, 0.3) for seed in (0, 1)},
    # 10 of 19 candidates are of another speaker.
    "two speakers under one name": (two_under_one_name, {}, (0, 1), (0.35, 0.6), (50,), 0.02),
    "one group, by the encoder's reference": (
        in_one_group, {"reference": cross_speaker_reference()}, (0, 1), (0.9, 1), (60,), 0.05,
    ),
    # If groups of the same speaker counted as other groups, half of all utterances would look misplaced.
    "two groups of each speaker": (
        two_groups_of_each, {"speakers": np.repeat(np.arange(NUM_SPEAKERS), EACH)}, (0, 0.005), (0, 1), (), 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ESTIMATES)
def test_wrong_labels_and_contexts_are_estimated(name):
    labels, keys, misplaced, foreign, thresholds, tolerance = ESTIMATES[name]
    voices, wrong = make_voices(labels, **keys)
    found = advise(voices, 0.01)
    assert misplaced[0] <= found.misplaced <= misplaced[1]
    assert foreign[0] <= found.foreign <= foreign[1]
    for threshold in thresholds:
        share = found.thresholds[threshold].wrong_share
        assert abs(share - true_share(voices, wrong, threshold / 100)) < tolerance


def test_advice_keeps_what_it_promises():
    voices, wrong = make_voices(exchange(0.1))
    advice = advise(voices, 0.01)
    chosen = advice.recommended
    assert chosen.wrong_share <= 0.01
    assert true_share(voices, wrong, chosen.min_similarity) <= 0.02
    assert chosen.context_share > 0.85  # 90 % of the utterances have a correct context


@pytest.mark.parametrize("seed", range(5))
def test_advice_of_a_small_pilot_is_on_the_safe_side(seed):
    part = np.arange(NUM_SPEAKERS * EACH) < 10 * EACH
    voices, wrong = make_voices(exchange(0.1), seed=seed, part=part)
    advice = advise(voices, 0.01)
    chosen = advice.recommended
    assert true_share(voices, wrong, chosen.min_similarity) <= chosen.wrong_bound <= 0.03
    right = (~wrong & np.isfinite(voices.best)).mean()
    assert chosen.context_share > 0.85 * right
    assert (chosen.wrong_bound <= 0.01) != ("cannot be ruled out: use a larger" in advice.reason)


@pytest.mark.parametrize(
    ("labels", "max_wrong", "reason", "is_advised"),
    [
        (in_one_group, 0.01, "only one speaker group", False),
        (each_alone, 0.01, "look at the rejects", False),
        (at_random, 0.001, "correct the labels", True),
    ],
)
def test_the_reason_explains_why_there_is_no_good_threshold(labels, max_wrong, reason, is_advised):
    advice = advise(make_voices(labels)[0], max_wrong)
    assert reason in advice.reason
    assert (advice.recommended is not None) == is_advised
