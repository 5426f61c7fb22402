"""What happens to a run when nodes come and go, when its driver ends, and what scheduling costs."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from support.errors import raises
from support.paths import TESTS
from support.toy_stage import ToyStage, is_running, output_bytes, run, wait_until

from sharmill.errors import DeviceError

DRIVER = TESTS / "support" / "ray_driver.py"


def ledger_counts(stage) -> Counter[int]:
    """How often each unit is in the ledger."""
    lines = [line for path in stage.dir.ledger.glob("*.jsonl") for line in path.read_text().splitlines()]
    return Counter(json.loads(line)["index"] for line in lines)


def redone(stage) -> dict[int, int]:
    """The units that were begun more than once, and how often."""
    return {unit: count for unit, count in stage.attempts().items() if count > 1}


@contextmanager
def running(on_ray, stage, *arguments):
    """Runs a stage in a thread of its own, since nodes can be added in the main thread only; yields its future.

    Units wait for the mark ``go``, which is there when the context ends, whatever happens in it.
    """
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(on_ray, stage, *arguments)
        try:
            yield future
        finally:
            stage.mark("go")


def in_flight(stage) -> int:
    return sum(stage.attempts().values()) - sum(ledger_counts(stage).values())


def whole_bytes(folder, units):
    stage = ToyStage(folder / "whole", units=units)
    run(stage)
    return output_bytes(stage)


def sentence_about_the_node_given_up(on_ray, stage):
    """Runs a stage to its end, without a failure, once one node has been given up."""
    log = stage.dir.driver_log
    with running(on_ray, stage) as future:
        wait_until(lambda: log.exists() and "is given up" in log.read_text())
    result, heard = future.result()
    assert result.ok
    assert heard.failed == {}
    [sentence] = result.given_up
    return sentence


class TestNodes:
    def test_a_node_that_is_removed_costs_only_what_was_in_flight_on_it(self, tmp_path, on_ray, add_node, cluster):
        node = add_node(num_cpus=2)
        stage = ToyStage(tmp_path, units=24, setup_does="meet:4", everywhere="wait:go")
        with running(on_ray, stage) as future:
            wait_until(lambda: in_flight(stage) == 4)
            cluster.remove_node(node, allow_graceful=False)
            wait_until(lambda: sum(is_running(pid) for pid in stage.pids()) == 2)
        result, heard = future.result()
        assert result.ok
        assert sorted(heard.done) == list(range(24))
        assert len(redone(stage)) == 2
        assert set(redone(stage).values()) == {2}
        assert output_bytes(stage) == whole_bytes(tmp_path, 24)
        # No fault of the units: none of them has lost one of its three attempts.
        log = stage.dir.driver_log.read_text()
        assert len(re.findall(r"WARNING sharmill.executors.ray.executor: rank \d: the actor died", log)) == 2
        assert "is taken out" not in log
        print(f"\nnode removed: 24 units, redone {redone(stage)}, ledger lines {sum(ledger_counts(stage).values())}")

    def test_a_node_that_joins_later_is_used(self, tmp_path, on_ray, add_node):
        stage = ToyStage(tmp_path, units=24, everywhere="wait:go")
        with running(on_ray, stage) as future:
            wait_until(lambda: in_flight(stage) == 2)
            add_node(num_cpus=2)
            wait_until(lambda: in_flight(stage) == 4)
        assert future.result()[0].ok
        assert len(stage.pids()) == 4
        assert set(stage.attempts().values()) == {1}

    @pytest.mark.slow
    def test_a_node_without_the_shared_disk_is_given_up_alone(self, tmp_path, on_ray, add_blind_node):
        add_blind_node(num_cpus=2)
        stage = ToyStage(tmp_path, units=6, everywhere="wait:go")
        assert "does not have the driver's folder" in sentence_about_the_node_given_up(on_ray, stage)
        assert output_bytes(stage) == whole_bytes(tmp_path, 6)

    @pytest.mark.slow
    def test_a_node_without_the_disk_of_the_output_is_given_up_alone(self, tmp_path, on_ray, add_blind_node):
        """It sees the run directory, so that a missing staging folder looked like a plan that others have replaced."""
        stage = ToyStage(tmp_path, units=6, everywhere="wait:go")
        add_blind_node(stage.root, num_cpus=2)
        assert f"does not see {stage.root}" in sentence_about_the_node_given_up(on_ray, stage)
        assert output_bytes(stage) == whole_bytes(tmp_path, 6)

    @pytest.mark.slow
    def test_where_no_node_has_the_shared_disk_the_stage_ends_with_that(self, tmp_path, on_ray, add_blind_node):
        """The cores of the other node are taken."""
        add_blind_node(num_cpus=4)
        with raises(DeviceError, "unlike_nodes", "does not have the driver's folder"):
            on_ray(ToyStage(tmp_path, units=3), 2, cores=3)

    def test_a_killed_actor_is_replaced(self, tmp_path, on_ray):
        stage = ToyStage(tmp_path, units=12, setup_does="meet:2", everywhere="wait:go")
        with running(on_ray, stage) as future:
            wait_until(lambda: in_flight(stage) == 2)
            unit, pid = map(int, stage.marked("attempts")[0].split())
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: len(stage.pids()) == 3)
        assert future.result()[0].ok
        assert redone(stage) == {unit: 2}
        assert set(ledger_counts(stage).values()) == {1}
        log = stage.dir.driver_log.read_text()
        assert log.count(f"unit {unit} failed") == 1
        print(f"\nactor killed: 12 units, redone {redone(stage)}")

    def test_workers_limits_the_actors(self, tmp_path, on_ray, add_node):
        add_node(num_cpus=2)
        stage = ToyStage(tmp_path, units=30, setup_does="meet:3")
        assert on_ray(stage, 3)[0].ok
        assert len(stage.pids()) == 3


class TestDriver:
    @pytest.fixture
    def toy(self, start, tmp_path):
        """Returns a function that starts a driver and waits until two units are in flight and some are done."""

        def begin(stage):
            options = json.dumps({"folder": str(tmp_path), "units": stage.units, "everywhere": stage.everywhere})
            process = start(DRIVER, options)
            wait_until(lambda: in_flight(stage) >= 2 or process.poll() is not None)
            return process

        return begin

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
    def test_a_driver_that_ends_takes_its_actors_along_and_a_relaunch_goes_on(self, tmp_path, toy, number):
        stage = ToyStage(tmp_path, units=20, everywhere="wait:go")
        process = toy(stage)
        in_flight_then = set(stage.attempts())
        began = time.monotonic()
        process.send_signal(number)
        process.wait(60)
        assert process.returncode == (1 if number != signal.SIGKILL else -9)
        wait_until(lambda: not any(is_running(pid) for pid in stage.pids()))
        seconds = time.monotonic() - began
        (stage.marks / "go").touch()
        again = toy(stage)
        assert again.wait(60) == 0
        assert set(redone(stage)) == in_flight_then
        assert ledger_counts(stage) == Counter(range(20))
        assert output_bytes(stage) == whole_bytes(tmp_path, 20)
        print(f"\n{number.name}: actors gone after {seconds:.1f} s; redone {redone(stage)} of 20 units")

    def test_a_driver_killed_in_full_flight_redoes_only_what_was_in_flight(self, tmp_path, toy):
        stage = ToyStage(tmp_path, units=400)
        process = toy(stage)
        wait_until(lambda: sum(ledger_counts(stage).values()) > 50)
        process.kill()
        process.wait(30)
        wait_until(lambda: not any(is_running(pid) for pid in stage.pids()))
        before = sum(ledger_counts(stage).values())
        assert before < 400
        assert toy(stage).wait(60) == 0
        assert sum(stage.attempts().values()) - 400 <= 2
        assert ledger_counts(stage) == Counter(range(400))
        assert output_bytes(stage) == whole_bytes(tmp_path, 400)
        print(f"\ndriver killed after {before} of 400 units; redone {redone(stage)}")
