"""The interface of a stage, and ``StageRun``, the object with everything that belongs to its run.

A stage declares nine members and knows nothing about folders, ranks or executors. The engine creates one ``StageRun``
for each stage of a run and passes it to the stage's methods. This object holds the configuration, the folders, the
plan's token and the limits.
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

# The function with which a processor reports how much of a unit's cost it has processed since the last call.
Advance = Callable[[float], None]
Resource = Literal["cpu", "gpu"]
CostUnit = Literal["records", "seconds of audio"]
Counted = Literal["records", "segments"]

# This many feeders decode audio faster than any GPU embeds it.
_MOST_FEEDERS: Final = 16


class Processor(ABC):
    """A stage that is loaded in one rank and ready to process units.

    Attributes:
        device_kind: the kind of device that the output depends on. Devices that give the same bytes share the same
            text; the text is empty if the output does not depend on the device.
    """

    device_kind: str = ""

    @property
    def memory_mb(self) -> float:
        """The peak memory of the child processes of this processor, in MB."""
        return 0.0

    @abstractmethod
    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        """Process one unit: write its files into ``staging`` and return their names, the rejects and the counts.

        Args:
            advance: reports progress. Call it from time to time with the cost processed since the last call; the engine
                adds any unreported cost when the unit ends.
        """

    def expect(self, unit: Unit | None) -> None:  # noqa: B027 - only processors that feed a model prefetch
        """Note the unit that will probably come after the next one, so that its input can be prefetched.

        The prediction may be wrong: another unit may come instead, or none.
        """

    def close(self) -> None:  # noqa: B027 - most processors hold no resources
        """Release the resources of the processor; called once, when the rank ends."""


class Stage(ABC):
    """One step of the pipeline: its declaration for the engine, and its work.

    Methods receive the ``run``, which has the configuration and the folders. A stage that loads a model, reads audio,
    publishes into a dataset or can predict its number of units also implements one of the small protocols below.

    Attributes:
        kind: the name of the stage in the registry and on the command line, such as ``encode``. A step with several
            rounds has one stage for each round, whose kind is ``<step>.<round>``; users see only the step.
        section: the class of its section in a configuration, whose key is ``kind``; None if it has no section.
        after: the kinds of the stages whose output it reads; they run before it. ``*`` stands for all stages that do
            not read its output, and for the rejects of all stages.
        resource: ``gpu`` if it needs one rank per visible GPU, or CPU ranks if there are no GPUs; otherwise ``cpu``.
        cost_unit: the measure of the costs of its units.
        is_cheap: True if an outdated plan is replaced without ``--restart``, because little work is lost.
    """

    kind: ClassVar[str]
    section: ClassVar[type[StageSection] | None] = None
    after: ClassVar[Sequence[str]] = ()
    resource: ClassVar[Resource] = "cpu"
    cost_unit: ClassVar[CostUnit] = "seconds of audio"
    is_cheap: ClassVar[bool] = False

    @abstractmethod
    def identity(self, run: "StageRun") -> dict[str, Any]:
        """Return everything that the output bytes depend on: configuration, inputs (size and checksum), versions.

        Raises:
            ConfigError: the configuration or an input cannot be used; no work has been done yet.
        """

    @abstractmethod
    def plan(self, run: "StageRun") -> Iterator[Unit]:
        """Yield the units, in order.

        Other files that the processor needs may be written to ``run.plan_folder``.
        """

    @abstractmethod
    def open(self, run: "StageRun", device: str) -> Processor:
        """Load the model and return the processor; called once per rank. ``device`` is ``cpu`` or ``cuda``."""

    @abstractmethod
    def finalize(self, run: "StageRun") -> Totals:
        """Merge the output of ``run.units`` and return the totals, with the products for other stages.

        ``run.commits`` has one commit for every unit, in the order of the plan. The method must be idempotent: it is
        called again after an interruption.
        """


class Model(Protocol):
    """A model that the ranks of a stage load."""

    @property
    def modules(self) -> Sequence[str]:
        """The modules that the model needs; they are imported once for all ranks of a machine."""

    def check(self) -> None:
        """Raise ConfigError if the model can neither be found on this machine nor be downloaded."""


class StageInput(Protocol):
    """Input of a stage that lies outside the run directory, such as its audio folders."""

    def check(self) -> None:
        """Raise ConfigError if the input cannot be read; called before any work."""

    def check_node(self) -> None:
        """Raise DeviceError with the code ``unlike_nodes`` if the input is not visible on the node of this process."""


@runtime_checkable
class ChecksConfig(Protocol):
    """A stage that checks its part of the configuration before any work, even if the stage itself is not to run."""

    def check(self, config: Config) -> None:
        """Raise ConfigError if the configuration cannot be used; the message says what to change."""


@runtime_checkable
class HasInput(Protocol):
    """A stage that reads input from outside the run directory."""

    def input(self, run: "StageRun") -> StageInput:
        """Return the input."""


@runtime_checkable
class HasModel(Protocol):
    """A stage whose ranks load a model."""

    def model(self, run: "StageRun") -> Model:
        """Return the model without loading it."""


@runtime_checkable
class WaitsForInput(Protocol):
    """A stage whose input may become visible late on another node."""

    def input_visible(self, run: "StageRun") -> bool:
        """Return True if this node sees the planned input rather than an older version."""


@runtime_checkable
class EstimatesUnits(Protocol):
    """A stage whose number of units depends on the size of its input; other stages have one unit per shard."""

    def expect_units(self, run: "StageRun", num_records: float, cost: float) -> int:
        """Return the number of units for an input with this many records and this cost."""


@runtime_checkable
class Publishes(Protocol):
    """A stage that publishes into a directory shared by several runs."""

    def publication(self, run: "StageRun") -> "Publication":
        """Return the description of the files that the stage publishes."""


@runtime_checkable
class ChoosesResource(Protocol):
    """A stage whose ``resource`` depends on its settings."""

    def resource_of(self, run: "StageRun") -> Resource:
        """Return the resource that the ranks of this run need."""


class Publication:
    """Files of a stage in a directory shared by several runs, such as a dataset; reserved until the stage is finished.

    Args:
        root: the directory.

    Attributes:
        in_place: True if ranks publish files below ``root``; otherwise the stage only reserves folders for a later
            stage.
        replaces_root: True if a restart of the stage removes everything that stages of this run and of other runs have
            published below ``root``.
        rejects_keep_cut: True if a rejected record stays in the dataset, without the fields of this stage.
        counts: what ``Unit.size`` counts. The accounts of consecutive stages that count records must match.
    """

    in_place: ClassVar[bool] = True
    replaces_root: ClassVar[bool] = False
    rejects_keep_cut: ClassVar[bool] = False
    counts: ClassVar[Counted] = "records"

    def __init__(self, root: Path) -> None:
        self.root = root

    def folders(self) -> Sequence[str]:
        """Return the folders below ``root`` into which the ranks publish files."""
        return ()

    def reserves(self) -> Sequence[str]:
        """Return the folders below ``root`` that no other run may change until this stage is finished."""
        return self.folders()

    def check_output(self) -> None:
        """Raise ConfigError if the reserved folders contain files that the run's current plan has not published."""

    def is_complete(self) -> bool:
        """Return True if everything that ``finalize`` has published is still in place."""
        return True

    def discard(self) -> None:
        """Remove everything that the stage has published, before it is restarted."""

    def units_of(self, shards: set[int]) -> set[int]:
        """Return the units that must be processed again to repair these shards."""
        return shards


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Limits and other options for the ranks of a run.

    Attributes:
        metrics: settings for the curves that ranks write.
        references: references from the configuration to environment variables, whose values must not be stored.
        unit_time_limit: see ``time_limit``.
        max_reject_fraction: the share of its records that a stage may reject before it stops.
        lease_seconds: a rank counts as dead if its heartbeat has not changed for this long.
        scratch: a folder on each machine in which ranks write before they publish, or None.
        seconds_until_seen: the longest delay, in seconds, until every node sees a file that another node has written.
        log_level: the lowest level that ranks log.
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
        """Return the options from a configuration."""
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
        """Return the number of processes that decode audio for a rank.

        By default, a rank with a GPU has one feeder per core except for one core; a CPU rank has none.
        """
        if self.feeders != "auto":
            return self.feeders
        return min(max(1, usable_cores() - 1), _MOST_FEEDERS) if device == "cuda" else 0

    def time_limit(self, unit: Unit) -> float | None:
        """Return the seconds after which an attempt at a unit ends its rank; None if there is no limit."""
        if self.unit_time_limit == "auto":
            # All known stages need far less time than this per record or second of audio, and an hour allows for a
            # stalled disk.
            return max(3600.0, 10.0 * unit.cost)
        return self.unit_time_limit


