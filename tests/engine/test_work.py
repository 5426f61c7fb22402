"""What becomes of units and slots where slots are bad, ranks stand still, or are told to leave."""

from __future__ import annotations

import pytest
from support.shared_disk import Fault, Host
from support.simulated_run import SimulatedStage, simulate

from sharmill.engine.attempts import MAX_RELEASES, Attempts, Note
from sharmill.errors import FatalError

LEASE_SECONDS = SimulatedStage.lease_seconds


@pytest.mark.parametrize("num_units", [1, 7])
def test_where_every_slot_is_bad_the_stage_ends(tmp_path, num_units):
    run = simulate(tmp_path, [Host(f"h/rank {number}", good_for=0) for number in range(2)], units=num_units)
    assert run.results[0].failures.keys() == set(range(num_units))
    assert run.commits() == {}
    # Ten different units tell that a slot is bad; fewer are given up, since nothing else could tell.
    assert run.attempts().slots_out() == {}


def test_slots_that_do_none_of_many_units_are_taken_out(tmp_path):
    with pytest.raises(FatalError, match="no rank can work"):
        simulate(tmp_path, [Host(f"h/rank {number}", good_for=0) for number in range(2)], units=25)


@pytest.mark.parametrize("is_useful", [False, True])
def test_a_host_with_three_bad_slots_is_taken_out_unless_others_of_it_work(tmp_path, is_useful):
    ranks = [Host(f"bad/rank {number}", good_for=0) for number in range(3)]
    ranks += [Host("bad/rank 3")] if is_useful else []
    run = simulate(tmp_path, [*ranks, Host("good/rank 4")], units=40)
    assert run.attempts().is_out("bad/rank 0")
    assert run.attempts().is_out("bad/rank 3") is not is_useful
    assert not run.attempts().is_out("good/rank 4")
    assert run.commits().keys() == set(range(40))


def test_a_frozen_rank_holds_its_unit_for_a_lease_and_no_longer(tmp_path):
    frozen = Host("h0/rank", faults=(Fault("first", 0, 3 * LEASE_SECONDS),))
    run = simulate(tmp_path, [frozen, Host("h1/rank")], units=2)
    # It goes on after the end of the stage, and publishes nothing.
    assert [commit.rank for commits in run.commits().values() for commit in commits] == [1, 1]
    # A unit and a minute; each file operation takes up to a second here.
    assert LEASE_SECONDS <= run.finished_at <= LEASE_SECONDS + 90
    assert run.finished == run.outcome_files()


def test_releases_do_not_count_up_to_ten(tmp_path):
    attempts = Attempts(tmp_path)
    for generation in range(MAX_RELEASES + 1):
        assert attempts.failures(0) == []
        attempts.add(Note(kind="released", slot="h/rank 0", unit=0, generation=generation))
    assert len(attempts.failures(0)) == 1
