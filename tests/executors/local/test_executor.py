"""The local executor: real processes on this machine, their logs, their devices, and GPUs that fail.

An interrupted or terminated run ends soon and leaves no process, and the same command resumes it.
"""

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from support.project import TESTS, raises, within
from support.toy_stage import (
    ECC,
    BadDevices,
    GoesBlind,
    GpuStage,
    KindStage,
    LookingAhead,
    ToyStage,
    is_running,
    output_bytes,
    run,
    session_members,
    wait_until,
)

from sharmill.engine.plan import read_ledger
from sharmill.engine.progress import read_progress
from sharmill.errors import ConfigError, DeviceError
from sharmill.executors.supervisor import Device, plan_devices, usable_gpus
from sharmill.files.staging import token_staging


@pytest.fixture(autouse=True)
def _no_process_is_left(tmp_path):
    yield
    stage = ToyStage(tmp_path)
    assert [pid for pid in stage.pids() - {os.getpid()} if is_running(pid)] == []


def rank_logs(stage):
    return "".join(path.read_text() for path in stage.dir.logs.glob("rank-*.log"))


@pytest.mark.parametrize(("workers", "limit"), [(1, "auto"), (1, 60.0), (2, "auto")])
def test_one_worker_without_a_time_limit_of_its_own_runs_inline(tmp_path, workers, limit):
    stage = ToyStage(tmp_path, units=1, unit_time_limit=limit)
    run(stage, workers)
    assert (stage.pids() == {os.getpid()}) == (workers == 1 and limit == "auto")


def test_a_forkserver_child_of_the_program_outlives_a_run(tmp_path):
    child = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(600,))
    child.start()
    run(ToyStage(tmp_path), 2)
    assert child.is_alive()
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL


def test_two_runs_in_threads_of_one_process_both_end(tmp_path):
    stages = [ToyStage(tmp_path / f"{seconds}", seconds=seconds, setup_does="meet:2") for seconds in (0.0, 0.5)]
    with ThreadPoolExecutor(2) as pool:
        results = [result for result, _ in pool.map(run, stages, [2, 2])]
    assert [result.ok for result in results] == [True, True]
    assert [set(stage.attempts().values()) for stage in stages] == [{1}, {1}]


def test_a_log_has_no_records_of_a_run_in_another_thread(tmp_path):
    both_log, both_logged = threading.Barrier(2, timeout=60.0), threading.Barrier(2, timeout=60.0)

    class Meets(ToyStage):
        def work(self, unit, *arguments):
            both_log.wait()
            logging.getLogger("sharmill.toy").info("from %s", self.folder)
            both_logged.wait()
            return super().work(unit, *arguments)

    stages = [Meets(tmp_path / name, units=1) for name in ("one", "two")]
    before = logging.getLogger("sharmill").level
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, stages))
    for own, other in (stages, reversed(stages)):
        assert f"from {own.folder}" in rank_logs(own)
        assert str(other.folder) not in rank_logs(own)
    assert logging.getLogger("sharmill").level == before


def test_a_stage_that_cannot_be_pickled_ends_in_one_line(tmp_path):
    stage = ToyStage(tmp_path)
    stage.filter = lambda record: True
    with raises(ConfigError, "bad_config_value", "toy cannot be passed to other processes", "lambda"):
        run(stage, 2)


def test_a_rank_that_loses_sight_of_its_input_is_given_up_alone(tmp_path):
    stage = GoesBlind(tmp_path)
    result, heard = run(stage, 2)
    assert (result.ok, result.totals.rejects, heard.failed) == (True, {}, {})
    assert stage.attempts()[2] == 2
    [sentence] = result.given_up
    assert "this node does not see the audio" in sentence


def test_if_no_rank_sees_its_input_nothing_is_rejected(tmp_path):
    stage = GoesBlind(tmp_path)
    with raises(DeviceError, "unlike_nodes", "does not see the audio"):
        run(stage)
    assert not stage.dir.rejects.exists()


