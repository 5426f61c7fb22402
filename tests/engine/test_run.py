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
from support.toy_stage import RECORDS_PER_UNIT, SlowStage, ToyStage, output_bytes, run

from sharmill.engine.progress import read_progress
from sharmill.engine.run import locked, read_totals
from sharmill.errors import REMEDIES, ConfigError, FatalError
from sharmill.files.storage import path_aside


class TestAccounts:
    @pytest.mark.parametrize("workers", [1, 2])
    @pytest.mark.parametrize(
        ("options", "names"), [({"behaviour": {3: "miscount"}}, ["unit 3"]), ({"lost_in_finalize": 1}, ["18", "17"])]
    )
    def test_a_stage_that_loses_a_record_does_not_end_well(self, tmp_path, workers, options, names):
        stage = ToyStage(tmp_path, **options)
        with raises(FatalError, "accounts", *names):
            run(stage, workers)
        assert read_totals(stage) is None

    def test_totals_are_kept_and_given_again(self, tmp_path):
        stage = ToyStage(tmp_path, behaviour={0: "reject:too_short,too_long"})
        first, _ = run(stage)
        assert (first.totals.num_in, first.totals.num_out) == (6 * RECORDS_PER_UNIT, 6 * RECORDS_PER_UNIT - 2)
        assert first.totals.rejects == {"too_long": 1, "too_short": 1}
        assert first.totals.hours == 5.0
        again, heard = run(stage)
        assert (again.totals, heard.done) == (first.totals, [])
        assert len(stage.attempts()) == 6


class TestRejects:
    ALL = "empty_text,empty_text,empty_text"

    def test_are_merged_in_the_order_of_the_units(self, tmp_path):
        stage = ToyStage(tmp_path, behaviour={4: "reject:too_long", 1: "reject:too_short,empty_text"})
        run(stage, 2)
        lines = [json.loads(line) for line in stage.dir.rejects.read_bytes().splitlines()]
        found = [(line["record"]["unit"], line["reason"]) for line in lines]
        assert found == [(1, "too_short"), (1, "empty_text"), (4, "too_long")]

    @pytest.mark.parametrize("workers", [1, 2])
    def test_too_many_stop_early_with_the_three_commonest_reasons(self, tmp_path, workers):
        common = "too_short,too_short,too_long"
        stage = ToyStage(tmp_path, units=40, everywhere=f"reject:{common}", behaviour={3: f"reject:{self.ALL}"})
        with raises(FatalError, "too_many_rejects", "0.2", REMEDIES["empty_text"]) as caught:
            run(stage, workers, max_reject_fraction=0.2)
        message = str(caught.value)
        assert message.index("too_short ") < message.index("too_long ") < message.index("empty_text 3")
        assert 8 < len(stage.attempts()) <= 9 + workers

    def test_exactly_the_limit_is_allowed(self, tmp_path):
        stage = ToyStage(tmp_path, units=100, behaviour=dict.fromkeys(range(29), f"reject:{self.ALL}"))
        assert run(stage, max_reject_fraction=0.29)[0].totals.num_rejected == 87

    def test_raised_limit_goes_on_from_the_ledger(self, tmp_path):
        stage = ToyStage(tmp_path, units=10, everywhere=f"reject:{self.ALL}")
        for _ in range(2):  # the second time because of what is in the ledger alone
            with raises(FatalError, "too_many_rejects"):
                run(stage, max_reject_fraction=0.5)
        assert len(stage.attempts()) == 6
        _, heard = run(stage, max_reject_fraction=1.0)
        assert (len(heard.already), len(heard.done)) == (6, 4)


class TestFailures:
    @pytest.mark.parametrize("workers", [1, 2])
    @pytest.mark.parametrize(
        ("does", "message", "place"),
        [
            ("raise", "ValueError: a bad day with two lines", "in _do_raise"),
            ("memory", "MemoryError: 93 TiB are not to be had", "in _do_memory"),
            ("sysexit:3", "SystemExit: 3", "in _do_sysexit"),
        ],
    )
    def test_are_named_with_their_tracebacks_while_the_others_finish(self, tmp_path, workers, does, message, place):
        stage = ToyStage(tmp_path, behaviour={2: does}, setup_does=f"meet:{workers}")
        result, heard = run(stage, workers)
        assert {index: error.message for index, error in result.failures.items()} == {2: message}
        assert (sorted(heard.done), heard.ended) == ([0, 1, 3, 4, 5], [result])
        assert (heard.failed[2].message, stage.attempts()[2]) == (message, 3)
        (record,) = map(msgspec.json.decode, stage.dir.failures.read_bytes().splitlines())
        assert place in record["traceback"]

    def test_are_forgotten_once_the_stage_is_done(self, tmp_path):
        run(ToyStage(tmp_path, behaviour={2: "raise"}))
        stage = ToyStage(tmp_path)
        assert run(stage)[1].done == [2]
        assert not stage.dir.failures.exists()

    @pytest.mark.parametrize("workers", [1, 2])
    @pytest.mark.parametrize("does", ["raise:no such device", "memory", "sysexit:0"])
    def test_any_error_in_setup_is_one_clear_line(self, tmp_path, workers, does):
        stage = ToyStage(tmp_path, setup_does=does)
        with raises(FatalError, "setup_failed", "toy", "the CPU", "rank-00"):
            run(stage, workers)
        assert "in _misbehave" in "".join(path.read_text() for path in stage.dir.logs.glob("rank-*.log"))


def test_a_second_driver_is_refused(tmp_path):
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
        assert all(rank.ended and rank.unit is None and rank.peak_memory_mb > 1 for rank in ranks)

    @pytest.mark.parametrize("workers", [1, 2])
    def test_the_listener_follows_a_long_unit_and_is_told_of_ranks_that_load(self, tmp_path, workers):
        _, heard = run(SlowStage(tmp_path, units=4, behaviour={0: "raise_once"}), workers)
        assert heard.loads[0] > heard.loads[-1]
        assert {index for index, _ in heard.advanced} == {0}
        done = [done for _, done in heard.advanced]
        # Two attempts were followed.
        assert len([share for share in done if 0 < share < 1]) >= 2

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
                    seen.add(path)
                    is_whole = path.read_text() == expected[path.parent.name](int(path.stem))
                    if not is_whole or not (stage.root / "first" / path.name).exists():
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
        of_ranks = [stage.dir.unit_rejects(0), stage.dir.rank_progress("a")]
        of_others = stage.run_dir.calibration
        for place in [*places, *of_ranks, of_others]:
            place.parent.mkdir(exist_ok=True)
            path_aside(place).touch()
        run(stage)
        # Ranks may be at work for this plan: what is theirs goes when it is done.
        assert len(list(stage.dir.ranks.rglob("*.tmp"))) == 2
        stage.dir.done.unlink()
        run(stage)
        assert [path.name.startswith(f".{of_others.name}") for path in tmp_path.rglob("*.tmp")] == [True]

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
