"""Results of a run and findings of a validation, as tables and closing lines."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

from rich.console import Console

from sharmill.cli.console import make_table, plain
from sharmill.executors.logs import printable
from sharmill.pipeline import DatasetResult
from sharmill.validate.report import INDEX, Report

_MAX_LINES = 10
_MAX_EXAMPLES = 3
_MAX_CHARACTERS = 160
_SHOWN_COUNTS = ("shards", "cuts", "files", "bytes", "items decoded", "seconds decoded", "segments encoded again",
                 "codes compared", "codes that differ")  # fmt: skip


def print_result(console: Console, result: DatasetResult) -> None:
    """Print the summary of a run over one dataset: accounts by stage, rejects by reason, failed units."""
    table = make_table(result.config.name)
    for column in ("stage", "in", "out", "rejected", "hours out"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    reasons: Counter[str] = Counter()
    for stage, outcome in result.stages:
        if outcome.totals is None:
            table.add_row(plain(stage.name), "", "", "", plain("failed", style="red"))
            continue
        totals = outcome.totals
        reasons.update(totals.rejects)
        numbers = (f"{totals.num_in}", f"{totals.num_out}", f"{totals.num_rejected}", f"{totals.hours:.3f}")
        table.add_row(plain(stage.name), *numbers)
    console.print(table)
    if reasons:
        listed = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        console.print(plain(f"rejects: {listed} (see {result.config.run_dir}/rejects.jsonl)"))
    for stage, outcome in result.stages:
        for error in list(outcome.failures.values())[:_MAX_LINES]:
            console.print(plain(f"{stage.name}: unit {error.index} failed: {error.message}", style="red"))
        if outcome.failures:
            sentence = f"tracebacks: {stage.dir.failures}; run the same command again to retry what failed"
            console.print(plain(sentence))


def print_report(console: Console, report: Report) -> None:
    """Print findings by kind with the first examples, and what was checked, what could not be, and what mends it."""
    checked = ", ".join(f"{report.checked[name]:,.0f} {name}" for name in _SHOWN_COUNTS if name in report.checked)
    if not report.findings:
        console.print(plain("validation: no findings", style="green"))
    else:
        table = make_table(f"validation: {report.errors} errors, {report.warnings} warnings")
        for column in ("finding", "severity", "count", "first examples", "what to do"):
            table.add_column(column, overflow="fold")
        for kind in report.kinds:
            examples = islice((row for row in report.findings if row["code"] == kind.code), _MAX_EXAMPLES)
            style = "red" if kind.severity == "error" else "yellow"
            table.add_row(
                plain(kind.code), plain(kind.severity, style=style), f"{kind.count}",
                plain("\n".join(_describe_finding(row) for row in examples)), plain(kind.to_do),
            )  # fmt: skip
        console.print(table)
    console.print(plain(f"checked: {checked}"))
    for phrase in report.unchecked:
        console.print(plain(f"not checked: {phrase}"))
    if report.redo:
        units = Counter(unit.stage for unit in report.redo)
        listed = ", ".join(stage if stage == INDEX else f"{count} of {stage}" for stage, count in units.items())
        console.print(plain(f"to be done again by --redo: {listed}"))


def _describe_finding(row: dict[str, Any]) -> str:
    shard = "" if row["shard"] is None else f"shard {row['shard']}, "
    text = printable(f"{shard}{row['where']}: {row['sentence']}")
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3] + "..."
