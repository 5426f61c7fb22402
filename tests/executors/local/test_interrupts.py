"""The driver is interrupted, terminated or killed: it ends soon, leaves no process, and a relaunch goes on."""

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
from sharmill.staging import token_staging

DRIVER = TESTS / "support" / "toy_driver.py"
MESSAGE = "Interrupted. What is done is kept; run the same command again to go on."
SECONDS_TO_END = 5.0


class Driver:
    """``sharmill toy`` in a process group of its own, as a shell would start it."""

    def __init__(self, folder, workers, **options):
        self.stage = ToyStage(folder)
        values = json.dumps({"folder": str(folder), "workers": workers, **options})
        self.process = subprocess.Popen(
            [sys.executable, DRIVER, values],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def members(self):
        """The processes of the driver's session that run."""
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        return [pid for pid in pids if is_running(pid) and _session(pid) == self.process.pid]

    def end(self):
        """Its exit status, its output and the seconds that it took to end, with all its processes."""
        started = time.monotonic()
        output, _ = self.process.communicate(timeout=120)
        wait_until(lambda: not self.members())
        return self.process.returncode, output, time.monotonic() - started


def _session(pid):
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


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


def done(stage):
    return sorted(read_ledger(stage.dir, load_plan(stage))) if stage.dir.units.exists() else []


def send(driver, how):
    if how == "ctrl-c":
        os.killpg(driver.process.pid, signal.SIGINT)
    else:
        os.kill(driver.process.pid, getattr(signal, how))


# The three units of cost 4 come first: they wait, so that two ranks are busy and nothing else is done.
BUSY = {3: "wait:never", 7: "wait:never", 11: "wait:never"}


def wait_until_busy(driver, workers):
    wait_until(lambda: len(driver.stage.marked("attempts")) >= workers)


class TestInterrupt:
    @pytest.mark.parametrize("how", ["ctrl-c", "SIGTERM"])
    @pytest.mark.parametrize("workers", [1, 2])
    def test_ends_in_time_with_the_message_and_without_orphans(self, start, tmp_path, workers, how):
        driver = start(workers, units=12, behaviour=BUSY)
        wait_until_busy(driver, workers)
        send(driver, how)
        status, output, seconds = driver.end()
        assert (status, output.strip().splitlines()[-1]) == (1, MESSAGE)
        assert "Traceback" not in output
        assert seconds < within(SECONDS_TO_END)
        assert all(rank.ended for rank in read_progress(driver.stage.dir.progress))
        assert not list(token_staging(driver.stage.root, driver.stage.dir.read_token()).iterdir())

    def test_a_relaunch_does_only_what_is_missing(self, start, tmp_path):
        driver = start(2, units=12, behaviour={3: "wait:never"})
        wait_until(lambda: len(done(driver.stage)) == 11)
        send(driver, "ctrl-c")
        assert driver.end()[0] == 1
        result, heard = run(ToyStage(tmp_path, units=12), 2)
        assert result.ok
        assert heard.done == [3]
        whole = ToyStage(tmp_path / "whole", units=12)
        run(whole)
        assert output_bytes(driver.stage) == output_bytes(whole)

    def test_while_ranks_start_leaves_no_traceback(self, start):
        """Ctrl-C reaches the ranks before they can ask to be spared."""
        driver = start(3, units=12, behaviour=BUSY)
        wait_until(lambda: len(driver.members()) >= 4)
        send(driver, "ctrl-c")
        status, output, seconds = driver.end()
        assert (status, output.strip().splitlines()) == (1, [MESSAGE])
        assert seconds < within(SECONDS_TO_END)

    def test_ranks_in_native_code_end_too(self, start):
        driver = start(2, units=2, behaviour={0: "hold_gil", 1: "hold_gil"})
        wait_until(lambda: len(driver.stage.marked("holding")) == 2)
        send(driver, "ctrl-c")
        status, _, seconds = driver.end()
        assert status == 1
        assert seconds < within(SECONDS_TO_END)

    def test_many_times_leaves_no_orphans_either(self, start):
        driver = start(2, units=12, behaviour=BUSY)
        wait_until_busy(driver, 2)
        for _ in range(20):
            if driver.process.poll() is None:
                send(driver, "ctrl-c")
            time.sleep(0.005)
        status, _, seconds = driver.end()
        assert status != 0
        assert seconds < within(SECONDS_TO_END)


class TestKilledDriver:
    @pytest.mark.parametrize("does", ["wait:never", "hold_gil"])
    def test_its_ranks_end_and_a_relaunch_goes_on(self, start, tmp_path, does):
        driver = start(2, units=12, behaviour={3: "wait:never", 8: does})
        wait_until(lambda: {3, 8} <= set(driver.stage.attempts()))
        committed = set(done(driver.stage))
        send(driver, "SIGKILL")
        status, _, seconds = driver.end()
        assert status == -signal.SIGKILL
        assert seconds < within(SECONDS_TO_END)
        result, heard = run(ToyStage(tmp_path, units=12), 2)
        assert result.ok
        assert set(heard.done) == set(range(12)) - committed
        assert driver.stage.attempts() == {index: 2 if index in (3, 8) else 1 for index in range(12)}

    def test_at_any_moment_the_bytes_are_the_same(self, start, tmp_path):
        killed = 0
        for attempt in range(6):
            driver = start(2, units=24)
            wait_until(lambda n=4 * attempt, d=driver: len(done(d.stage)) > n or d.process.poll() is not None)
            killed += driver.process.poll() is None
            send(driver, "SIGKILL")
            driver.end()
        result, _ = run(ToyStage(tmp_path, units=24), 2)
        assert result.ok
        assert killed >= 2
        whole = ToyStage(tmp_path / "whole", units=24)
        run(whole)
        assert output_bytes(driver.stage) == output_bytes(whole)


class TestDeferredInterrupts:
    def test_an_interrupt_comes_when_the_context_ends(self):
        steps = []

        def interrupt_and_go_on():
            with deferred_interrupts():
                os.kill(os.getpid(), signal.SIGINT)
                steps.append("went on")

        with pytest.raises(KeyboardInterrupt):
            interrupt_and_go_on()
        assert steps == ["went on"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def test_one_that_another_thread_receives_as_well(self):
        steps, inside = [], threading.Event()

        def interrupt_from_here():
            inside.wait()
            signal.raise_signal(signal.SIGINT)

        # Started before: a thread inherits the mask.
        thread = threading.Thread(target=interrupt_from_here)
        thread.start()

        def interrupt_and_go_on():
            with deferred_interrupts():
                inside.set()
                thread.join()
                steps.append("went on")

        with pytest.raises(KeyboardInterrupt):
            interrupt_and_go_on()
        assert steps == ["went on"]

    def test_elsewhere_than_in_the_main_thread_it_does_nothing(self):
        def enter():
            with deferred_interrupts():
                seen.append(signal.getsignal(signal.SIGINT))

        seen = []
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        assert seen == [signal.default_int_handler]
