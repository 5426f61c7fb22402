"""Commands that run stages: here (``run``, ``demo``, ``work``), on SLURM (``submit``), or the checker alone."""

import os
import shlex
import shutil
import stat
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
import msgspec
from rich.text import Text

from sharmill.cli.command import (
    FAILED,
    FINDINGS,
    OK,
    describe_cost,
    is_override,
    json_option,
    load_configs,
    make_console,
    parse_pairs,
    parse_workers,
    plain,
    print_json,
    print_pairs,
    print_table,
    resolve_stages,
    say,
    say_all,
    split_arguments,
    workers_option,
    worst,
)
from sharmill.cli.progress import ProgressListener
from sharmill.config import Config, load_config, load_typed
from sharmill.demo import make_demo, next_steps
from sharmill.engine.executor import StageResult, Submitted
from sharmill.engine.order import choose_stages, make_stages
from sharmill.engine.run_dir import RunDir, RunOutcome
from sharmill.engine.stage import StageRun, is_main
from sharmill.engine.state import pack_units
from sharmill.engine.unit import Unit
from sharmill.engine.view import read_or_preview_units
from sharmill.errors import ConfigError, SharmillError, describe_error, printable_line, refuse
from sharmill.executors.local import JoiningExecutor, run_alone
from sharmill.executors.slurm.executor import SlurmExecutor, wait_for_end
from sharmill.executors.slurm.profile import ClusterProfile
from sharmill.files.atomic import require_writable, write_atomic
from sharmill.files.disk import disk_errors
from sharmill.files.trust import require_private
from sharmill.pipeline import DatasetResult, DatasetRun, check_config, run_dataset, take_back
from sharmill.rates import expect_seconds
from sharmill.registry import require_package
from sharmill.report.page import report_on_run
from sharmill.shar.fields import DATASET_FILE
from sharmill.shar.index import open_directory
from sharmill.sources.nemo import NemoSource
from sharmill.sources.table import TableSource, delimiter_of
from sharmill.validate.accounts import ExpectedRecords
from sharmill.validate.findings import INDEX, Report, encode_report, read_report
from sharmill.validate.stage import Subject, ValidateConfig, ValidateStage

T = TypeVar("T")
_MAX_LINES = 10
_MAX_CHARACTERS = 160
_SHOWN_COUNTS = ("shards", "cuts", "items clipped in writing", "files", "bytes", "items decoded", "seconds decoded",
                 "segments encoded again", "codes compared", "codes that differ")  # fmt: skip
# A larger share of records without a similar context is worth a look at the threshold.
_MUCH_LOST = 0.1
_ACCOUNTS = ("records found as cuts", "records found among the rejects", "records not found")


_restart_option = click.option(
    "--restart", is_flag=True, help="Begin the stages anew: discard their plans and remove their output."
)
_redo_option = click.option(
    "--redo",
    type=click.Path(path_type=str),
    metavar="FINDINGS.json",
    help="Do the shards again that a validation names: what its --json wrote.",
)


def _conclude(results: Sequence[tuple[int, dict[str, Any]]]) -> int:
    """Print the results of several datasets as JSON where that is asked for, and return their exit status."""
    print_json([told for _, told in results])
    return worst(status for status, _ in results)


def _each(
    items: Iterable[tuple[str, T]], step: Callable[[T], tuple[int, dict[str, Any]]]
) -> list[tuple[int, dict[str, Any]]]:
    """Return the exit status of a step for each of several datasets, and what there is to tell of it.

    An error is printed with the name of its dataset, and keeps no other from its turn.
    """
    results = []
    for name, item in items:
        try:
            results.append(step(item))
        except SharmillError as error:
            click.echo(f"Error: {printable_line(name)}: {describe_error(error)}", err=True)
            results.append((error.exit_status, {"name": name, "ok": False, "error": str(error), "code": error.code}))
    return results


def _command_line(*words: str) -> str:
    """Return a command of sharmill as it can be typed anywhere, although its paths are relative to this folder."""
    return f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(['sharmill', *words])}"


