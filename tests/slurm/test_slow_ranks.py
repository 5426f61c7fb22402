"""Ranks of unequal speed."""

from __future__ import annotations

from collections import Counter

import pytest
from support.toy_cluster import UnevenStage, assert_same_as_local

from sharmill.engine.ledger import read_ledger
from sharmill.engine.plan import load_plan
from sharmill.executors.slurm.chain_state import wait_for_end

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_units_of_a_rank_that_is_eight_times_slower_are_done_by_the_others(make_chain, tmp_path):
    chain = make_chain(kind=UnevenStage, units=24, seconds=0.5)
    chain.start()
    assert wait_for_end(chain.run_dir).state == "done"
    assert_same_as_local(chain, tmp_path)
    assert chain.stage.redone() == 0
    done = Counter(commit.rank for commit in read_ledger(chain.stage.dir, load_plan(chain.stage)).values())
    # Each rank began with a quarter of the units.
    assert done[0] < 6
