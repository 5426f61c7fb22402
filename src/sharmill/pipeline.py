"""Runs of stages over the dataset of a configuration; the entry point of command line, recipes and cluster jobs."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import yaml

from sharmill.config import Config, load_for_display, to_yaml
from sharmill.encode.config import CodecConfig, EncodeConfig
from sharmill.encode.stage import EncodeStage
from sharmill.engine.fence import release, stop_ranks
from sharmill.engine.plan import mark_to_begin_anew, read_ledger, refuse_linked_folders
from sharmill.engine.run import Executor, Listener, Unlocked, locked, merge_files, reserved, run_stage
from sharmill.engine.stage import End, Given, RunDir, Stage, StageResult, stage_classes, stages_behind
from sharmill.engine.state import Attempts, describe_workers, find_workers
from sharmill.errors import ConfigError, FatalError, SharmillError
from sharmill.executors.local import ConfiguredExecutor
from sharmill.executors.slurm.queue import require_no_jobs
from sharmill.files.atomic import remove, require_writable, write_atomic
from sharmill.files.disk import disk_errors
from sharmill.files.stored import read_stored
from sharmill.grow.join import require_fitting
from sharmill.validate.findings import Report, take_back_commits


@dataclass(frozen=True)
class DatasetResult:
    """The results of a run over one dataset."""

    config: Config
    stages: list[tuple[Stage, StageResult]]

    @property
    def ok(self) -> bool:
        """Return True if all stages that were to be run are done."""
        return all(result.ok for _, result in self.stages)

    def end(self, appended: str = "") -> End:
        """Return the end of the run, as it is noted: of its stages the last is done, or has units that failed.

        ``appended`` is a sentence about what went to another dataset.
        """
        stage, result = self.stages[-1] if self.stages else (None, StageResult())
        if stage is not None and not result.ok:
            named = "; ".join(f"unit {error.index}: {error.message}" for error in list(result.failures.values())[:3])
            return End(
                state="failed",
                message=f"{stage.name}: {len(result.failures)} units failed ({named}); "
                f"tracebacks: {stage.dir.failures}",
                code="units_failed",
            )
        out = [sentence for stage, _ in self.stages for sentence in Attempts(stage.dir.attempts).describe_out()]
        done = "; on the way: ".join(["all stages are done" if self.stages else "there is no stage to run", *out])
        return End(state="done", message="; ".join(filter(None, [done, appended])), findings=self.num_errors)

    @property
    def report(self) -> Report | None:
        """The report of the checker, if it ran."""
        reports = (stage.report() for stage, result in self.stages if result.ok)
        return next((report for report in reports if report is not None), None)

    @property
    def num_errors(self) -> int:
        """The number of errors that the checker found."""
        return self.report.errors if self.report else 0


def choose_stages(config: Config, names: Sequence[str] | None = None) -> Sequence[str]:
    """Return the stages that are named, or all of the dataset where none are, with those that are a part of them.

    Raises:
        ConfigError: one is named that a dataset of this kind does not have.
    """
    classes = stage_classes(config)
    if absent := [name for name in names or () if name not in classes]:
        what = "null in" if absent[0] in config.sections else "not a key of"
        raise ConfigError(
            f"{config.name} has no stage {absent[0]}: {absent[0]} is {what} its configuration; its stages are "
            f"{', '.join(classes)}",
            code="unknown_stage",
        )
    if names is None:
        return tuple(classes)
    return tuple(kind for kind, stage in classes.items() if kind in names or stage.part_of in names)


def make_stages(config: Config, names: Sequence[str] | None = None) -> list[Stage]:
    """Return the stages in the order in which they run, by default all; there may be several of one kind."""
    kinds, classes = choose_stages(config, names), stage_classes(config)
    # Each looks for the plan that is there.
    with disk_errors(Path(config.run_dir)):
        chosen = [stage for kind in kinds for stage in classes[kind].of(config)]
    for stage in chosen:
        stage.metrics = config.metrics
        stage.references = config.references
        stage.unit_time_limit = config.executor.unit_time_limit
        stage.scratch = config.executor.scratch
        stage.seconds_until_seen = config.executor.seconds_until_seen
        stage.log_level = config.executor.log_level
    return chosen


def config_of_run(run_dir: str | Path) -> Config:
    """Return the configuration that a run directory has, to show its run; see ``load_for_display``.

    Raises:
        ConfigError: it is no run directory.
    """
    paths = RunDir(Path(run_dir))
    if not paths.config.exists():
        raise ConfigError(f"{run_dir} is not a run directory: there is no {paths.config.name} in it", code="no_run_dir")
    shown = load_for_display(paths.config)
    dataset_dir = shown.dataset_dir
    if ("dataset_dir",) in shown.references.written:
        dataset_dir = str(paths.read_reserved() or dataset_dir)
    # By its own path: the stored one is relative to where the run was started, if it is relative.
    return replace(shown, run_dir=str(run_dir), dataset_dir=dataset_dir)


def stages_of_run(config: Config) -> list[Stage]:
    """Return the stages of a configuration, and those of codecs that earlier runs added to the same run directory."""
    encode = config.section(EncodeConfig)
    folder = RunDir(Path(config.run_dir)).stage(EncodeStage.kind).path
    planned = sorted(path.name for path in folder.glob("*") if RunDir(folder).stage(path.name).units.exists())
    named = {codec.name for codec in encode.codecs}
    earlier = [CodecConfig(name=name, model="") for name in planned if name not in named]
    return make_stages(config.with_section(replace(encode, codecs=[*earlier, *encode.codecs])))


def check_config(config: Config, stages: Sequence[str] | None = None, *, restart: bool = False) -> None:
    """Check, before any work, what can be checked then: stages, models, patterns, filters, formats, folders.

    Raises:
        ConfigError: with what to change.
    """
    stages = choose_stages(config, stages)
    for stage_class in stage_classes(config).values():
        stage_class.check(config)
    if config.append_to is not None:
        require_fitting(config, Path(config.append_to))
    run_dir, dataset_dir = Path(config.run_dir).resolve(), Path(config.dataset_dir).resolve()
    if dataset_dir.is_relative_to(run_dir) or run_dir.is_relative_to(dataset_dir):
        raise ConfigError(
            "run_dir and dataset_dir must not lie within each other: a dataset holds nothing else",
            code="bad_config_value",
        )
    for stage in make_stages(config, stages):
        stage.check_input()
    if stages:
        require_writable(run_dir)
    for stage in _unfinished(config, stages, restart=restart):
        stage.require_models()


def take_back(config: Config, findings: Report, stages: Sequence[str], *, take_over: bool) -> None:
    """Take back what a validation found damaged, for a run of ``stages`` that can begin; see ``take_back_commits``.

    Raises:
        ConfigError: it cannot, or jobs of an earlier one are left, whose ranks would add to what is taken back.
    """
    check_config(config, stages)
    require_no_jobs(RunDir(Path(config.run_dir)), take_over=take_over)
    take_back_commits(config, findings, stages)


def _unfinished(config: Config, stages: Sequence[str], *, restart: bool) -> list[Stage]:
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
        given = Given(stages=list(stages), folder=str(Path.cwd()), run=str(run_dir.path.resolve()), command=command)
        if not joins:
            _begin(config, given, executor, restart=restart, take_over=take_over)
        elif (end := run_dir.read_end()) is not None and end.state != "done":
            raise end.as_error()
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
                    run_dir.note_end(End.of(error))
                _merge_rejects(config)
            raise
        result = DatasetResult(config, results)
        # Others may go on to stages that were not named here.
        given = run_dir.read_given() or given
        if executor.waits and not (result.ok and _unfinished(config, given.stages, restart=False)):
            run_dir.note_end(result.end())
    return result


def _begin(config: Config, given: Given, executor: Executor, *, restart: bool, take_over: bool) -> None:
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
    executor.begin(run_dir, given, jobs, joins=joins)


def _run_stages(
    config: Config,
    stages: Sequence[str],
    executor: Executor,
    listener: Listener,
    *,
    restart: bool,
    unlocked: Unlocked,
) -> list[tuple[Stage, StageResult]]:
    """Run stages until one has units that failed or is submitted, and return how each ended."""
    results = []
    chosen = make_stages(config, stages)
    if restart and stages:
        # Ranks of a submission that was taken over would go on publishing what comes of the input that was.
        kinds = choose_stages(config)
        for stage in make_stages(config, kinds[kinds.index(stages[0]) :]):
            stop_ranks(stage)
        for stage in chosen:
            mark_to_begin_anew(stage)
    for stage in chosen:
        if "*" in stage.after:
            _merge_rejects(config)
        try:
            result = run_stage(
                stage, executor, listener, max_reject_fraction=config.max_reject_fraction, restart=restart,
                unlocked=unlocked,
            )  # fmt: skip
        except ConfigError as error:
            if error.code != "changed_plan":
                raise
            raise ConfigError(f"{error}: {_restart_command(config, stages, stage)}", code=error.code) from error
        results.append((stage, result))
        if not result.ok:
            break
        if all(one.dir.is_finished() for one in chosen if one.reserves[1]):
            # The checker looks at a dataset that is finished.
            release(chosen)
    return results


def _restart_command(config: Config, stages: Sequence[str], changed: Stage) -> str:
    """Return the command that begins a stage anew, and those behind it, whose input is another then."""
    behind = stages_behind(config, changed.kind)
    begun = {stage.kind for stage in make_stages(config, behind) if any(stage.dir.ledger.glob("*.jsonl"))}
    named = [kind for kind in behind if kind in stages or kind in begun or kind == changed.kind]
    return " ".join(["sharmill run CONFIG", *(named if len(named) < len(choose_stages(config)) else []), "--restart"])


def _merge_rejects(config: Config) -> None:
    """Write all rejects of the dataset so far, in the order of the stages: of each unit where a stage is not done.

    What stays in the dataset is listed apart, and without any there is no such file.
    """
    run_dir, lost, kept = RunDir(Path(config.run_dir)), list[Path](), list[Path]()
    for stage in stages_of_run(config):
        files = kept if stage.keeps_cuts else lost
        if stage.dir.done.exists():
            files.append(stage.dir.rejects)
        elif stage.dir.units.exists():
            commits = read_ledger(stage.dir, stage.dir.read_units())
            files += [stage.dir.unit_rejects(index) for index in sorted(commits) if commits[index].num_rejected]
    merge_files(filter(Path.exists, lost), run_dir.rejects)
    if kept := [path for path in kept if path.exists() and path.stat().st_size]:
        merge_files(kept, run_dir.bad_codes)
    else:
        remove(run_dir.bad_codes)


def _check_accounts(config: Config, results: Sequence[tuple[Stage, StageResult]]) -> None:
    """Raise FatalError unless the records that went on from a stage came into those that read its output."""
    counted = [(stage, result.totals) for stage, result in results if result.totals and stage.counts == "records"]
    for number, (after, came) in enumerate(counted):
        # Of several the last: it has read the output of the others. What reads all looks at the dataset.
        read = [
            one for one in counted[:number] if one[0].kind in after.after or ("*" in after.after and one[0].shares_root)
        ]
        for before, totals in read[-1:]:
            went_on = totals.num_in if before.keeps_cuts else totals.num_out
            if came.num_in != went_on:
                raise FatalError(
                    f"accounts do not add up: {went_on} records went on from {before.name}, but {came.num_in} "
                    f"came into {after.name}; begin that anew: {_restart_command(config, (), after)}",
                    code="accounts",
                )