@click.command(context_settings={"ignore_unknown_options": False})
@click.argument("arguments", nargs=-1, required=True, metavar="CONFIG... [STAGE...] [KEY=VALUE...]")
@_restart_option
@_redo_option
@click.option("--workers", callback=parse_workers, help="Worker processes, as executor.workers: a number, or auto.")
@click.option(
    "--take-over",
    is_flag=True,
    help="Run where SLURM cannot be asked about submitted jobs; with --restart, also beside ranks that are at work.",
)
@json_option
def run(
    arguments: tuple[str, ...], restart: bool, redo: str | None, workers: int | Literal["auto"] | None, take_over: bool
) -> int:
    """Run all stages, or those named, for datasets. Where that is under way already, more ranks are added.

    CONFIG is a YAML file. STAGE is prepare, match (stage1), write (stage2), encode (stage3) or validate; a dataset
    without contexts (match: null) has no stage match.
    KEY=VALUE overrides the configuration, as in match.min_similarity=0.7.
    """
    paths, overrides, names = split_arguments(arguments)
    stages = resolve_stages(names) or None
    if workers is not None:
        overrides.append(f"executor.workers={workers}")
    configs = [load_config(path, overrides) for path in paths]
    named = read_redo_report(redo, configs, restart=restart)
    # As it can be typed anywhere: paths in configurations are relative to this folder.
    commands = [_command_line("run", str(Path(path).absolute()), *names, *overrides) for path in paths]
    return _conclude(run_configs(configs, stages, restart=restart, redo=named, take_over=take_over, commands=commands))


def _warn_of_umask() -> None:
    """Print a warning where anybody may write to what this process makes."""
    mask = os.umask(0)
    os.umask(mask)
    if not mask & stat.S_IWOTH:
        click.echo(
            f"Warning: anybody may write to the files of this run, since the umask is {mask:04o}: set umask 022",
            err=True,
        )


def run_configs(
    configs: Sequence[Config], stages: Sequence[str] | None, *, restart: bool = False, redo: Report | None = None,
    take_over: bool = False, commands: Sequence[str] = (), joins: bool = False, json_file: str | None = None,
) -> list[tuple[int, dict[str, Any]]]:  # fmt: skip
    """Run stages, None for all, of the datasets one after the other; return their exit statuses and outcomes.

    Each of ``commands`` goes on with one of them. With ``joins`` they are gone on with as they were begun elsewhere.
    The report of the checker goes to ``json_file``.
    """

    def run_one(pair: tuple[Config, str]) -> tuple[int, dict[str, Any]]:
        config, command = pair
        result = _run_with_progress(
            config, choose_stages(config, stages), restart=restart, redo=redo, take_over=take_over, command=command,
            joins=joins,
        )  # fmt: skip
        report = result.report
        if report is not None:
            print_report(report, json_file)
        paths = _result_paths(result)
        print_pairs((name, plain(path, style="bold" if name == "next" else "")) for name, path in paths.items())
        status = FAILED if not result.ok else FINDINGS if result.num_errors else OK
        return status, {
            "name": config.name,
            "ok": result.ok,
            "stages": [
                {"name": stage.name, "ok": outcome.ok, "failed_units": sorted(outcome.failures),
                 "totals": None if outcome.totals is None else msgspec.to_builtins(outcome.totals)}
                for stage, outcome in result.stages
            ],
            "findings": {"errors": result.num_errors, "checked": report is not None},
            "paths": paths,
        }  # fmt: skip

    _warn_of_umask()
    pairs = list(zip(configs, commands or [""] * len(configs), strict=True))
    if len(pairs) == 1:
        return [run_one(pairs[0])]
    # One dataset is checked by its own run; of several, a bad one must not show only after the others have run.
    for config in configs:
        check_config(config, stages)
    return _each([(pair[0].name, pair) for pair in pairs], run_one)


