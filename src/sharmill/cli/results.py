"""Results of a run and findings of a validation, as tables and closing lines."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from sharmill.cli.console import describe_cost, make_pairs, make_table, plain
from sharmill.engine.outcomes import StageResult
from sharmill.engine.plan import load_plan
from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Stage
from sharmill.executors.logs import one_line
from sharmill.pipeline import DatasetResult
from sharmill.shar.layout import DATASET_FILE
from sharmill.validate.findings import INDEX, Report

_MEANING_OF_HOURS = (
    "processed: all audio that a stage handles, contexts included; target audio: the utterances that went on"
)
_MAX_LINES = 10
_MAX_EXAMPLES = 3
_MAX_CHARACTERS = 160
_SHOWN_COUNTS = ("shards", "cuts", "files", "bytes", "items decoded", "seconds decoded", "segments encoded again",
                 "codes compared", "codes that differ")  # fmt: skip
_ACCOUNTS = ("records found as cuts", "records found among the rejects", "records not found")


def print_result(console: Console, result: DatasetResult) -> None:
    """Print the summary of a run over one dataset: accounts by stage, rejects by reason, failed units."""
    table = make_table(result.config.name, ("stage", "in", "out", "rejects", "processed", "target audio"))
    reasons: Counter[str] = Counter()
    for stage, outcome in result.stages:
        table.add_row(*_accounts(stage, outcome))
        if outcome.totals is not None:
            reasons.update(outcome.totals.rejects)
    console.print(table)
    console.print(plain(_MEANING_OF_HOURS, style="dim"))
    if reasons:
        listed = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        console.print(plain(f"rejects: {listed} (see {result.config.run_dir}/rejects.jsonl)"), soft_wrap=True)
    for stage, outcome in result.stages:
        for sentence in outcome.given_up[:_MAX_LINES]:
            console.print(plain(f"{stage.name}: {sentence}", style="yellow"), soft_wrap=True)
        for error in list(outcome.failures.values())[:_MAX_LINES]:
            console.print(plain(f"{stage.name}: unit {error.index} failed: {error.message}", style="red"))
        if outcome.failures:
            sentence = f"tracebacks: {stage.dir.failures}; run the same command again to retry what failed"
            console.print(plain(sentence), soft_wrap=True)


def print_paths(console: Console, result: DatasetResult) -> None:
    """Print where everything lies, and the command that comes next."""
    paths = result_paths(result)
    table = make_pairs()
    for name, path in paths.items():
        table.add_row(plain(name), plain(path, style="bold" if name == "next" else ""))
    console.print(table)


def result_paths(result: DatasetResult) -> dict[str, str]:
    """Return the folders and files that a run has left, by what they are, and under ``next`` a command."""
    config, run_dir = result.config, RunDir(Path(result.config.run_dir))
    paths = {"run directory": config.run_dir}
    if run_dir.rejects.exists() and run_dir.rejects.stat().st_size:
        paths["rejects"] = str(run_dir.rejects)
    if run_dir.report.exists():
        paths["page"] = str(run_dir.report)
    if (Path(config.dataset_dir) / DATASET_FILE).exists():
        paths["dataset"] = config.dataset_dir
    if not result.ok:
        paths["next"] = f"sharmill status {config.run_dir}"
    elif result.num_errors:
        paths["next"] = f"sharmill validate {config.dataset_dir} --json findings.json"
    elif "page" in paths and "dataset" in paths:
        paths["next"] = f"sharmill inspect {config.dataset_dir}"
    else:
        paths["next"] = f"sharmill report {config.run_dir}"
    return paths


def describe_result(result: DatasetResult) -> dict[str, Any]:
    """Return the outcome of a run over one dataset as values that JSON has."""
    stages = [
        {
            "name": stage.name,
            "ok": outcome.ok,
            "failed_units": sorted(outcome.failures),
            "totals": None if outcome.totals is None else asdict(outcome.totals),
        }
        for stage, outcome in result.stages
    ]
    findings = {"errors": result.num_errors, "checked": result.report is not None}
    return {"name": result.config.name, "ok": result.ok, "stages": stages, "findings": findings} | {
        "paths": result_paths(result)
    }


def _accounts(stage: Stage, outcome: StageResult) -> list[Text]:
    """Return the row of a stage."""
    if outcome.totals is None:
        return [plain(stage.name), *[plain("")] * 2, plain("failed", style="red")]
    totals = outcome.totals
    records = stage.cost_unit == "records"
    processed = sum(unit.cost for unit in load_plan(stage)) if stage.dir.units.exists() else 0.0
    numbers = (totals.num_in, totals.num_out, totals.num_rejected)
    hours = describe_cost(totals.hours * 3600, records=False)
    return [plain(cell) for cell in (stage.name, *map(str, numbers), describe_cost(processed, records=records), hours)]


def print_report(console: Console, report: Report) -> None:
    """Print findings by kind with the first examples, and what was checked, what could not be, and what mends it."""
    checked = ", ".join(f"{report.checked[name]:,.0f} {name}" for name in _SHOWN_COUNTS if name in report.checked)
    if not report.findings:
        console.print(plain("validation: no findings", style="green"))
    else:
        console.print(plain(f"validation: {report.errors} errors, {report.warnings} warnings", style="bold"))
    for kind in report.kinds:
        style = "red" if kind.severity == "error" else "yellow"
        console.print(plain(f"{kind.severity}: {kind.code}, found {kind.count} times", style=style))
        examples = [row for row in report.findings if row["code"] == kind.code][:_MAX_EXAMPLES]
        for line in [*map(_describe_finding, examples), f"what to do: {kind.to_do}"]:
            console.print(Padding(plain(line), (0, 0, 0, 2)))
    console.print(plain(f"checked: {checked}"))
    if (expected := report.checked.get("records of the manifests")) is not None:
        found = ", ".join(f"{report.checked[name]:,.0f} {name.removeprefix('records ')}" for name in _ACCOUNTS)
        console.print(plain(f"accounted for: {expected:,.0f} records of the manifests: {found}"))
    for phrase in report.unchecked:
        console.print(plain(f"not checked: {phrase}"))
    if report.units_to_repeat:
        units = Counter(unit.stage for unit in report.units_to_repeat)
        listed = ", ".join(stage if stage == INDEX else f"{count} of {stage}" for stage, count in units.items())
        console.print(plain(f"to be done again by --redo: {listed}"))


def _describe_finding(row: dict[str, Any]) -> str:
    shard = "" if row["shard"] is None else f"shard {row['shard']}, "
    text = one_line(f"{shard}{row['where']}: {row['sentence']}")
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3] + "..."
