"""Promises of every executor for any behaviour of ranks, slots and units: locally, on a real SLURM and a real Ray."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.toy_cluster import ToyDataset, ToyRun, cancel_all, make_profile, why_no_cluster
from support.toy_stage import ToyStage, is_running, output_bytes, run as run_locally, wait_until

from sharmill.engine.executor import Executor, Submitted
from sharmill.engine.launch import find_live, find_workers, read_attempts
from sharmill.engine.plan import read_ledger
from sharmill.engine.run_dir import RunOutcome, RunRequest
from sharmill.errors import SharmillError
from sharmill.executors.local import LocalExecutor
from sharmill.executors.slurm.executor import wait_for_end
from sharmill.files.host import ended_by_sigterm


@dataclass
class End:
    """The end of a stage, as reported to its user."""

    message: str = ""
    failures: dict[int, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.message and not self.failures


Run = Callable[[ToyStage, int], End]


def loop(*values: Any) -> Any:
    """Return a parameter that is tested only with the local executor."""
    return pytest.param(*values, marks=pytest.mark.loop)


def _run_stage(stage: ToyStage, executor: Executor) -> End:
    try:
        result, _ = run_locally(stage, executor=executor)
    except SharmillError as error:
        return End(str(error))
    return End(failures={index: error.message for index, error in result.failures.items()})


def _on_slurm(stage: ToyStage, ranks: int) -> End:
    run = ToyRun(ToyDataset(stage), make_profile(max_ranks=ranks))  # type: ignore[arg-type]
    try:
        end = run.start()
        if isinstance(end, Submitted):
            end = wait_for_end(run.run_dir)
    finally:
        cancel_all(run.run_dir)
    if not stage.dir.failures.exists():
        return End("" if end.state == "done" else end.message)
    return End(failures={error.index: error.message for error in stage.dir.read_failures()})


@pytest.fixture(
    params=[
        "local",
        pytest.param("slurm", marks=[pytest.mark.slurm, pytest.mark.slow]),
        pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow]),
    ]
)
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Return a function: a stage, maximum number of ranks -> the end of the stage. No rank may be left behind."""
    stages = []
    if request.param != "local" and request.node.get_closest_marker("loop"):
        pytest.skip("n/a: this executor runs the same loop in its ranks")
    if request.param == "slurm" and (reason := why_no_cluster()):
        pytest.skip(reason)
    if request.param == "ray":
        from sharmill.executors.ray import RayExecutor

        address = request.getfixturevalue("cluster").address

    def run(stage: ToyStage, ranks: int) -> End:
        # With a time limit, which no unit reaches, even a single rank is a process of its own. The lease is short,
        # because other ranks may join for that long after a unit has failed on all slots.
        stage.limits = {"unit_time_limit": 300.0, "lease_seconds": 15.0} | stage.limits
        stages.append(stage)
        if request.param == "slurm":
            return _on_slurm(stage, ranks)
        if request.param == "ray":
            return _run_stage(stage, RayExecutor(workers=min(ranks, 2), address=address))
        return _run_stage(stage, LocalExecutor(ranks))

    yield run
    wait_until(lambda: not any(is_running(pid) for stage in stages for pid in stage.pids() - {os.getpid()}))


@pytest.fixture
def interrupted(request: pytest.FixtureRequest) -> Callable[[ToyStage, signal.Signals], None]:
    """Return a function that starts a stage, and signals its supervisor when unit 3 has started."""
    if "local" not in request.node.name:
        pytest.skip("n/a: signals from here do not reach the supervisors of this executor")

    def interrupt(stage: ToyStage, number: signal.Signals) -> None:
        process = _start_locally(stage)
        wait_until(lambda: stage.marked("once-unit-3"))
        assert process.pid is not None
        os.kill(process.pid, number)
        process.join()
        wait_until(lambda: not any(map(is_running, stage.pids())))

    return interrupt


def _start_locally(stage: ToyStage) -> multiprocessing.process.BaseProcess:
    """Run a stage in its own process, whose exit status is 0 if the stage succeeded."""
    process = multiprocessing.get_context("spawn").Process(target=_run_locally, args=(stage,))
    process.start()
    return process