@pytest.mark.parametrize(
    ("does", "lines"),
    [("raise", ["in _do_raise"]), ("segfault", ["Segmentation fault", "in _do_segfault"]),
     ("print:hello from unit 2", ["hello from unit 2\n", "from native code\n"])],
)  # fmt: skip
def test_the_log_of_a_rank_has_what_it_printed_and_how_it_failed(tmp_path, capfd, does, lines):
    stage = ToyStage(tmp_path, behaviour={2: does}, setup_does="meet:2")
    run(stage, 2)
    assert [rank_logs(stage).count(line) for line in lines] == [3] * len(lines)
    assert "hello" not in "".join(capfd.readouterr())


FAULTS = ["cuda_memory_once", "no_engine_once", "cufft_once", "break_once", "hold_gil_once"]


@pytest.fixture
def whole(tmp_path):
    stage = ToyStage(tmp_path / "whole")
    run(stage)
    return output_bytes(stage)


@pytest.mark.slow
def test_a_unit_that_always_breaks_the_context_fails_alone(tmp_path, gpus):
    gpus("0")
    stage = GpuStage(tmp_path, behaviour={2: "break"})
    result, heard = run(stage, "auto")
    assert list(result.failures) == [2]
    assert result.failures[2].message.startswith("AcceleratorError: CUDA error: device-side assert triggered")
    assert sorted(heard.done) == [0, 1, 3, 4, 5]
    assert stage.attempts() == {0: 1, 1: 1, 2: 3, 3: 1, 4: 1, 5: 1}


@pytest.mark.slow
def test_a_bad_gpu_is_excluded_and_named_and_the_others_continue(tmp_path, gpus, whole):
    gpus("0", "1", "2")
    stage = BadDevices(tmp_path, bad=("1",))
    result, _ = run(stage, "auto")
    assert result.ok
    assert output_bytes(stage) == whole
    assert stage.marked("bad") == ["1"] * 3
    [sentence] = result.given_up
    assert "GPU 1 of rank 1 was excluded: toy: a rank cannot be set up on GPU 1 of " in sentence
    assert ECC in sentence


@pytest.mark.slow
def test_a_stage_whose_gpus_are_all_bad_ends_with_their_reason(tmp_path, gpus):
    gpus("0", "1")
    stage = BadDevices(tmp_path, bad=("0", "1"))
    with raises(DeviceError, "device_failed", "cannot be set up on GPU", ECC):
        run(stage, "auto")
    assert sorted(stage.marked("bad")) == ["0"] * 3 + ["1"] * 3
    assert stage.attempts() == {}


@pytest.mark.parametrize(
    ("number", "faults", "dead"),
    [
        (0, (0, 1, 2), False),
        (1, (3,), True),
        pytest.param(2, (0, 1), True, marks=pytest.mark.slow),
        pytest.param(2, (2, 3), True, marks=pytest.mark.slow),
        pytest.param(2, (4,), True, marks=pytest.mark.slow),
    ],
)
def test_every_fault_costs_one_attempt(tmp_path, gpus, whole, number, faults, dead):
    """Inline, where a lack of memory does not break the process, and in ranks, whose first GPU also fails at set-up."""
    gpus(*map(str, range(number)))
    behaviour, limit = {index: FAULTS[index] for index in faults}, 3.0 if 4 in faults else None
    setup_does = "device_once" if dead else ""
    stage = GpuStage(tmp_path, behaviour=behaviour, setup_does=setup_does, unit_time_limit=limit)
    result, heard = run(stage, number or 1)
    assert (result.ok, result.given_up, heard.failed) == (True, [], {})
    assert (os.getpid() in stage.pids()) == (number == 0)
    assert stage.attempts() == {index: 1 + (index in faults) for index in range(6)}
    assert output_bytes(stage) == whole


