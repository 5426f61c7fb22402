"""Printed results: the summary of a run on one dataset, and the report of the checker."""

import re
from collections import Counter
from pathlib import Path
from typing import Final

from rich.text import Text

from sharmill.cli.command import (
    describe_cost,
    echo,
    echo_all,
    plain,
    print_table,
)
from sharmill.engine.executor import StageResult
from sharmill.engine.run_dir import RunDir
from sharmill.engine.stage import StageRun, is_main
from sharmill.errors import counted
from sharmill.files.atomic import write_atomic
from sharmill.pipeline import DatasetResult
from sharmill.shar.fields import DATASET_FILE
from sharmill.validate.findings import INDEX, Report, encode_report

_MAX_LINES: Final = 10
_MAX_CHARACTERS: Final = 160
# Above this share of records without a similar context, the threshold should be reviewed.
_MUCH_LOST: Final = 0.1
_SHOWN_COUNTS: Final = (
    "shards", "cuts", "items clipped in writing", "files", "bytes", "items decoded", "seconds decoded",
    "segments encoded again", "codes compared", "codes that differ",
)  # fmt: skip
_PLURAL: Final = re.compile(r"s\b")
_ACCOUNTS: Final = ("records found as cuts", "records found among the rejects", "records not found")


def print_result(result: DatasetResult) -> None:
    """Print the summary of a run on one dataset: records by stage, rejects by reason, failed units."""
    columns = ("stage", "in", "out", "rejects", "processed", "target audio")
    # Each stage has one row, and each failed round of a stage has a row of its own.
    shown = [(stage, outcome) for stage, outcome in result.stages if is_main(stage.kind) or outcome.totals is None]
    print_table(result.config.name, columns, [_accounts(stage, outcome) for stage, outcome in shown or result.stages])
    echo(
        "processed: all audio of a stage, including contexts; target audio: the utterances that were kept",
        style="dim",
    )
    reasons: Counter[str] = Counter()
    for stage, outcome in result.stages:
        found = outcome.totals.rejects if outcome.totals is not None else {}
        reasons.update({} if stage.rejects_keep_cut else found)
        if stage.rejects_keep_cut and found:
            listed = f"{sum(found.values())} {'cuts' if stage.counts == 'records' else 'segments'} without codes"
            echo(f"{stage.name}: {listed} (see {result.config.run_dir}/bad_codes.jsonl)", style="yellow")
    if reasons:
        listed = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        echo(f"rejects: {listed} (see {result.config.run_dir}/rejects.jsonl)")
        share = reasons["no_similar_context"] / max(
            outcome.totals.num_in for _, outcome in result.stages if outcome.totals
        )
        if share > _MUCH_LOST:
            echo(f"{share:.0%} of the records have no similar context: check the speaker labels, or run sharmill "
                "calibrate to choose match.min_similarity", style="yellow")  # fmt: skip
    for stage, outcome in result.stages:
        notes = outcome.totals.notes if outcome.totals else []
        for sentence in (*notes, *outcome.given_up[:_MAX_LINES]):
            echo(f"{stage.name}: {sentence}", style="yellow")
        for error in list(outcome.failures.values())[:_MAX_LINES]:
            echo(f"{stage.name}: unit {error.index} failed: {error.message}", style="red")
        if outcome.failures:
            echo(f"tracebacks: {stage.dir.failures}; run the same command again to retry failed units")


def result_paths(result: DatasetResult) -> dict[str, str]:
    """Return the folders and files of a run by description, and a recommended command under the key ``next``."""
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
    else:
        is_shown = "page" in paths and "dataset" in paths
        paths["next"] = f"sharmill inspect {config.dataset_dir}" if is_shown else f"sharmill report {config.run_dir}"
    return paths


def _accounts(stage: StageRun, outcome: StageResult) -> list[str | Text]:
    """Return the table row of a stage."""
    if outcome.totals is None:
        return [stage.name, "", "", plain("failed", style="red")]
    totals = outcome.totals
    processed = sum(unit.cost for unit in stage.dir.read_units()) if stage.dir.units.exists() else 0.0
    return [
        stage.name, str(totals.num_in), str(totals.num_out), str(totals.num_rejected),
        describe_cost(processed, records=stage.cost_unit == "records"),
        describe_cost(totals.hours * 3600, records=False),
    ]  # fmt: skip


def print_report(report: Report, json_file: str | None = None) -> None:
    """Print the findings by kind, with examples and a remedy for each kind, then what was checked and what was not.

    Args:
        json_file: file to which the whole report is written.
    """
    shown = (name for name in report.checked if name.startswith("cuts without "))
    names = [*(name for name in _SHOWN_COUNTS if name in report.checked), *shown]
    counts = ((report.checked[name], name) for name in names)
    # Each name begins with its noun: one cut without codes, two cuts without codes.
    checked = ", ".join(f"{count:,.0f} {_PLURAL.sub('', name, 1) if count == 1 else name}" for count, name in counts)
    if not report.findings:
        echo("validation: no findings", style="green")
    else:
        echo(f"validation: {counted(report.errors, 'error')}, {counted(report.warnings, 'warning')}", style="bold")
    for kind in report.kinds:
        echo(
            f"{kind.severity}: {kind.code}, {counted(kind.count, 'finding')}",
            style="red" if kind.severity == "error" else "yellow",
        )
        for row in [row for row in report.findings if row["code"] == kind.code][:3]:
            shard = "" if row["shard"] is None else f"shard {row['shard']}, "
            text = f"{shard}{row['where']}: {row['sentence']}"
            echo(f"  {text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3] + '...'}")
        echo(f"  what to do: {kind.to_do}")
    echo(f"checked: {checked}")
    if (expected := report.checked.get("records of the manifests")) is not None:
        found = ", ".join(f"{report.checked[name]:,.0f} {name.removeprefix('records ')}" for name in _ACCOUNTS)
        echo(f"accounted for: {expected:,.0f} records of the manifests: {found}")
    echo_all(f"not checked: {phrase}" for phrase in report.unchecked)
    if report.units_to_repeat:
        units = Counter(unit.stage for unit in report.units_to_repeat)
        listed = ", ".join(stage if stage == INDEX else f"{count} of {stage}" for stage, count in units.items())
        echo(f"units that --redo would rebuild: {listed}")
    if json_file is not None:
        write_atomic(Path(json_file), encode_report(report))
