"""Stages and their processors. The engine does the rest: skip what is done, log, retry, publish, record.

A stage is configuration: cheap to make, to pickle and to ask for its plan. A processor is what a rank works with: the
stage's model, loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args

from sharmill.config import Config, MetricsConfig, StageSection
from sharmill.config.references import References
from sharmill.engine.rundir import RunDir, StageDir
from sharmill.engine.unit import Commit, Output, Totals, Unit
from sharmill.errors import ConfigError
from sharmill.files.staging import Staging
from sharmill.registry import STAGES

# No stage is known to be as slow, by record or by second of audio; a disk or a model server may stand still.
_SECONDS_OF_COST = 10.0
_LEAST_TIME_LIMIT = 3600.0

# Called by a processor with the part of a unit's cost that it has done since the last call.
Advance = Callable[[float], None]
Resource = Literal["cpu", "gpu"]
CostUnit = Literal["records", "seconds of audio"]


_dir_of_plan = lru_cache(StageDir)


class Processor(ABC):
    """A stage in one rank, ready to do units.

    Attributes:
        device_kind: the kind of device that its output depends on, the same text for devices that give the same bytes;
            nothing where it depends on none.
    """

    device_kind: str = ""

    @abstractmethod
    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        """Do one unit: write its files into ``staging`` and return their names, the rejects and the counts.

        ``advance`` is for people who watch: call it now and then with the cost done since the last call. What is not
        reported is added when the unit ends.
        """

    def expect(self, unit: Unit | None) -> None:  # noqa: B027 - only what feeds a model has to be ahead
        """Note the unit that will probably come after the next one, so that its input can be made ready in time.

        Another may come instead, or none.
        """

    def close(self) -> None:  # noqa: B027 - most processors hold nothing that has to be closed
        """Release what the processor holds; called once, when the rank ends."""


class Stage(ABC):
    """One step of the pipeline over one dataset: its configuration, and all that the engine has to know of it.

    An instance is cheap to make and to pickle. Nothing changes it but the engine, which notes the
    token of its plan and the limit on rejects.

    Attributes:
        kind: the stage as the command line calls it, such as ``encode``: its name in the registry.
        section: the class of its keys in a configuration, which lie below its kind; None where it has none of its own.
        after: the kinds of the stages whose output it reads; ``*`` for all that do not read its own. They run before
            it; and where one that ``replaces_root`` begins anew, what lies behind it does too.
        part_of: the kind of the stage with which it is run where that is named: both are one step to users.
        resource: ``gpu`` for one rank per visible GPU where there are any.
        cost_unit: the measure of the costs of its units.
        counts: what its units have so many of; the records of stages that count them are accounted for.
        config: the configuration of the dataset.
        settings: its section, or the item of a list that it is of.
        name: the folder of the stage in the run directory, and its name in messages: the kind, and behind it the
            ``name`` in its settings, if they have one, as in ``encode/mimi``.
        run_dir: the run directory of the dataset.
        root: published files are named relative to this directory.
        folders: the folders below ``root`` that its ranks publish files in.
        token: the token of its plan, once that is read or made; ranks have it from the process that started them.
        metrics: which curves its ranks write.
        references: those of the configuration to the environment, whose values are not to be stored.
        seconds_until_seen: seconds until every node sees what another has written.
        unit_time_limit: that of ``time_limit``.
        max_reject_fraction: the share of its records that may be rejected before it stops; set by ``run_stage``.
        lease_seconds: a rank is taken for dead when its heartbeat has not been seen for so long.
        scratch: a folder of each machine in which ranks write before they publish, or None.
        replaces_root: begun anew, it removes all of ``root`` that stages of this and of other runs have published.
        looks_ahead: its processors make use of ``expect``, so that a rank holds its next unit already.
        replan_when_changed: a check, which loses nothing by starting anew when its input has changed.
        reads_rejects: it reads the rejects of all stages before it.
    """

    kind: ClassVar[str]
    section: ClassVar[type[StageSection] | None] = None
    after: ClassVar[Sequence[str]] = ()
    part_of: ClassVar[str] = ""
    resource: ClassVar[Resource] = "cpu"
    cost_unit: ClassVar[CostUnit] = "seconds of audio"
    counts: ClassVar[Literal["records", "segments"]] = "records"
    config: Config
    settings: Any = None
    run_dir: RunDir
    root: Path
    folders: Sequence[str] = ("parts",)
    token: str = ""
    metrics: MetricsConfig = MetricsConfig()
    references: References = References()
    unit_time_limit: float | Literal["auto"] | None = None
    max_reject_fraction: float = 1.0
    lease_seconds: float = 120.0
    scratch: str | None = None
    seconds_until_seen: float = 0.0
    looks_ahead: ClassVar[bool] = False
    replaces_root: ClassVar[bool] = False
    replan_when_changed: ClassVar[bool] = False
    reads_rejects: ClassVar[bool] = False

    def __init__(self, config: Config, settings: Any = None) -> None:
        self.config = config
        self.settings = config.section(self.section) if settings is None and self.section else settings
        self.run_dir = RunDir(Path(config.run_dir))
        self.root = self.dir.path

    @classmethod
    def of(cls, config: Config) -> list[Self]:
        """Return the stages of this class that a dataset has: one for each section of its own."""
        return [cls(config, section) for section in config.all(cls.section)] if cls.section else []

    @classmethod  # noqa: B027 - most keys are checked when they are read
    def check(cls, config: Config) -> None:
        """Check, before any work, what the configuration says about stages of this class, whichever are to run.

        Raises:
            ConfigError: with what to change.
        """

    @property
    def name(self) -> str:
        own = getattr(self.settings, "name", "")
        return f"{self.kind}/{own}" if own else self.kind

    @property
    def dir(self) -> StageDir:
        path = self.run_dir.path / self.name
        # Ranks ask for it many times a unit.
        return _dir_of_plan(path, self.token) if self.token else StageDir(path)

    @property
    def shares_root(self) -> bool:
        """Return True if stages of other runs may publish below ``root`` too."""
        return self.root != self.dir.path

    @property
    def reserves(self) -> tuple[Path, Sequence[str]]:
        """Return a directory that runs share, and its folders that no other run may change before this stage ends."""
        return self.root, self.folders if self.shares_root else ()

    def is_published_later(self) -> bool:
        """Return True if another stage is to publish in the reserved folders when this one is finished."""
        return False

    def time_limit(self, unit: Unit) -> float | None:
        """Return the seconds after which an attempt at a unit ends its rank, None for no limit."""
        if self.unit_time_limit == "auto":
            return max(_LEAST_TIME_LIMIT, _SECONDS_OF_COST * unit.cost)
        return self.unit_time_limit

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return all that the output bytes depend on: configuration, inputs (size and checksum), versions.

        Raises:
            ConfigError: the configuration or an input cannot be used; nothing has been done yet.
        """

    def modules(self) -> list[str]:
        """Return the names of the modules that a rank imports; the ranks of one machine import them once."""
        return [type(self).__module__]

    def check_input(self) -> None:  # noqa: B027 - most stages read what earlier ones leave
        """Check, before any work, the input of a stage that is to run, as far as it is there then.

        Raises:
            ConfigError: with what to change.
        """

    def require_models(self) -> None:  # noqa: B027 - most stages load none
        """Raise ConfigError where a model that ``open`` loads can neither be found on this machine nor be had."""

    def expect_units(self, num_records: float, cost: float) -> int | None:
        """Return the number of units that an input of so many records and this cost is divided into, where one is not a
        shard."""
        return None

    @abstractmethod
    def plan(self, folder: Path) -> Iterator[Unit]:
        """Yield the units, in order.

        Files that the processor needs beside them may be written to ``folder``, which will be ``self.dir.plan``.
        """

    def check_node(self) -> None:  # noqa: B027 - most stages read what earlier ones have left
        """Raise DeviceError ``unlike_nodes`` where the node of this process does not see the input of the stage."""

    def sees_input(self) -> bool:
        """Return True where this node sees the input that the plan was made of, rather than what was there before.

        Ranks wait for that. What is only new they miss in any case, and wait for it too.
        """
        return True

    @abstractmethod
    def open(self, device: str) -> Processor:
        """Load the model, once per rank, and return what does the units. ``device`` is ``cpu`` or ``cuda``."""

    @abstractmethod
    def finalize(self, units: list[Unit], commits: Iterable[Commit]) -> Totals:
        """Merge the parts and return the totals. ``commits`` are in the order of the plan, one for every unit.
        Called again if it was interrupted."""

    def products(self) -> list[Path]:
        """Return the files that ``finalize`` leaves for others."""
        return []

    def is_finalized(self) -> bool:
        """Return True if what ``finalize`` leaves is still in place; where it is not, it is run again."""
        return all(path.exists() for path in self.products())

    def report(self) -> Any:
        """Return the report on the dataset of a stage that checks it and is finished, None of any other."""
        return None

    def check_output(self) -> None:  # noqa: B027 - most stages publish below their own folder only
        """Raise ConfigError where ``root`` holds what the present plan of this run has not published."""

    def discard(self) -> None:  # noqa: B027 - most stages publish below their own folder only
        """Remove for good what the stage has published beside the files of units in its own folder, on a restart.

        It is called when ``check_output`` found nothing, as long as the plan is there.
        """

    @classmethod
    def mender(cls, field: str, *, content: bool) -> str | None:
        """Return the name of the stage of this class that mends a field of the published layout, if one does.

        Args:
            content: what the stage has put together is wrong in itself, and has to be made anew.
        """
        return None

    def redo(self, shards: Mapping[str, set[int]], *, of_index: bool) -> set[int] | None:
        """Return the units to do again for findings of the checker, or None where they do not concern the stage.

        Args:
            shards: those with findings, by the name of the stage whose output mends them.
            of_index: the index of the dataset is to be compared with the ledgers of all that publish in it.
        """
        return None

    def later(self) -> list[StageDir]:
        """Return the folders of the stages whose output goes with that of this one when it begins anew.

        Where it replaces all of ``root``, these are all in the run directory but those that do not read its output, and
        those that read the output of all stages, which notice a change by themselves.
        """
        if not self.replaces_root:
            return []
        patterns = [f"{depth}/{name}" for depth in ("*", "*/*") for name in ("plan", "ranks")]
        found = {path.parent for pattern in patterns for path in self.run_dir.path.glob(pattern)}
        names = [path.relative_to(self.run_dir.path).as_posix() for path in sorted(found)]
        classes, behind = stage_classes(self.config), stages_behind(self.config, self.kind)
        kept = {kind for kind, stage in classes.items() if kind not in behind or "*" in stage.after} | {self.kind}
        return [self.run_dir.stage(name) for name in names if name.partition("/")[0] not in kept]


