"""One stage from plan to totals: accounts, rejects and their sentences, failures, locks, progress."""

import json
import subprocess
import sys

import msgspec
import pytest
from support.project import raises
from support.toy_stage import ToyStage, run

from sharmill.engine.rejects import describe_rejects
from sharmill.errors import REASONS, REMEDIES, FatalError
from sharmill.manifest import Reject


def count_engine_calls(stage):
    """Run a stage in this process, and return how many functions of the engine it calls."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call" and "/engine/" in frame.f_code.co_filename

    sys.setprofile(count)
    try:
        run(stage)
    finally:
        sys.setprofile(None)
    return calls


class TestAccounts:
    @pytest.mark.parametrize("workers", [1, 2])
    @pytest.mark.parametrize(
        ("options", "names"), [({"behaviour": {3: "miscount"}}, ["unit 3"]), ({"lost_in_finalize": 1}, ["18", "17"])]
    )
    def test_a_stage_that_loses_a_record_does_not_end_well(self, tmp_path, workers, options, names):
        stage = ToyStage(tmp_path, **options)
        with raises(FatalError, "accounts", *names):
            run(stage, workers)
        assert stage.dir.read_totals() is None


class TestRejects:
    ALL = "empty_text,empty_text,empty_text"

    def test_are_merged_in_the_order_of_the_units(self, tmp_path):
        stage = ToyStage(tmp_path, behaviour={4: "reject:too_long", 1: "reject:too_short,empty_text"})
        run(stage, 2)
        lines = [json.loads(line) for line in stage.dir.rejects.read_bytes().splitlines()]
        found = [(line["record"]["unit"], line["reason"]) for line in lines]
        assert found == [(1, "too_short"), (1, "empty_text"), (4, "too_long")]

    @pytest.mark.parametrize("workers", [1, 2])
    def test_too_many_stop_early_with_the_three_most_common_reasons(self, tmp_path, workers):
        common = "too_short,too_short,too_long"
        behaviour, limits = {3: f"reject:{self.ALL}"}, {"max_reject_fraction": 0.2}
        units = 40 if workers == 1 else 200
        stage = ToyStage(tmp_path, units=units, everywhere=f"reject:{common}", behaviour=behaviour, **limits)
        with raises(FatalError, "too_many_rejects", "0.2", REMEDIES["empty_text"]) as caught:
            run(stage, workers)
        message = str(caught.value)
        assert message.index("too_short ") < message.index("too_long ") < message.index("empty_text 3")
        # Ranks continue until the leader, which looks ten times a second, has seen their notes.
        assert 0.2 * units < len(stage.attempts()) <= (12 if workers == 1 else 190)

    def test_checking_them_costs_a_unit_no_more_the_more_there_are(self, tmp_path):
        stages = [ToyStage(tmp_path / f"{n}", units=n, everywhere="reject:too_short") for n in (10, 60, 110)]
        calls = [count_engine_calls(stage) for stage in stages]
        assert calls[2] - calls[1] <= 1.1 * (calls[1] - calls[0])

    def test_exactly_the_limit_is_allowed(self, tmp_path):
        rejecting = dict.fromkeys(range(29), f"reject:{self.ALL}")
        stage = ToyStage(tmp_path, units=100, behaviour=rejecting, max_reject_fraction=0.29)
        assert run(stage)[0].totals.num_rejected == 87


class TestFailures:
    @pytest.mark.parametrize("workers", [1, 2])
    @pytest.mark.parametrize(
        ("does", "message", "place"),
        [
            ("raise", "ValueError: a bad day with two lines", "in _do_raise"),
            ("memory", "MemoryError: 93 TiB are not to be had", "in _misbehave"),
            ("sysexit:3", "SystemExit: 3", "in _do_sysexit"),
        ],
    )
    def test_are_named_with_their_tracebacks_while_the_others_finish(self, tmp_path, workers, does, message, place):
        stage = ToyStage(tmp_path, behaviour={2: does}, setup_does=f"meet:{workers}")
        result, heard = run(stage, workers)
        assert {index: error.message for index, error in result.failures.items()} == {2: message}
        assert sorted(heard.done) == [0, 1, 3, 4, 5]
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


def test_engine_imports_no_stage_no_audio_and_no_torch():
    code = "import sys, sharmill.engine.run, sharmill.executors.local\n"
    code += "print(*sorted(name for name in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"torch", "soundfile", "lhotse", "librosa", "nemo", "ray", "sharmill.audio.files"}.isdisjoint(loaded)
    # The base class of sources, with its keys, is part of the configuration; the formats are not.
    formats = ("sources.files", "sources.folder", "sources.nemo", "sources.table")
    stages = ("prepare", "match", "write", "encode", "validate", "shar", "models", *formats)
    assert [name for name in loaded if name.startswith(tuple(f"sharmill.{stage}" for stage in stages))] == []


def test_the_most_common_reasons_have_an_example_and_a_remedy(tmp_path):
    units = [
        [
            Reject("prepare", "missing_field", f"the record has no {300 * 'y'}", {"audio_filepath": "a.wav"}),
            Reject("prepare", "malformed", "the line is not JSON:\nsyntax " + 2000 * "x", "a,b,c"),
            Reject("prepare", "missing_audio", "/data/c.wav: No such file or directory", {"audio_filepath": "c.wav"}),
        ],
        [Reject("prepare", "missing_field", "the record has no text", {"audio_filepath": "b.wav"})],
    ]
    for index, rejects in enumerate(units):
        lines = b"".join(reject.to_json() + b"\n" for reject in rejects)
        (tmp_path / f"{index:06d}.jsonl").write_bytes(lines)
    reasons = {"malformed": 2, "missing_field": 5, "missing_audio": 3, "too_long": 1}
    first, second, third = describe_rejects(tmp_path, reasons)
    assert first.startswith(f"missing_field 5, the first: a.wav: the record has no {300 * 'y'}. To do: ")
    assert "prepare.require_text=false" in first
    assert second.startswith("missing_audio 3, the first: /data/c.wav: No such file or directory. To do: ")
    assert "audio_root" in second
    assert third.startswith("malformed 2, the first: the line is not JSON: syntax xxx")
    assert "xxx.... To do: correct these lines or files; the detail" in third
    assert len(third) < 600


def test_rejects_without_files_are_counted(tmp_path):
    assert describe_rejects(tmp_path, {"too_short": 3}) == ["too_short 3. To do: lower prepare.min_duration"]


def test_every_reason_has_a_remedy():
    assert REMEDIES.keys() == REASONS.keys()
