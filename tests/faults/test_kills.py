"""SIGKILL at random moments of every stage: readers see nothing bad, and a relaunch brings the same bytes."""

from __future__ import annotations

import random

import pytest
from support.kills import VICTIMS, torture
from support.small_run import STAGES

# Many whole launches a test.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

SEED = 20
KILLS = 4


@pytest.mark.parametrize("stage", STAGES)
def test_kills_of_ranks_drivers_and_groups_change_no_byte(small_run, stage):
    rng = random.Random(f"{SEED} {stage}")
    left = [*VICTIMS, rng.choice(VICTIMS)]
    kills: list[str] = []
    while left:
        outcome = torture(small_run, stage, left, rng)
        assert outcome.differences == []
        # A run may be over before a moment that was drawn: the rest is for the next one.
        left = left[len(outcome.kills) :]
        kills += outcome.kills
    assert len(kills) == KILLS
    assert set(kills) == set(VICTIMS)
