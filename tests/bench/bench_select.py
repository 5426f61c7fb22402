"""Prints time and peak memory of context selection: ``python tests/bench/bench_select.py``.

Every figure comes from a process of its own, since the peak of a process never goes down:
``python tests/bench/bench_select.py select 20000`` prints one as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from sharmill.match.select import select_context

DIM = 192
MIN_SIMILARITY, MIN_DURATION = 0.6, 3.0


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


def plain(
    embeddings: np.ndarray,
    durations: np.ndarray,
    recordings: np.ndarray,
    offsets: np.ndarray,
    texts: np.ndarray,
) -> np.ndarray:
    """The same rule with full N x N matrices."""
    units = embeddings.astype(np.float64)
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    scores = units @ units.T
    ends = offsets + durations
    excluded = (offsets[:, None] < ends) & (offsets < ends[:, None]) & (recordings[:, None] == recordings)
    excluded |= (texts[:, None] == texts) & (texts != -1)
    excluded |= durations < MIN_DURATION
    np.fill_diagonal(excluded, True)
    scores[excluded] = -np.inf
    index = scores.argmax(axis=1)
    return np.where(scores.max(axis=1) >= MIN_SIMILARITY, index, -1)


def memory_mib(key: str) -> float:
    """VmRSS, the resident size of this process now, or VmHWM, its peak.

    Not getrusage: its ru_maxrss also counts what the parent held when it started this process.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{key}:")[1].split()[0]) / 1024


def measure(kind: str, num_rows: int) -> dict[str, Any]:
    """Runs one kind ("select", "sample" or "plain"), after a small one that starts the libraries' threads."""

    def select(**data: Any) -> np.ndarray:
        choice: Any = "sample" if kind == "sample" else "best"
        return select_context(**data, min_similarity=MIN_SIMILARITY, min_duration=MIN_DURATION, choice=choice)[0]

    run = plain if kind == "plain" else select
    run(**problem(500))
    data = problem(num_rows)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, start = memory_mib("VmRSS"), time.perf_counter()
    index = run(**data)
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "additional_mib": memory_mib("VmHWM") - before,
        "found": int((index >= 0).sum()),
        "index_sum": int(index.sum()),
    }


def main() -> None:
    """Prints one line per kind and size, and the ratio to the full matrix."""
    figures = {}
    for kind, num_rows in [("select", 20_000), ("sample", 20_000), ("select", 5_000), ("plain", 5_000)]:
        command = [sys.executable, __file__, kind, str(num_rows)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        figure = figures[kind, num_rows] = json.loads(output)
        print(
            f"{kind:7} N={num_rows:6,} D={DIM}: {figure['seconds']:6.2f} s, "
            f"{figure['additional_mib']:6.0f} MiB more, {figure['found']:,} found"
        )
    ours, full = figures["select", 5_000], figures["plain", 5_000]
    print(
        f"against the full matrix at N=5,000: {ours['seconds'] / full['seconds']:.2f} of the time, "
        f"{ours['additional_mib'] / full['additional_mib']:.2f} of the memory, "
        f"same result: {ours['index_sum'] == full['index_sum']}"
    )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
    else:
        main()
