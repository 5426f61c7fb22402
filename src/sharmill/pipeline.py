"""Runs of stages on one dataset: the entry point for the command line, recipes and cluster jobs."""

import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, cast

import yaml

from sharmill.config import Config, to_yaml
from sharmill.encode.config import CodecConfig, EncodeConfig
from sharmill.engine.executor import Executor, Listener, StageResult, Submitted, Unlocked
from sharmill.engine.fence import release, require_own_output, stop_ranks
from sharmill.engine.launch import describe_workers, find_workers, read_attempts
from sharmill.engine.order import choose_stages, dependent_stages, make_stages, stage_classes
from sharmill.engine.plan import read_ledger, refuse_linked_folders, request_replan, request_replan_if_audio_came
from sharmill.engine.run import locked, merge_files, reserved, run_stage
from sharmill.engine.run_dir import RunDir, RunOutcome, RunRequest
from sharmill.engine.stage import ChecksConfig, StageRun, step_of
from sharmill.engine.unit import Unit
from sharmill.errors import ConfigError, FatalError, SharmillError, counted, refuse
from sharmill.executors.local import ConfiguredExecutor
from sharmill.executors.slurm.queue import require_no_jobs
from sharmill.files.atomic import remove, require_writable, write_atomic
from sharmill.files.disk import disk_errors
from sharmill.files.location import is_url
from sharmill.files.stored import read_stored
from sharmill.grow.join import append_dataset, require_fitting
from sharmill.rates import ranks_of_use
from sharmill.report.page import report_on_run
from sharmill.shar.fields import DATASET_FILE
from sharmill.stages.fields import require_distinct_fields
from sharmill.stages.inputs import segment_roots
from sharmill.validate.findings import Report, read_report, take_back_commits

log = logging.getLogger(__name__)

# The message of a run that has finished all of its stages.
ALL_DONE: Final = "all stages are done"