def _run_with_progress(
    config: Config, stages: Sequence[str], *, restart: bool, redo: Report | None, take_over: bool, command: str,
    joins: bool,
) -> DatasetResult:  # fmt: skip
    """Run stages of one dataset, and print progress, accounts and the path of the page."""
    executor = JoiningExecutor(config.executor.workers, config.executor.device) if joins else None
    if redo is not None:
        config.executor.check(config)
        take_back(config, redo, stages, take_over=take_over)
    expected: dict[str, float] = {}
    if config.executor.runs_here and not restart:
        try:
            with disk_errors(Path(config.run_dir)):
                expected = expect_seconds(config, make_stages(config))
        except SharmillError as error:
            say(f"the time left of the whole run is not known: {error}", style="dim")
    with ProgressListener(
        names=[stage.name for stage in make_stages(config, stages) if is_main(stage.kind)], expected=expected
    ) as listener:
        result = run_dataset(
            config, listener, stages=stages, restart=restart, executor=executor, take_over=take_over, command=command,
            joins=joins,
        )  # fmt: skip
    print_result(result)
    if result.ok and set(choose_stages(config)) <= set(stages):
        say(report_on_run(config, make_stages(config), decode=True))
    return result


def read_redo_report(path: str | None, configs: Sequence[Config], *, restart: bool) -> Report | None:
    """Return the report that ``--redo`` names, or None without that option.

    Raises:
        ConfigError: it cannot be read, or is combined with several datasets or with ``--restart``.
    """
    if path is None:
        return None
    refuse((restart or len(configs) > 1, "--redo is for one configuration, and without --restart"), code="bad_usage")
    return read_report(Path(path))


@click.command()
@click.argument("directory", default="demo", type=click.Path(path_type=str))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE...]")
@json_option
def demo(directory: str, overrides: tuple[str, ...]) -> int:
    """Run all stages on a synthetic corpus.

    Makes corpus, run directory, dataset and demo.yaml in DIRECTORY (default: demo).
    """
    if is_override(directory):
        directory, overrides = "demo", (directory, *overrides)
    require_writable(Path(directory))
    config = make_demo(Path(directory), overrides, tell=say)
    status = _conclude(run_configs([config], None))
    if status == OK:
        # `make demo` calls it by its path, since its folder is not on PATH.
        command = "sharmill" if shutil.which("sharmill") else sys.argv[0]
        make_console().print(next_steps(config, command), markup=False, soft_wrap=True)
    return status


@click.command("work")
@click.argument("run_dir", type=click.Path(path_type=Path))
@workers_option
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), help="As executor.device.")
@json_option
def join_run(run_dir: Path, workers: int | Literal["auto"], device: str | None) -> int:
    """Add ranks on this machine to a run, until it has ended.

    A run is begun by sharmill run, sharmill submit or a job on Ray. Any number of these may be started, at any time,
    by any scheduler: they share what is left, and whoever comes to the end of a stage first plans the next.
    """
    paths = RunDir(run_dir.resolve())
    given = None
    if paths.path.is_dir():
        require_private(paths.path)
        given = paths.read_request()
    if given is None:
        raise ConfigError(
            f"no run has begun in {run_dir}: begin it with sharmill run or sharmill submit", code="no_run_dir"
        )
    if not Path(given.folder).is_dir():
        raise ConfigError(
            f"the run was begun in {given.folder}, at which the paths of its "
            "configuration begin, and that cannot be seen here: work where it is mounted",
            code="no_run_dir",
        )
    # The paths of its configuration are relative to it.
    os.chdir(given.folder)
    config = load_config(
        paths.config, [f"executor.workers={workers}", *([f"executor.device={device}"] if device else [])]
    )
    own = Path(config.run_dir).resolve()
    if own != paths.path:
        raise ConfigError(
            f"{paths.path} is the run directory {own}, copied or moved: name that, or begin a run here",
            code="no_run_dir",
        )
    return _conclude(run_configs([config], given.stages, commands=[given.command], joins=True))


