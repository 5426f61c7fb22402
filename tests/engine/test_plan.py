"""The frozen plan, which is bound to its identity, and the ledger of complete units."""

import errno
import multiprocessing
import os
import signal
from unittest import mock

import msgspec
import pytest
from support.project import raises
from support.toy_stage import ToyStage, output_bytes, run

from sharmill.engine.plan import find_changes, read_ledger, read_or_make_plan
from sharmill.engine.run_dir import StageDir
from sharmill.engine.stage import identify_folder
from sharmill.engine.unit import Commit, make_unit
from sharmill.errors import ConfigError, FatalError
from sharmill.files.record_log import RecordLog


class CheckingStage(ToyStage):
    after = ("*",)


class TestFreeze:
    def test_second_run_makes_no_second_plan(self, tmp_path):
        for _ in range(2):
            run(ToyStage(tmp_path))
        assert len(ToyStage(tmp_path).marked("plan")) == 1

    def test_planner_killed_half_way_leaves_nothing_that_counts(self, tmp_path):
        stage = ToyStage(tmp_path)
        stage.mark("die_in_plan")
        process = multiprocessing.get_context("spawn").Process(target=read_or_make_plan, args=(stage.in_run,))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not stage.dir.plan.exists()
        (stage.marks / "die_in_plan").unlink()
        assert run(stage)[0].ok
        assert sorted(path.name for path in stage.dir.path.iterdir() if path.name.startswith(".")) == []


class TestIdentity:
    def test_other_configuration_is_refused_by_name_and_values(self, tmp_path):
        run(ToyStage(tmp_path, option=0.6))
        before = output_bytes(ToyStage(tmp_path))
        with raises(ConfigError, "changed_plan", "toy", "option", "0.7", "0.6"):
            run(ToyStage(tmp_path, option=0.7))
        assert output_bytes(ToyStage(tmp_path)) == before

    def test_a_folder_may_be_spelt_differently_or_move_with_the_run(self, tmp_path):
        for place in ("old", "new"):
            (tmp_path / place / "run").mkdir(parents=True)
            (tmp_path / place / "data").mkdir()
        (tmp_path / "link").symlink_to("old/data")

        def identify(data, run="old/run"):
            return {"dataset_dir": identify_folder(tmp_path / data, tmp_path / run)}

        old, new, apart = identify("old/data"), identify("new/data", "new/run"), identify("old/data", "new/run")
        for same in (identify("old/run/../data"), identify("link"), new, apart):
            assert find_changes(old, same) == []
        assert len(find_changes(apart, new)) == 1

    def test_a_check_is_planned_again_when_its_input_has_changed(self, tmp_path):
        run(CheckingStage(tmp_path, option=1))
        _, heard = run(CheckingStage(tmp_path, option=2))
        assert sorted(heard.done) == list(range(6))


class TestRestart:
    def test_removes_output_and_ledger_and_does_all_again(self, tmp_path):
        run(ToyStage(tmp_path, units=8))
        stage = ToyStage(tmp_path, units=3, option=2)
        result, heard = run(stage, restart=True)
        assert result.ok
        assert sorted(heard.done) == [0, 1, 2]
        assert sorted(output_bytes(stage)) == [
            *(f"first/{index:06d}.txt" for index in range(3)),
            *(f"last/{index:06d}.txt" for index in range(3)),
            "merged.txt",
        ]


@pytest.mark.parametrize(
    ("old", "new", "clauses"),
    [
        ({"a": {"b": [1, {"c": 2}]}, "same": "x"}, {"a": {"b": [1, {"c": 3}]}, "same": "x"}, ["a.b[1].c is 3, was 2"]),
        ({"a": {"x": 1}}, {"a": {"y": None}}, ["a.x is absent, was 1", "a.y is null, was absent"]),
        ({"a": 1}, {"a": True}, ["a is true, was 1"]),
        ({"a": 1}, {"a": 1.0}, ["a is 1.0, was 1"]),
        ({"a": [1]}, {"a": [1, 2]}, ["a is [1,2], was [1]"]),
        ({"a": "x" * 100}, {"a": 1}, [f'a is 1, was "{"x" * 56}...']),
        ({"input": [{"size": 1, "sum": 2}]}, {"input": [{"size": 3, "sum": 4}]}, ["the input has other content"]),
    ],
)
def test_each_innermost_difference_is_a_clause(old, new, clauses):
    assert find_changes(old, new) == clauses


