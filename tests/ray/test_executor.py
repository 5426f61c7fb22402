"""The Ray executor on a real cluster: nodes that come and go, unusable places, and numbers of workers.

``tests/executors/test_contract.py`` tests the promises of all executors.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.project import raises
from support.toy_stage import ECC, BadDevices, LookingAhead, ToyStage, is_running, output_bytes, run, wait_until

from sharmill.errors import DeviceError


@contextmanager
def running(on_ray, stage, *arguments):
    """Run a stage in its own thread, since nodes can be added only in the main thread; yield its future.

    Units wait for the mark ``go``, which is always set at the end of the context.
    """
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(on_ray, stage, *arguments)
        try:
            yield future
        finally:
            stage.mark("go")


def redone(stage) -> dict[int, int]:
    """Return the units with several attempts, and their number of attempts."""
    return {unit: count for unit, count in stage.attempts().items() if count > 1}


def whole_bytes(folder, units):
    stage = ToyStage(folder / "whole", units=units)
    run(stage)
    return output_bytes(stage)


class TestNodes:
    def test_a_removed_node_costs_only_its_units_in_progress(self, tmp_path, on_ray, add_node, cluster):
        node = add_node(num_cpus=2)
        stage = ToyStage(tmp_path, units=24, setup_does="meet:4", everywhere="wait:go")
        with running(on_ray, stage) as future:
            wait_until(lambda: stage.attempts().total() == 4)
            cluster.remove_node(node, allow_graceful=False)
            wait_until(lambda: sum(map(is_running, stage.pids())) == 2)
        result, heard = future.result()
        assert result.ok
        assert heard.failed == {}
        assert list(redone(stage).values()) == [2, 2]
        assert output_bytes(stage) == whole_bytes(tmp_path, 24)

    def test_a_node_that_joins_later_is_used(self, tmp_path, on_ray, add_node):
        stage = ToyStage(tmp_path, units=24, everywhere="wait:go")
        with running(on_ray, stage) as future:
            wait_until(lambda: stage.attempts().total() == 2)
            add_node(num_cpus=2)
            wait_until(lambda: stage.attempts().total() == 4)
        assert future.result()[0].ok
        assert (len(stage.pids()), redone(stage)) == (4, {})

    @pytest.mark.slow
    @pytest.mark.parametrize(("hidden", "says"), [("", "not have the driver's folder "), ("out", "not see ")])
    def test_a_node_without_the_shared_disk_is_given_up_alone(self, tmp_path, on_ray, add_blind_node, hidden, says):
        folder = tmp_path / hidden if hidden else Path.cwd()
        add_blind_node(folder, num_cpus=2)
        stage = ToyStage(tmp_path, units=6, everywhere="wait:go")
        log = stage.dir.driver_log
        with running(on_ray, stage) as future:
            wait_until(lambda: log.exists() and log.read_text().count("is given up") == 2)
        result, heard = future.result()
        assert result.ok
        assert heard.failed == {}
        [sentence] = result.given_up
        assert f"{says}{folder}" in sentence
        assert redone(stage) == {}

    @pytest.mark.slow
    def test_a_stage_ends_if_no_node_has_the_shared_disk(self, tmp_path, on_ray, add_blind_node):
        """The only other node has too few cores."""
        add_blind_node(Path.cwd(), num_cpus=4)
        with raises(DeviceError, "unlike_nodes", "does not have the driver's folder"):
            on_ray(ToyStage(tmp_path, units=3), 2, cores=3)

    @pytest.mark.parametrize(("workers", "cores", "ranks"), [(3, 1, 3), ("auto", 2, 2)])
    def test_workers_and_cores_limit_the_ranks(self, tmp_path, on_ray, add_node, workers, cores, ranks):
        add_node(num_cpus=2)
        stage = ToyStage(tmp_path, units=12, setup_does=f"meet:{ranks}")
        assert on_ray(stage, workers, cores=cores)[0].ok
        assert len(stage.pids()) == ranks


class TestGpus:
    """Tests with nodes that only claim to have GPUs."""

    def test_a_rank_of_a_gpu_stage_has_one_gpu_and_its_cores(self, tmp_path, on_ray, add_node):
        add_node(num_cpus=2, num_gpus=2)
        stage = LookingAhead(tmp_path, setup_does="meet:2", everywhere="environment:CUDA_VISIBLE_DEVICES")
        assert on_ray(stage)[0].ok
        assert {line.split()[1] for line in stage.marked("setup")} == {"cuda"}
        seen = dict(line.split() for line in stage.marked("environment"))
        assert sorted(seen.values()) == ["0", "1"]
        assert stage.marked("cores") == ["1", "1"]

    @pytest.mark.slow
    def test_a_bad_gpu_is_kept_occupied_and_named(self, tmp_path, on_ray, add_node):
        add_node(num_cpus=2, num_gpus=2)
        stage = BadDevices(tmp_path, bad=("1",))
        result, _ = on_ray(stage)
        assert result.ok
        assert stage.marked("bad") == ["1"] * 3
        [sentence] = result.given_up
        assert "cannot be set up on GPU 1 of " in sentence
        assert ECC in sentence
