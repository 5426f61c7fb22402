"""Samples of whole speaker groups: sizes, seeds and unbiased weights."""

import numpy as np

from sharmill.pilot.sample import draw_groups


def test_groups_are_whole_and_the_size_is_reached():
    groups = np.random.default_rng(0).permutation(np.repeat(np.arange(300), 10))
    sample = draw_groups(groups, 200, seed=1)
    counts = np.bincount(groups[sample.rows])
    assert set(counts[counts > 0].tolist()) == {10}
    assert (len(sample.rows), sample.num_groups, sample.num_partial) == (200, 20, 0)
    assert (np.diff(sample.rows) > 0).all()


def test_only_a_part_of_a_large_group_is_taken():
    sample = draw_groups(np.array([0] * 5000 + [1] * 10), 200, seed=0)
    assert (len(sample.rows), sample.num_groups, sample.num_partial) == (110, 2, 1)
    assert np.isclose(sample.weights[sample.rows >= 5000].sum(), 10 / 5010)


def test_no_records_are_no_sample():
    assert len(draw_groups(np.empty(0, dtype=np.int64), 100, seed=0).rows) == 0


def test_weighted_means_are_unbiased():
    # Half of the records are in one large group, half in groups of two.
    groups = np.concatenate([np.zeros(4000, dtype=np.int64), np.repeat(np.arange(1, 2001), 2)])
    shares = []
    for seed in range(40):
        sample = draw_groups(groups, 200, seed)
        shares.append(sample.weights[groups[sample.rows] == 0].sum())
    assert abs(np.mean(shares) - 0.5) < 0.05
