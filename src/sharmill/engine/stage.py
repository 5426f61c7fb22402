"""Stages and their processors, with all that a stage needs of the engine: units, outputs, commits, its run directory.

The engine does the rest: skip what is done, log, retry, publish, record.
A stage is configuration: cheap to make, to pickle and to ask for its plan. A processor is what a rank works with: the
stage's model, loaded.

The paths of a run directory are named here, and the notes about a run in it: only what it was given and how it has
ended, for all else follows from plans, ledgers, the ``done.json`` of each stage and the queue. Files that a stage keeps
in its own folder beside these are named by the stage.
"""

import os
import re
import secrets
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args

import msgspec

import sharmill
from sharmill.config import Config, MetricsConfig, References, StageSection
from sharmill.errors import CODES, ConfigError, DeviceError, FatalError, SharmillError, refuse
from sharmill.files.atomic import remove, write_atomic
from sharmill.files.checksums import checksum_bytes
from sharmill.files.staging import PublishedFile, Staging
from sharmill.files.stored import damaged_file, read_record, read_records, read_stored
from sharmill.manifest import Reject
from sharmill.registry import STAGES


def _read_name(path: Path, pattern: str, problem: str) -> str:
    """Return the text of a file, which is a part of the names of folders; "" where there is no such file.

    Raises:
        ConfigError: it does not have the pattern; ``problem`` says so, behind the path.
    """
    try:
        text = read_stored(path).decode("ascii", "replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    if not re.fullmatch(pattern, text):
        raise ConfigError(f"{path} {problem}", code="damaged_run_dir")
    return text


class StageDir:
    """The folder of one stage in a run directory: plan, ledger, logs, progress, rejects.

    Args:
        token: that of the plan whose ranks are meant; by default that of the plan which is there now.
    """

    def __init__(self, path: Path, token: str = "") -> None:
        self.path = path
        self.plan = path / "plan"
        self.identity = self.plan / "identity.json"
        self.units = self.plan / "units.jsonl"
        self.token_file = self.plan / "token"
        # There once a user has asked for another plan, whose folder takes the place of this one.
        self.begin_anew = self.plan / "begin_anew"
        self.logs = path / "logs"
        self.driver_log = self.logs / "driver.log"
        self.failures = path / "failures.jsonl"
        self.rejects = path / "rejects.jsonl"
        # The first commits of units that were to be done again.
        self.revoked = path / "revoked.jsonl"
        # Written last of all: the stage is finished, with these totals.
        self.done = path / "done.json"
        # What the stage makes of its parts at its end, for the stages behind it.
        self.merged = path / "merged"

        self.token = token or self.read_token()
        # All that the ranks of the plan write in the run directory, but their logs.
        self.ranks = path / "ranks" / (self.token or "none")
        self.ledger = self.ranks / "ledger"
        self.attempts = self.ranks / "attempts"
        self.claims = self.ranks / "claims"
        self.progress = self.ranks / "progress"
        self.metrics = self.ranks / "metrics"
        self.rejects_of_units = self.ranks / "rejects"
        self.folders_of_ranks = [
            self.ledger, self.attempts, self.claims, self.progress, self.metrics, self.rejects_of_units,
        ]  # fmt: skip
        # The values that the ranks that are at work were started with.
        self.round = self.ranks / "round.json"
        # The kind of device that the stage keeps to.
        self.device_kind = self.ranks / "device_kind"

    def is_finished(self) -> bool:
        """Return True if the stage is finished and not to begin anew."""
        return self.done.exists() and not self.begin_anew.exists()

    def read_token(self) -> str:
        """Return the token of the plan that is there, or nothing where there is none."""
        return _read_name(self.token_file, "[0-9A-Za-z_-]{0,64}", "is damaged: it has no token; begin this stage anew")

    def read_units(self) -> "list[Unit]":
        """Return the units of a plan that is known to exist."""
        return list(read_records(self.units, Unit))

    def read_totals(self) -> "Totals | None":
        """Return the totals of a finished stage, or None."""
        return read_record(self.done, Totals)

    def read_failures(self) -> "list[FailedAttempt]":
        """Return the units that failed for good when the stage ended last."""
        return list(read_records(self.failures, FailedAttempt)) if self.failures.exists() else []

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:03d}.log"

    def rank_progress(self, owner: str) -> Path:
        return self.progress / f"rank-{owner}.json"

    def unit_rejects(self, index: int) -> Path:
        return self.rejects_of_units / f"{index:06d}.jsonl"