def _run_locally(stage: ToyStage) -> None:
    with ended_by_sigterm():
        sys.exit(0 if _run_stage(stage, LocalExecutor(2)).ok else 1)


@pytest.fixture
def whole(tmp_path: Path) -> Callable[[int], dict[str, bytes]]:
    """Return a function: number of units -> the output of a single rank."""

    def whole(units: int) -> dict[str, bytes]:
        stage = ToyStage(tmp_path / "whole", units=units)
        assert run_locally(stage)[0].ok
        return output_bytes(stage)

    return whole


@pytest.mark.parametrize("ranks", [loop(1), 2, loop(5)])
def test_any_number_of_ranks_gives_the_same_bytes(run, tmp_path, whole, ranks):
    stage = ToyStage(tmp_path, units=12)
    assert run(stage, ranks).ok
    assert output_bytes(stage) == whole(12)


@pytest.mark.parametrize("does", ["kill_once", loop("raise_once"), loop("memory_once"), loop("segfault_once")])
def test_a_single_fault_of_a_rank_costs_one_attempt(run, tmp_path, whole, does):
    stage = ToyStage(tmp_path, behaviour={2: does})
    assert run(stage, 2).ok
    assert stage.attempts()[2] == 2
    assert output_bytes(stage) == whole(6)


@pytest.mark.parametrize(
    ("does", "how"), [loop("raise:a bad day", "a bad day"), loop("kill", "SIGKILL"), ("hold_gil", "unit_time_limit")]
)
def test_a_bad_unit_is_given_up_and_named_and_others_are_done(run, tmp_path, does, how):
    limits = {"unit_time_limit": 2.0} if does == "hold_gil" else {}
    stage = ToyStage(tmp_path, behaviour={2: does}, **limits)
    end = run(stage, 2)
    assert list(end.failures) == [2], end
    assert how in end.failures[2]
    assert 3 <= stage.attempts()[2] <= 4
    if does == "hold_gil":
        assert "in _do_hold_gil" in "".join(path.read_text() for path in stage.dir.logs.glob("rank-*.log"))
    assert sorted(read_ledger(stage.dir, stage.dir.read_units())) == [0, 1, 3, 4, 5]


def test_a_rank_that_turns_bad_costs_no_unit(run, tmp_path, whole):
    stage = ToyStage(tmp_path, units=14, seconds=0.3, everywhere="fail_on_rank_1")
    end = run(stage, 3)
    assert end.ok, end
    assert output_bytes(stage) == whole(14)


def test_a_rank_that_cannot_be_set_up_costs_no_unit(run, tmp_path, whole):
    stage = ToyStage(tmp_path, units=8, setup_does="refuse_rank_1")
    end = run(stage, 2)
    assert end.ok, end
    assert output_bytes(stage) == whole(8)


def test_a_frozen_rank_holds_nobody_up_for_longer_than_a_lease(run, tmp_path, whole):
    stage = ToyStage(tmp_path, behaviour={2: "kill_once:SIGSTOP"}, lease_seconds=4.0)
    end = run(stage, 2)
    assert end.ok, end
    assert stage.attempts()[2] == 2
    assert output_bytes(stage) == whole(6)


@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
def test_a_supervisor_that_dies_or_hangs_costs_only_its_attempts(run, tmp_path, whole, request, number):
    if "local" in request.node.name:
        pytest.skip("n/a: the run itself is the supervisor")
    stage = ToyStage(tmp_path, behaviour={2: f"end_supervisor_once:{number}"}, lease_seconds=8.0)
    end = run(stage, 2)
    assert end.ok, end
    assert stage.marked("once-unit-2") == [""]
    assert output_bytes(stage) == whole(6)


