"""The balance of match over 1,024 ranks: corpora of about 20,000 hours whose speaker groups are of all sizes.

``pytest -s`` prints the table of docs/benchmarks.md.
"""

from __future__ import annotations

import numpy as np
import pytest

from sharmill.engine.balance import pack
from sharmill.match.groups import ManifestIndex, divide
from sharmill.match.stage import UNIT_SECONDS

RANKS = 1024
# Long ones, so that there are few enough for a test.
SECONDS_OF_AN_UTTERANCE = (20.0, 60.0)
NUM_UTTERANCES = 1_800_000


def heavy_tailed(largest):
    """Sizes of groups by Pareto's law with an exponent of 1.2, up to the largest."""
    sizes = (np.random.default_rng(0).pareto(1.2, NUM_UTTERANCES // 10) * 3 + 1).astype(np.int64)
    sizes = np.minimum(sizes, largest)
    return sizes[: int(np.searchsorted(np.cumsum(sizes), NUM_UTTERANCES)) + 1]


def pack_groups(sizes, max_group=None):
    """The costs of the units of a corpus, and the loads of the ranks."""
    groups = np.repeat(np.arange(len(sizes), dtype=np.uint32), sizes)
    seconds = np.random.default_rng(1).uniform(*SECONDS_OF_AN_UTTERANCE, len(groups)).astype(np.float32)
    index = ManifestIndex(np.zeros(len(groups), np.int64), seconds, groups)
    order = np.arange(len(groups), dtype=np.uint32)
    costs = [one.seconds for one in divide(index, order, unit_seconds=UNIT_SECONDS[1], max_group=max_group)]
    return costs, [sum(costs[unit] for unit in units) for units in pack(costs, RANKS)]


def one_percent():
    """The number of utterances in a hundredth of the load of a rank."""
    return NUM_UTTERANCES // RANKS // 100


CORPORA = {
    "a million groups": (np.full(1_000_000, 2), None),
    "heavy-tailed groups, none above 1 % of a rank's load": (heavy_tailed(one_percent()), None),
    "heavy-tailed groups": (heavy_tailed(NUM_UTTERANCES), None),
    "heavy-tailed groups, parts of 1 %": (heavy_tailed(NUM_UTTERANCES), one_percent()),
    "four groups": (np.full(4, NUM_UTTERANCES // 4), None),
    "four groups, parts of 1 %": (np.full(4, NUM_UTTERANCES // 4), one_percent()),
    "one group": (np.array([NUM_UTTERANCES]), None),
    "one group, parts of 1 %": (np.array([NUM_UTTERANCES]), one_percent()),
}


@pytest.mark.parametrize("corpus", CORPORA)
def test_the_busiest_of_1024_ranks_has_little_more_than_any_packing_would_give_it(corpus):
    sizes, max_group = CORPORA[corpus]
    costs, loads = pack_groups(sizes, max_group)
    mean = sum(loads) / RANKS
    # Of any packing.
    least = max(mean, *costs)
    largest = max(costs) / mean
    print(f"| {corpus} | {len(sizes):,} | {len(costs):,} | {largest:.1%} | {sum(map(bool, loads)):,} | "
          f"{max(loads) / mean:,.3f} | {max(loads) / least:.3f} |")  # fmt: skip
    assert sum(loads) == pytest.approx(sum(costs))
    if (max_group or sizes.max()) <= one_percent():
        assert max(loads) <= 1.02 * mean
    # Where a group is more than that, it is the group that bounds all packings.
    assert max(loads) <= 1.02 * least