@click.command()
@click.argument("arguments", nargs=-1, required=True, metavar="DATASET | URL | CONFIG... [KEY=VALUE...]")
@click.option("--deep", is_flag=True, help="Decode every audio item as well.")
@click.option("--recheck-codes", default="0", metavar="SHARE", help="Encode this share of the segments again: 0.1%.")
@click.option("--codec-model", "models", multiple=True, metavar="CODEC=MODEL", callback=parse_pairs,
              help="Model of a codec, for --recheck-codes.")  # fmt: skip
@click.option("--against", multiple=True, metavar="MANIFEST",
              help="Account for every record of this manifest, or table of a record's keys.")  # fmt: skip
@click.option("--rejects", multiple=True, metavar="FILE", help="rejects.jsonl of the run directory, for --against.")
@click.option("--audio-root", "audio_roots", multiple=True, metavar="DIR",
              help="What absolute paths in the manifests lie below, for --against.")  # fmt: skip
@click.option("--json", "json_file", type=click.Path(path_type=str), help="Write the whole report to this file.")
@workers_option
def validate(
    arguments: tuple[str, ...], workers: int | Literal["auto"], deep: bool, recheck_codes: str, models: dict[str, str],
    against: tuple[str, ...], rejects: tuple[str, ...], audio_roots: tuple[str, ...], json_file: str | None,
) -> int:  # fmt: skip
    """Check a finished dataset.

    DATASET is its directory, or its URL (https://, s3://, gs:// or ais://), whose files go through ~/.cache/sharmill;
    for a CONFIG it is that of the configuration, checked on the executor that this names.
    Exit status 3 means errors; warnings alone leave it at 0.
    """
    if json_file is not None:
        refuse((Path(json_file).is_dir(), f"--json {json_file} is a folder; name a file"), code="bad_usage")
        require_writable(Path(json_file).parent)
    try:
        level = ValidateConfig(deep=deep, recheck_codes=recheck_codes, codec_models=models)
    except ValueError as error:
        raise ConfigError(f"--recheck-codes {recheck_codes}: {error}", code="bad_usage") from error
    if arguments[0].endswith((".yaml", ".yml")):
        refuse(
            (
                against or rejects or audio_roots,
                "--against, --rejects and --audio-root are for a dataset directory; a configuration knows its own: "
                "validate.against_sources=true",
            ),
            code="bad_usage",
        )
        given = {f"validate.codec_models.{codec}": model for codec, model in models.items()} | {
            "validate.deep": "true" if deep else "",
            "validate.recheck_codes": recheck_codes if level.recheck_share else "",
            "executor.workers": "" if workers == "auto" else str(workers),
        }
        configs = load_configs("validate", arguments, [f"{key}={value}" for key, value in given.items() if value])
        refuse((json_file is not None and len(configs) > 1, "--json is for one configuration"), code="bad_usage")
        for config in configs:
            _require_recheck(models, config.section(ValidateConfig))
        return worst(status for status, _ in run_configs(configs, ["validate"], json_file=json_file))
    found = " ".join(arguments)
    refuse(
        (len(arguments) > 1, f"'validate' takes one dataset, or configurations that end in .yaml: {found}"),
        (not against and (rejects or audio_roots), "--rejects and --audio-root go with --against"),
        code="bad_usage",
    )
    _require_recheck(models, level)
    # Only the records are read, and --audio-root says what absolute paths are below.
    sources = tuple(
        TableSource(table=name, delimiter=delimiter_of(name), audio_root=".")
        if name.lower().endswith((".csv", ".tsv"))
        else NemoSource(manifest=name, audio_root=".")
        for name in against
    )
    accounts = ExpectedRecords(sources=sources, rejects=rejects, audio_roots=audio_roots) if against else None
    with tempfile.TemporaryDirectory(prefix="sharmill-validate-") as scratch, ProgressListener() as listener:
        subject = Subject(dataset_dir=open_directory(arguments[0]), level=level, against=accounts)
        checked = run_alone(
            ValidateStage(subject), RunDir(Path(scratch) / "run"), workers=workers, listener=listener, resumes=False
        )
        with checked as (run, _):
            report = read_report(run.product("validate/report"))
    print_report(report, json_file)
    return FINDINGS if report.errors else OK