@pytest.mark.parametrize(
    ("where", "does", "names"),
    [
        ("setup_does", "config", "model 'x' is unknown; use 'y'"),
        ("everywhere", "import", "no_such_module_at_all"),
        loop("setup_does", "absent", "pip install 'sharmill[nemo]'"),
        loop("setup_does", "fatal", "the disk is full"),
        loop("everywhere", "config", "model 'x' is unknown; use 'y'"),
        loop("everywhere", "fatal", "the disk is full"),
    ],
)
def test_an_error_of_all_ranks_ends_the_stage_and_is_named(run, tmp_path, where, does, names):
    stage = ToyStage(tmp_path, **{where: does})
    end = run(stage, 2)
    assert names in end.message, end
    assert max(stage.attempts().values(), default=0) <= 2
    assert read_ledger(stage.dir, stage.dir.read_units()) == {}


@pytest.mark.loop
def test_a_stage_of_failing_units_ends_and_names_them(run, tmp_path):
    stage = ToyStage(tmp_path, units=24, everywhere="raise:no such voice")
    end = run(stage, 2)
    assert "no such voice" in end.message
    assert "no usable rank is left after failures on units" in end.message


def test_a_second_run_adds_ranks_and_both_see_the_end(run, tmp_path, whole):
    """A second executor joins: here the local one, in its own process."""
    stage = ToyStage(tmp_path, units=16, seconds=0.4, setup_does="meet:2")
    joining = ToyStage(tmp_path, units=16, seconds=0.4, setup_does="meet:2")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run, stage, 1)
        wait_until(lambda: stage.pids())
        second = _start_locally(joining)
        second.join()
    assert (first.result().ok, second.exitcode) == (True, 0), first.result()
    assert set(stage.attempts().values()) == {1}
    assert len({commit.rank for commit in read_ledger(stage.dir, stage.dir.read_units()).values()}) > 1
    assert output_bytes(stage) == whole(16)


def test_a_cancelled_run_ends_and_can_be_resumed(run, tmp_path, whole):
    stage = ToyStage(tmp_path, units=60, seconds=0.6)
    with ThreadPoolExecutor(1) as pool:
        cancelled = pool.submit(run, stage, 2)
        wait_until(lambda: len(stage.attempts()) > 3)
        stage.run_dir.note_outcome(RunOutcome(state="cancelled", message="cancelled by ada"))
        began = time.monotonic()
        assert "cancelled by ada" in cancelled.result().message
    assert time.monotonic() - began < 60
    # A rank that was killed, because it did not stop in time, counts as live for another lease.
    wait_until(lambda: find_live(stage.dir) == [], 180)
    assert len(read_ledger(stage.dir, stage.dir.read_units())) < 60
    stage.run_dir.begin(RunRequest(stages=["toy"]))
    assert run(ToyStage(tmp_path, units=60), 2).ok
    assert output_bytes(stage) == whole(60)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_supervisor_that_ends_leaves_no_rank_and_can_be_resumed(run, interrupted, tmp_path, whole, how):
    stage = ToyStage(tmp_path, units=12, behaviour={3: "wait_once:never"})
    interrupted(stage, how)
    if how == signal.SIGTERM:
        # The unit is released, as after preemption.
        attempts = read_attempts(stage.in_run)
        assert attempts.failed == set()
    assert run(stage, 2).ok
    assert output_bytes(stage) == whole(12)


def test_live_ranks_are_named_as_long_as_they_are_at_work(run, tmp_path):
    """A restart beside live ranks is refused by this list."""
    stage = ToyStage(tmp_path, behaviour={2: "wait:go"})
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(run, stage, 2)
        wait_until(lambda: stage.attempts()[2])
        named = find_workers(stage.run_dir)
        stage.mark("go")
        assert end.result().ok
    assert any("rank " in words for words in named), named
    assert find_workers(stage.run_dir) == []


@pytest.mark.loop
def test_a_run_directory_that_was_moved_can_be_resumed(run, tmp_path, whole):
    assert list(run(ToyStage(tmp_path / "first", behaviour={2: "raise"}), 2).failures) == [2]
    (tmp_path / "first").rename(tmp_path / "second")
    stage = ToyStage(tmp_path / "second")
    before = stage.attempts()
    assert run(stage, 2).ok
    assert stage.attempts() - before == {2: 1}
    assert output_bytes(stage) == whole(6)
