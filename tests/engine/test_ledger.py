"""The ledger: what is in it is done, what is not is not."""

from __future__ import annotations

import errno
import os
from unittest import mock

import msgspec
import pytest
from support.errors import raises
from support.toy_stage import ToyStage, output_bytes, run

from sharmill.engine.ledger import read_ledger
from sharmill.engine.rundir import StageDir
from sharmill.engine.unit import Commit, make_unit
from sharmill.errors import FatalError
from sharmill.files.stored import RecordLog

UNITS = [make_unit(index, cost=1.0, size=1, params={}) for index in range(3)]
OTHER = make_unit(0, cost=1.0, size=1, params={"of": "another"})


@pytest.fixture
def paths(tmp_path):
    paths = StageDir(tmp_path, "0123456789abcdef")
    paths.ledger.mkdir(parents=True)
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
        (paths.ledger / "a.jsonl").write_bytes(line_of(UNITS[0]) + lines)
        (paths.ledger / "b.jsonl").write_bytes(line_of(UNITS[2]))
        assert sorted(read_ledger(paths, UNITS)) == [0, 2]

    def test_no_ledger_is_an_empty_one(self, tmp_path):
        assert read_ledger(StageDir(tmp_path / "absent"), UNITS) == {}

    def test_records_after_an_error_of_the_disk_are_whole(self, paths):
        def half_a_line(descriptor):
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - 20)
            raise OSError(errno.ENOSPC, "No space left on device")

        writer = RecordLog(paths.ledger)
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
    def test_a_committed_unit_whose_file_is_not_as_it_was_is_done_again(self, tmp_path, spoil):
        """As long as the stage is not finished: from then on, what reads a file compares its checksum."""
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

    def test_a_committed_unit_whose_rejects_are_missing_is_done_again(self, tmp_path):
        stage = ToyStage(tmp_path, behaviour={1: "reject:too_short"})
        run(stage)
        stage.dir.unit_rejects(1).unlink()
        assert run(stage)[1].done == [1]
        assert len(stage.dir.rejects.read_bytes().splitlines()) == 1

    def test_an_old_record_does_not_stand_in_for_a_failed_repeat(self, tmp_path):
        run(ToyStage(tmp_path))
        (tmp_path / "out" / "last" / "000002.txt").unlink()
        assert list(run(ToyStage(tmp_path, behaviour={2: "raise"}))[0].failures) == [2]

    def test_output_that_vanishes_meanwhile_is_reported(self, tmp_path, monkeypatch):
        stage = ToyStage(tmp_path)
        work = ToyStage.work

        def work_and_remove(self, unit, staging, advance):
            (self.root / "last" / "000003.txt").unlink(missing_ok=True)
            return work(self, unit, staging, advance)

        monkeypatch.setattr(ToyStage, "work", work_and_remove)
        assert list(run(stage)[0].failures) == [3]