def _require_recheck(models: dict[str, str], level: ValidateConfig) -> None:
    """Raise ConfigError where models are named and nothing is encoded again."""
    refuse((models and not level.recheck_share, "--codec-model goes with --recheck-codes"), code="bad_usage")


def print_result(result: DatasetResult) -> None:
    """Print the summary of a run over one dataset: accounts by stage, rejects by reason, failed units."""
    columns = ("stage", "in", "out", "rejects", "processed", "target audio")
    # A step has one row; a round of it that failed has its own.
    shown = [(stage, outcome) for stage, outcome in result.stages if is_main(stage.kind) or outcome.totals is None]
    print_table(result.config.name, columns, [_accounts(stage, outcome) for stage, outcome in shown or result.stages])
    say(
        "processed: all audio that a stage handles, contexts included; target audio: the utterances that went on",
        style="dim",
    )
    reasons: Counter[str] = Counter()
    for stage, outcome in result.stages:
        found = outcome.totals.rejects if outcome.totals is not None else {}
        reasons.update({} if stage.rejects_keep_cut else found)
        if stage.rejects_keep_cut and found:
            listed = f"{sum(found.values())} {'cuts' if stage.counts == 'records' else 'segments'} without codes"
            say(f"{stage.name}: {listed} (see {result.config.run_dir}/bad_codes.jsonl)", style="yellow")
    if reasons:
        listed = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        say(f"rejects: {listed} (see {result.config.run_dir}/rejects.jsonl)")
        share = reasons["no_similar_context"] / max(
            outcome.totals.num_in for _, outcome in result.stages if outcome.totals
        )
        if share > _MUCH_LOST:
            say(f"{share:.0%} of the records have no similar context: check that the speakers are right; sharmill "
                "calibrate finds a fitting match.min_similarity", style="yellow")  # fmt: skip
    for stage, outcome in result.stages:
        notes = outcome.totals.notes if outcome.totals else []
        for sentence in (*notes, *outcome.given_up[:_MAX_LINES]):
            say(f"{stage.name}: {sentence}", style="yellow")
        for error in list(outcome.failures.values())[:_MAX_LINES]:
            say(f"{stage.name}: unit {error.index} failed: {error.message}", style="red")
        if outcome.failures:
            say(f"tracebacks: {stage.dir.failures}; run the same command again to retry what failed")


def _result_paths(result: DatasetResult) -> dict[str, str]:
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
    else:
        is_shown = "page" in paths and "dataset" in paths
        paths["next"] = f"sharmill inspect {config.dataset_dir}" if is_shown else f"sharmill report {config.run_dir}"
    return paths


def _accounts(stage: StageRun, outcome: StageResult) -> list[str | Text]:
    """Return the row of a stage."""
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
    """Print findings by kind with the first examples, and what was checked, what could not be, and what mends it.

    The whole report goes to ``json_file``.
    """
    shown = (name for name in report.checked if name.startswith("cuts without "))
    names = [*(name for name in _SHOWN_COUNTS if name in report.checked), *shown]
    checked = ", ".join(f"{report.checked[name]:,.0f} {name}" for name in names)
    if not report.findings:
        say("validation: no findings", style="green")
    else:
        say(f"validation: {report.errors} errors, {report.warnings} warnings", style="bold")
    for kind in report.kinds:
        say(
            f"{kind.severity}: {kind.code}, found {kind.count} times",
            style="red" if kind.severity == "error" else "yellow",
        )
        for row in [row for row in report.findings if row["code"] == kind.code][:3]:
            shard = "" if row["shard"] is None else f"shard {row['shard']}, "
            text = f"{shard}{row['where']}: {row['sentence']}"
            say(f"  {text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3] + '...'}")
        say(f"  what to do: {kind.to_do}")
    say(f"checked: {checked}")
    if (expected := report.checked.get("records of the manifests")) is not None:
        found = ", ".join(f"{report.checked[name]:,.0f} {name.removeprefix('records ')}" for name in _ACCOUNTS)
        say(f"accounted for: {expected:,.0f} records of the manifests: {found}")
    say_all(f"not checked: {phrase}" for phrase in report.unchecked)
    if report.units_to_repeat:
        units = Counter(unit.stage for unit in report.units_to_repeat)
        listed = ", ".join(stage if stage == INDEX else f"{count} of {stage}" for stage, count in units.items())
        say(f"to be done again by --redo: {listed}")
    if json_file is not None:
        write_atomic(Path(json_file), encode_report(report))


