"""A launch after one whose ranks have ended; earlier attempts still count."""

from support.toy_stage import ToyStage, wait_until

from sharmill.engine.attempts import Claim
from sharmill.engine.claims import Claims
from sharmill.engine.fence import make_fence
from sharmill.engine.launch import begin_launch, make_claim
from sharmill.engine.parent import Rank
from sharmill.engine.plan import read_or_make_plan
from sharmill.engine.watch import Watcher


def launch(stage, units):
    begin_launch(stage, units, 1, keeps_attempts=True)
    watcher = Watcher(stage)
    watcher.look()
    return watcher, Claims(stage, Rank(0, "node/rank 0", "cpu"), watcher)


def test_units_in_flight_are_tried_once_and_each_end_counts(tmp_path):
    stage, units = read_or_make_plan(ToyStage(tmp_path, units=1).in_run, restart=False)
    make_fence(stage)
    for number in range(3):
        watcher, claims = launch(stage, units)
        # The rank of each launch is killed in the middle of its unit.
        assert claims.next()[1] == number
        assert watcher.state.offers == {}
    watcher, _ = launch(stage, units)
    assert len(watcher.notes.attempts.failures(0)) == 3


def test_a_leader_that_dies_before_its_first_write_is_replaced(tmp_path):
    stage, units = read_or_make_plan(ToyStage(tmp_path, units=1, lease_seconds=0.2).in_run, restart=False)
    make_fence(stage)
    begin_launch(stage, units, 1)
    make_claim(stage, "leader.1", Claim(owner="dead"))
    watcher = Watcher(stage)
    watcher.look()
    assert watcher.leader is None
    wait_until(lambda: watcher.look() or watcher.leader)
    assert watcher.state.term == 2
