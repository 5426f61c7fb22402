"""The local executor: real processes, and every way in which one can die."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest
from support.errors import raises
from support.toy_stage import (
    DiesBesideAnIdleRank,
    DiesIdle,
    EndsTheForkServer,
    GoesBlind,
    HalfBroken,
    RecordingListener,
    SlowStage,
    ToyStage,
    Unloadable,
    is_running,
    run,
)

from sharmill.engine.unit import make_unit
from sharmill.errors import DeviceError, FatalError


@pytest.fixture(autouse=True)
def _no_process_is_left(tmp_path):
    yield
    stage = ToyStage(tmp_path)
    assert [pid for pid in stage.pids() - {os.getpid()} if is_running(pid)] == []


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("does", ["hold_gil", "wait:never"])
def test_a_unit_that_hangs_is_tried_three_times_after_all_others_and_given_up(tmp_path, workers, does):
    stage = ToyStage(tmp_path, units=4, behaviour={0: does}, setup_does=f"meet:{workers}")
    stage.unit_time_limit = 2.0
    result, _ = run(stage, workers)
    message = result.failures[0].message
    assert message.startswith("it took longer than executor.unit_time_limit of 2 s; its log is ")
    assert stage.attempts() == {0: 3, 1: 1, 2: 1, 3: 1}
    assert "in _do_" in Path(message.rpartition("its log is ")[2]).read_text(), "where it hung is in the log"


@pytest.mark.parametrize(("setting", "cost", "limit"), [
    (None, 1e6, None), (7.5, 1e6, 7.5), ("auto", 10.0, 3600.0), ("auto", 0.0, 3600.0), ("auto", 1000.0, 10_000.0),
])  # fmt: skip
def test_the_limit_is_as_set_or_ten_seconds_for_each_of_cost_and_an_hour_at_least(tmp_path, setting, cost, limit):
    stage = ToyStage(tmp_path)
    stage.unit_time_limit = setting
    assert stage.time_limit(make_unit(0, cost=cost, size=1, params={})) == limit


class TestWorkers:
    @pytest.mark.parametrize(("workers", "limit"), [(1, "auto"), (1, 60.0), (2, "auto")])
    def test_one_without_a_time_limit_of_its_own_runs_inline(self, tmp_path, workers, limit):
        stage = ToyStage(tmp_path, units=1)
        stage.unit_time_limit = limit
        run(stage, workers)
        assert (stage.pids() == {os.getpid()}) == (workers == 1 and limit == "auto")

    def test_there_are_no_more_ranks_than_units(self, tmp_path):
        stage = ToyStage(tmp_path, units=2, setup_does="meet:2")
        run(stage, 5)
        assert len(stage.pids()) == 2

    def test_largest_units_come_first(self, tmp_path):
        stage = ToyStage(tmp_path, units=8)
        run(stage, 1)
        order = [int(line.split()[0]) for line in stage.marked("attempts")]
        assert order == [3, 7, 2, 6, 1, 5, 0, 4]


class TestDeaths:
    def test_a_worker_that_dies_after_its_commit_counts_once(self, tmp_path):
        stage = ToyStage(tmp_path, setup_does="die_after_commit:2")
        result, heard = run(stage, 2)
        assert result.ok
        assert (result.totals.num_in, result.totals.num_out) == (18, 18)
        assert sorted(heard.done) == list(range(6))
        assert stage.attempts()[2] == 1

    def test_a_rank_that_fails_twice_in_a_row_makes_way_for_a_fresh_one(self, tmp_path):
        stage = ToyStage(tmp_path, units=2, behaviour={0: "raise", 1: "raise"}, setup_does="meet:2")
        run(stage, 2)
        assert stage.attempts() == {0: 3, 1: 3}
        assert len(stage.pids()) > 2

    def test_a_segfault_leaves_its_stack_in_the_log(self, tmp_path):
        stage = ToyStage(tmp_path, behaviour={2: "segfault"})
        run(stage, 2)
        logs = "".join(path.read_text() for path in stage.dir.logs.iterdir())
        assert "Segmentation fault" in logs
        assert "in _do_segfault" in logs


class TestStarts:
    @pytest.mark.parametrize(("does", "how"), [("kill", "SIGKILL"), ("exit:7", "7")])
    def test_setup_that_always_dies_ends_the_stage(self, tmp_path, does, how):
        stage = ToyStage(tmp_path, setup_does=does)
        with raises(FatalError, "no_ranks", "toy", how, str(stage.dir.logs)):
            run(stage, 2)
        assert len(stage.pids()) == 6

    def test_setup_that_dies_once_is_tried_again(self, tmp_path):
        stage = ToyStage(tmp_path, setup_does="kill_once")
        assert run(stage, 2)[0].ok

    def test_a_rank_that_sees_its_input_no_more_is_given_up_alone(self, tmp_path):
        stage = GoesBlind(tmp_path)
        result, heard = run(stage, 2)
        assert (result.ok, result.totals.rejects, heard.failed) == (True, {}, {})
        assert stage.attempts()[2] == 2
        [sentence] = result.given_up
        assert "this node does not see the audio" in sentence

    def test_where_no_rank_sees_its_input_nothing_is_rejected(self, tmp_path):
        stage = GoesBlind(tmp_path)
        with raises(DeviceError, "unlike_nodes", "does not see the audio"):
            run(stage)
        assert not stage.dir.rejects.exists()

    def test_a_rank_that_cannot_start_is_given_up_and_the_others_go_on(self, tmp_path, monkeypatch):
        monkeypatch.setattr("sharmill.executors.devices.visible_gpus", lambda: ("0", "1"))
        stage = HalfBroken(tmp_path, units=8, everywhere="wait:given-up")
        result, heard = run(stage, 2)
        assert result.ok
        assert sorted(heard.done) == list(range(8))
        assert len(stage.marked("died-on-1")) == 3

    def test_a_stage_that_cannot_be_unpickled_leaves_its_traceback_in_the_log(self, tmp_path):
        stage = Unloadable(tmp_path)
        with raises(FatalError, "no_ranks"):
            run(stage, 2)
        assert "these are not the bytes" in _rank_logs(stage)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_the_display_fails_no_unit(tmp_path, workers, monkeypatch):
    shown = []

    def unit_advanced(self, unit, done):
        shown.append(done)
        if done > 0:
            raise BrokenPipeError

    monkeypatch.setattr(RecordingListener, "unit_advanced", unit_advanced)
    stage = SlowStage(tmp_path, units=2)
    assert run(stage, workers)[0].ok
    assert stage.attempts() == {0: 1, 1: 1}
    assert len([done for done in shown if done > 0]) == 1


class TestIdleRanks:
    def test_an_idle_rank_takes_over_what_a_dead_one_left(self, tmp_path):
        """The rank that has nothing more to do stays until all is done: no other has to load the model again."""
        stage = DiesBesideAnIdleRank(tmp_path, units=2, setup_does="meet:2")
        assert run(stage, 2)[0].ok
        assert stage.attempts() == {0: 1, 1: 2}
        assert len(stage.pids()) == 2

    def test_a_rank_that_dies_idle_does_no_harm(self, tmp_path):
        stage = DiesIdle(tmp_path, units=2, setup_does="meet:2")
        result, _ = run(stage, 2)
        assert result.ok
        assert stage.attempts() == {0: 1, 1: 1}

    @pytest.mark.slow
    def test_a_rank_that_hangs_at_its_end_is_ended(self, tmp_path):
        stage = ToyStage(tmp_path, setup_does="hang_at_exit")
        assert run(stage, 2)[0].ok

    def test_ranks_that_still_load_are_not_waited_for(self, tmp_path):
        stage = ToyStage(tmp_path, units=2, setup_does="one_is_slow")
        assert run(stage, 2)[0].ok
        assert sorted(stage.attempts()) == [0, 1]

    def test_a_death_that_a_child_process_hides_is_noticed(self, tmp_path):
        """A process that the rank forked holds its pipe and its sentinel open."""
        stage = ToyStage(tmp_path, units=3, behaviour={2: "fork_and_die_once"})
        try:
            assert run(stage, 2)[0].ok
        finally:
            for line in stage.marked("children"):
                os.kill(int(line), signal.SIGKILL)


class TestImports:
    @pytest.fixture
    def stage(self, tmp_path, monkeypatch):
        """A stage with two ranks, in a folder that modules are imported from."""
        monkeypatch.syspath_prepend(str(tmp_path))
        return ToyStage(tmp_path, units=4, setup_does="meet:2")

    def module(self, stage, text):
        (stage.root.parent / "noted_module.py").write_text(text)
        stage.modules = partial(list, ["noted_module"])

    def test_are_made_once_for_all_ranks(self, stage, tmp_path):
        self.module(stage, f"print('from the import'); open({str(tmp_path / 'imports')!r}, 'a').write('one')")
        assert run(stage, 2)[0].ok
        assert len(stage.pids()) == 2
        assert (tmp_path / "imports").read_text() == "one"
        assert "from the import" in stage.dir.driver_log.read_text()

    def test_that_fail_are_left_to_the_ranks(self, stage):
        self.module(stage, "raise ImportError('no such library')")
        assert run(stage, 2)[0].ok

    def test_are_made_again_where_the_process_that_made_them_has_ended(self, tmp_path):
        stage = EndsTheForkServer(tmp_path, units=4)
        assert run(stage, 2)[0].ok
        assert [pid for pid in map(int, stage.marked("ended")) if is_running(pid)] == []

    @pytest.mark.slow
    def test_that_end_the_process_end_the_stage_in_one_line(self, stage):
        self.module(stage, "import os; os._exit(7)")
        with raises(FatalError, "no_ranks", "could not be started"):
            run(stage, 2)


class TestLogs:
    def test_the_log_of_a_rank_has_its_traceback(self, tmp_path):
        stage = ToyStage(tmp_path, behaviour={2: "raise"})
        run(stage, 1)  # a second rank may still be loading when all is done, and is not waited for
        logs = _rank_logs(stage)
        assert logs.count("in _do_raise") == 3
        assert logs.count("is ready for toy on cpu") == len(stage.pids())

    def test_what_a_rank_prints_goes_to_its_log_even_if_it_is_killed(self, tmp_path, capfd):
        stage = ToyStage(tmp_path, behaviour={2: "print:hello from unit 2"}, setup_does="meet:2")
        run(stage, 2)
        logs = _rank_logs(stage)
        assert logs.count("hello from unit 2\n") == 3
        assert logs.count("from native code\n") == 3
        out = capfd.readouterr()
        assert "hello" not in out.out + out.err

    def test_the_driver_logs_what_it_saw(self, tmp_path):
        stage = ToyStage(tmp_path, behaviour={2: "exit:9"})
        run(stage, 2)
        assert stage.dir.driver_log.read_text().count("ended with exit status 9") >= 3


def _rank_logs(stage):
    return "".join(path.read_text() for path in stage.dir.logs.glob("rank-*.log"))
