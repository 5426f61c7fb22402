"""Tests of clusters of vectors, and of the comparison of clips with voices."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform
from support.project import examples

from sharmill.voices import compare
from sharmill.voices.compare import compare_with_voices
from sharmill.voices.find import find_voices
from sharmill.voices.labels import find_lowest_similarity
from sharmill.voices.linkage import link_average, link_blocks


def unit(rows):
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)


def near(centres, count, noise, seed=0):
    """Return ``count`` unit vectors around each centre, (C * count, D)."""
    random = np.random.default_rng(seed)
    rows = np.repeat(centres, count, axis=0)
    return unit(rows + random.normal(scale=noise, size=rows.shape))


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 40), st.floats(-0.5, 0.95), st.integers(1, 4))
def test_the_clusters_are_those_of_scipys_average_linkage(seed, count, least, copies):
    random = np.random.default_rng(seed)
    rows = unit(random.normal(size=(count, 6)) + 0.5)[random.integers(count, size=count * copies)]
    rows += random.normal(scale=1e-3, size=rows.shape)  # exact ties have several right answers
    found = link_average(unit(rows), np.ones(len(rows)), least)
    distances = 1 - unit(rows) @ unit(rows).T
    np.fill_diagonal(distances, 0)
    expected = fcluster(linkage(squareform(distances, checks=False), "average"), 1 - least, "distance")
    assert [np.flatnonzero(expected == label)[0] for label in expected] == found.tolist()


def test_clusters_that_are_merged_count_by_their_clips():
    rows = near(np.eye(3, 16), 8, 0.03)
    whole = link_average(rows, np.ones(len(rows)), 0.9)
    halves = [rows[start : start + 4].mean(axis=0) for start in range(0, 24, 4)]
    merged = link_average(np.array(halves), np.full(6, 4), 0.9)
    assert (np.unique(whole).tolist(), np.unique(merged).tolist()) == ([0, 8, 16], [0, 2, 4])


@pytest.mark.parametrize("rows", [np.zeros((0, 4)), np.zeros((3, 4)), np.eye(4)[[0]]])
def test_nothing_and_silence_are_no_cluster(rows):
    assert link_blocks(rows, np.ones(len(rows)), 0.5).tolist() == list(range(len(rows)))


def test_voices_are_found_across_blocks_too():
    """1,600 clips of 100 voices, in blocks of 64 clips."""
    centres = unit(np.random.default_rng(1).normal(size=(100, 64)))
    rows = near(centres, 16, 0.03)[np.random.default_rng(2).permutation(1600)]
    found = link_blocks(rows, np.ones(1600), 0.8, block=64)
    whole = link_average(rows, np.ones(1600), 0.8)
    assert len(np.unique(whole)) == 100
    assert np.array_equal(found, whole)


def audit(rows, groups, least=0.8):
    """Return the voices of clips and their comparison, from unit vectors and the group of each clip."""
    groups = np.array([np.flatnonzero(np.array(groups) == group)[0] for group in groups])
    clusters = np.empty(len(rows), np.int64)
    for group in np.unique(groups):
        lines = np.flatnonzero(groups == group)
        clusters[lines] = lines[link_average(rows[lines], np.ones(len(lines)), least)]
    voices, directions = find_voices(rows, clusters, groups, least)
    return voices, compare_with_voices(rows, clusters, groups, voices, torch.from_numpy(directions))


def test_a_clip_is_compared_without_itself_and_with_other_voices_only():
    rows = near(np.eye(3, 16), 4, 0.05)
    voices, found = audit(rows, [*"aaaabbbbcccc"])
    assert voices["size"].tolist() == [4, 4, 4]
    others = rows[1:4].sum(axis=0)
    assert found.own[0] == pytest.approx(float(rows[0] @ others / np.linalg.norm(others)), abs=1e-6)
    assert found.other.max() < 0.3
    # One voice has the labels a and b. The last clip has the voice of c and the label a.
    voices, found = audit(rows[[0, 1, 2, 3, 4, 5, 6, 7, 4]], [*"aabbcccca"])
    assert len(np.unique(voices["voice"])) == 2
    assert found.other[:8].max() < 0.3
    assert found.other[8] > 0.9 > 0.3 > found.own[8]
    assert voices["group"][found.nearest[8]] == 4


def test_the_result_does_not_depend_on_blocks(monkeypatch):
    rows = near(unit(np.random.default_rng(3).normal(size=(40, 32))), 5, 0.1)
    groups = np.random.default_rng(4).permutation(np.repeat(np.arange(40), 5))
    _, whole = audit(rows, groups.tolist())
    monkeypatch.setattr(compare, "_ROWS", 7)
    monkeypatch.setattr(compare, "_VOICES", 3)
    _, parts = audit(rows, groups.tolist())
    for name in ("own", "other", "nearest"):
        assert np.array_equal(getattr(whole, name), getattr(parts, name))


def test_groups_of_one_and_of_silence_have_no_other_voice():
    rows = np.concatenate([np.eye(2, 8), np.zeros((2, 8))])
    _, found = audit(rows, [*"abcc"])
    assert not (np.isfinite(found.own[:2])).any()
    assert not (found.other > 0).any()


def test_a_group_may_have_more_than_65536_voices(monkeypatch):
    """All clips have one label, as in a corpus without speakers, and each clip is a voice of its own."""
    angles = np.linspace(0, 2 * np.pi, 70_000, endpoint=False)
    rows = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    clusters, groups = np.arange(70_000, dtype=np.uint32), np.zeros(70_000, np.uint32)
    voices, directions = find_voices(rows, clusters, groups, 0.8)
    assert len(np.unique(voices["number"])) == 70_000
    largest = []
    product = compare._product
    monkeypatch.setattr(compare, "_product", lambda *args: largest.append((found := product(*args)).size) or found)
    found = compare_with_voices(rows[:9], clusters[:9], groups[:9], voices, torch.from_numpy(directions))
    assert found.own == pytest.approx(np.cos(angles[1]), abs=1e-6)  # its neighbour on the circle
    assert max(largest) <= 9 * 8192


def test_the_voices_of_a_group_are_compared_in_bounded_memory():
    rows = unit(np.random.default_rng(0).normal(size=(9_000, 3)))
    tracemalloc.start()
    lowest = find_lowest_similarity(rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 400 * 2**20  # all pairs would need 648 MB
    assert find_lowest_similarity(rows[:1]) == 1.0
    assert lowest == pytest.approx(float((rows[:, None, :] * rows[None, :90]).sum(axis=2).min()), abs=0.01)