@click.command()
@click.argument("arguments", nargs=-1, required=True, metavar="STAGE|all CONFIG... [KEY=VALUE...]")
@click.option("--cluster", type=click.Choice(["slurm", "local", "debug"]), default="slurm", show_default=True,
              help="slurm: job arrays; local: processes here; debug: in this process.")  # fmt: skip
@click.option("--profile", type=click.Path(path_type=str), help="What ranks need: a YAML file in configs/clusters.")
@_restart_option
@_redo_option
@click.option("--take-over", is_flag=True, help="Submit although jobs may be left that nobody here can be asked about.")
@click.option("--wait", is_flag=True, help="Wait until all datasets are done, and return how that ended.")
@click.option("--dry-run", is_flag=True, help="Show what would be submitted, with the scripts; submit nothing.")
@json_option
def submit(
    arguments: tuple[str, ...], cluster: str, profile: str | None, restart: bool, redo: str | None,
    take_over: bool, wait: bool, dry_run: bool,
) -> int:  # fmt: skip
    """Run stages on a cluster, each dataset with jobs of its own.

    CONFIG, STAGE and KEY=VALUE are those of sharmill run.
    """
    paths, overrides, names = split_arguments(arguments)
    stages = None if names == ["all"] else resolve_stages(names)
    refuse((not names, "name a stage, or 'all'"), code="bad_usage")
    if cluster == "debug":
        overrides.append("executor.workers=1")
    configs = [load_config(path, overrides) for path in paths]
    named = read_redo_report(redo, configs, restart=restart)
    if cluster != "slurm":
        return _conclude(run_configs(configs, stages, restart=restart, redo=named, take_over=take_over))
    require_package("submitit")
    _warn_of_umask()
    refuse(
        (
            dry_run and named is not None,
            "--dry-run shows what is left to do; with --redo that would have to be taken back first",
        ),
        code="bad_usage",
    )
    loaded = load_typed(ClusterProfile, profile) if profile else ClusterProfile()
    if loaded.max_parallel_all is not None:
        # Each has an equal share of the ranks that run at once.
        loaded = replace(loaded, max_parallel_all=max(1, loaded.max_parallel_all // len(configs)))
    options = ["--profile", str(Path(profile).absolute())] if profile else []
    runs = []
    for path, config in zip(paths, configs, strict=True):
        # As it can be typed anywhere: paths in configurations are relative to this folder.
        again = _command_line("submit", *(names or ["all"]), str(Path(path).absolute()), *overrides, *options)
        run = DatasetRun(config, tuple(choose_stages(config, stages)))
        runs.append((run, SlurmExecutor(run, loaded, again, restart=restart, take_over=take_over)))
    if dry_run:
        return _conclude(_each([(run.name, (run, jobs)) for run, jobs in runs], lambda pair: _show_submission(*pair)))
    if named is not None:
        take_back(configs[0], named, choose_stages(configs[0], stages), take_over=take_over)
    results = _each([(run.name, jobs) for run, jobs in runs], _start)
    if wait:
        started = [(run.name, (jobs, result)) for (run, jobs), result in zip(runs, results, strict=True)]
        results = _each(started, lambda pair: _finish(*pair))
    return _conclude(results)


def _show_submission(run: DatasetRun, jobs: SlurmExecutor) -> tuple[int, dict[str, Any]]:
    """Print and return all jobs that are known now, with their sbatch scripts: those of the first stage of a dataset
    that has something to do. What comes after it depends on its outcome; of later stages only the resource is known."""
    config = run.config
    check_config(config, run.stages)
    if config.append_to is not None and run.is_whole:
        say(f"{config.name}: once all stages are done, its shards are appended to {config.append_to}")
    left: list[tuple[StageRun, list[Unit]]] = []
    for stage in run.make_stages():
        units, done = read_or_preview_units(stage) if not left else ([], {})
        missing = [unit for unit in units if unit.index not in done]
        if missing or left:
            left.append((stage, missing))
    if not left:
        say(f"{config.name}: no unit is left to be submitted")
        return OK, {"name": config.name, "stage": None, "balance": [], "scripts": [], "later": []}
    (stage, units), *behind = left
    num_ranks = 0 if jobs.workers_in_job(stage, units) else jobs.num_ranks(stage, units)
    balance = _describe_balance(stage, units, jobs, num_ranks)
    later = []
    for following, _ in behind:
        may_be_own = following.resource == "cpu" and jobs.profile.driver_units
        own = ", or few units in the advance job itself" if may_be_own else ""
        most = f"at most {jobs.ranks_of(following).max_ranks} {following.resource} ranks"
        later.append(f"{following.name}, later: {most}{own}")
    scripts = jobs.scripts(stage, num_ranks)
    say_all(f"{config.name}, {stage.name}: {line}" for line in balance)
    for script in scripts:
        say_all(script.split("\n"))
    say_all(f"{config.name}, {line}" for line in later)
    return OK, {"name": config.name, "stage": stage.name, "balance": balance, "scripts": scripts, "later": later}


def _describe_balance(stage: StageRun, units: Sequence[Unit], jobs: SlurmExecutor, num_ranks: int) -> list[str]:
    """Return sentences about the units of a stage: who does them, and what waits for whom."""
    behind = "the job behind it, which runs only if that fails (afternotok)"
    if not num_ranks:
        return [
            f"{len(units)} units in the advance job itself, on {jobs.workers_in_job(stage, units)} workers",
            f"then {behind}",
        ]
    loads = [sum(unit.cost for unit in part) for part in pack_units(units, num_ranks)]
    balance = f", balance {sum(loads) / len(loads) / max(loads):.0%}" if max(loads) else ""
    cost = describe_cost(sum(loads), records=stage.cost_unit == "records")
    return [
        f"{len(units)} units ({cost}) on {num_ranks} {stage.resource} ranks; at most "
        f"{min(jobs.max_parallel(stage), num_ranks)} run at once",
        f"{min(loads):.1f} to {max(loads):.1f} {stage.cost_unit} per rank{balance}",
        f"then the advance job, once the ranks have ended (afterany), then {behind}",
    ]


def _start(jobs: SlurmExecutor) -> tuple[int, dict[str, Any]]:
    """Submit what is left of a dataset."""
    name, outcome = jobs.dataset.name, jobs.start()
    say(f"{name}: {outcome.message}")
    if isinstance(outcome, Submitted):
        return OK, {"name": name, "state": "waiting", "message": outcome.message, "jobs": outcome.jobs}
    return _describe_end(name, outcome)


def _finish(jobs: SlurmExecutor, started: tuple[int, dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    """Wait for the end of what was submitted."""
    if started[1].get("state") != "waiting":
        return started
    name, end = jobs.dataset.name, wait_for_end(jobs.run_dir)
    say(f"{name}: {end.state}: {end.message}")
    return _describe_end(name, end)


def _describe_end(name: str, end: RunOutcome) -> tuple[int, dict[str, Any]]:
    status = FAILED if end.state != "done" else FINDINGS if end.findings else OK
    return status, {"name": name} | msgspec.to_builtins(end)
