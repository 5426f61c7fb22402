"""Runs of stages over the dataset of a configuration; the entry point of command line, recipes and cluster jobs."""

import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

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
from sharmill.files.stored import read_stored
from sharmill.grow.join import append_dataset, require_fitting
from sharmill.rates import ranks_of_use
from sharmill.report.page import report_on_run
from sharmill.shar.fields import DATASET_FILE
from sharmill.stages.fields import require_distinct_fields
from sharmill.stages.inputs import segment_roots
from sharmill.validate.findings import Report, read_report, take_back_commits

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DatasetResult:
    """The results of a run over one dataset; ``left`` are the steps of the dataset that are not done."""

    config: Config
    stages: list[tuple[StageRun, StageResult]]
    left: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Return True if all stages that were to be run are done."""
        return all(result.ok for _, result in self.stages)

    def outcome(self, appended: str = "") -> RunOutcome:
        """Return the outcome of the run, to be recorded: its last stage is done, or has units that failed.

        ``appended`` is a sentence about what went to another dataset.
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
        done = "all stages are done" if self.stages else "there is no stage to run"
        if self.left and self.stages:
            asked = ", ".join(dict.fromkeys(step_of(stage.kind) for stage, _ in self.stages))
            done = f"{asked} done, as asked for; left: {', '.join(self.left)}"
        done = "; on the way: ".join([done, *out])
        return RunOutcome(state="done", message="; ".join(filter(None, [done, appended])), findings=self.num_errors)

    @property
    def report(self) -> Report | None:
        """The report of the checker, if it ran."""
        checked = [stage for stage, result in self.stages if result.totals and "report" in result.totals.products]
        return read_report(checked[-1].product(f"{checked[-1].key}/report")) if checked else None

    @property
    def num_errors(self) -> int:
        """The number of errors that the checker found."""
        return self.report.errors if self.report else 0


def stages_of_run(config: Config) -> list[StageRun]:
    """Return the stages of a configuration, and those of codecs that earlier runs added to the same run directory."""
    encode = config.section(EncodeConfig)
    folder = RunDir(Path(config.run_dir)).stage("encode").path
    planned = sorted(path.name for path in folder.glob("*") if RunDir(folder).stage(path.name).units.exists())
    named = {codec.name for codec in encode.codecs}
    earlier = [CodecConfig(name=name, model="") for name in planned if name not in named]
    config = config.with_section(replace(encode, codecs=[*earlier, *encode.codecs]))
    chosen = choose_stages(config)
    # Without sources, those of a run that had some are not chosen.
    every = make_stages(config, stage_classes(config))
    return [stage for stage in every if stage.kind in chosen or stage.dir.units.exists()]


def check_config(config: Config, stages: Sequence[str] | None = None, *, restart: bool = False) -> None:
    """Check, before any work, what can be checked then: stages, models, patterns, filters, formats, folders.

    Raises:
        ConfigError: with what to change.
    """
    stages = choose_stages(config, stages)
    refuse(
        (
            not config.sources and not (Path(config.dataset_dir) / DATASET_FILE).exists(),
            "prepare needs sources: name at least one manifest or other input, or a finished dataset as dataset_dir",
        ),
        code="missing_key",
    )
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
            "run_dir and dataset_dir must not lie within each other: a dataset holds nothing else",
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
    """Take back what a validation found damaged, for a run of ``stages`` that can begin; see ``take_back_commits``.

    Raises:
        ConfigError: it cannot, or jobs of an earlier one are left, whose ranks would add to what is taken back.
    """
    check_config(config, stages)
    require_no_jobs(RunDir(Path(config.run_dir)), take_over=take_over)
    take_back_commits(config, findings, stages)


