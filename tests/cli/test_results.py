"""Closing lines of a run and of a validation, at 80 columns and more."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from sharmill.cli.results import print_report, print_result
from sharmill.engine.outcomes import FailedAttempt, StageResult
from sharmill.engine.unit import Totals
from sharmill.validate.findings import CODES, Finding, make_report


def printed(width, show, *arguments) -> list[str]:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    show(console, *arguments)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def stage_of(tmp_path, name, costs=()):
    """A stage with a plan of units of these costs."""
    folder = SimpleNamespace(units=tmp_path / name / "units.jsonl", failures=tmp_path / name / "failures.jsonl")
    folder.units.parent.mkdir(parents=True)
    units = [{"index": n, "id": str(n), "cost": cost, "size": 1, "params": {}} for n, cost in enumerate(costs)]
    folder.units.write_text("".join(f"{unit}\n" for unit in units).replace("'", '"'))
    return SimpleNamespace(name=name, dir=folder, cost_unit="records" if name == "prepare" else "seconds of audio")


def totals(num_in, num_out, hours, **rejects):
    return StageResult(Totals(num_in=num_in, num_out=num_out, rejects=rejects, hours=hours))


@pytest.fixture
def result(tmp_path):
    """A run of which the last stage failed."""
    return SimpleNamespace(
        config=SimpleNamespace(name="librispeech", run_dir="run"),
        stages=[
            (stage_of(tmp_path, "prepare", [100.0]), totals(100, 98, 0.213, missing_audio=2)),
            (stage_of(tmp_path, "write", [1000.0, 944.0]), totals(98, 98, 0.213)),
            (stage_of(tmp_path, "encode/mimi", [1944.0]), StageResult(None, {0: FailedAttempt(0, "OSError: no", "")})),
        ],
    )  # fmt: skip


@pytest.mark.parametrize("width", [80, 120])
def test_accounts_say_what_was_processed_and_what_came_out(result, width):
    lines = printed(width, print_result, result)
    assert max(map(len, lines[:6])) <= width
    assert lines[1].split("  ")[0] == "stage"
    assert lines[3].split() == ["prepare", "100", "98", "2", "100", "records", "0.213", "h"]
    assert lines[4].split() == ["write", "98", "98", "0", "0.540", "h", "0.213", "h"]
    assert lines[5].split() == ["encode/mimi", "failed"]
    text = " ".join(lines)
    assert "processed: all audio that a stage handles, contexts included" in text
    assert "rejects: missing_audio 2 (see run/rejects.jsonl)" in lines
    assert "encode/mimi: unit 0 failed: OSError: no" in lines


def report_of(findings=(), **checked):
    return make_report(Path("dataset"), list(findings), level={}, checked=checked, unchecked=["silence (--deep)"])


def test_findings_fit_80_columns_with_examples_and_what_to_do():
    code = next(iter(CODES))
    findings = [Finding(code=code, sentence=f"sentence {n} " + 30 * "word ", shard=n) for n in range(5)]
    lines = printed(80, print_report, report_of(findings, shards=5))
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert f"{CODES[code].severity}: {code}, found 5 times" in text
    assert "sentence 2" in text
    assert "sentence 3" not in text
    assert f"what to do: {CODES[code].to_do}"[:40] in text
    assert "not checked: silence (--deep)" in text


def test_records_of_the_manifests_are_accounted_for():
    counts = {
        "records of the manifests": 1254,
        "records found as cuts": 1240,
        "records found among the rejects": 13,
        "records not found": 1,
    }
    lines = printed(120, print_report, report_of(**counts))
    expected = (
        "accounted for: 1,254 records of the manifests: 1,240 found as cuts, 13 found among the rejects, 1 not found"
    )
    assert expected in lines
    assert not any("accounted" in line for line in printed(120, print_report, report_of(shards=1)))
