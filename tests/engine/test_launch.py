"""A launch that goes on after one whose ranks have ended: attempts of before count on."""

from support.toy_stage import ToyStage

from sharmill.engine.claims import Claims
from sharmill.engine.fence import make_fence
from sharmill.engine.launch import begin_launch
from sharmill.engine.parent import Rank
from sharmill.engine.plan import read_or_make_plan
from sharmill.engine.watch import Watcher


def launch(stage, units):
    begin_launch(stage, units, 1, goes_on=True)
    watcher = Watcher(stage)
    watcher.look()
    return watcher, Claims(stage, Rank(0, "node/rank 0", "cpu"), watcher)


def test_units_in_flight_are_tried_once_and_each_end_counts(tmp_path):
    stage, units = read_or_make_plan(ToyStage(tmp_path, units=1).in_run, restart=False)
    make_fence(stage)
    for number in range(3):
        watcher, claims = launch(stage, units)
        # The rank of each launch is killed in the middle of the unit.
        assert claims.next()[1] == number
        assert watcher.state.offers == {}
    watcher, _ = launch(stage, units)
    assert len(watcher.notes.attempts.failures(0)) == 3
