"""The fence of a plan and the claims on a directory: nothing but the present plan of one run writes an output."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
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
from sharmill.engine.fence import claim_output, release_output
from sharmill.engine.ledger import read_ledger
from sharmill.engine.plan import load_plan, read_or_make_plan
from sharmill.engine.progress import mark_ended, read_progress
from sharmill.engine.run import make_fence
from sharmill.engine.state import begin_round
from sharmill.engine.work import work
from sharmill.errors import ConfigError, FatalError
from sharmill.executors.slurm.executor import RankTask
from sharmill.executors.slurm.profile import RankProfile
from sharmill.staging import STAGING_NAME, token_staging


def other_run(stage, **options):
    """A stage of another run directory that publishes where ``stage`` does."""
    other = ToyStage(stage.run_dir.path.parent / "other", **options)
    other.root = stage.root
    return other


def plan(stage, *, restart=False):
    """What the process that directs a run does before ranks begin."""
    units = read_or_make_plan(stage, restart=restart)
    claim_output(stage, stage.token)
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


def take_for_dead(stage):
    """What becomes of a rank whose heartbeats do not get through for a lease."""
    mark_ended(stage.dir.progress, {record.owner for record in read_progress(stage.dir.progress)})


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
        lines = ledger.read_bytes().replace(stage.token.encode(), b"0123456789abcdef")
        ledger.write_bytes(lines)
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
        take_for_dead(stage)
        finished = ToyStage(tmp_path, units=2)
        assert run(finished)[0].ok
        expected = output_bytes(finished)
        stage.mark("go_on")
        rank.join()
        assert outcome == ["superseded_plan"]
        assert output_bytes(finished) == expected


class TestClaims:
    def test_are_there_from_the_plan_to_the_end(self, tmp_path):
        stage = ToyStage(tmp_path)
        plan(stage)
        staging = stage.root / STAGING_NAME
        assert sorted(path.name for path in staging.iterdir()) == [stage.token, "first.claim", "last.claim"]
        assert run(ToyStage(tmp_path))[0].ok
        assert not staging.exists()

    def test_another_run_is_refused_before_any_work_and_told_whose_it_is(self, tmp_path):
        stage = ToyStage(tmp_path)
        plan(stage)
        before = contents(tmp_path)
        for restart in (False, True):
            with raises(ConfigError, "claimed", str(stage.run_dir.path), "first.claim", "last.claim", " on ", "since"):
                run(other_run(stage), restart=restart)
        assert [name for name in contents(tmp_path) if not name.startswith("other")] == before
        assert not other_run(stage).dir.path.exists() or not contents(other_run(stage).dir.path)
        assert run(ToyStage(tmp_path))[0].ok

    @pytest.mark.parametrize(
        "changes",
        [{"host": "node7"}, {"user": "ada"}, {"device": 0}, {"device": None}],
        ids=["host", "user", "device", "no device"],
    )
    def test_a_run_directory_that_is_gone_is_said_to_be(self, tmp_path, changes):
        """Elsewhere, of another user, or with a file system that is not mounted here: it may be there all the same."""
        stage = ToyStage(tmp_path)
        plan(stage)
        other = other_run(stage)
        shutil.rmtree(stage.run_dir.path)
        claims = list((stage.root / STAGING_NAME).glob("*.claim"))
        for claim in claims:
            # Here its removal would be known.
            claim.write_text(json.dumps(json.loads(claim.read_bytes()) | changes))
        with raises(ConfigError, "claimed", "not there any more", "sharmill cancel", "remove"):
            run(other)
        assert token_staging(stage.root, stage.token).is_dir()
        release_output(stage.root, [stage.token])
        assert run(other)[0].ok

    def test_a_run_directory_in_a_private_home_is_taken_to_be_there(self, tmp_path, monkeypatch):
        stage = ToyStage(tmp_path)
        plan(stage)
        look = os.stat

        def refuse(path, *options, **more):
            if path == stage.run_dir.path:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return look(path, *options, **more)

        monkeypatch.setattr(os, "stat", refuse)
        with raises(ConfigError, "claimed", str(stage.run_dir.path)) as caught:
            run(other_run(stage))
        assert "not there" not in str(caught.value)
        assert token_staging(stage.root, stage.token).is_dir()

    def test_of_a_run_that_was_removed_here_go_with_its_staging(self, tmp_path):
        stage = ToyStage(tmp_path)
        plan(stage)
        other = other_run(stage)
        shutil.rmtree(stage.run_dir.path)
        assert run(other)[0].ok
        assert not (stage.root / STAGING_NAME).exists()

    def test_only_one_of_many_gets_it(self, tmp_path):
        stages = [ToyStage(tmp_path / str(number)) for number in range(8)]
        outcomes = []
        barrier = threading.Barrier(len(stages))

        def attempt(stage):
            stage.root = tmp_path / "out"
            barrier.wait()
            try:
                plan(stage)
                outcomes.append("got")
            except ConfigError as error:
                outcomes.append(error.code)

        threads = [threading.Thread(target=attempt, args=(stage,)) for stage in stages]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcomes) in (["claimed"] * 7 + ["got"], ["claimed"] * 8)

    def test_runs_that_add_other_folders_do_not_meet(self, tmp_path):
        one, other = ToyStage(tmp_path / "one", units=2), ToyStage(tmp_path / "other", units=2)
        one.root = other.root = tmp_path / "out"
        one.folders, other.folders = ("first", "last"), ("elsewhere",)
        plan(one)
        plan(other)
        other_staging = token_staging(other.root, other.token) / "a-unit"
        other_staging.mkdir()
        assert run(one)[0].ok
        assert other_staging.is_dir()
        staging = tmp_path / "out" / STAGING_NAME
        assert {path.name for path in staging.iterdir()} == {other.token, "elsewhere.claim"}
        release_output(other.root, [other.token])
        assert not staging.exists()

    def test_a_moved_run_keeps_its_claims(self, tmp_path):
        plan(ToyStage(tmp_path / "old"))
        (tmp_path / "old").rename(tmp_path / "new")
        assert run(ToyStage(tmp_path / "new"))[0].ok


class TestWhatIsNotOurs:
    @pytest.mark.parametrize(
        "names", [["logs/mine.txt"], ["plan/mine.txt"], ["ranks/mine/file"], ["ledger/mine.jsonl"]]
    )
    @pytest.mark.parametrize("restart", [False, True])
    def test_a_folder_that_has_no_plan_of_ours_is_refused(self, tmp_path, names, restart):
        stage = ToyStage(tmp_path)
        for name in names:
            (stage.dir.path / name).parent.mkdir(parents=True)
            (stage.dir.path / name).write_text("mine")
        before = contents(tmp_path)
        with raises(ConfigError, "foreign_output", "not sharmill's"):
            run(stage, restart=restart)
        assert [name for name in contents(tmp_path) if name in before] == before
        assert all((stage.dir.path / name).read_text() == "mine" for name in names)

    def test_files_that_others_have_put_beside_ours_stay(self, tmp_path):
        stage = ToyStage(tmp_path)
        run(stage)
        mine = [stage.dir.path / "notes.txt", stage.dir.logs / "notes.txt", stage.root / "first/notes.txt"]
        for path in mine:
            path.write_text("mine")
        stage.discard = lambda: None
        assert run(stage, restart=True)[0].ok
        assert all(path.read_text() == "mine" for path in mine)

    @pytest.mark.parametrize("name", ["toy", "toy/plan", "toy/logs", "toy/ranks", "manifests"])
    @pytest.mark.parametrize("restart", [False, True])
    def test_links_in_the_run_directory_are_refused(self, tmp_path, name, restart):
        stage = ToyStage(tmp_path)
        run(stage)
        behind = tmp_path / "elsewhere"
        link = stage.run_dir.path / name
        if link.exists():
            link.rename(behind)
        behind.mkdir(exist_ok=True)
        (behind / "mine").write_text("mine")
        link.symlink_to(behind)
        before = contents(behind)
        (stage.root / "last/000000.txt").unlink()
        with raises(ConfigError, "foreign_output", f"{link} is a link"):
            run(ToyStage(tmp_path), restart=restart)
        assert contents(behind) == before

    @pytest.mark.parametrize("name", ["first", STAGING_NAME])
    @pytest.mark.parametrize("restart", [False, True])
    def test_links_below_the_output_are_refused(self, tmp_path, name, restart):
        stage = ToyStage(tmp_path)
        run(stage)
        behind = tmp_path / "elsewhere"
        if (stage.root / name).exists():
            (stage.root / name).rename(behind)
        behind.mkdir(exist_ok=True)
        (stage.root / name).symlink_to(behind)
        (stage.root / "last/000000.txt").unlink()
        before = contents(behind)
        with raises(ConfigError, "foreign_output", "is a link"):
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