@pytest.mark.parametrize("behaviour", [{}, {3: "kill_once"}])
def test_a_rank_prefetches_its_next_unit_which_survives_its_death(tmp_path, gpus, whole, behaviour):
    gpus("0")
    stage = LookingAhead(tmp_path, behaviour=behaviour)
    assert run(stage, "auto")[0].ok
    assert stage.attempts() == {index: 1 + (index in behaviour) for index in range(6)}
    order = [int(line.split()[0]) for line in stage.marked("attempts")]
    if not behaviour:
        assert stage.marked("expected") == [*map(str, order[1:]), "none"]
    assert output_bytes(stage) == whole


MESSAGE = "Interrupted. Finished work is kept; run the same command again to resume."
SECONDS_TO_END = 5.0


class Driver:
    """The command ``sharmill toy`` in its own process group, as started by a shell."""

    def __init__(self, folder, workers, **options):
        self.stage = ToyStage(folder)
        values = json.dumps({"folder": str(folder), "workers": workers, **options})
        self.process = subprocess.Popen(
            [sys.executable, TESTS / "support" / "toy_driver.py", values],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def end(self, how):
        """Send a signal, check that all processes end in time, and return the exit status and the output."""
        started = time.monotonic()
        if how == "ctrl-c":
            os.killpg(self.process.pid, signal.SIGINT)
        else:
            self.process.send_signal(getattr(signal, how))
        output, _ = self.process.communicate(timeout=120)
        wait_until(lambda: not session_members(self.process.pid))
        assert time.monotonic() - started < within(SECONDS_TO_END)
        return self.process.returncode, output.strip().splitlines()


@pytest.fixture
def start(tmp_path):
    drivers = []

    def start_driver(workers, **options):
        drivers.append(Driver(tmp_path, workers, **options))
        return drivers[-1]

    yield start_driver
    for driver in drivers:
        for pid in session_members(driver.process.pid):
            # The other processes may have ended by themselves meanwhile.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        driver.process.wait()


# The three units of cost 4 come first and wait, so that both ranks are busy and complete nothing.
BUSY = {3: "wait:never", 7: "wait:never", 11: "wait:never"}


@pytest.mark.parametrize("how", ["ctrl-c", "SIGTERM"])
@pytest.mark.parametrize(("workers", "does"), [(1, "wait:never"), (2, "wait:never"), (2, "hold_gil")])
def test_an_interrupted_run_ends_in_time_without_orphans(start, workers, does, how):
    driver = start(workers, units=12, behaviour=dict.fromkeys(BUSY, does))
    wait_until(lambda: len(driver.stage.marked("attempts")) >= workers)
    assert driver.end(how) == (1, [MESSAGE])
    assert all(rank.ended for rank in read_progress(driver.stage.ranks.progress))
    assert not list(token_staging(driver.stage.root, driver.stage.dir.read_token()).iterdir())


GPUS = ("0", "3", "GPU-5f")
ON_GPUS = [Device("cuda", gpu) for gpu in GPUS]


@pytest.mark.parametrize(("workers", "uses_gpu", "gpus", "cores", "devices"), [
    ("auto", True, GPUS, 16, ON_GPUS),
    ("auto", True, (), 3, [Device()] * 3),
    ("auto", False, GPUS, 5, [Device()] * 5),
    (4, True, GPUS, 2, [*ON_GPUS, ON_GPUS[0]]),
    ("4", True, GPUS, 2, [*ON_GPUS, ON_GPUS[0]]),
    (1, True, GPUS, 2, ON_GPUS[:1]),
    (7, False, (), 2, [Device()] * 7),
])  # fmt: skip
def test_auto_means_one_rank_per_gpu_or_core(workers, uses_gpu, gpus, cores, devices):
    assert plan_devices(workers, uses_gpu=uses_gpu, gpus=gpus, cores=cores) == devices


@pytest.mark.parametrize(("device", "found", "environment", "usable"), [
    ("auto", (), {}, ()),
    ("auto", ("0",), {}, ("0",)),
    ("cpu", ("0",), {}, ()),
    ("auto", (), {"CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS_ON_NODE": "4"}, ()),
    ("auto", (), {"CUDA_VISIBLE_DEVICES": "-1", "SLURM_GPUS_ON_NODE": "4"}, ()),
    ("auto", (), {"CUDA_VISIBLE_DEVICES": "NoDevFiles", "SLURM_GPUS_ON_NODE": "4"}, ()),
    ("cuda", (), {}, None),
    ("cuda", (), {"CUDA_VISIBLE_DEVICES": ""}, None),
    ("auto", (), {"CUDA_VISIBLE_DEVICES": "0"}, None),
    ("auto", (), {"SLURM_GPUS_ON_NODE": "4"}, None),
])  # fmt: skip
def test_gpus_that_are_requested_or_allocated_must_exist(monkeypatch, device, found, environment, usable):
    monkeypatch.setattr("sharmill.executors.supervisor.visible_gpus", lambda: found)
    monkeypatch.setattr("sharmill.models.device.explain_missing", lambda: "the driver is too old")
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if usable is None:
        with raises(ConfigError, "device_failed", "executor.device=cpu", "the driver is too old"):
            usable_gpus(device)
    else:
        assert usable_gpus(device) == usable


def test_each_rank_sees_only_its_own_gpu(tmp_path, gpus):
    gpus(*GPUS)
    stage = GpuStage(tmp_path, units=9, everywhere="environment:CUDA_VISIBLE_DEVICES", setup_does="meet:3")
    run(stage, 3)
    seen = {line.split()[0]: line.split()[1] for line in stage.marked("environment")}
    assert sorted(seen.values()) == sorted(GPUS)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("before", ["0,3", None])
def test_ranks_on_the_cpu_see_none_and_the_run_all_again(tmp_path, monkeypatch, workers, before):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if before is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    stage = ToyStage(tmp_path, everywhere="environment:CUDA_VISIBLE_DEVICES")
    run(stage, workers)
    assert {tuple(line.split()[1:]) for line in stage.marked("environment")} == {()}
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before


# A rank on the CPU sees no GPU.
KINDS = {"": "cpu", "0": "A100", "1": "H200"}


def kinds_of(stage):
    return {commit.device_kind for commit in read_ledger(stage.dir, stage.dir.read_units()).values()}


@pytest.fixture
def gpus(monkeypatch):
    """Return a function that pretends that these GPUs exist."""
    return lambda *names: monkeypatch.setattr("sharmill.executors.supervisor.visible_gpus", lambda: names)


@pytest.mark.parametrize(("first", "then", "names"), [
    ((), ("0",), ("GPU 0", "cpu", "A100", "--restart")),
    (("0",), (), ("the CPU", "cpu", "A100", "--restart")),
])  # fmt: skip
def test_a_stage_does_not_continue_on_another_kind_of_device(tmp_path, gpus, first, then, names):
    gpus(*first)
    run(KindStage(tmp_path, kinds=KINDS, behaviour={2: "raise"}), "auto" if first else 1)
    gpus(*then)
    stage = KindStage(tmp_path, kinds=KINDS)
    assert kinds_of(stage) == {"A100" if first else "cpu"}
    with raises(DeviceError, "other_device", *names):
        run(stage, "auto" if then else 1)
    assert stage.attempts()[2] == 3


@pytest.mark.slow
def test_ranks_on_another_kind_of_device_are_excluded_at_once(tmp_path, gpus):
    gpus("0", "1")
    stage = KindStage(tmp_path, kinds=KINDS, setup_does="meet:2")
    result, _ = run(stage, "auto")
    assert result.ok
    assert len(kinds_of(stage)) == 1
    assert len(stage.pids()) == 2
    [sentence] = result.given_up
    assert "the stage was started on" in sentence
