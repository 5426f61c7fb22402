"""The stages of a configuration and their order."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import get_args

from sharmill.config import Config, load_for_display
from sharmill.engine.run_dir import RunDir, StageDir
from sharmill.engine.stage import Resource, RunOptions, Stage, StageRun, step_of
from sharmill.errors import ConfigError, refuse
from sharmill.registry import ROUNDS, STAGES


def stage_classes(config: Config) -> dict[str, type[Stage]]:
    """Return the classes of the stages of a dataset by kind, in the order in which they run.

    Raises:
        ConfigError: the stage of a plug-in has a bad declaration.
    """
    kinds = dict.fromkeys((*STAGES.own, *config.sections))
    classes: dict[str, type[Stage]] = {kind: STAGES.load_class(kind) for kind in kinds}
    classes |= {kind: ROUNDS.load_class(kind) for kind in ROUNDS.own}
    for kind, stage in [(kind, stage) for kind, stage in classes.items() if kind not in {*STAGES.own, *ROUNDS.own}]:
        refuse(
            (
                getattr(stage, "kind", None) != kind,
                f"the class of the stage {kind!r} has the kind {getattr(stage, 'kind', None)!r}: both must be the same",
            ),
            (
                stage.resource not in get_args(Resource),
                f"the stage {kind!r} has the resource {stage.resource!r}; it must be {' or '.join(get_args(Resource))}",
            ),
            (
                not {*stage.after} <= {"*", *STAGES.names()},
                f"the stage {kind!r} has after = {', '.join(stage.after)}, but not all of these are stages",
            ),
            code="bad_plugin",
        )
    classes = {kind: stage for kind, stage in classes.items() if stage.section is None or config.all(stage.section)}
    before = {
        kind: [
            other for other, its in classes.items()
            if _reads(stage, other) or ("*" in stage.after and kind not in its.after and other != kind)
        ]
        for kind, stage in classes.items()
    }  # fmt: skip
    try:
        return {kind: classes[kind] for kind in TopologicalSorter(before).static_order()}
    except CycleError as error:
        raise ConfigError(
            f"these stages form a dependency cycle: {', '.join(error.args[1])}", code="bad_plugin"
        ) from error


def _reads(stage: type[Stage], kind: str) -> bool:
    """Return True if a stage's ``after`` names this kind, or if it names the step of this kind and the stage is of
    another step.
    """
    step = step_of(kind)
    return kind in stage.after or (step in stage.after and step != step_of(stage.kind))


def dependent_stages(config: Config, kind: str) -> list[str]:
    """Return a kind of stage and all kinds that depend on it, directly or indirectly, in the order of execution."""
    classes, dependents = stage_classes(config), {kind}
    for other, stage in classes.items():
        if "*" in stage.after or any(_reads(stage, one) for one in dependents):
            dependents.add(other)
    return [other for other in classes if other in dependents]


def choose_stages(config: Config, names: Iterable[str] | None = None) -> Sequence[str]:
    """Return the kinds of the named stages, including all rounds of a step; by default all stages.

    A configuration without sources describes a finished dataset. The default is then all stages except ``prepare``,
    ``match`` and the stages that read their output.

    Raises:
        ConfigError: the dataset has no stage with one of these names.
    """
    classes = stage_classes(config)
    if names is None:
        needs = set() if config.sources else {"prepare", "match"}
        return tuple(kind for kind, stage in classes.items() if not needs & {kind, *stage.after})
    names = list(names)
    if absent := [name for name in names if name not in classes]:
        what = "null in" if absent[0] in config.sections else "not a key of"
        raise ConfigError(
            f"{config.name} has no stage {absent[0]}: {absent[0]} is {what} its configuration; its stages are "
            f"{', '.join(dict.fromkeys(map(step_of, classes)))}",
            code="unknown_stage",
        )
    return tuple(kind for kind in classes if kind in names or step_of(kind) in names)


def make_stages(config: Config, names: Iterable[str] | None = None) -> list[StageRun]:
    """Return the named stages (by default, all stages) in the order in which they run.

    If the section of a stage is a list, there is one ``StageRun`` for each item of the list.
    """
    run_dir, options, classes = RunDir(Path(config.run_dir)), RunOptions.from_config(config), stage_classes(config)
    runs = []
    for kind in choose_stages(config, names):
        stage = classes[kind]
        items = (
            [None] if stage.section is None else [one for keys in config.all(stage.section) for one in keys.items(kind)]
        )
        runs += [StageRun(stage(), run_dir, config, item, options) for item in items]
    return runs


def config_of_run(run_dir: str | Path) -> Config:
    """Return the configuration stored in a run directory, for display only; see ``load_for_display``.

    Raises:
        ConfigError: the folder is not a run directory.
    """
    paths = RunDir(Path(run_dir))
    if not paths.config.exists():
        raise ConfigError(f"{run_dir} is not a run directory: it has no {paths.config.name}", code="no_run_dir")
    shown = load_for_display(paths.config)
    dataset_dir = shown.dataset_dir
    if ("dataset_dir",) in shown.references.written:
        dataset_dir = str(paths.read_reserved() or dataset_dir)
    # Use the given path, because a relative path in the stored configuration refers to the folder in which the run was
    # started.
    return replace(shown, run_dir=str(run_dir), dataset_dir=dataset_dir)


def dependent_folders(stage: StageRun) -> list[StageDir]:
    """Return the folders of the stages whose output is removed when a stage is restarted.

    If the stage does not replace all of ``root``, the list is empty. Otherwise it contains all stages in the run
    directory except the following: the stage itself, stages that do not depend on its output, and stages that read the
    output of all stages, because these detect the change themselves.
    """
    if stage.publication is None or not stage.publication.replaces_root:
        return []
    root = stage.run_dir.path
    patterns = [f"{depth}/{name}" for depth in ("*", "*/*") for name in ("plan", "ranks")]
    found = {path.parent for pattern in patterns for path in root.glob(pattern)}
    names = [path.relative_to(root).as_posix() for path in sorted(found)]
    classes, dependents = stage_classes(stage.config), dependent_stages(stage.config, stage.kind)
    kept = {kind for kind, one in classes.items() if kind not in dependents or "*" in one.after} | {stage.kind}
    return [stage.run_dir.stage(name) for name in names if name.partition("/")[0] not in kept]
