"""Rows of the selection of contexts, beside plain products of matrices, and its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bench.rows import Case, row, with_peak
from sharmill.match.select import select_context

DIM = 192
LIMITS = {"min_similarity": 0.6, "min_duration": 3.0}
TARGETS = {"ratio": "<= 1.67", "MiB above": "<= 512"}
MATMUL = "`matmul` of the same candidates in float64"


def problem(num_rows: int) -> dict[str, Any]:
    """A large group: 40 voices, recordings of 100 segments that overlap a little, some repeated texts."""
    rng = np.random.default_rng(7)
    voices = rng.normal(size=(40, DIM))[rng.integers(40, size=num_rows)]
    durations = rng.uniform(1.0, 15.0, num_rows).round(2)
    return {
        "embeddings": (voices + 0.7 * rng.normal(size=(num_rows, DIM))).astype(np.float32),
        "durations": durations,
        "recordings": np.arange(num_rows) // 100,
        "offsets": np.cumsum(durations) - durations - rng.uniform(0, 0.5, num_rows),
        "texts": rng.integers(-1, num_rows, num_rows),
    }


def case(num_rows: int) -> Case:
    """The best context of each utterance of one group; a small group starts the libraries' threads before."""
    select_context(**problem(500), **LIMITS)
    data = problem(num_rows)
    units = data["embeddings"].astype(np.float64)
    candidates = np.ascontiguousarray(units[data["durations"] >= LIMITS["min_duration"]].T)
    product = np.empty((256, candidates.shape[1]))

    def select() -> dict[str, float]:
        return with_peak(lambda: select_context(**data, **LIMITS))

    def matmul() -> None:
        for start in range(0, len(units), len(product)):
            rows = units[start : start + len(product)]
            np.matmul(rows, candidates, out=product[: len(rows)])

    return Case(amount=num_rows, unit="utterances", ours=select, baseline=matmul)


@row("select", baseline=MATMUL, targets=TARGETS, inverse=True)
def select_beside_matmul(folder: Path, tiny: bool) -> Case:
    """The contexts of 20,000 utterances of one group, 192 dimensions."""
    return case(400 if tiny else 20_000)


@row("select 100,000", baseline=MATMUL, targets=TARGETS, inverse=True, group="scale")
def select_many(folder: Path, tiny: bool) -> Case:
    """The contexts of 100,000 utterances of one group, 192 dimensions."""
    return case(400 if tiny else 100_000)
