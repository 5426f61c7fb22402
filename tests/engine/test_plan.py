"""The frozen plan: made once, bound to what made it."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from itertools import count

import pytest
from support.errors import raises
from support.toy_stage import ToyStage, output_bytes, run

from sharmill.engine.identity import find_changes, identify_folder
from sharmill.engine.plan import load_plan, read_or_make_plan
from sharmill.errors import ConfigError


class ReplanningStage(ToyStage):
    replan_when_changed = True


class VersionedStage(ToyStage):
    """Depends on the version of a package."""

    def __init__(self, *arguments, version, **options):
        super().__init__(*arguments, **options)
        self.version = version

    def identity(self):
        return super().identity() | {"versions": {"torch": self.version}}


class TestFreeze:
    def test_second_run_makes_no_second_plan(self, tmp_path):
        for _ in range(2):
            run(ToyStage(tmp_path))
        assert len(ToyStage(tmp_path).marked("plan")) == 1

    def test_what_is_loaded_is_what_was_planned(self, tmp_path):
        stage = ToyStage(tmp_path)
        assert read_or_make_plan(stage, restart=False) == load_plan(stage) == read_or_make_plan(stage, restart=False)

    def test_planner_killed_half_way_leaves_nothing_that_counts(self, tmp_path):
        stage = ToyStage(tmp_path)
        stage.mark("die_in_plan")
        process = multiprocessing.get_context("spawn").Process(
            target=read_or_make_plan, args=(stage,), kwargs={"restart": False}
        )
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not stage.dir.plan.exists()
        (stage.marks / "die_in_plan").unlink()
        assert run(stage)[0].ok
        assert sorted(path.name for path in stage.dir.path.iterdir() if path.name.startswith(".")) == []

    def test_planner_that_raises_leaves_nothing(self, tmp_path, monkeypatch):
        stage = ToyStage(tmp_path)
        monkeypatch.setattr(stage, "plan", lambda folder: iter([1 / 0 for _ in range(1)]))
        with pytest.raises(ZeroDivisionError):
            read_or_make_plan(stage, restart=False)
        assert list(stage.dir.path.iterdir()) == []

    def test_what_a_lock_has_left_is_not_foreign(self, tmp_path):
        """Names may come back in any order after a loss of power."""
        stage = ToyStage(tmp_path)
        (stage.dir.path / ".sharmill-lock.0123").mkdir(parents=True)
        (stage.dir.path / ".sharmill-lock").mkdir()
        assert run(stage)[0].ok


class TestIdentity:
    def test_other_configuration_is_refused_by_name_and_values(self, tmp_path):
        run(ToyStage(tmp_path, option=0.6))
        before = output_bytes(ToyStage(tmp_path))
        with raises(ConfigError, "changed_plan", "toy", "option", "0.7", "0.6"):
            run(ToyStage(tmp_path, option=0.7))
        assert output_bytes(ToyStage(tmp_path)) == before

    def test_tuples_and_the_order_of_keys_make_no_difference(self, tmp_path):
        run(ToyStage(tmp_path, option=[{"b": (1, 2), "a": 3}]))
        assert run(ToyStage(tmp_path, option=({"a": 3, "b": [1, 2]},)))[0].ok

    def test_a_folder_is_the_same_however_it_is_spelt(self, tmp_path):
        (tmp_path / "data").mkdir()
        (tmp_path / "run").mkdir()
        (tmp_path / "link").symlink_to("data")
        first = identify_folder(tmp_path / "data", tmp_path / "run")
        for path in (tmp_path / "run" / ".." / "data", tmp_path / "link"):
            assert find_changes({"dataset_dir": first}, {"dataset_dir": identify_folder(path, tmp_path / "run")}) == []

    def test_a_folder_that_moved_with_the_run_directory_is_the_same(self, tmp_path):
        for place in ("old", "new"):
            (tmp_path / place / "run").mkdir(parents=True)
            (tmp_path / place / "data").mkdir()
        old, new = (identify_folder(tmp_path / place / "data", tmp_path / place / "run") for place in ("old", "new"))
        assert find_changes({"dataset_dir": old}, {"dataset_dir": new}) == []
        apart = identify_folder(tmp_path / "old" / "data", tmp_path / "new" / "run")
        assert find_changes({"dataset_dir": old}, {"dataset_dir": apart}) == []
        assert len(find_changes({"dataset_dir": apart}, {"dataset_dir": new})) == 1

    def test_a_check_plans_anew_when_its_input_has_changed(self, tmp_path):
        run(ReplanningStage(tmp_path, option=1))
        _, heard = run(ReplanningStage(tmp_path, option=2))
        assert sorted(heard.done) == list(range(6))


class TestRestart:
    def test_removes_output_and_ledger_and_does_all_again(self, tmp_path):
        run(ToyStage(tmp_path, units=8))
        stage = ToyStage(tmp_path, units=3, option=2)
        result, heard = run(stage, restart=True)
        assert result.ok
        assert heard.already == []
        assert sorted(heard.done) == [0, 1, 2]
        assert sorted(output_bytes(stage)) == [
            *(f"first/{index:06d}.txt" for index in range(3)),
            *(f"last/{index:06d}.txt" for index in range(3)),
            "merged.txt",
        ]

    @pytest.mark.slow
    def test_killed_at_any_file_operation_the_next_run_is_whole(self, tmp_path):
        """Neither a plan without units, nor output that no plan knows, nor a claim of nobody may be left."""
        expected = _fresh_output(tmp_path / "fresh")
        for number in count(1):
            folder = tmp_path / str(number)
            run(ToyStage(folder, units=3))
            stage = ToyStage(folder, units=3, option=number)
            if not _restart_killed_at(stage, number):
                break
            again = ToyStage(folder, units=3, option=number)
            assert run(again, restart=number % 2 == 0 or again.dir.identity.exists())[0].ok
            assert output_bytes(again) == expected
            assert sorted(path.name for path in again.root.iterdir()) == ["first", "last", "merged.txt"]
            assert [path.name for path in (again.dir.path / "ranks").iterdir()] == [again.token]
            assert not [path for path in again.dir.path.iterdir() if path.name.startswith(".")]
            shutil.rmtree(folder)
        assert number > 30


def _restart_killed_at(stage, number):
    """Makes a new plan in a process that is killed at its nth file operation; False if it was done before."""
    process = multiprocessing.get_context("fork").Process(target=_restart, args=(stage, number))
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def _restart(stage, number):
    operations = count(1)

    def counted(original):
        def call(*arguments, **options):
            if next(operations) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        return call

    for name in ("unlink", "rmdir", "mkdir", "open", "rename"):
        setattr(os, name, counted(getattr(os, name)))
    read_or_make_plan(stage, restart=True)


def _fresh_output(folder):
    stage = ToyStage(folder, units=3)
    run(stage)
    return output_bytes(stage)
