"""The Ray executor in this process, on a real cluster: outcomes, errors, and every way in which an actor can die."""

from __future__ import annotations

import os
import sys

import pytest
from support.errors import raises
from support.manifests import config_for
from support.pipelines import run_sharmill
from support.toy_stage import GpuStage, ToyStage, Unloadable, output_bytes, run

from sharmill.config import ExecutorConfig
from sharmill.engine.ledger import read_ledger
from sharmill.engine.plan import load_plan
from sharmill.engine.progress import read_progress
from sharmill.errors import ConfigError, FatalError


def num_records(stage) -> int:
    """Lines in the ledger: more than one for a unit means that it was redone after it had been done."""
    return sum(len(path.read_text().splitlines()) for path in stage.dir.ledger.glob("*.jsonl"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What the local executor makes of six units that behave."""
    stage = ToyStage(tmp_path_factory.mktemp("whole"))
    run(stage)
    return output_bytes(stage)


class TestRanks:
    def test_actors_are_processes_of_their_own_that_say_that_they_end(self, tmp_path, on_ray):
        stage = ToyStage(tmp_path, setup_does="meet:2")
        on_ray(stage)
        assert os.getpid() not in stage.pids()
        assert len(stage.pids()) == 2
        records = read_progress(stage.dir.progress)
        assert {record.pid for record in records} == stage.pids()
        assert all(record.ended for record in records)
        assert sum(record.units_done for record in records) == 6

    def test_largest_units_come_first(self, tmp_path, on_ray):
        stage = ToyStage(tmp_path, units=8)
        on_ray(stage, 1)
        order = [int(line.split()[0]) for line in stage.marked("attempts")]
        assert order == [3, 7, 2, 6, 1, 5, 0, 4]

    def test_each_actor_logs_to_its_own_file(self, tmp_path, on_ray):
        stage = ToyStage(tmp_path, setup_does="meet:2", behaviour={2: "print:the last words"})
        on_ray(stage, 2)
        logs = {path.name: path.read_text() for path in stage.dir.logs.iterdir()}
        assert {"driver.log", "rank-000.log", "rank-001.log"} <= set(logs)
        ranks = logs["rank-000.log"] + logs["rank-001.log"]
        assert ranks.count("the last words") == 3
        assert "from native code" in ranks
        assert "unit 2 failed, attempt 3: " in logs["driver.log"]

    def test_only_what_is_missing_is_done(self, tmp_path, on_ray, whole):
        stage = ToyStage(tmp_path, behaviour={2: "raise"})
        run(stage)
        again = ToyStage(tmp_path)
        result, heard = on_ray(again)
        assert result.ok
        assert heard.done == [2]
        assert output_bytes(again) == whole
        assert num_records(again) == 6

    def test_a_gpu_stage_gets_one_gpu_per_actor(self, tmp_path, on_ray, add_node):
        add_node(num_cpus=2, num_gpus=2)
        stage = GpuStage(tmp_path, setup_does="meet:2", everywhere="environment:CUDA_VISIBLE_DEVICES")
        assert on_ray(stage)[0].ok
        seen = dict(line.split() for line in stage.marked("environment"))
        assert {line.split()[1] for line in stage.marked("setup")} == {"cuda"}
        assert set(seen.values()) == {"0", "1"}
        assert len(seen) == 2

    def test_a_gpu_stage_runs_on_cores_where_there_is_no_gpu(self, tmp_path, on_ray):
        stage = GpuStage(tmp_path)
        assert on_ray(stage)[0].ok
        assert {line.split()[1] for line in stage.marked("setup")} == {"cpu"}

    def test_cores_are_set_aside(self, tmp_path, on_ray):
        stage = ToyStage(tmp_path)
        assert on_ray(stage, cores=2)[0].ok
        assert len(stage.pids()) == 1


class TestFailures:
    def test_a_commit_that_nobody_heard_of_is_not_lost(self, tmp_path, on_ray, whole):
        stage = ToyStage(tmp_path, setup_does="die_after_commit:3")
        assert on_ray(stage, 1)[0].ok
        assert output_bytes(stage) == whole
        assert set(read_ledger(stage.dir, load_plan(stage))) == set(range(6))

    def test_an_actor_that_cannot_be_set_up_ends_the_stage(self, tmp_path, on_ray):
        with raises(FatalError, "setup_failed", "cpu", "ValueError: a bad day", "rank-00"):
            on_ray(ToyStage(tmp_path, setup_does="raise"), 2)

    @pytest.mark.parametrize("stage_class", [ToyStage, Unloadable])
    def test_actors_that_never_start_end_the_stage(self, tmp_path, on_ray, stage_class):
        with raises(FatalError, "no_ranks"):
            on_ray(stage_class(tmp_path, setup_does="kill"), 2)

    def test_an_actor_that_dies_at_its_start_is_replaced(self, tmp_path, on_ray):
        stage = ToyStage(tmp_path, setup_does="kill_once")
        assert on_ray(stage, 1)[0].ok
        assert set(stage.attempts().values()) == {1}

    def test_too_many_rejects_stop_the_stage(self, tmp_path, on_ray):
        stage = ToyStage(tmp_path, units=40, everywhere="reject:too_short,too_short")
        with raises(FatalError, "too_many_rejects", "too_short"):
            on_ray(stage, 2, max_reject_fraction=0.1)
        assert len(stage.attempts()) < 40


class TestConfiguration:
    def test_without_ray_the_message_names_the_package(self, monkeypatch, tmp_path):
        from sharmill.pipeline import make_executor

        monkeypatch.setitem(sys.modules, "ray", None)
        with raises(ConfigError, "missing_package", "sharmill[ray]"):
            make_executor(config_for(tmp_path, [("m.json", "audio")], executor={"kind": "ray"}))

    def test_relative_paths_are_refused_in_a_copy_of_the_working_directory(self, monkeypatch, tmp_path):
        from sharmill.pipeline import make_executor

        copy = tmp_path / "working_dir_files" / "_ray_pkg_1"
        copy.mkdir(parents=True)
        monkeypatch.chdir(copy)
        config = config_for(tmp_path, [("m.json", tmp_path)], executor={"kind": "ray"})
        with raises(ConfigError, "bad_config_value", "sources[0].manifest", "'m.json'", "--root DIR"):
            make_executor(config)

    def test_no_cluster_is_a_configuration_error(self, tmp_path, ray_folder):
        (tmp_path / "m.json").write_text("{}\n")
        config = tmp_path / "config.yaml"
        config.write_text(
            f"{{name: x, run_dir: {tmp_path}/run, dataset_dir: {tmp_path}/data,"
            f" executor: {{kind: ray, address: '127.0.0.1:1023'}},"
            f" sources: [{{manifest: {tmp_path}/m.json, audio_root: {tmp_path}}}]}}"
        )
        done = run_sharmill("run", config, "prepare")
        assert "127.0.0.1:1023" in done.stderr
        assert done.returncode == 2

    def test_keys_for_ray_are_errors_elsewhere(self):
        with pytest.raises(ValueError, match="for kind: ray"):
            ExecutorConfig(cores=2)
