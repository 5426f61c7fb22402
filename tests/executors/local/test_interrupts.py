"""A run is interrupted, terminated or killed: it ends soon, leaves no process, and a relaunch goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support.paths import TESTS
from support.timing import within
from support.toy_stage import ToyStage, is_running, output_bytes, run, wait_until

from sharmill.engine.ledger import read_ledger
from sharmill.engine.plan import load_plan
from sharmill.engine.progress import read_progress
from sharmill.executors.signals import deferred_interrupts
from sharmill.files.staging import token_staging

MESSAGE = "Interrupted. What is done is kept; run the same command again to go on."
SECONDS_TO_END = 5.0


class Driver:
    """``sharmill toy`` in a process group of its own, as a shell would start it."""

    def __init__(self, folder, workers, **options):
        self.stage = ToyStage(folder)
        values = json.dumps({"folder": str(folder), "workers": workers, **options})
        self.process = subprocess.Popen(
            [sys.executable, TESTS / "support" / "toy_driver.py", values],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def members(self):
        """The processes of the driver's session that run."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(ProcessLookupError):
                if os.getsid(int(path.name)) == self.process.pid and is_running(int(path.name)):
                    found.append(int(path.name))
        return found

    def end(self, how):
        """Its exit status and its output, once a signal has ended it and all its processes in time."""
        started = time.monotonic()
        if how == "ctrl-c":
            os.killpg(self.process.pid, signal.SIGINT)
        else:
            self.process.send_signal(getattr(signal, how))
        output, _ = self.process.communicate(timeout=120)
        wait_until(lambda: not self.members())
        assert time.monotonic() - started < within(SECONDS_TO_END)
        return self.process.returncode, output.strip().splitlines()

    def done(self):
        stage = self.stage
        return sorted(read_ledger(stage.dir, load_plan(stage))) if stage.dir.units.exists() else []


@pytest.fixture
def start(tmp_path):
    drivers = []

    def start_driver(workers, **options):
        drivers.append(Driver(tmp_path, workers, **options))
        return drivers[-1]

    yield start_driver
    for driver in drivers:
        for pid in driver.members():
            # The others end by themselves when the first of them has.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        driver.process.wait()


def whole(folder, units):
    stage = ToyStage(folder / "whole", units=units)
    run(stage)
    return output_bytes(stage)


# The three units of cost 4 come first: they wait, so that two ranks are busy and nothing else is done.
BUSY = {3: "wait:never", 7: "wait:never", 11: "wait:never"}


@pytest.mark.parametrize("how", ["ctrl-c", "SIGTERM"])
@pytest.mark.parametrize(("workers", "does"), [(1, "wait:never"), (2, "wait:never"), (2, "hold_gil")])
def test_an_interrupted_run_ends_in_time_with_the_message_and_without_orphans(start, workers, does, how):
    driver = start(workers, units=12, behaviour=dict.fromkeys(BUSY, does))
    wait_until(lambda: len(driver.stage.marked("attempts")) >= workers)
    assert driver.end(how) == (1, [MESSAGE])
    assert all(rank.ended for rank in read_progress(driver.stage.dir.progress))
    assert not list(token_staging(driver.stage.root, driver.stage.dir.read_token()).iterdir())


def test_an_interrupt_while_ranks_start_leaves_no_traceback(start):
    """Ctrl-C reaches the ranks before they can ask to be spared."""
    driver = start(3, units=12, behaviour=BUSY)
    wait_until(lambda: len(driver.members()) >= 4)
    assert driver.end("ctrl-c") == (1, [MESSAGE])


def test_many_interrupts_leave_no_orphans_either(start):
    driver = start(2, units=12, behaviour=BUSY)
    wait_until(lambda: len(driver.stage.marked("attempts")) >= 2)
    for _ in range(20):
        if driver.process.poll() is None:
            os.killpg(driver.process.pid, signal.SIGINT)
        time.sleep(0.005)
    assert driver.end("SIGCONT")[0] != 0


@pytest.mark.parametrize(("how", "does"), [("ctrl-c", "wait:never"), ("SIGKILL", "hold_gil")])
def test_a_relaunch_does_only_what_is_missing(start, tmp_path, how, does):
    driver = start(2, units=12, behaviour={3: "wait:never", 8: does})
    wait_until(lambda: {3, 8} <= set(driver.stage.attempts()))
    driver.end(how)
    missing = set(range(12)) - set(driver.done())
    assert {3, 8} <= missing
    result, heard = run(ToyStage(tmp_path, units=12), 2)
    assert result.ok
    assert set(heard.done) == missing
    assert output_bytes(driver.stage) == whole(tmp_path, 12)


def test_a_run_that_is_killed_at_any_moment_gives_the_same_bytes(start, tmp_path):
    killed = 0
    for attempt in range(6):
        driver = start(2, units=24)
        wait_until(lambda n=4 * attempt, d=driver: len(d.done()) > n or d.process.poll() is not None)
        killed += driver.process.poll() is None
        driver.end("SIGKILL")
    assert run(ToyStage(tmp_path, units=24), 2)[0].ok
    assert killed >= 2
    assert output_bytes(driver.stage) == whole(tmp_path, 24)


def test_a_deferred_interrupt_comes_when_the_context_ends_also_where_another_thread_receives_it():
    steps, inside = [], threading.Event()

    def interrupt_from_here():
        inside.wait()
        signal.raise_signal(signal.SIGINT)

    # Started before: a thread inherits the mask.
    thread = threading.Thread(target=interrupt_from_here)
    thread.start()

    def interrupt_and_go_on():
        with deferred_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            inside.set()
            thread.join()
            steps.append("went on")

    with pytest.raises(KeyboardInterrupt):
        interrupt_and_go_on()
    assert steps == ["went on"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
