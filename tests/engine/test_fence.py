"""The fence of a plan: only the current plan of a run writes its output, and a run removes only its own files.

Files of other nodes are waited for only as long as they may be late.
"""

import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.project import REPOSITORY, raises
from support.toy_stage import ToyStage, run, wait_until

from sharmill.engine.fence import make_fence
from sharmill.engine.launch import begin_launch, read_attempts
from sharmill.engine.parent import Rank
from sharmill.engine.plan import read_or_make_plan
from sharmill.engine.watch import Watcher
from sharmill.engine.work import work
from sharmill.errors import ConfigError, FatalError
from sharmill.executors.slurm.executor import RankTask
from sharmill.executors.slurm.profile import RankProfile
from sharmill.files.shared_disk import VisibilityTimeout


def plan(stage):
    """Plan a stage like the process that directs a run, before ranks start; return the stage in its run."""
    planned, units = read_or_make_plan(stage.in_run)
    make_fence(planned)
    begin_launch(planned, units, 1)
    return planned


def contents(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


class TestRanksOfAnOlderPlan:
    def test_one_that_has_not_begun_stops_at_once_and_leaves_nothing(self, tmp_path):
        stage = ToyStage(tmp_path)
        old = pickle.loads(pickle.dumps(plan(stage)))
        assert run(stage, restart=True)[0].ok
        before = contents(tmp_path)
        # The task of the array does not fail, because its plan was superseded.
        RankTask(old, 0, RankProfile())()
        with raises(FatalError, "superseded_plan"):
            work(old, Rank(0, "node/rank 0", "cpu"), Watcher(old))
        assert contents(tmp_path) == before

    def test_a_process_that_was_stopped_meanwhile_changes_nothing(self, tmp_path):
        """A task of a job array is stopped in the middle of its unit. The new plan gives other bytes."""
        old = ToyStage(tmp_path, units=4, behaviour={1: "wait:go_on"})
        task = RankTask(plan(old), 0, RankProfile())
        (tmp_path / "task").write_bytes(pickle.dumps(task))
        code = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))()"
        command = [sys.executable, "-c", code, str(tmp_path / "task")]
        environment = {"PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY / 'tests'}"}
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as rank:
            wait_until(lambda: old.attempts()[1])
            rank.send_signal(signal.SIGSTOP)
            new = ToyStage(tmp_path, units=4, everywhere="reject:too_short", max_reject_fraction=1.0)
            assert run(new, restart=True)[0].ok
            expected = contents(tmp_path)
            old.mark("go_on")
            rank.send_signal(signal.SIGCONT)
            assert rank.wait(60) == 0
        assert contents(tmp_path) == sorted([*expected, "marks/go_on"])
        assert read_attempts(new.in_run).stopped is None


class TestForeignFiles:
    @pytest.mark.parametrize("name", ["logs/mine.txt", "plan/mine.txt", "parts/000001.npy"])
    @pytest.mark.parametrize("restart", [False, True])
    def test_a_folder_that_has_no_plan_of_ours_is_refused(self, tmp_path, name, restart):
        stage = ToyStage(tmp_path)
        path = stage.dir.path / name
        path.parent.mkdir(parents=True)
        path.write_text("mine")
        with raises(ConfigError, "foreign_output", "sharmill did not write"):
            run(stage, restart=restart)
        assert path.read_text() == "mine"


@pytest.fixture
def waited(monkeypatch):
    """The seconds of all waits, which are only simulated."""
    seconds, really_sleep = [], time.sleep

    def sleep(duration):
        # Threads left over from other tests do not count.
        note = seconds.append if threading.current_thread() is threading.main_thread() else really_sleep
        note(duration)

    monkeypatch.setattr(time, "monotonic", lambda: sum(seconds))
    monkeypatch.setattr(time, "sleep", sleep)
    return seconds


def test_waiting_has_a_total_limit_and_names_the_missing_file(waited, caplog):
    visibility = VisibilityTimeout(60.0)
    for name in ("the plan", "the ledger"):
        assert not visibility.wait_until(lambda: False, name)
    assert 60.0 <= sum(waited) < 62.0
    assert [record.getMessage().split(" waiting")[0] for record in caplog.records] == [
        "the plan is still not visible here after",
        "the ledger is still not visible here after",
    ]


def test_a_plan_of_another_node_is_used_once_it_is_visible(waited, tmp_path, monkeypatch):
    stage = ToyStage(tmp_path, units=2, seconds_until_seen=30.0)
    first, _ = read_or_make_plan(stage.in_run)
    exists, late = Path.exists, stage.dir.identity
    monkeypatch.setattr(Path, "exists", lambda path: exists(path) and (path != late or sum(waited) > 5.0))
    second, _ = read_or_make_plan(stage.in_run)
    assert second.token == first.token
    assert 5.0 < sum(waited) < 7.0


def test_a_rank_waits_for_the_planned_input(waited, tmp_path, monkeypatch):
    opened = []

    class LateInput(ToyStage):
        def input_visible(self, run):
            return sum(waited) > 5.0

        def load(self, device):
            opened.append(sum(waited))

    planned = plan(LateInput(tmp_path, units=2, seconds_until_seen=30.0))
    work(planned, Rank(0, "node/rank 0", "cpu"), Watcher(planned))
    assert 5.0 < opened[0] < 7.0
