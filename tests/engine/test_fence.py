"""The fence of a plan: nothing but the present plan of a run writes its output, and only what is the run's own goes."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import threading

import pytest
from support.errors import raises
from support.paths import REPOSITORY
from support.toy_stage import ToyStage, output_bytes, run, wait_until

from sharmill.engine.attempts import Attempts
from sharmill.engine.claims import Rank
from sharmill.engine.fence import make_fence
from sharmill.engine.ledger import read_ledger
from sharmill.engine.plan import load_plan, read_or_make_plan
from sharmill.engine.progress import mark_ended, read_progress
from sharmill.engine.state import begin_round
from sharmill.engine.work import work
from sharmill.errors import ConfigError, FatalError
from sharmill.executors.slurm.executor import RankTask
from sharmill.executors.slurm.profile import RankProfile
from sharmill.files.staging import STAGING_NAME


def plan(stage, *, restart=False):
    """What the process that directs a run does before ranks begin."""
    units = read_or_make_plan(stage, restart=restart)
    make_fence(stage)
    return units


def begin_work(stage, units):
    """Begin to work as rank 7 in a thread; returned are the thread and a list that gets the code of its error."""
    outcome = []
    begin_round(stage, units, 1)

    def do_units():
        try:
            work(stage, Rank(7, "node/rank 7", "cpu", is_replaced=False))
        except FatalError as error:
            outcome.append(error.code)

    rank = threading.Thread(target=do_units)
    rank.start()
    wait_until(lambda: stage.marked("attempts"))
    return rank, outcome


def contents(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


class TestRanksOfAnOlderPlan:
    def test_one_that_has_not_begun_stops_at_once_and_leaves_nothing(self, tmp_path):
        stage = ToyStage(tmp_path)
        plan(stage)
        old = pickle.loads(pickle.dumps(stage))
        assert run(stage, restart=True)[0].ok
        before = contents(tmp_path)
        # The task of an array has not failed; it was overtaken.
        RankTask(old, 0, RankProfile())()
        with raises(FatalError, "superseded_plan"):
            work(old, Rank(0, "node/rank 0", "cpu"))
        assert contents(tmp_path) == before

    @pytest.mark.parametrize("begun_differently", [False, True])
    def test_one_in_the_middle_of_a_unit_changes_nothing(self, tmp_path, begun_differently):
        """With units of the same ids, and with others."""
        old = ToyStage(tmp_path, units=2, behaviour={0: "wait:go_on"})
        units = plan(old)
        rank, outcome = begin_work(old, units[:1])
        new = ToyStage(tmp_path, units=3 if begun_differently else 2)
        assert run(new, restart=True)[0].ok
        expected = output_bytes(new)
        old.mark("go_on")
        rank.join()
        assert outcome == ["superseded_plan"]
        assert output_bytes(new) == expected
        assert sorted(read_ledger(new.dir, load_plan(new))) == list(range(new.units))
        assert {path.name for path in (new.dir.path / "ranks").iterdir()} == {new.token}
        assert [record.rank for record in read_progress(new.dir.progress)] == [0]
        assert not (new.root / STAGING_NAME).exists()

    def test_a_process_that_was_stopped_meanwhile_changes_nothing(self, tmp_path):
        """A task of a job array, with SIGSTOP in the middle of its unit; the new plan gives other bytes."""
        old = ToyStage(tmp_path, units=4, behaviour={1: "wait:go_on"})
        begin_round(old, plan(old), 1)
        task = RankTask(old, 0, RankProfile())
        (tmp_path / "task").write_bytes(pickle.dumps(task))
        code = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))()"
        command = [sys.executable, "-c", code, str(tmp_path / "task")]
        environment = {"PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY / 'tests'}"}
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as rank:
            wait_until(lambda: old.attempts()[1])
            rank.send_signal(signal.SIGSTOP)
            new = ToyStage(tmp_path, units=4, everywhere="reject:too_short")
            assert run(new, restart=True, max_reject_fraction=1.0)[0].ok
            expected = contents(tmp_path)
            old.mark("go_on")
            rank.send_signal(signal.SIGCONT)
            assert rank.wait(60) == 0
        assert contents(tmp_path) == sorted([*expected, "marks/go_on"])
        assert Attempts(new.dir.attempts).stopped is None

    def test_a_commit_of_another_token_does_not_count(self, tmp_path):
        stage = ToyStage(tmp_path)
        run(stage)
        (ledger,) = stage.dir.ledger.iterdir()
        ledger.write_bytes(ledger.read_bytes().replace(stage.token.encode(), b"0123456789abcdef"))
        assert read_ledger(stage.dir, load_plan(stage)) == {}


class TestRanksOfTheSamePlan:
    def test_a_second_run_joins_it_and_waits_for_its_unit(self, tmp_path):
        stage = ToyStage(tmp_path, units=3, behaviour={0: "wait:go_on"})
        units = plan(stage)
        rank, outcome = begin_work(stage, units)
        again = ToyStage(tmp_path, units=3)
        results = []
        joined = threading.Thread(target=lambda: results.append(run(again)[0]))
        joined.start()
        wait_until(lambda: sorted(read_ledger(stage.dir, units)) == [1, 2])
        stage.mark("go_on")
        rank.join()
        joined.join()
        assert (outcome, results[0].ok, again.token) == ([], True, stage.token)
        assert stage.attempts() == {0: 1, 1: 1, 2: 1}
        assert {record.rank for record in read_progress(stage.dir.progress)} == {7, 1}

    def test_one_that_was_taken_for_dead_and_comes_too_late_stops(self, tmp_path):
        stage = ToyStage(tmp_path, units=2, behaviour={0: "wait:go_on"})
        units = plan(stage)
        rank, outcome = begin_work(stage, units[:1])
        # Its heartbeats do not get through for a lease.
        mark_ended(stage.dir.progress, {record.owner for record in read_progress(stage.dir.progress)})
        finished = ToyStage(tmp_path, units=2)
        assert run(finished)[0].ok
        expected = output_bytes(finished)
        stage.mark("go_on")
        rank.join()
        assert outcome == ["superseded_plan"]
        assert output_bytes(finished) == expected


class TestWhatIsNotOurs:
    @pytest.mark.parametrize("name", ["logs/mine.txt", "plan/mine.txt", "parts/000001.npy"])
    @pytest.mark.parametrize("restart", [False, True])
    def test_a_folder_that_has_no_plan_of_ours_is_refused(self, tmp_path, name, restart):
        stage = ToyStage(tmp_path)
        path = stage.dir.path / name
        path.parent.mkdir(parents=True)
        path.write_text("mine")
        with raises(ConfigError, "foreign_output", "not sharmill's"):
            run(stage, restart=restart)
        assert path.read_text() == "mine"

    def test_files_that_others_have_put_beside_ours_stay(self, tmp_path):
        stage = ToyStage(tmp_path)
        run(stage)
        mine = [stage.dir.path / "notes.txt", stage.dir.logs / "notes.txt", stage.root / "first/notes.txt"]
        for path in mine:
            path.write_text("mine")
        stage.discard = lambda: None
        assert run(stage, restart=True)[0].ok
        assert all(path.read_text() == "mine" for path in mine)

    @pytest.mark.parametrize(
        "name", ["run/toy", "run/toy/plan", "run/toy/logs", "run/toy/ranks", "run/manifests", "out/first",
                 f"out/{STAGING_NAME}"]
    )  # fmt: skip
    @pytest.mark.parametrize("restart", [False, True])
    def test_links_in_run_directory_and_output_are_refused(self, tmp_path, name, restart):
        stage = ToyStage(tmp_path)
        run(stage)
        link, behind = tmp_path / name, tmp_path / "elsewhere"
        if link.exists():
            link.rename(behind)
        behind.mkdir(exist_ok=True)
        (behind / "mine").write_text("mine")
        link.symlink_to(behind)
        (stage.root / "last/000000.txt").unlink()
        before = contents(behind)
        with raises(ConfigError, "foreign_output", f"{link} is a link"):
            run(ToyStage(tmp_path), restart=restart)
        assert contents(behind) == before


class TestOutputThatIsGone:
    def test_a_relaunch_says_what_to_do(self, tmp_path):
        stage = ToyStage(tmp_path)
        run(stage)
        stage.root.rename(tmp_path / "moved")
        with raises(ConfigError, "no_dataset", "move it back", "--restart"):
            run(ToyStage(tmp_path))
        (tmp_path / "moved").rename(stage.root)
        assert run(ToyStage(tmp_path))[1].done == []
        stage.root.rename(tmp_path / "moved")
        assert run(ToyStage(tmp_path), restart=True)[0].ok