UNITS = [make_unit(index, cost=1.0, size=1, params={}) for index in range(3)]
OTHER = make_unit(0, cost=1.0, size=1, params={"of": "another"})


@pytest.fixture
def paths(tmp_path):
    paths = StageDir(tmp_path, "0123456789abcdef")
    paths.ranks.ledger.mkdir(parents=True)
    return paths


def commit_of(unit, token="0123456789abcdef", rank=0):
    return Commit(
        token=token, index=unit.index, id=unit.id, files=[], num_in=1, num_out=1, rejects={}, stats={}, seconds=0.5,
        rank=rank,
    )  # fmt: skip


def line_of(unit, **options):
    return msgspec.json.encode(commit_of(unit, **options)) + b"\n"


class TestReading:
    @pytest.mark.parametrize(
        "lines",
        [
            line_of(UNITS[1])[:-1],
            line_of(UNITS[1])[:-20],
            b'\0\0\0\n{"index": 1}\n[]\n',
            line_of(OTHER),
            line_of(UNITS[1], token="fedcba9876543210"),
            line_of(UNITS[0], rank=1),
        ],
        ids=["torn", "torn earlier", "damaged", "another unit", "another plan", "the same again"],
    )
    def test_only_whole_records_of_this_plan_count_and_once(self, paths, lines):
        (paths.ranks.ledger / "a.jsonl").write_bytes(line_of(UNITS[0]) + lines)
        (paths.ranks.ledger / "b.jsonl").write_bytes(line_of(UNITS[2]))
        assert sorted(read_ledger(paths, UNITS)) == [0, 2]

    def test_records_after_an_error_of_the_disk_are_whole(self, paths):
        def half_a_line(descriptor):
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - 20)
            raise OSError(errno.ENOSPC, "No space left on device")

        writer = RecordLog(paths.ranks.log("a"))
        writer.append(commit_of(UNITS[0]), synced=True)
        with mock.patch("os.fsync", half_a_line), raises(FatalError, "disk", "No space left"):
            writer.append(commit_of(UNITS[1]), synced=True)
        writer.append(commit_of(UNITS[2]), synced=True)
        assert sorted(read_ledger(paths, UNITS)) == [0, 2]


class TestOutputsInPlace:
    @pytest.mark.parametrize(
        "spoil",
        [
            lambda path: path.unlink(),
            lambda path: (path.rename(path.with_name("elsewhere")), path.symlink_to("elsewhere")),
            lambda path: path.write_bytes(path.read_bytes() + b"more"),
        ],
        ids=["missing", "a link", "of another size"],
    )
    def test_a_committed_unit_with_a_changed_file_is_done_again(self, tmp_path, spoil):
        """This holds only until the stage is finished; afterwards, readers compare checksums."""
        stage = ToyStage(tmp_path)
        run(stage)
        stage.dir.done.unlink()
        before = output_bytes(stage)
        path = stage.root / "last" / "000002.txt"
        spoil(path)
        assert run(stage)[1].done == [2]
        assert not path.is_symlink()
        path.with_name("elsewhere").unlink(missing_ok=True)
        assert output_bytes(stage) == before

    def test_a_committed_unit_without_its_rejects_is_done_again(self, tmp_path):
        stage = ToyStage(tmp_path, behaviour={1: "reject:too_short"})
        run(stage)
        stage.ranks.unit_rejects(1).unlink()
        assert run(stage)[1].done == [1]
        assert len(stage.dir.rejects.read_bytes().splitlines()) == 1
