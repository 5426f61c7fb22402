"""One stage from plan to totals: accounts, rejects, failures, locks, progress."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading

import msgspec
import pytest
from support.errors import raises
from support.toy_stage import RECORDS_PER_UNIT, SlowStage, ToyStage, output_bytes, run, wait_until

from sharmill.engine.progress import ProgressWriter, read_progress
from sharmill.engine.run import locked, read_totals
from sharmill.errors import REMEDIES, ConfigError, FatalError
from sharmill.staging import STAGING_NAME, token_staging
from sharmill.storage import path_aside


class TestAccounts:
    @pytest.mark.parametrize("workers", [1, 2])
    def test_unit_that_loses_a_record_ends_the_stage(self, tmp_path, workers):
        stage = ToyStage(tmp_path, behaviour={3: "miscount"})
        with raises(FatalError, "accounts", "unit 3"):
            run(stage, workers)
        assert read_totals(stage) is None

    def test_finalize_that_loses_a_record_ends_the_stage(self, tmp_path):
        stage = ToyStage(tmp_path, lost_in_finalize=1)
        with raises(FatalError, "accounts", "18", "17"):
            run(stage)
        assert read_totals(stage) is None

    def test_totals_are_kept_and_given_again(self, tmp_path):
        stage = ToyStage(tmp_path, behaviour={0: "reject:too_short,too_long"})
        first, _ = run(stage)
        assert (first.totals.num_in, first.totals.num_out) == (6 * RECORDS_PER_UNIT, 6 * RECORDS_PER_UNIT - 2)
        assert first.totals.rejects == {"too_long": 1, "too_short": 1}
        assert first.totals.hours == 5.0
        again, heard = run(stage)
        assert again.totals == first.totals
        assert heard.done == []
        assert len(stage.attempts()) == 6


class TestRejects:
    ALL = "empty_text,empty_text,empty_text"

    def test_are_merged_in_the_order_of_the_units(self, tmp_path):
        stage = ToyStage(tmp_path, behaviour={4: "reject:too_long", 1: "reject:too_short,empty_text"})
        run(stage, 2)
        lines = [json.loads(line) for line in stage.dir.rejects.read_bytes().splitlines()]
        assert [(line["record"]["unit"], line["reason"]) for line in lines] == [
            (1, "too_short"),
            (1, "empty_text"),
            (4, "too_long"),
        ]

    @pytest.mark.parametrize("workers", [1, 2])
    def test_too_many_stop_early_with_the_three_commonest_reasons(self, tmp_path, workers):
        common = "too_short,too_short,too_long"
        stage = ToyStage(tmp_path, units=40, everywhere=f"reject:{common}", behaviour={3: f"reject:{self.ALL}"})
        with raises(FatalError, "too_many_rejects", "0.2") as caught:
            run(stage, workers, max_reject_fraction=0.2)
        message = str(caught.value)
        assert message.index("too_short ") < message.index("too_long ") < message.index("empty_text 3")
        assert REMEDIES["empty_text"] in message
        assert "raise max_reject_fraction" not in message
        assert 8 < len(stage.attempts()) <= 9 + workers

    def test_a_higher_limit_is_advised_only_where_something_is_left(self, tmp_path):
        stage = ToyStage(tmp_path, units=10, behaviour=dict.fromkeys(range(5, 10), f"reject:{self.ALL}"))
        with raises(FatalError, "too_many_rejects", "raise max_reject_fraction"):
            run(stage, max_reject_fraction=0.2)

    def test_exactly_the_limit_is_allowed(self, tmp_path):
        stage = ToyStage(tmp_path, units=100, behaviour=dict.fromkeys(range(29), f"reject:{self.ALL}"))
        result, _ = run(stage, max_reject_fraction=0.29)
        assert result.totals.num_rejected == 87

    def test_raised_limit_goes_on_from_the_ledger(self, tmp_path):
        stage = ToyStage(tmp_path, units=10, everywhere=f"reject:{self.ALL}")
        with raises(FatalError, "too_many_rejects"):
            run(stage, max_reject_fraction=0.5)
        with raises(FatalError, "too_many_rejects"):  # of what is in the ledger alone
            run(stage, max_reject_fraction=0.5)
        assert len(stage.attempts()) == 6
        result, heard = run(stage, max_reject_fraction=1.0)
        assert len(heard.already) == 6
        assert len(heard.done) == 4
        assert result.totals.rejects == {"empty_text": 30}


class TestFailures:
    @pytest.mark.parametrize("workers", [1, 2])
    def test_are_tried_three_times_and_named_while_the_others_finish(self, tmp_path, workers):
        stage = ToyStage(tmp_path, behaviour={2: "raise"}, setup_does=f"meet:{workers}")
        result, heard = run(stage, workers)
        assert not result.ok
        assert sorted(heard.done) == [0, 1, 3, 4, 5]
        assert stage.attempts() == {0: 1, 1: 1, 2: 3, 3: 1, 4: 1, 5: 1}
        error, attempts = heard.failed[2]
        assert (error.message, attempts) == ("ValueError: a bad day with two lines", 3)
        (record,) = map(msgspec.json.decode, stage.dir.failures.read_bytes().splitlines())
        assert record["index"] == 2
        assert "in _do_raise" in record["traceback"]
        assert heard.ended == [result]

    def test_a_relaunch_retries_only_those(self, tmp_path):
        run(ToyStage(tmp_path, behaviour={2: "raise"}))
        stage = ToyStage(tmp_path)
        result, heard = run(stage)
        assert result.ok
        assert heard.done == [2]
        assert not stage.dir.failures.exists()

    @pytest.mark.parametrize("workers", [1, 2])
    def test_a_unit_that_succeeds_at_the_second_attempt_is_no_failure(self, tmp_path, workers):
        stage = ToyStage(tmp_path, behaviour={2: "raise_once"})
        result, heard = run(stage, workers)
        assert result.ok
        assert heard.failed == {}
        assert stage.attempts()[2] == 2

    @pytest.mark.parametrize("workers", [1, 2])
    @pytest.mark.parametrize(
        ("does", "message"),
        [("memory", "MemoryError: 93 TiB are not to be had"), ("sysexit:3", "SystemExit: 3")],
    )
    def test_what_is_no_plain_exception_is_a_failed_unit_too(self, tmp_path, workers, does, message):
        stage = ToyStage(tmp_path, behaviour={2: does})
        result, heard = run(stage, workers)
        assert {index: error.message for index, error in result.failures.items()} == {2: message}
        assert sorted(heard.done) == [0, 1, 3, 4, 5]

    def test_nothing_is_left_in_the_staging_folder(self, tmp_path):
        stage = ToyStage(tmp_path, behaviour={2: "kill", 3: "raise"})
        run(stage, 2)
        staging = token_staging(stage.root, stage.token)
        assert sorted(path.name for path in stage.root.iterdir()) == [STAGING_NAME, "first", "last"]
        assert sorted(path.name for path in staging.parent.iterdir()) == [stage.token, "first.claim", "last.claim"]
        assert list(staging.iterdir()) == []


class TestErrorsThatEndTheStage:
    @pytest.mark.parametrize("workers", [1, 2])
    @pytest.mark.parametrize("place", ["setup", "process"])
    @pytest.mark.parametrize(
        ("does", "kind", "code", "name"),
        [
            ("config", ConfigError, "unknown_name", "'x'"),
            ("fatal", FatalError, "disk", "disk"),
            # Each rank may lack something that others have.
            ("import", FatalError, "missing_package", "'no_such_module_at_all'"),
        ],
    )
    def test_are_raised_in_the_driver(self, tmp_path, workers, place, does, kind, code, name):
        where = {"setup_does": does} if place == "setup" else {"behaviour": {2: does}}
        stage = ToyStage(tmp_path, **where)
        with raises(kind, code, name):
            run(stage, workers)
        assert max(stage.attempts().values(), default=0) <= workers
        assert len(stage.pids()) <= workers

    @pytest.mark.parametrize("workers", [1, 2])
    @pytest.mark.parametrize("does", ["raise:no such device", "memory", "sysexit:0"])
    def test_any_error_in_setup_is_one_clear_line(self, tmp_path, workers, does):
        stage = ToyStage(tmp_path, setup_does=does)
        with raises(FatalError, "setup_failed", "toy", "cpu", "rank-00"):
            run(stage, workers)
        assert all(rank.ended for rank in read_progress(stage.dir.progress))
        assert "in _misbehave" in "".join(path.read_text() for path in stage.dir.logs.glob("rank-*.log"))

    @pytest.mark.xdist_group("memory, threads, descriptors")
    def test_no_progress_thread_is_left_behind(self, tmp_path):
        before = threading.active_count()
        with raises(FatalError, "setup_failed"):
            run(ToyStage(tmp_path, setup_does="raise"))
        assert threading.active_count() == before


class TestLock:
    def test_second_driver_is_refused(self, tmp_path):
        stage = ToyStage(tmp_path)
        with locked(stage.run_dir), raises(ConfigError, "locked"):
            run(stage)
        assert run(stage)[0].ok


class TestProgress:
    @pytest.mark.parametrize("workers", [1, 2])
    def test_one_record_per_rank_adds_up(self, tmp_path, workers):
        stage = ToyStage(tmp_path, units=10, setup_does=f"meet:{workers}")
        run(stage, workers)
        ranks = read_progress(stage.dir.progress)
        assert [rank.rank for rank in ranks] == list(range(workers))
        assert sum(rank.units_done for rank in ranks) == 10
        assert sum(rank.cost_done for rank in ranks) == sum(index % 4 + 1 for index in range(10))
        assert {rank.pid for rank in ranks} == stage.pids()
        assert all(rank.ended and rank.unit is None and rank.peak_memory_mb > 1 for rank in ranks)

    @pytest.mark.parametrize("workers", [1, 2])
    def test_the_listener_follows_a_long_unit_and_is_told_of_ranks_that_load(self, tmp_path, workers):
        result, heard = run(SlowStage(tmp_path, units=4, behaviour={0: "raise_once"}), workers)
        assert result.ok
        assert heard.loads[0] >= 1
        assert heard.loads[-1] < heard.loads[0]
        of_unit_0 = [done for index, done in heard.advanced if index == 0]
        # Two attempts were followed; the first came to nothing.
        assert len([done for done in of_unit_0 if 0 < done < 1]) >= 2
        assert of_unit_0.count(0.0) == 1
        assert {index for index, _ in heard.advanced} == {0}

    def test_progress_within_a_unit_is_in_its_record_and_never_more_than_its_cost(self, tmp_path):
        with ProgressWriter(tmp_path / "rank-a.json", 0, "node/rank 0", "a", 0.01) as writer:
            writer.begin(7, None)
            writer.advance(1.5)
            assert writer.record.unit_cost_done == 1.5
            writer.end(2.0)
            assert (writer.record.unit_cost_done, writer.record.cost_done) == (0.0, 2.0)

    def test_killed_ranks_are_not_shown_as_alive(self, tmp_path):
        stage = ToyStage(tmp_path, units=3, behaviour={0: "kill"})
        run(stage, 3)
        assert all(rank.ended and rank.unit is None for rank in read_progress(stage.dir.progress))

    def test_a_relaunch_with_fewer_ranks_shows_only_those(self, tmp_path):
        run(ToyStage(tmp_path, behaviour={5: "raise"}), 3)
        stage = ToyStage(tmp_path)
        run(stage)
        assert [rank.rank for rank in read_progress(stage.dir.progress)] == [0]

    def test_a_long_unit_gives_signs_of_life(self, tmp_path):
        with ProgressWriter(tmp_path / "rank-a.json", 0, "node/rank 0", "a", 0.01) as writer:
            writer.begin(7, None)
            (first,) = read_progress(tmp_path)
            wait_until(lambda: read_progress(tmp_path)[0].unit == 7)
            wait_until(lambda: read_progress(tmp_path)[0].updated > first.updated)
        (last,) = read_progress(tmp_path)
        assert last.ended

    def test_an_empty_record_is_passed_over(self, tmp_path):
        with ProgressWriter(tmp_path / "rank-b.json", 1, "node/rank 1", "b"):
            (tmp_path / "rank-a.json").touch()
            assert [rank.rank for rank in read_progress(tmp_path)] == [1]

    def test_level_and_handlers_of_the_log_are_put_back(self, tmp_path):
        before = logging.getLogger().handlers[:], logging.getLogger("sharmill").level
        run(ToyStage(tmp_path))
        assert (logging.getLogger().handlers, logging.getLogger("sharmill").level) == before


class TestAtomic:
    def test_no_reader_sees_a_partial_file_or_a_last_without_its_first(self, tmp_path):
        stage = ToyStage(tmp_path, units=60)
        expected = {"first": lambda i: f"unit {i}\n" * 2000, "last": lambda i: f"end of unit {i}\n" * 2000}
        wrong, seen, stop = [], set(), threading.Event()

        def poll():
            while not stop.is_set():
                # Not by "*": the staging folder beside them is removed in the middle of a listing.
                for path in [path for name in expected for path in (stage.root / name).glob("*.txt")]:
                    index, folder = int(path.stem), path.parent.name
                    seen.add((folder, index))
                    if path.read_text() != expected[folder](index):
                        wrong.append(path)
                    if folder == "last" and not (stage.root / "first" / path.name).exists():
                        wrong.append(path)

        reader = threading.Thread(target=poll)
        reader.start()
        try:
            run(stage, 2)
        finally:
            stop.set()
            reader.join()
        assert wrong == []
        assert len(seen) > 10

    def test_a_relaunch_removes_what_killed_processes_left_aside(self, tmp_path):
        stage = ToyStage(tmp_path, behaviour={0: "reject:too_short"})
        run(stage)
        places = [stage.run_dir.rejects, stage.run_dir.manifests / "m.json", stage.dir.done, stage.root / "probe"]
        of_ranks = [stage.dir.unit_rejects(0), stage.dir.rank_progress(0)]
        for place in places + of_ranks:
            place.parent.mkdir(exist_ok=True)
            path_aside(place).touch()
        of_others = path_aside(stage.run_dir.calibration)
        of_others.touch()
        assert run(stage)[0].ok
        # Ranks may be at work for this plan: what is theirs goes when it is done.
        assert len(list(stage.dir.ranks.rglob("*.tmp"))) == 2
        stage.dir.done.unlink()
        assert run(stage)[0].ok
        assert list(tmp_path.rglob("*.tmp")) == [of_others]

    def test_a_unit_that_dies_half_way_publishes_nothing(self, tmp_path):
        stage = ToyStage(tmp_path, behaviour={2: "kill"})
        run(stage, 2)
        assert [name for name in output_bytes(stage) if "000002" in name] == []


def test_engine_imports_no_stage_no_audio_and_no_torch():
    code = "import sys, sharmill.engine.run, sharmill.executors.local\n"
    code += "print(*sorted(name for name in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"torch", "soundfile", "lhotse", "librosa", "nemo", "ray", "sharmill.audio.files"}.isdisjoint(loaded)
    # The base class of sources, with its keys, is part of the configuration; the formats are not.
    formats = ("sources.files", "sources.folder", "sources.nemo", "sources.table")
    stages = ("prepare", "match", "write", "encode", "validate", "shar", "models", *formats)
    assert [name for name in loaded if name.startswith(tuple(f"sharmill.{stage}" for stage in stages))] == []
