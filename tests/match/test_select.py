"""Tests of the context selection against an independent implementation of the published rule."""

import math
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.project import TESTS, examples

from sharmill.match.select import select_context

# Runs in a separate process, whose peak memory is that of the selection.
MEASURE = """
from bench.rows import with_peak
from bench.match import LIMITS, large_group, select_context

data, found = large_group(20_000), []
print(with_peak(lambda: found.append(select_context(**data, **LIMITS)[0]))["MiB above"], (found[0] >= 0).sum())
"""
# Signed squares of similarities, some of which small integer vectors reach exactly.
SIGNED_SQUARES = [-1.0, -0.5, 0.0, 0.1, 0.2, 0.25, 0.36, 0.5, 0.64, 0.8, 0.9, 1.0, 1.5]


@dataclass
class Problem:
    """Draw small integer vectors and times in tenths of a second, so that the expected result is exact."""

    vectors: np.ndarray  # (N, D) integers
    tenths: np.ndarray  # (N,) durations
    starts: np.ndarray  # (N,) offsets
    recordings: np.ndarray | None
    texts: np.ndarray | None
    contents: np.ndarray | None
    least_square: float
    most_square: float | None
    min_tenths: int
    max_tenths: int | None
    options: dict[str, Any] = field(default_factory=dict)

    def select(self, embeddings: Any = None, **options: Any) -> tuple[Any, Any]:
        return select_context(
            self.vectors.astype(np.float32) if embeddings is None else embeddings,
            self.tenths / 10,
            min_similarity=math.copysign(math.sqrt(abs(self.least_square)), self.least_square),
            min_duration=self.min_tenths / 10,
            max_duration=None if self.max_tenths is None else self.max_tenths / 10,
            recordings=self.recordings,
            offsets=None if self.recordings is None else self.starts / 10,
            texts=self.texts,
            contents=self.contents,
            max_similarity=None if self.most_square is None else as_cosine(self.most_square),
            **(self.options | options),
        )

    def signed_squares(self) -> np.ndarray:
        """Return cos * |cos|, (N, N), from one division of integers each, so that equal values are exactly equal."""
        dots = self.vectors @ self.vectors.T
        norms = (self.vectors**2).sum(axis=1)
        return dots * abs(dots) / np.maximum(np.outer(norms, norms), 1)

    def eligible(self, i: int, j: int) -> bool:
        if i == j or self.tenths[j] < self.min_tenths:
            return False
        if self.max_tenths is not None and self.tenths[j] > self.max_tenths:
            return False
        if self.texts is not None and self.texts[i] != -1 and self.texts[i] == self.texts[j]:
            return False
        if self.contents is not None and self.contents[i] == self.contents[j]:
            return False
        if self.recordings is None or self.recordings[i] != self.recordings[j]:
            return True
        ends = self.starts + self.tenths
        return bool(ends[i] <= self.starts[j] or ends[j] <= self.starts[i])

    def walk(self, how_many: int) -> list[tuple[list[int], float]]:
        """Return for each row the first candidates that pass the published rule, and the best eligible square."""
        squares, rows = self.signed_squares(), []
        for i, row in enumerate(squares.tolist()):
            survivors, best = [], -math.inf
            for j in sorted(range(len(row)), key=lambda j, row=row: (-row[j], j)):
                if not self.eligible(i, j) or (self.most_square is not None and row[j] > self.most_square):
                    continue
                best = max(best, row[j])
                if row[j] < self.least_square or len(survivors) == how_many:
                    break
                survivors.append(j)
            rows.append((survivors, best))
        return rows