class RunDir:
    """Plans, ledgers, logs, progress, rejects and intermediate manifests of one dataset."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # A random number, by which the jobs and the reservations of the run are found.
        self.id = path / "id"
        # The path of the dataset directory in which the run has reservations.
        self.reserved = path / "reserved"
        self.config = path / "resolved_config.yaml"
        # What the run was begun with, and how it has ended.
        self.given = path / "given.json"
        self.end = path / "end.json"
        self.rejects = path / "rejects.jsonl"
        # Of stages that keep the cuts of what they reject: segments and cuts without codes.
        self.bad_codes = path / "bad_codes.jsonl"
        self.stats = path / "stats.json"
        # The page that ``sharmill report`` makes.
        self.report = path / "report.html"
        # Written by ``sharmill calibrate``: similarities, yields, rejects and rates of a pilot.
        self.calibration = path / "calibration.json"
        # The scripts of a cluster's jobs, their input and their output, and the log of its advance jobs.
        self.jobs = path / "jobs"
        self.advance_log = self.jobs / "advance.log"
        self.manifests = path / "manifests"
        # Audio that was fetched from URLs.
        self.copies = path / "copies"

    def stage(self, name: str) -> StageDir:
        return StageDir(self.path / name)

    def read_id(self) -> str:
        """Return the id of the run, "" where it has none yet."""
        return _read_name(
            self.id, "[0-9a-f]{16}",
            "is not the id of a run directory, by which its jobs and reservations are found: look for jobs with "
            "squeue, and remove the file once there are none",
        )  # fmt: skip

    def make_id(self) -> str:
        """Return the id of the run, made now if it has none. The caller holds the lock of the run directory."""
        if not self.read_id():
            write_atomic(self.id, secrets.token_hex(8).encode())
        return self.read_id()

    def read_reserved(self) -> Path | None:
        """Return the directory in which the run has reservations; None where it never had one."""
        if not self.reserved.exists():
            return None
        root = Path(os.fsdecode(read_stored(self.reserved)))
        if not root.is_absolute() or "\0" in str(root):
            raise damaged_file(self.reserved, "it names no directory")
        return root

    def begin(self, given: "Given") -> None:
        """Note what a run is given; that an earlier one has ended counts no more. The caller holds the lock."""
        write_atomic(self.given, msgspec.json.encode(given) + b"\n")
        self.end.unlink(missing_ok=True)

    def read_given(self) -> "Given | None":
        """Return what the run was given; None where none has begun."""
        return read_record(self.given, Given)

    def read_end(self) -> "End | None":
        """Return how the run has ended; None where it is under way, or was killed."""
        return read_record(self.end, End)

    def note_end(self, end: "End") -> None:
        """Note how the run has ended; that it was cancelled stays."""
        if not self.is_cancelled():
            write_atomic(self.end, msgspec.json.encode(end) + b"\n")

    def is_cancelled(self) -> bool:
        """Return True if a user has cancelled the run since it began."""
        end = self.read_end()
        return end is not None and end.state == "cancelled"

    def require_not_cancelled(self) -> None:
        """Raise FatalError if a user has cancelled the run since it began."""
        if (end := self.read_end()) is not None and end.state == "cancelled":
            raise FatalError(f"the run was {end.message}", code="cancelled")


class Given(msgspec.Struct, kw_only=True):
    """Values that a run was begun with; who joins it, and the jobs that go on with it, take it from here.

    ``stages`` are the names of its stages, ``folder`` is what relative paths of its configuration begin at, and
    ``run`` is the run directory, so that a copy of it is told. ``command`` is what goes on with it, "" where nobody
    knows. ``cluster`` is the name of the SLURM cluster that has its jobs, "" where it has none.
    """

    stages: list[str]
    folder: str = ""
    run: str = ""
    command: str = ""
    cluster: str = ""


class StoredError(msgspec.Struct, kw_only=True):
    """An error as a file of a run directory has it; ``place`` is that of a ``DeviceError``."""

    message: str = ""
    code: str = ""
    details: list[str] = []
    place: str = ""
    is_config: bool = False

    def as_error(self) -> SharmillError:
        """Return the error, to be raised."""
        code = self.code if self.code in CODES else "unspecified"
        if self.place:
            return DeviceError(self.message, place=self.place, code=code)
        kind = ConfigError if self.is_config else FatalError
        return kind(self.message, code=code, details=self.details)


class End(StoredError, kw_only=True):
    """The end of a run, with the error that has ended it; ``findings`` are the errors that the checker found."""

    state: Literal["done", "failed", "cancelled"]
    findings: int = 0

    @classmethod
    def of(cls, error: BaseException) -> "End":
        """Return the end of a run that an error has ended."""
        if not isinstance(error, SharmillError):
            return cls(state="failed", message=f"{type(error).__name__}: {error}")
        return cls(
            state="failed",
            message="; ".join(error.lines),
            code=error.code,
            is_config=isinstance(error, ConfigError),
        )


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """The smallest piece of work, committed as a whole.

    Attributes:
        index: position in the plan.
        id: derived from the content, so that a commit record proves which work it is the record of.
        cost: predicted work, in the stage's ``cost_unit``.
        size: number of input records.
        params: the few values that the stage needs to find its records.
    """

    index: int
    id: str
    cost: float
    size: int
    params: dict[str, Any]


def make_unit(index: int, *, cost: float, size: int, params: dict[str, Any]) -> Unit:
    """Return a unit whose id is derived from its position and parameters."""
    content = msgspec.json.encode([index, size, params], order="sorted")
    return Unit(index=index, id=checksum_bytes(content), cost=cost, size=size, params=params)


@dataclass(kw_only=True)
class Output:
    """Result of one unit.

    Attributes:
        files: names, relative to the stage's root, of the files written in the staging folder, in the order in which
            they are to be published.
        num_out: records that go on to the next stage.
        rejects: records that do not.
        stats: numbers that ``finalize`` needs, small and JSON-encodable.
    """

    files: list[str]
    num_out: int
    rejects: list[Reject] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a finished unit: written last, and its existence means that all else is in place.

    It counts for the plan with its ``token`` only. ``device_kind`` is that of its rank's processor, ``delays`` the part
    of its ``seconds`` that went into decoding, the model and the disk, as far as that was noted. ``memory_mb`` is the
    most that its process had held by then, ``memory_asked_mb`` what its job had asked for, 0 where that is not known.
    """

    token: str
    index: int
    id: str
    files: list[PublishedFile]
    num_in: int
    num_out: int
    rejects: dict[str, int]
    stats: dict[str, Any]
    seconds: float
    rank: int
    device_kind: str = ""
    delays: dict[str, float] = {}
    host: str = ""
    memory_mb: float = 0.0
    memory_asked_mb: float = 0.0

    def __post_init__(self) -> None:
        # Stages add these up; a damaged ledger may hold anything, and is refused when it is read.
        for key, value in self.stats.items():
            if ("seconds" in key or "clipped" in key) and not isinstance(value, (int, float)):
                raise ValueError(f"stats: {key} is not a number")

    @property
    def num_rejected(self) -> int:
        return sum(self.rejects.values())