@dataclass(frozen=True)
class StageRun:
    """One stage in one run: the declaration, and everything that belongs to the run. Ranks receive a pickled copy.

    Attributes:
        declaration: the stage.
        run_dir: the run directory of the dataset.
        given: the configuration of the dataset; None for a stage that belongs to no dataset.
        settings: the section of the stage; if the section is a list, the item for this stage.
        options: limits and other options for its ranks.
        token: the token of its plan, "" before the plan is read or made.
        units, commits: all units and their commits, in the order of the plan; set only for ``finalize``.
        plan_draft: the temporary folder of a plan that is being made.
    """

    declaration: Stage
    run_dir: RunDir
    given: Config | None = None
    settings: Any = None
    options: RunOptions = field(default_factory=RunOptions)
    token: str = ""
    units: Sequence[Unit] = ()
    commits: Sequence[Commit] = ()
    plan_draft: Path | None = None

    @property
    def config(self) -> Config:
        assert self.given is not None  # a stage that belongs to no dataset never needs the configuration
        return self.given

    @property
    def kind(self) -> str:
        return self.declaration.kind

    @property
    def resource(self) -> Resource:
        stage = self.declaration
        return stage.resource_of(self) if isinstance(stage, ChoosesResource) else stage.resource

    @property
    def cost_unit(self) -> CostUnit:
        return self.declaration.cost_unit

    @cached_property
    def key(self) -> str:
        """The folder of the stage in the run directory: ``kind``, or ``kind/name`` if its settings have a ``name``."""
        item = getattr(self.settings, "name", "")
        return f"{self.kind}/{item}" if item else self.kind

    @property
    def name(self) -> str:
        """The name of the stage in messages, such as ``encode/mimi``; all rounds of a step have the same name."""
        return display_name(self.key)

    @cached_property
    def dir(self) -> StageDir:
        return StageDir(self.run_dir.path / self.key, self.token)

    @property
    def ranks(self) -> RankFolders:
        return self.dir.ranks

    @property
    def plan_folder(self) -> Path:
        """The folder of the plan, which may also hold other files that processors need."""
        return self.plan_draft or self.dir.plan

    @cached_property
    def publication(self) -> Publication | None:
        """The files that the stage publishes into a shared directory; None if it publishes none."""
        return self.declaration.publication(self) if isinstance(self.declaration, Publishes) else None

    @property
    def shares_root(self) -> bool:
        """Return True if stages of other runs may publish below ``root`` too."""
        return self.publication is not None and self.publication.in_place

    @property
    def root(self) -> Path:
        """The directory to which the names of published files are relative."""
        return self.publication.root if self.publication is not None and self.publication.in_place else self.dir.path

    @property
    def folders(self) -> Sequence[str]:
        """The folders below ``root`` into which its ranks publish files."""
        return self.publication.folders() if self.publication is not None and self.publication.in_place else ("parts",)

    @property
    def rejects_keep_cut(self) -> bool:
        """Return True if a rejected record stays in the dataset, without the fields of this stage."""
        return self.publication is not None and self.publication.rejects_keep_cut

    @property
    def counts(self) -> Counted:
        """The kind of item that ``Unit.size`` counts."""
        return "records" if self.publication is None else self.publication.counts

    @property
    def model(self) -> Model | None:
        """The model that its ranks load; None if they load none."""
        return self.declaration.model(self) if isinstance(self.declaration, HasModel) else None

    @property
    def input(self) -> StageInput | None:
        """The input of the stage outside the run directory; None if it has none."""
        return self.declaration.input(self) if isinstance(self.declaration, HasInput) else None

    def with_plan(self, token: str) -> "StageRun":
        """Return the same stage with the token of its plan."""
        return replace(self, token=token)

    def record_products(self, **paths: Path) -> dict[str, PublishedFile]:
        """Return a record of each file, by product name, for ``Totals.products``; other stages will read the files."""
        return {
            name: PublishedFile(path.relative_to(self.run_dir.path).as_posix(), path.stat().st_size, checksum(path))
            for name, path in paths.items()
        }

    def product(self, name: str, *, verify: bool = False) -> Path:
        """Return the path of a product of another stage, such as ``match/manifest``.

        Args:
            verify: read the file and compare its checksum with the recorded one.

        Raises:
            ConfigError: that stage is not finished, or the file is missing, lies behind a link, or has changed.
        """
        stage, _, file = name.rpartition("/")
        left = self.totals_of(stage, file).products[file]
        path = self.run_dir.path / left.name
        require_trusted_owner(self.run_dir.path, [path])
        if not path.exists():
            raise ConfigError(f"{path} is missing: run the stage {display_name(stage)} again", code="stage_not_run")
        if verify and not _is_unchanged(path, left):
            raise ConfigError(
                f"{path} has changed since the stage {display_name(stage)} wrote it: restore it, or run that stage "
                "again with --restart",
                code="stage_not_run",
            )
        return path

    def totals_of(self, stage: str, *names: str, **facts: Any) -> Totals:
        """Return the totals of another stage, with its products and facts.

        Args:
            names: products or facts that must exist.
            facts: for each fact, by name, the type to which it is converted; these facts must exist too.

        Raises:
            ConfigError: the stage is not finished, a product or fact is missing, or a fact cannot be converted to its
                type.
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
                f"{display_name(stage)} has left no {' and no '.join(lacking)} in {self.run_dir.path}, because another "
                "version of sharmill has run it: run that stage again with --restart",
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
    """Return True if a file still has the bytes that a stage has recorded."""
    # Compare the size first, because a replacement such as a device file may be endless.
    if path.stat().st_size != left.size:
        return False
    with open_stored(path, buffering=0) as stream:
        return checksum_stream(stream) == left.xxh3


def step_of(kind: str) -> str:
    """Return the step to which a kind of stage belongs. Most kinds are steps themselves.

    >>> step_of("encode.shards"), step_of("write")
    ('encode', 'write')
    """
    return kind.partition(".")[0]


def is_main(kind: str) -> bool:
    """Return True if a kind of stage is a step, or the main round of a step, which represents it in tables."""
    return step_of(kind) == kind


def display_name(key: str) -> str:
    """Return the name of a stage in messages.

    >>> display_name("encode.shards/mimi")
    'encode/mimi'
    """
    kind, slash, item = key.partition("/")
    return f"{step_of(kind)}{slash}{item}"


def versions(*packages: str) -> dict[str, str]:
    """Return the installed versions of sharmill and of these packages; ``absent`` for a missing package."""
    found = {"sharmill": sharmill.__version__}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def identify_folder(folder: Path, run_dir: Path) -> dict[str, str]:
    """Return the part of a plan's identity that stands for a folder, independent of how its path is written.

    Links and ``..`` are resolved. A folder also counts as the same if its path relative to the run directory is the
    same, so a project can be moved as a whole and continued.
    """
    real = folder.resolve()
    return {"folder": str(real), "from_run_dir": os.path.relpath(real, run_dir.resolve())}