def _unfinished(config: Config, stages: Sequence[str], *, restart: bool) -> list[StageRun]:
    """Return the stages that will load a model, if they have one."""
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
    joins: bool = False,
) -> DatasetResult:
    """Run stages over one dataset, in order, until one has units that failed or is submitted to a cluster.

    Where others are at work on the same run, this process adds its ranks to theirs.

    Args:
        listener: follows the run; ``Listener()`` shows nothing.
        stages: names of stages; by default all that the dataset has.
        restart: begin these stages anew.
        executor: by default the one that the configuration names.
        wait_seconds: how long to wait for another process to leave the run directory.
        take_over: go on also where SLURM cannot be asked whether jobs submitted from the run directory are left, and
            with ``restart`` also beside ranks that are at work, which come to nothing then.
        command: what goes on with the run, as it can be typed anywhere.
        joins: go on with a run only as it was begun elsewhere, and not with one that has failed.

    Raises:
        ConfigError: before any work.
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
        if not joins:
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
            # The error that ended the run is the one to be raised.
            with suppress(SharmillError, OSError):
                # An error of the ranks that are added here, such as one of their device, need not end those of others.
                is_own = executor.waits and not joins and error.code != "superseded_plan"
                if is_own and not find_workers(run_dir):
                    run_dir.note_outcome(RunOutcome.from_error(error))
                _merge_rejects(config)
            raise
        left = dict.fromkeys(step_of(stage.kind) for stage in _unfinished(config, choose_stages(config), restart=False))
        result = DatasetResult(config, results, list(left))
        # Others may go on to stages that were not named here.
        request = run_dir.read_request() or request
        if executor.waits and not (result.ok and _unfinished(config, request.stages, restart=False)):
            run_dir.note_outcome(result.outcome())
    return result


def _begin(config: Config, request: RunRequest, executor: Executor, *, restart: bool, take_over: bool) -> None:
    """Begin a run, or join it where others are at work. This process has the run directory.

    Raises:
        ConfigError: they are at work on another configuration, or it is to begin anew beside them.
        FatalError: the run of this job has ended.
    """
    run_dir = RunDir(Path(config.run_dir))
    live = find_workers(run_dir, ranks=executor.waits)
    if live and restart and not take_over:
        raise ConfigError(
            f"{describe_workers(live)} at work on this run: wait until it ends, or end it by sharmill cancel "
            f"{run_dir.path}; --restart --take-over begins anew all the same, and what they do comes to nothing",
            code="locked",
        )
    joins = bool(live) and not restart
    if executor.waits and not joins:
        require_no_jobs(run_dir, take_over=take_over)
    jobs = executor.find_jobs(run_dir)
    if jobs is None:
        return
    if joins or jobs:
        theirs, ours = (yaml.safe_load(text) for text in (read_stored(run_dir.config), to_yaml(config)))
        changed = [key for key in sorted(theirs | ours) if key != "executor" and theirs.get(key) != ours.get(key)]
        if changed:
            raise ConfigError(
                f"{describe_workers([*live, *map(str, jobs)])} at work on this run with another configuration "
                f"({', '.join(changed)} in {run_dir.config}): wait until it ends, or choose another run_dir",
                code="locked",
            )
    else:
        write_atomic(run_dir.config, to_yaml(config))
        roots = segment_roots(config)
        for stage in make_stages(config):
            request_replan_if_audio_came(stage, roots.may_have)
    executor.begin(run_dir, request, jobs, is_joining=joins)


def _run_stages(
    config: Config,
    stages: Sequence[str],
    executor: Executor,
    listener: Listener,
    *,
    restart: bool,
    unlocked: Unlocked,
) -> list[tuple[StageRun, StageResult]]:
    """Run stages until one has units that failed or is submitted, and return how each ended."""
    results = []
    chosen = make_stages(config, stages)
    if restart and stages:
        # Ranks of a submission that was taken over would go on publishing what comes of the input that was.
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
            # The checker looks at a dataset that is finished.
            release(chosen)
    return results


def _restart_command(config: Config, stages: Sequence[str], changed: StageRun) -> str:
    """Return the command that begins a stage anew, and those behind it, whose input is another then."""
    behind = dependent_stages(config, changed.kind)
    begun = {stage.kind for stage in make_stages(config, behind) if any(stage.ranks.ledger.glob("*.jsonl"))}
    named = [kind for kind in behind if kind in stages or kind in begun or kind == changed.kind]
    steps = dict.fromkeys(map(step_of, named)) if len(named) < len(choose_stages(config)) else []
    return " ".join(["sharmill run CONFIG", *steps, "--restart"])


def _merge_rejects(config: Config) -> None:
    """Write all rejects of the dataset so far, in the order of the stages: of each unit where a stage is not done.

    What stays in the dataset is listed apart, and without any there is no such file.
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
    """Raise FatalError unless the records that went on from a stage came into those that read its output."""
    counted = [(stage, result.totals) for stage, result in results if result.totals and stage.counts == "records"]
    for number, (after, came) in enumerate(counted):
        # Of several the last: it has read the output of the others. The checker of all looks at the dataset.
        reads = after.declaration.after
        read = [one for one in counted[:number] if one[0].kind in reads or ("*" in reads and one[0].shares_root)]
        for before, totals in read[-1:]:
            went_on = totals.num_in if before.rejects_keep_cut else totals.num_out
            if came.num_in != went_on:
                raise FatalError(
                    f"accounts do not add up: {went_on} records went on from {before.name}, but {came.num_in} "
                    f"came into {after.name}; begin that anew: {_restart_command(config, (), after)}",
                    code="accounts",
                )


@dataclass(frozen=True)
class DatasetRun:
    """The stages of one dataset that are to be run, by default all: what the jobs of a cluster carry along."""

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
        """Run the stages; see ``run_dataset``. Once all of them are done, the shards are appended to ``append_to``."""
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
        """Return for how many ranks the units of a stage are enough."""
        return ranks_of_use(self.config, stage, units)

    def show(self) -> None:
        """Make the page about a finished run of all stages."""
        if self.is_whole:
            # An advance job has little memory: no model is loaded in it.
            log.info("%s", report_on_run(self.config, make_stages(self.config), decode=False))

    @property
    def is_whole(self) -> bool:
        """Return True if all stages of the dataset are among these."""
        return self.stages is None or set(choose_stages(self.config)) <= set(self.stages)