def name_devices(kinds: Iterable[str]) -> list[str]:
    """Return the kinds of device that are named beside an output: none for CPUs alone, of which one is as another."""
    found = sorted(set(kinds) - {""})
    return [] if found == ["cpu"] else found


@dataclass(frozen=True, kw_only=True)
class Totals:
    """The accounts of a whole stage. ``rejects`` counts by reason code; ``hours`` is audio that went on."""

    num_in: int
    num_out: int
    rejects: dict[str, int]
    hours: float
    notes: list[str] = field(default_factory=list)

    @property
    def num_rejected(self) -> int:
        return sum(self.rejects.values())

    def check(self, stage: str, expected_in: int) -> None:
        """Raise FatalError unless every input record ended exactly once."""
        if self.num_in != expected_in or self.num_out + self.num_rejected != self.num_in:
            raise FatalError(
                f"{stage}: accounts do not add up: {expected_in} records planned, {self.num_in} read, "
                f"{self.num_out} went on, {self.num_rejected} rejected",
                code="accounts",
            )


@dataclass(frozen=True)
class FailedAttempt:
    """Why an attempt at a unit failed: one line, and the traceback or the signal."""

    index: int
    message: str
    traceback: str


@dataclass(frozen=True)
class Submitted:
    """An executor has submitted ranks and, behind them, a job that goes on when they have ended.

    Attributes:
        message: one sentence that says so.
        jobs: the numbers of all these jobs.
    """

    message: str
    jobs: list[str]