@st.composite
def problems(draw: st.DrawFn, max_rows: int = 300) -> Problem:
    num_rows = draw(st.one_of(st.integers(1, 8), st.integers(30, max_rows), st.integers(30, max_rows)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_voices, dim = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    voices = rng.integers(-2, 3, (num_voices, dim))
    vectors = voices[rng.integers(num_voices, size=num_rows)]
    vectors = vectors * rng.integers(1, 4, (num_rows, 1))  # cosine similarity ignores the scale
    span = draw(st.sampled_from([3000, 3000, 200, 60, 5]))  # all, some or hardly any segments overlap
    num_recordings = draw(st.sampled_from([None, 50, 50, 3, 3, 1]))
    num_texts = draw(st.sampled_from([None, 200, 200, 4, 4, 1]))
    num_contents = draw(st.sampled_from([None, None, 200, 20, 3, 1]))
    max_tenths = draw(st.sampled_from([None, None, None, 80, 60, 40, 5]))
    return Problem(
        vectors=vectors,
        tenths=rng.integers(1, draw(st.sampled_from([90, 90, 90, 30])), num_rows),
        starts=rng.integers(0, span, num_rows),
        recordings=None if num_recordings is None else rng.integers(num_recordings, size=num_rows),
        texts=None if num_texts is None else rng.integers(-1, num_texts, num_rows),
        contents=None if num_contents is None else rng.integers(num_contents, size=num_rows),
        most_square=draw(st.sampled_from([None, None, None, *SIGNED_SQUARES])),
        least_square=draw(st.sampled_from(SIGNED_SQUARES)),
        min_tenths=draw(st.sampled_from([0, 1, 5, 10, 20, 29, 30, 31, 30, 200])),
        max_tenths=max_tenths,
        options={"block_size": draw(st.sampled_from([None, 1, 2, 7, 64, 1000]))},
    )


def as_cosine(square: float) -> float:
    return math.copysign(math.sqrt(abs(square)), square) if math.isfinite(square) else square


@settings(max_examples=examples(400), deadline=None)
@given(problems())
def test_the_choice_is_that_of_the_published_walk(problem):
    index, similarity = problem.select()
    expected = problem.walk(how_many=1)
    assert index.tolist() == [survivors[0] if survivors else -1 for survivors, _ in expected]
    np.testing.assert_allclose(similarity, [as_cosine(best) for _, best in expected], rtol=0, atol=2**-24)
    assert (index.dtype, similarity.dtype) == (np.int64, np.float32)


@settings(max_examples=examples(100), deadline=None)
@given(problems(max_rows=100), st.sampled_from(["best", "sample"]))
def test_tensors_give_what_arrays_give(problem, choice):
    index, similarity = problem.select(choice=choice)
    torch_index, torch_similarity = problem.select(torch.from_numpy(problem.vectors).float(), choice=choice)
    assert (torch_index.dtype, torch_similarity.dtype) == (torch.int64, torch.float32)
    np.testing.assert_array_equal(torch_index.numpy(), index)
    np.testing.assert_array_equal(torch_similarity.numpy(), similarity)


@settings(max_examples=examples(200), deadline=None)
@given(problems(max_rows=100), st.integers(1, 7), st.integers(0, 1000))
def test_a_sample_is_one_of_the_best_for_any_block_size(problem, sample_size, seed):
    options = {"choice": "sample", "sample_size": sample_size, "seed": seed}
    index, similarity = problem.select(**options)
    squares = problem.signed_squares()
    for i, (survivors, best) in enumerate(problem.walk(how_many=sample_size)):
        assert index[i] in (survivors or [-1])
        chosen = squares[i, index[i]] if survivors else best
        assert similarity[i] == pytest.approx(as_cosine(chosen), rel=0, abs=2**-24)
    for block_size in (1, 13, None):
        again = problem.select(**options, block_size=block_size)
        np.testing.assert_array_equal(again[0], index)
        np.testing.assert_array_equal(again[1], similarity)


def choose(embeddings, durations=None, **options):
    """Return index and similarity as lists; by default, the limits exclude nothing."""
    durations = np.full(len(embeddings), 4.0) if durations is None else durations
    options = {"min_similarity": -1.0, "min_duration": 3.0} | options
    index, similarity = select_context(np.asarray(embeddings, dtype=np.float64), durations, **options)
    return index.tolist(), similarity.tolist()


@pytest.mark.parametrize("limit", [0.6, np.float32(0.6)])
def test_a_similarity_that_equals_the_limit_is_enough(limit):
    assert choose([[1, 0], [3, 4]], min_similarity=limit)[0] == [1, 0]
    assert choose([[1, 0], [3, 4]], min_similarity=limit + 1e-6)[0] == [-1, -1]


@pytest.mark.parametrize("block_size", [1, 3, 50, None])
def test_the_first_duplicate_wins_despite_noise_of_the_product(block_size):
    rng = np.random.default_rng(3)
    embeddings = np.tile(rng.normal(size=(100, 192)) * 10.0 ** rng.integers(-3, 4, (100, 1)), (5, 1))
    index, similarity = choose(embeddings, min_similarity=0.5, block_size=block_size)
    assert index == [*range(100, 200), *np.tile(np.arange(100), 4)]
    assert similarity == [1.0] * 500


def test_the_first_orthogonal_candidate_wins_despite_noise():
    # Products of a rotated orthonormal basis are 0 up to about 1e-17, with either sign.
    basis, _ = np.linalg.qr(np.random.default_rng(4).normal(size=(64, 64)))
    index, similarity = choose(basis)
    assert index == [1] + [0] * 63
    assert [str(value) for value in similarity] == ["0.0"] * 64


def test_segments_that_touch_do_not_overlap_despite_rounding():
    options = {"recordings": [7, 7], "min_duration": 0.1}
    assert 0.1 + 0.2 > 0.3
    assert choose([[1], [1]], [0.2, 0.5], offsets=[0.1, 0.3], **options)[0] == [1, 0]
    assert choose([[1], [1]], [0.2, 0.5], offsets=[0.1, 0.2999], **options)[0] == [-1, -1]
    assert choose([[1], [1]], [0.2, 0.5], **options)[0] == [-1, -1]  # both begin at 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embeddings": np.ones(3)}, r"embeddings must have shape \(N, D\)"),
        ({"embeddings": np.array([[1.0], [math.nan], [1.0]])}, "those of 1 utterances are not"),
        ({"embeddings": np.array([[1.0], [math.inf], [math.nan]])}, "those of 2 utterances are not"),
        ({"durations": [4.0, 4.0]}, r"durations must have shape \(3,\)"),
        ({"durations": [4.0, math.nan, 4.0]}, "durations must be finite"),
        ({"durations": [4.0, -1.0, 4.0]}, "at least 0.0 s"),
        ({"recordings": [1, 2]}, "recordings must have shape"),
        ({"recordings": [1.0, 2.0, 3.0]}, "recordings must be integers"),
        ({"recordings": [1, 2, 3], "offsets": [0.0]}, "offsets must have shape"),
        ({"recordings": [1, 2, 3], "offsets": [0.0, math.inf, 0.0]}, "offsets must be finite"),
        ({"offsets": [0.0, 1.0, 2.0]}, "offsets have no effect without recordings"),
        ({"texts": ["a", "b", "c"]}, "texts must be integers"),
        ({"contents": [0.5, 1.0, 2.0]}, "contents must be integers"),
        ({"max_similarity": math.nan}, "max_similarity is NaN"),
        ({"min_similarity": math.nan}, "min_similarity is NaN"),
        ({"max_duration": math.nan}, "max_duration is NaN"),
        ({"choice": "worst"}, 'choice must be "best" or "sample"'),
        ({"sample_size": 0}, "sample_size must be at least 1"),
        ({"block_size": 0}, "block_size must be at least 1"),
    ],
)
def test_invalid_arguments_are_refused(change, message):
    arguments = {
        "embeddings": np.ones((3, 2)),
        "durations": [4.0] * 3,
        "min_similarity": 0.6,
        "min_duration": 3.0,
    }
    with pytest.raises(ValueError, match=message):
        select_context(**(arguments | change))


@pytest.mark.slow
def test_twenty_thousand_utterances_take_less_than_one_gib():
    command = [sys.executable, "-c", MEASURE]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=TESTS, text=True).stdout
    mebibytes, num_found = printed.split()
    # The embeddings alone take 31 MB in float64; a lower figure would mean that the measurement failed.
    assert 30 < float(mebibytes) < 1024
    assert int(num_found) > 19_000