def add_up(commits: Iterable[Commit]) -> Totals:
    """Return the totals of the commits' counts; ``hours`` from ``stats['seconds']``, the audio that went on."""
    commits = list(commits)
    rejects = Counter[str]()
    for commit in commits:
        rejects.update(commit.rejects)
    return Totals(
        num_in=sum(commit.num_in for commit in commits),
        num_out=sum(commit.num_out for commit in commits),
        rejects=dict(rejects),
        hours=sum(commit.stats.get("seconds", 0.0) for commit in commits) / 3600,
    )


def stage_classes(config: Config) -> dict[str, type[Stage]]:
    """Return the classes of the stages of a dataset by their kinds, in the order in which they run.

    Raises:
        ConfigError: a stage of another package is not as it has to be.
    """
    kinds = dict.fromkeys((*STAGES.own, *config.sections))
    classes: dict[str, type[Stage]] = {kind: STAGES.load_class(kind) for kind in kinds}
    for kind in [kind for kind in kinds if kind not in STAGES.own]:
        _check_declared(kind, classes[kind])
    classes = {kind: stage for kind, stage in classes.items() if stage.section is None or config.all(stage.section)}
    before = {
        kind: [
            other for other, its in classes.items()
            if other in stage.after or ("*" in stage.after and kind not in its.after and other != kind)
        ]
        for kind, stage in classes.items()
    }  # fmt: skip
    try:
        return {kind: classes[kind] for kind in TopologicalSorter(before).static_order()}
    except CycleError as error:
        raise ConfigError(f"stages read each other's output: {', '.join(error.args[1])}", code="bad_plugin") from error


def _check_declared(kind: str, stage: type[Stage]) -> None:
    """Raise ConfigError where a stage of another package does not declare what it has to."""
    own = getattr(stage, "kind", None)
    problems = {
        f"calls itself {own!r}": own != kind,
        f"needs {stage.resource!r}; a resource is {' or '.join(get_args(Resource))}": (
            stage.resource not in get_args(Resource)
        ),
        f"reads the output of {', '.join(stage.after)}, of which one is no stage": (
            not {*stage.after} <= {"*", *STAGES.names()}
        ),
    }
    for problem in (problem for problem, is_there in problems.items() if is_there):
        raise ConfigError(f"the stage {kind!r} {problem}", code="bad_plugin")


def stages_behind(config: Config, kind: str) -> list[str]:
    """Return a kind of stage and those that read its output, or that of one of these, in the order of the run."""
    classes, behind = stage_classes(config), {kind}
    for other, stage in classes.items():
        if "*" in stage.after or not behind.isdisjoint(stage.after):
            behind.add(other)
    return [other for other in classes if other in behind]