@dataclass(frozen=True)
class StageResult:
    """Outcome of a stage, or of the work of an executor on it.

    Attributes:
        totals: the accounts of a stage that is done.
        failures: the units that failed for good, by index.
        submitted: what was submitted and is not done yet.
        given_up: names ranks and devices that could not be used on the way, a sentence each.
    """

    totals: Totals | None = None
    failures: dict[int, FailedAttempt] = field(default_factory=dict)
    submitted: Submitted | None = None
    given_up: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Return True if the stage is done."""
        return self.totals is not None


# Called by a processor with the part of a unit's cost that it has done since the last call.
Advance = Callable[[float], None]
Resource = Literal["cpu", "gpu"]


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
        after: the kinds of the stages whose output it reads; ``*`` for all that do not read its own, and the
            rejects of all. They run before it; and where one that ``replaces_root`` begins anew, what lies behind it
            does too.
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
        log_level: the least level of what its ranks log.
        unit_time_limit: that of ``time_limit``.
        max_reject_fraction: the share of its records that may be rejected before it stops; set by ``run_stage``.
        lease_seconds: a rank is taken for dead when its heartbeat has not been seen for so long.
        scratch: a folder of each machine in which ranks write before they publish, or None.
        replaces_root: begun anew, it removes all of ``root`` that stages of this and of other runs have published.
        keeps_cuts: what it rejects stays in the dataset, without the fields of this stage.
        looks_ahead: its processors make use of ``expect``, so that a rank holds its next unit already.
        replan_when_changed: a check, which loses nothing by starting anew when its input has changed.
    """

    kind: ClassVar[str]
    section: ClassVar[type[StageSection] | None] = None
    after: ClassVar[Sequence[str]] = ()
    part_of: ClassVar[str] = ""
    resource: ClassVar[Resource] = "cpu"
    cost_unit: ClassVar[Literal["records", "seconds of audio"]] = "seconds of audio"
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
    log_level: str = "INFO"
    keeps_cuts: ClassVar[bool] = False
    looks_ahead: ClassVar[bool] = False
    replaces_root: ClassVar[bool] = False
    replan_when_changed: ClassVar[bool] = False

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

    def time_limit(self, unit: Unit) -> float | None:
        """Return the seconds after which an attempt at a unit ends its rank, None for no limit."""
        if self.unit_time_limit == "auto":
            # No stage is known to be as slow, by record or second of audio; a disk or a model server may stand still.
            return max(3600.0, 10.0 * unit.cost)
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
    def finalize(self, units: list[Unit], commits: list[Commit]) -> Totals:
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

    def discard(self) -> None:
        """Remove for good what the stage has published beside the files of units in its own folder, on a restart.

        It is called when ``check_output`` found nothing, as long as the plan is there. These are its products, unless a
        stage says otherwise.
        """
        remove(*self.products())

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
        own = shards.get(self.name, set())
        return own if own or (of_index and self.shares_root) else None

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


def versions(*packages: str) -> dict[str, str]:
    """Return the installed version of sharmill and of each package; ``absent`` where there is none."""
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


def add_up(commits: list[Commit]) -> Totals:
    """Return the totals of the commits' counts; ``hours`` from ``stats['seconds']``, the audio that went on."""
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
    for kind, stage in [(kind, stage) for kind, stage in classes.items() if kind not in STAGES.own]:
        refuse(
            (
                getattr(stage, "kind", None) != kind,
                f"the stage {kind!r} calls itself {getattr(stage, 'kind', None)!r}",
            ),
            (
                stage.resource not in get_args(Resource),
                f"the stage {kind!r} needs {stage.resource!r}; a resource is {' or '.join(get_args(Resource))}",
            ),
            (
                not {*stage.after} <= {"*", *STAGES.names()},
                f"the stage {kind!r} reads the output of {', '.join(stage.after)}, of which one is no stage",
            ),
            code="bad_plugin",
        )
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


def stages_behind(config: Config, kind: str) -> list[str]:
    """Return a kind of stage and those that read its output, or that of one of these, in the order of the run."""
    classes, behind = stage_classes(config), {kind}
    for other, stage in classes.items():
        if "*" in stage.after or not behind.isdisjoint(stage.after):
            behind.add(other)
    return [other for other in classes if other in behind]
