"""Stages: what one declares, and the object with everything that belongs to its run.

A stage declares nine members and knows nothing of folders, ranks or executors. The engine makes one ``StageRun`` for
each stage of a run, and passes it: it has the configuration, the folders, the plan's token and the limits.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Protocol, runtime_checkable

import msgspec

import sharmill
from sharmill.config import Config, MetricsConfig, References, StageSection
from sharmill.engine.run_dir import RankFolders, RunDir, StageDir
from sharmill.engine.unit import Commit, Output, Totals, Unit
from sharmill.errors import ConfigError, refuse
from sharmill.files.checksums import checksum, checksum_stream
from sharmill.files.host import usable_cores
from sharmill.files.staging import PublishedFile, Staging
from sharmill.files.stored import damaged_file, open_stored
from sharmill.files.trust import require_trusted_owner

# Called by a processor with the part of a unit's cost that it has done since the last call.
Advance = Callable[[float], None]
Resource = Literal["cpu", "gpu"]
CostUnit = Literal["records", "seconds of audio"]
Counted = Literal["records", "segments"]

# More would decode faster than any GPU embeds.
_MOST_FEEDERS: Final = 16


class Processor(ABC):
    """A stage in one rank, ready to do units.

    Attributes:
        device_kind: the kind of device that its output depends on, the same text for devices that give the same bytes;
            empty if it depends on none.
    """

    device_kind: str = ""

    @property
    def memory_mb(self) -> float:
        """The most memory that other processes have held which it has for itself."""
        return 0.0

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
        """Release the resources of the processor; called once, when the rank ends."""


class Stage(ABC):
    """One step of the pipeline: what the engine has to know of it, and the work.

    Methods get the ``run``, which has the configuration and the folders. A stage that loads a model, reads audio,
    publishes in a dataset or can tell its size in advance says so by one of the small protocols below.

    Attributes:
        kind: the stage as the command line calls it, such as ``encode``: its name in the registry. A step that is done
            in several rounds has a stage for each, whose kind has the round behind a dot: users meet the step alone.
        section: the class of its keys in a configuration, which lie below its kind; None if it has none of its own.
        after: the kinds of the stages whose output it reads; ``*`` for all that do not read its own, and the rejects of
            all. They run before it.
        resource: ``gpu`` for one rank per visible GPU if there are any.
        cost_unit: the measure of the costs of its units.
    """

    kind: ClassVar[str]
    section: ClassVar[type[StageSection] | None] = None
    after: ClassVar[Sequence[str]] = ()
    resource: ClassVar[Resource] = "cpu"
    cost_unit: ClassVar[CostUnit] = "seconds of audio"

    @abstractmethod
    def identity(self, run: "StageRun") -> dict[str, Any]:
        """Return all that the output bytes depend on: configuration, inputs (size and checksum), versions.

        Raises:
            ConfigError: the configuration or an input cannot be used; nothing has been done yet.
        """

    @abstractmethod
    def plan(self, run: "StageRun") -> Iterator[Unit]:
        """Yield the units, in order.

        Files that the processor needs beside them may be written to ``run.plan_folder``.
        """

    @abstractmethod
    def open(self, run: "StageRun", device: str) -> Processor:
        """Load the model, once per rank, and return the processor. ``device`` is ``cpu`` or ``cuda``."""

    @abstractmethod
    def finalize(self, run: "StageRun") -> Totals:
        """Merge the output of ``run.units`` and return the totals, with the products for other stages.

        ``run.commits`` are in the order of the plan, one for every unit. Called again if it was interrupted.
        """


class Model(Protocol):
    """A model that the ranks of a stage load."""

    @property
    def modules(self) -> Sequence[str]:
        """The modules that a rank imports for it; the ranks of one machine import them once."""

    def check(self) -> None:
        """Raise ConfigError if the model can neither be found on this machine nor be downloaded."""


class StageInput(Protocol):
    """The input of a stage outside of the run directory, such as the folders of its audio."""

    def check(self) -> None:
        """Raise ConfigError, before any work, if it cannot be read."""

    def check_node(self) -> None:
        """Raise DeviceError ``unlike_nodes`` if the node of this process does not see it."""


@runtime_checkable
class ChecksConfig(Protocol):
    """A stage that checks its part of a configuration before any work, whichever stages are to run."""

    def check(self, config: Config) -> None:
        """Raise ConfigError with what to change."""


@runtime_checkable
class HasInput(Protocol):
    """A stage that reads more than other stages have left in the run directory."""

    def input(self, run: "StageRun") -> StageInput:
        """Return the input."""


@runtime_checkable
class HasModel(Protocol):
    """A stage whose ranks load a model."""

    def model(self, run: "StageRun") -> Model:
        """Return the model, not loaded."""


@runtime_checkable
class WaitsForInput(Protocol):
    """A stage whose input may be seen late on another node."""

    def input_visible(self, run: "StageRun") -> bool:
        """Return True if this node sees the input that the plan was made from, rather than an older one."""


@runtime_checkable
class EstimatesUnits(Protocol):
    """A stage whose number of units follows from the size of its input; other stages have a unit for each shard."""

    def expect_units(self, run: "StageRun", num_records: float, cost: float) -> int:
        """Return the number of units that an input of so many records and this cost is divided into."""


@runtime_checkable
class Publishes(Protocol):
    """A stage that publishes in a directory which runs share."""

    def publication(self, run: "StageRun") -> "Publication":
        """Return what it publishes there."""


class Publication:
    """Files of a stage in a directory that runs share, such as a dataset, reserved until the stage is finished.

    Args:
        root: the directory.

    Attributes:
        in_place: ranks publish files below ``root``; otherwise the stage only reserves folders for a later one.
        replaces_root: started again, the stage removes all of ``root`` that stages of this and of other runs have
            published.
        rejects_keep_cut: a rejected record stays in the dataset, without the fields of this stage.
        counts: the things that its units count; the accounts of stages that count records must fit each other.
    """

    in_place: ClassVar[bool] = True
    replaces_root: ClassVar[bool] = False
    rejects_keep_cut: ClassVar[bool] = False
    counts: ClassVar[Counted] = "records"

    def __init__(self, root: Path) -> None:
        self.root = root

    def folders(self) -> Sequence[str]:
        """Return the folders below ``root`` that the ranks publish files in."""
        return ()

    def reserves(self) -> Sequence[str]:
        """Return the folders below ``root`` that no other run may change before this stage ends."""
        return self.folders()

    def check_output(self) -> None:
        """Raise ConfigError if ``root`` holds files in these folders that the run's present plan has not published."""

    def is_complete(self) -> bool:
        """Return True if everything that ``finalize`` published is still in place."""
        return True

    def discard(self) -> None:
        """Remove for good what the stage has published, before it is started again."""

    def units_of(self, shards: set[int]) -> set[int]:
        """Return the units that have to be done again for findings in some shards."""
        return shards


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Limits and habits of the ranks of a run.

    Attributes:
        metrics: the curves that ranks write.
        references: references of the configuration to the environment, whose values are not to be stored.
        unit_time_limit: see ``time_limit``.
        max_reject_fraction: the share of its records that may be rejected before a stage stops.
        lease_seconds: a rank counts as dead if its heartbeat has not been seen for so long.
        scratch: a folder of each machine in which ranks write before they publish, or None.
        seconds_until_seen: seconds until every node sees what another has written.
        log_level: the least level of what ranks log.
        feeders: see ``num_feeders``.
    """

    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    references: References = field(default_factory=References)
    unit_time_limit: float | Literal["auto"] | None = None
    max_reject_fraction: float = 1.0
    lease_seconds: float = 120.0
    scratch: str | None = None
    seconds_until_seen: float = 0.0
    log_level: str = "INFO"
    feeders: int | Literal["auto"] = "auto"

    @classmethod
    def from_config(cls, config: Config) -> "RunOptions":
        """Return the options that a configuration gives."""
        executor = config.executor
        return cls(
            metrics=config.metrics,
            references=config.references,
            unit_time_limit=executor.unit_time_limit,
            max_reject_fraction=config.max_reject_fraction,
            scratch=executor.scratch,
            seconds_until_seen=executor.seconds_until_seen,
            log_level=executor.log_level,
            feeders=executor.feeders,
        )

    def num_feeders(self, device: str) -> int:
        """Return how many processes decode audio for a rank: by default its cores but one where it has a GPU."""
        if self.feeders != "auto":
            return self.feeders
        return min(max(1, usable_cores() - 1), _MOST_FEEDERS) if device == "cuda" else 0

    def time_limit(self, unit: Unit) -> float | None:
        """Return the seconds after which an attempt at a unit ends its rank, None for no limit."""
        if self.unit_time_limit == "auto":
            # No stage is known to be as slow, by record or second of audio; a disk or a model server may stand still.
            return max(3600.0, 10.0 * unit.cost)
        return self.unit_time_limit


@dataclass(frozen=True)
class StageRun:
    """One stage in one run: the declaration, and everything that belongs to the run. It is pickled to ranks.

    Attributes:
        declaration: the stage.
        run_dir: the run directory of the dataset.
        given: the configuration of the dataset; None for a stage that belongs to no dataset.
        settings: the section of the stage, or the item of a list that it is made for.
        options: limits and habits of its ranks.
        token: the token of its plan, "" before the plan is read or made.
        units, commits: all of them, in the order of the plan, when the stage is finalized.
        plan_aside: the folder of a plan that is being made.
    """

    declaration: Stage
    run_dir: RunDir
    given: Config | None = None
    settings: Any = None
    options: RunOptions = field(default_factory=RunOptions)
    token: str = ""
    units: Sequence[Unit] = ()
    commits: Sequence[Commit] = ()
    plan_aside: Path | None = None

    @property
    def config(self) -> Config:
        assert self.given is not None  # a stage that belongs to no dataset does not ask
        return self.given

    @property
    def kind(self) -> str:
        return self.declaration.kind

    @property
    def resource(self) -> Resource:
        return self.declaration.resource

    @property
    def cost_unit(self) -> CostUnit:
        return self.declaration.cost_unit

    @cached_property
    def key(self) -> str:
        """The folder of the stage in the run directory: the kind, and behind it the ``name`` in its settings."""
        item = getattr(self.settings, "name", "")
        return f"{self.kind}/{item}" if item else self.kind

    @property
    def name(self) -> str:
        """The stage in messages, as in ``encode/mimi``; the rounds of a step have one name."""
        return display_name(self.key)

    @cached_property
    def dir(self) -> StageDir:
        return StageDir(self.run_dir.path / self.key, self.token)

    @property
    def ranks(self) -> RankFolders:
        return self.dir.ranks

    @property
    def plan_folder(self) -> Path:
        """The folder of the plan, for files that processors need beside the units."""
        return self.plan_aside or self.dir.plan

    @cached_property
    def publication(self) -> Publication | None:
        """The files that the stage publishes in a directory that runs share, None if it does not."""
        return self.declaration.publication(self) if isinstance(self.declaration, Publishes) else None

    @property
    def shares_root(self) -> bool:
        """Return True if stages of other runs may publish below ``root`` too."""
        return self.publication is not None and self.publication.in_place

    @property
    def root(self) -> Path:
        """The directory that published files are named relative to."""
        return self.publication.root if self.publication is not None and self.publication.in_place else self.dir.path

    @property
    def folders(self) -> Sequence[str]:
        """The folders below ``root`` that its ranks publish files in."""
        return self.publication.folders() if self.publication is not None and self.publication.in_place else ("parts",)

    @property
    def rejects_keep_cut(self) -> bool:
        """Return True if a rejected record stays in the dataset, without the fields of this stage."""
        return self.publication is not None and self.publication.rejects_keep_cut

    @property
    def counts(self) -> Counted:
        """The things that its units count."""
        return "records" if self.publication is None else self.publication.counts

    @property
    def model(self) -> Model | None:
        """The model that its ranks load, None if they load none."""
        return self.declaration.model(self) if isinstance(self.declaration, HasModel) else None

    @property
    def input(self) -> StageInput | None:
        """The input of the stage outside of the run directory, None if it has none."""
        return self.declaration.input(self) if isinstance(self.declaration, HasInput) else None

    def with_plan(self, token: str) -> "StageRun":
        """Return the same stage with the token of its plan."""
        return replace(self, token=token)

    def record_products(self, **paths: Path) -> dict[str, PublishedFile]:
        """Return the records of files that the stage leaves for others, for ``Totals.products``."""
        return {
            name: PublishedFile(path.relative_to(self.run_dir.path).as_posix(), path.stat().st_size, checksum(path))
            for name, path in paths.items()
        }

    def product(self, name: str, *, verify: bool = False) -> Path:
        """Return the path of a product of another stage, such as ``match/manifest``.

        Args:
            verify: read the file, to see that its bytes are those that the stage left.

        Raises:
            ConfigError: that stage is not finished, or the file has gone, or lies behind a link, or has changed.
        """
        stage, _, file = name.rpartition("/")
        left = self.totals_of(stage, file).products[file]
        path = self.run_dir.path / left.name
        require_trusted_owner(self.run_dir.path, [path])
        if not path.exists():
            raise ConfigError(f"{path} is not there: run the stage {display_name(stage)} again", code="stage_not_run")
        if verify and not _is_unchanged(path, left):
            raise ConfigError(
                f"{path} is not as the stage {display_name(stage)} left it: restore it, or begin that stage again with "
                "--restart",
                code="stage_not_run",
            )
        return path

    def totals_of(self, stage: str, *names: str, **facts: Any) -> Totals:
        """Return the totals of another stage, with its products and facts; ``names`` are among these.

        Args:
            facts: the types that facts are converted to, by their names.

        Raises:
            ConfigError: it is not finished, or has left nothing of such a name, or a fact of another type.
        """
        totals = self.run_dir.stage(stage).read_totals()
        if totals is None:
            raise ConfigError(
                f"{display_name(stage)} is not finished in {self.run_dir.path}: run it first", code="stage_not_run"
            )
        lacking = sorted({*names, *facts} - totals.products.keys() - totals.facts.keys())
        refuse(
            (
                lacking,
                f"{display_name(stage)} has left no {' and no '.join(lacking)} in {self.run_dir.path}, as another "
                "version of sharmill does: begin that stage again with --restart",
            ),
            code="stage_not_run",
        )
        for name, kind in facts.items():
            try:
                totals.facts[name] = msgspec.convert(totals.facts[name], kind)
            except msgspec.ValidationError as error:
                raise damaged_file(self.run_dir.stage(stage).done, f"{name}: {error}") from error
        return totals


def _is_unchanged(path: Path, left: PublishedFile) -> bool:
    """Return True if a file has the bytes that a stage left."""
    # The size first: whatever is in the file's place may have no end.
    if path.stat().st_size != left.size:
        return False
    with open_stored(path, buffering=0) as stream:
        return checksum_stream(stream) == left.xxh3


def step_of(kind: str) -> str:
    """Return the step that a kind of stage is a round of: the kind itself for most.

    >>> step_of("encode.shards"), step_of("write")
    ('encode', 'write')
    """
    return kind.partition(".")[0]


def is_main(kind: str) -> bool:
    """Return True if a kind of stage is a step, or the round of one that gives it its row in tables."""
    return step_of(kind) == kind


def display_name(key: str) -> str:
    """Return the name of a stage in messages.

    >>> display_name("encode.shards/mimi")
    'encode/mimi'
    """
    kind, slash, item = key.partition("/")
    return f"{step_of(kind)}{slash}{item}"


def versions(*packages: str) -> dict[str, str]:
    """Return the installed version of sharmill and of each package; ``absent`` if it is not installed."""
    found = {"sharmill": sharmill.__version__}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def identify_folder(folder: Path, run_dir: Path) -> dict[str, str]:
    """Return what identifies a folder in the identity of a plan, however its path is spelt.

    Links and ``..`` are resolved. A folder that lies elsewhere by now, but at the same place as seen from the run
    directory, counts as the same: so a project goes on when it was moved as a whole.
    """
    real = folder.resolve()
    return {"folder": str(real), "from_run_dir": os.path.relpath(real, run_dir.resolve())}