@dataclass(frozen=True)
class DatasetResult:
    """Results of a run on one dataset.

    Attributes:
        left: the stages of the dataset that are not finished.
    """

    config: Config
    stages: list[tuple[StageRun, StageResult]]
    left: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Return True if all requested stages are finished."""
        return all(result.ok for _, result in self.stages)

    def outcome(self, appended: str = "") -> RunOutcome:
        """Return the outcome of the run for the records: finished, or failed if units of its last stage failed.

        Args:
            appended: a sentence about the shards that were appended to another dataset.
        """
        stage, result = self.stages[-1] if self.stages else (None, StageResult())
        if stage is not None and not result.ok:
            named = "; ".join(f"unit {error.index}: {error.message}" for error in list(result.failures.values())[:3])
            return RunOutcome(
                state="failed",
                message=f"{stage.name}: {counted(len(result.failures), 'unit')} failed ({named}); "
                f"tracebacks: {stage.dir.failures}",
                code="units_failed",
            )
        out = [sentence for stage, _ in self.stages for sentence in read_attempts(stage).describe_excluded()]
        done = ALL_DONE if self.stages else "no stage to run"
        if self.left and self.stages:
            asked = ", ".join(dict.fromkeys(step_of(stage.kind) for stage, _ in self.stages))
            done = f"{asked} done as requested; left: {', '.join(self.left)}"
        done = "; ".join([done, *out])
        return RunOutcome(state="done", message="; ".join(filter(None, [done, appended])), findings=self.num_errors)

    @property
    def report(self) -> Report | None:
        """The report of the checker; None if it did not run."""
        checked = [stage for stage, result in self.stages if result.totals and "report" in result.totals.products]
        return read_report(checked[-1].product(f"{checked[-1].key}/report")) if checked else None

    @property
    def num_errors(self) -> int:
        """Number of errors found by the checker."""
        return self.report.errors if self.report else 0


def stages_of_run(config: Config) -> list[StageRun]:
    """Return the stages of a configuration, including the stages of codecs from earlier runs in the run directory."""
    encode = config.section(EncodeConfig)
    folder = RunDir(Path(config.run_dir)).stage("encode").path
    planned = sorted(path.name for path in folder.glob("*") if RunDir(folder).stage(path.name).units.exists())
    named = {codec.name for codec in encode.codecs}
    earlier = [CodecConfig(name=name, model="") for name in planned if name not in named]
    config = config.with_section(replace(encode, codecs=[*earlier, *encode.codecs]))
    chosen = choose_stages(config)
    # Stages that need sources are not chosen if the configuration has none, but an earlier run may have planned them.
    every = make_stages(config, stage_classes(config))
    return [stage for stage in every if stage.kind in chosen or stage.dir.units.exists()]


def check_config(config: Config, stages: Sequence[str] | None = None, *, restart: bool = False) -> None:
    """Check a configuration before any work: its stages, models, patterns, filters, formats and folders.

    Raises:
        ConfigError: a value is wrong; the message names the remedy.
    """
    stages = choose_stages(config, stages)
    refuse(
        (
            not config.sources and not (Path(config.dataset_dir) / DATASET_FILE).exists(),
            "prepare needs sources: name a manifest or other input, or a finished dataset as dataset_dir",
        ),
        code="missing_key",
    )
    for key, folder in (("run_dir", config.run_dir), ("dataset_dir", config.dataset_dir)):
        refuse((is_url(folder), f"{key} is a URL; name a folder, and copy the dataset with sharmill publish"))
    every = make_stages(config)
    for stage in stage_classes(config).values():
        if issubclass(stage, ChecksConfig):
            stage().check(config)
    require_distinct_fields(every)
    if config.append_to is not None:
        require_fitting(config, Path(config.append_to))
    run_dir, dataset_dir = Path(config.run_dir).resolve(), Path(config.dataset_dir).resolve()
    if dataset_dir.is_relative_to(run_dir) or run_dir.is_relative_to(dataset_dir):
        raise ConfigError(
            "run_dir and dataset_dir must not contain each other: choose separate folders",
            code="bad_config_value",
        )
    for run in [run for run in every if run.kind in stages]:
        if run.input is not None:
            run.input.check()
        if run.publication is not None and run.publication.replaces_root:
            require_own_output(run)
    if stages:
        require_writable(run_dir)
    for run in _unfinished(config, stages, restart=restart):
        if run.model is not None:
            run.model.check()


def take_back(config: Config, findings: Report, stages: Sequence[str], *, take_over: bool) -> None:
    """Revoke the commits of units that a validation found damaged; see ``take_back_commits``.

    Raises:
        ConfigError: a run of ``stages`` could not start, or jobs that work on the same units are still in the queue.
    """
    check_config(config, stages)
    require_no_jobs(RunDir(Path(config.run_dir)), take_over=take_over)
    take_back_commits(config, findings, stages)


def _unfinished(config: Config, stages: Sequence[str], *, restart: bool) -> list[StageRun]:
    """Return the stages that still have work to do, and would therefore load their models."""
    return [stage for stage in make_stages(config, stages) if restart or not stage.dir.is_finished()]


def run_dataset(
    config: Config,
    listener: Listener,
    *,
    stages: Sequence[str] | None = None,
    restart: bool = False,
    executor: Executor | None = None,
    wait_seconds: float = math.inf,
    take_over: bool = False,
    command: str = "",
    is_joining: bool = False,
) -> DatasetResult:
    """Run stages of one dataset in order, until units of a stage fail or a stage is submitted to a cluster.

    If other processes work on the same run, this process adds its ranks to theirs.

    Args:
        listener: receives the progress of the run; ``Listener()`` ignores it.
        stages: names of stages; all stages of the dataset by default.
        restart: start these stages over.
        executor: the executor; the configured one by default.
        wait_seconds: how long to wait until another process releases the run directory.
        take_over: run even if SLURM cannot be asked about jobs that were submitted from the run directory. With
            ``restart``, run even if other ranks are still working; their work is discarded.
        command: the command that resumes the run, as it can be typed in any folder.
        is_joining: only join a run that was started elsewhere; refuse a run that has failed.

    Raises:
        ConfigError: the configuration is wrong, or the run directory is in use. No work has been done.
        FatalError: a stage stopped.

    Example:
        >>> from sharmill.config import load_config
        >>> from sharmill.engine.run import Listener
        >>> result = run_dataset(load_config("configs/demo.yaml"), Listener())  # doctest: +SKIP
        >>> result.ok  # doctest: +SKIP
        True
    """
    if executor is None:
        executor = cast("ConfiguredExecutor", config.executor)
        executor.check(config)
    stages = choose_stages(config, stages)
    run_dir = RunDir(Path(config.run_dir))
    with disk_errors(run_dir.path):
        check_config(config, stages, restart=restart)
        executor.require_devices(_unfinished(config, stages, restart=restart))
    with disk_errors(run_dir.path), locked(run_dir, wait_seconds) as lock:
        for stage in make_stages(config):
            refuse_linked_folders(stage)
        request = RunRequest(
            stages=list(stages), folder=str(Path.cwd()), run=str(run_dir.path.resolve()), command=command
        )
        if not is_joining:
            _begin(config, request, executor, restart=restart, take_over=take_over)
        elif (outcome := run_dir.read_outcome()) is not None and outcome.state != "done":
            raise outcome.as_error()
        lock.must_end = run_dir.is_cancelled
        try:
            with reserved(run_dir, make_stages(config, stages), restart=restart, releases=executor.waits):
                results = _run_stages(config, stages, executor, listener, restart=restart, unlocked=lock.released)
            _merge_rejects(config)
            _check_accounts(config, results)
        except SharmillError as error:
            # Errors of the cleanup must not hide the error that ended the run.
            with suppress(SharmillError, OSError):
                # An error of ranks that joined a run, such as a missing device, does not end the run for other ranks.
                is_own = executor.waits and not is_joining and error.code != "superseded_plan"
                if is_own and not find_workers(run_dir):
                    run_dir.note_outcome(RunOutcome.from_error(error))
                _merge_rejects(config)
            raise
        left = dict.fromkeys(step_of(stage.kind) for stage in _unfinished(config, choose_stages(config), restart=False))
        result = DatasetResult(config, results, list(left))
        # Other processes may have requested stages that were not named here.
        request = run_dir.read_request() or request
        if executor.waits and not (result.ok and _unfinished(config, request.stages, restart=False)):
            run_dir.note_outcome(result.outcome())
    return result


def _begin(config: Config, request: RunRequest, executor: Executor, *, restart: bool, take_over: bool) -> None:
    """Start a run, or join it if other processes are working on it. The caller must hold the lock of the run directory.

    Raises:
        ConfigError: other processes are working on another configuration, or are still working although a restart is
            requested.
        FatalError: the run of this job has ended.
    """
    run_dir = RunDir(Path(config.run_dir))
    live = find_workers(run_dir, ranks=executor.waits)
    if live and restart and not take_over:
        raise ConfigError(
            f"this run is in use by {describe_workers(live)}: wait until it ends, or stop it with sharmill cancel "
            f"{run_dir.path}; --restart --take-over starts over at once and discards their work",
            code="locked",
        )
    is_joining = bool(live) and not restart
    if executor.waits and not is_joining:
        require_no_jobs(run_dir, take_over=take_over)
    jobs = executor.find_jobs(run_dir)
    if jobs is None:
        return
    if is_joining or jobs:
        theirs, ours = (yaml.safe_load(text) for text in (read_stored(run_dir.config), to_yaml(config)))
        changed = [key for key in sorted(theirs | ours) if key != "executor" and theirs.get(key) != ours.get(key)]
        if changed:
            raise ConfigError(
                f"this run is in use by {describe_workers([*live, *map(str, jobs)])} with a different configuration "
                f"({', '.join(changed)} in {run_dir.config}): wait until it ends, or choose another run_dir",
                code="locked",
            )
    else:
        write_atomic(run_dir.config, to_yaml(config))
        roots = segment_roots(config)
        for stage in make_stages(config):
            request_replan_if_audio_came(stage, roots.may_have)
    executor.begin(run_dir, request, jobs, is_joining=is_joining)


def _run_stages(
    config: Config,
    stages: Sequence[str],
    executor: Executor,
    listener: Listener,
    *,
    restart: bool,
    unlocked: Unlocked,
) -> list[tuple[StageRun, StageResult]]:
    """Run stages until units of a stage fail or a stage is submitted; return each of these stages with its result."""
    results = []
    chosen = make_stages(config, stages)
    if restart and stages:
        # Ranks of a submission that was taken over must stop; otherwise they would publish output of the earlier input.
        kinds = [*stage_classes(config)]
        for stage in make_stages(config, kinds[kinds.index(stages[0]) :]):
            stop_ranks(stage)
        for stage in chosen:
            request_replan(stage)
    for stage in chosen:
        if "*" in stage.declaration.after:
            _merge_rejects(config)
        try:
            result = run_stage(stage, executor, listener, restart=restart, unlocked=unlocked)
        except ConfigError as error:
            if error.code != "changed_plan":
                raise
            raise ConfigError(f"{error}: {_restart_command(config, stages, stage)}", code=error.code) from error
        results.append((stage, result))
        if not result.ok:
            break
        if all(one.dir.is_finished() for one in chosen if one.publication is not None):
            # The remaining stage is the checker, which reads a finished dataset and needs no reservation.
            release(chosen)
    return results


def _restart_command(config: Config, stages: Sequence[str], changed: StageRun) -> str:
    """Return the command that restarts a stage and the stages that depend on it, whose input changes."""
    behind = dependent_stages(config, changed.kind)
    begun = {stage.kind for stage in make_stages(config, behind) if any(stage.ranks.ledger.glob("*.jsonl"))}
    named = [kind for kind in behind if kind in stages or kind in begun or kind == changed.kind]
    steps = dict.fromkeys(map(step_of, named)) if len(named) < len(choose_stages(config)) else []
    return " ".join(["sharmill run CONFIG", *steps, "--restart"])


def _merge_rejects(config: Config) -> None:
    """Write all rejects of the dataset so far, in the order of stages, including finished units of unfinished stages.

    Rejects whose cut stays in the dataset are written to a separate file, which exists only if there are any.
    """
    run_dir, lost, kept = RunDir(Path(config.run_dir)), list[Path](), list[Path]()
    for stage in stages_of_run(config):
        files = kept if stage.rejects_keep_cut else lost
        if stage.dir.done.exists():
            files.append(stage.dir.rejects)
        elif stage.dir.units.exists():
            commits = read_ledger(stage.dir, stage.dir.read_units())
            files += [stage.ranks.unit_rejects(index) for index in sorted(commits) if commits[index].num_rejected]
    merge_files(filter(Path.exists, lost), run_dir.rejects)
    if kept := [path for path in kept if path.exists() and path.stat().st_size]:
        merge_files(kept, run_dir.bad_codes)
    else:
        remove(run_dir.bad_codes)


def _check_accounts(config: Config, results: Sequence[tuple[StageRun, StageResult]]) -> None:
    """Raise FatalError unless each stage received all records that the stage before it kept."""
    counted = [(stage, result.totals) for stage, result in results if result.totals and stage.counts == "records"]
    for number, (after, came) in enumerate(counted):
        # Compare only with the last stage whose output was read, since that stage has itself read the output of earlier
        # stages. The checker, which comes after all other stages ("*"), reads the dataset.
        reads = after.declaration.after
        read = [one for one in counted[:number] if one[0].kind in reads or ("*" in reads and one[0].shares_root)]
        for before, totals in read[-1:]:
            went_on = totals.num_in if before.rejects_keep_cut else totals.num_out
            if came.num_in != went_on:
                raise FatalError(
                    f"record counts do not match: {before.name} kept {went_on} records, but {after.name} received "
                    f"{came.num_in}; restart {after.name}: {_restart_command(config, (), after)}",
                    code="accounts",
                )


@dataclass(frozen=True)
class DatasetRun:
    """The stages of a dataset to be run, by default all of them; cluster jobs receive this object."""

    config: Config
    stages: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def run_dir(self) -> Path:
        return Path(self.config.run_dir)

    def make_stages(self) -> list[StageRun]:
        """Return the stages in the order in which they run."""
        return make_stages(self.config, self.stages)

    def run(self, executor: Executor, *, restart: bool, wait_seconds: float) -> RunOutcome | Submitted:
        """Run the stages; see ``run_dataset``. If all finish without errors, append the shards to ``append_to``."""
        config = self.config
        result = run_dataset(
            config, Listener(), stages=self.stages, restart=restart, executor=executor, wait_seconds=wait_seconds
        )
        if result.stages and (submitted := result.stages[-1][1].submitted) is not None:
            return submitted
        if config.append_to is None or not self.is_whole or result.report is None or result.num_errors:
            return result.outcome()
        appended = append_dataset(config.append_to, config.dataset_dir)
        return result.outcome(appended.describe(config.append_to, config.dataset_dir))

    def ranks_of_use(self, stage: StageRun, units: Sequence[Unit]) -> int:
        """Return the largest number of ranks that the units of a stage can keep busy."""
        return ranks_of_use(self.config, stage, units)

    def show(self) -> None:
        """Write the report of the finished run, if it was a run of all stages."""
        if self.is_whole:
            # A driver job has little memory, so no model is loaded to decode codes.
            log.info("%s", report_on_run(self.config, make_stages(self.config), decode=False))

    @property
    def is_whole(self) -> bool:
        """Return True if these are all stages of the dataset."""
        return self.stages is None or set(choose_stages(self.config)) <= set(self.stages)
