"""The ledger: what is in it is done, what is not is not."""

from __future__ import annotations

import errno
import os

import msgspec
import pytest
from support.errors import raises
from support.toy_stage import ToyStage, output_bytes, run

from sharmill.engine.ledger import LedgerWriter, read_ledger
from sharmill.engine.plan import load_plan
from sharmill.engine.rundir import StageDir
from sharmill.engine.unit import Commit, make_unit
from sharmill.errors import FatalError

TOKEN = "0123456789abcdef"


def unit(index, **params):
    return make_unit(index, cost=1.0, size=1, params=params)


def commit_of(unit, rank=0):
    return Commit(
        token=TOKEN,
        index=unit.index,
        id=unit.id,
        files=[],
        num_in=1,
        num_out=1,
        rejects={},
        stats={},
        seconds=0.5,
        rank=rank,
    )


def open_ledger(folder):
    """A writer for the ledger of a stage's folder, as one of its ranks has it."""
    ledger = StageDir(folder, TOKEN).ledger
    ledger.mkdir(parents=True, exist_ok=True)
    return LedgerWriter(ledger)


class TestReading:
    def test_a_torn_last_line_is_no_record(self, tmp_path):
        units = [unit(0), unit(1)]
        writer = open_ledger(tmp_path)
        for each in units:
            writer.append(commit_of(each))
        (file,) = tmp_path.rglob("*.jsonl")
        whole = file.read_bytes()
        first = whole.index(b"\n") + 1
        for length in range(first, len(whole)):
            file.write_bytes(whole[:length])
            assert list(read_ledger(StageDir(tmp_path, TOKEN), units)) == [0]

    def test_a_damaged_line_is_no_record_and_hides_none(self, tmp_path):
        units = [unit(0), unit(1)]
        writer = open_ledger(tmp_path)
        writer.append(commit_of(units[0]))
        (file,) = tmp_path.rglob("*.jsonl")
        file.write_bytes(file.read_bytes() + b"\0\0\0\n" + b'{"index": 1}\n' + b"[]\n")
        writer.append(commit_of(units[1]))
        assert sorted(read_ledger(StageDir(tmp_path, TOKEN), units)) == [0, 1]

    def test_records_of_another_plan_do_not_count(self, tmp_path):
        writer = open_ledger(tmp_path)
        writer.append(commit_of(unit(0, of="another")))
        writer.append(commit_of(unit(7)))
        writer.append(msgspec.structs.replace(commit_of(unit(0)), token="fedcba9876543210"))
        assert read_ledger(StageDir(tmp_path, TOKEN), [unit(0)]) == {}

    def test_a_unit_recorded_twice_counts_once(self, tmp_path):
        for rank in range(2):
            open_ledger(tmp_path).append(commit_of(unit(0), rank))
        assert list(read_ledger(StageDir(tmp_path, TOKEN), [unit(0)])) == [0]

    def test_no_ledger_is_an_empty_one(self, tmp_path):
        assert read_ledger(StageDir(tmp_path / "absent", TOKEN), [unit(0)]) == {}


class TestFailedAppend:
    def test_error_of_the_disk_is_fatal_and_later_records_are_whole(self, tmp_path, monkeypatch):
        writer = open_ledger(tmp_path)
        writer.append(commit_of(unit(0)))
        fsync = os.fsync

        def half_a_line(descriptor):
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - 20)
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", half_a_line)
        with raises(FatalError, "disk", "No space left"):
            writer.append(commit_of(unit(1)))
        monkeypatch.setattr(os, "fsync", fsync)
        writer.append(commit_of(unit(2)))
        assert sorted(read_ledger(StageDir(tmp_path, TOKEN), [unit(0), unit(1), unit(2)])) == [0, 2]


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
        result, heard = run(stage)
        assert result.ok
        assert heard.done == [2]
        assert not path.is_symlink()
        path.with_name("elsewhere").unlink(missing_ok=True)
        assert output_bytes(stage) == before

    def test_a_committed_unit_whose_rejects_are_missing_is_done_again(self, tmp_path):
        stage = ToyStage(tmp_path, behaviour={1: "reject:too_short"})
        run(stage)
        stage.dir.unit_rejects(1).unlink()
        _, heard = run(stage)
        assert heard.done == [1]
        assert len(stage.dir.rejects.read_bytes().splitlines()) == 1

    def test_an_old_record_does_not_stand_in_for_a_failed_repeat(self, tmp_path):
        run(ToyStage(tmp_path))
        (tmp_path / "out" / "last" / "000002.txt").unlink()
        stage = ToyStage(tmp_path, behaviour={2: "raise"})
        result, _ = run(stage)
        assert not result.ok
        assert list(result.failures) == [2]

    def test_output_that_vanishes_meanwhile_is_reported(self, tmp_path, monkeypatch):
        stage = ToyStage(tmp_path)
        work = ToyStage.work

        def work_and_remove(self, unit, staging, advance):
            (self.root / "last" / "000003.txt").unlink(missing_ok=True)
            return work(self, unit, staging, advance)

        monkeypatch.setattr(ToyStage, "work", work_and_remove)
        result, _ = run(stage)
        assert list(result.failures) == [3]

    def test_a_relaunch_reads_the_same_plan(self, tmp_path):
        stage = ToyStage(tmp_path)
        run(stage)
        assert sorted(read_ledger(stage.dir, load_plan(stage))) == list(range(6))
