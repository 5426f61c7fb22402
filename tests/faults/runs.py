"""Runs with faults: a run that can be restored to the moment before any stage, and runs with simulated power failures.

Each stage runs once without faults, and its output is kept as the expected output of all runs with faults. A run with
power failures is recorded once, then resumed from each state that a power failure may have left on the disk.

The model of crashes: the bytes of a file at its last fsync are safe. Of bytes that were written later, all, none, or a
first part may be on the disk, or the file may have its full length with zeros. A creation, rename or removal of a name
is durable after the next fsync of its folder. Any subset of the changes of names that were not synced may have
happened, in any order, with two rules. A rename changes both names in one step; between folders, an fsync of either
folder makes it durable. A change of a name never happens without the earlier changes of the same name. The fsync of a
file does not make its name durable, and the fsync of a folder does not make the folder's own name durable. These are
the rules of POSIX according to ALICE (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014). They promise
less than any file system in use, and include states in which only bytes are missing, as on ext4 and XFS.
"""

import os
import random
import re
import shutil
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from lhotse import CutSet
from support.project import REPOSITORY, TINY_ENCODER, command, run_sharmill, write_config

from sharmill.demo.corpus import make_corpus
from sharmill.errors import ConfigError, SharmillError
from sharmill.files.locks import LOCK_NAME
from sharmill.files.staging import STAGING_NAME
from sharmill.shar import open_shar
from sharmill.shar.fields import (
    BASE_FIELDS,
    CONTEXT_AUDIO,
    CONTEXT_CODES,
    CUTS,
    TARGET_AUDIO,
    TARGET_CODES,
    codes_field,
    published_field,
)
from sharmill.shar.index import read_shards

STAGES = ("prepare", "voices", "match", "write", "encode", "validate")
CODEC = "tiny"
# Names of files and folders that may differ from run to run, because they record processes and times.
_PERSONAL = {
    "claims", "end.json", "given.json", "id", "jobs", "launch.json", "ledger", "logs", "progress",
    "reserved", "resolved_config.yaml", "state.json", "token",
}  # fmt: skip
# This file contains the times of the dataset's files.
_PERSONAL_FILES = {"run/validate/plan/identity.json"}
_INDEX = {"dataset.json", "shards.jsonl"}


class SmallRun:
    """A small run. ``work`` has its run directory and dataset; ``states/<stage>`` is ``work`` after that stage."""

    def __init__(self, folder: Path, *, num_voices: int = 8, utterances_per_voice: int = 4, **units: int) -> None:
        self.folder = folder
        self.work = folder / "work"
        self.dataset = self.work / "dataset"
        corpus = make_corpus(folder / "corpus", num_voices=num_voices, utterances_per_voice=utterances_per_voice)
        self.config = write_config(
            folder, corpus.manifest, corpus.audio_root, run_dir=str(self.work / "run"), dataset_dir=str(self.dataset),
            prepare={"unit_records": units.get("records", 3)}, write={"shard_size": units.get("shard", 2)},
            match={"encoder": TINY_ENCODER, "min_similarity": 0.0, "unit_seconds": units.get("seconds", 2.0)},
            voices={"window_seconds": 0.5},
        )  # fmt: skip
        self.work.mkdir()
        self._save("begin")
        for stage in STAGES:
            assert self.run(stage).returncode == 0
            self._save(stage)

    def command(self, stage: str, workers: int = 1) -> list[str]:
        """Return the command line that runs one stage."""
        return command("run", self.config, stage, f"executor.workers={workers}")

    def run(self, stage: str, workers: int = 1, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run one stage to its end."""
        return run_sharmill("run", self.config, stage, f"executor.workers={workers}", status=None, **options)

    def stage_dirs(self, stage: str) -> list[Path]:
        """Return the folders of all rounds of a stage in the run directory."""
        rounds = {
            "voices": ("voices.embed", "voices.cluster", "voices"),
            "encode": ("encode.segments", f"encode/{CODEC}", f"encode.shards/{CODEC}"),
        }
        return [self.work / "run" / name for name in rounds.get(stage, (stage,))]

    def state(self, stage: str) -> Path:
        """Return the copy of ``work`` after a stage."""
        return self.folder / "states" / stage

    def before(self, stage: str) -> Path:
        """Return the copy of ``work`` before a stage."""
        return self.state(("begin", *STAGES)[STAGES.index(stage)])

    def restore(self, stage: str) -> None:
        """Restore ``work`` to its state before a stage; the folder itself stays, because it may be a mount point."""
        for path in self.work.iterdir():
            shutil.rmtree(path)
        shutil.copytree(self.before(stage), self.work, dirs_exist_ok=True)

    def commits(self, stage: str) -> int:
        """Return the number of commits in the ledgers of a stage."""
        ledgers = (path for folder in self.stage_dirs(stage) for path in folder.glob("ranks/*/ledger/*.jsonl"))
        return sum(path.read_bytes().count(b"\n") for path in ledgers)

    def differences(self, stage: str) -> list[str]:
        """Return the differences between ``work`` and its expected state after the stage; there must be none."""
        expected, found = lasting_files(self.state(stage)), lasting_files(self.work)
        wrong = [f"{name} is missing" for name in expected.keys() - found.keys()]
        wrong += [f"{name} is unexpected" for name in found.keys() - expected.keys()]
        for name in expected.keys() & found.keys():
            if expected[name] != found[name]:
                wrong.append(f"{name} has other bytes")
        staging = [path.parent.relative_to(self.work) for path in self.work.rglob(f"{STAGING_NAME}/*")]
        return sorted(wrong) + [f"{name} is left over" for name in (*self.leftovers(), *staging)]

    def leftovers(self, below: str = "") -> list[str]:
        """Return all temporary files and folders, including remains of attempts in staging folders."""
        names = (path.relative_to(self.work).as_posix() for path in sorted((self.work / below).rglob("*")))
        return [name for name in names if is_temporary(name)]

    def check_readers(self, stage: str) -> None:
        """Check that readers of the dataset directory get nothing bad at this moment, while a stage is running."""
        self.check_published()
        shards = self._committed(CUTS)
        self._check_with_lhotse(shards, {field: field for field in BASE_FIELDS})
        # The codes of contexts are published last.
        with_codes = self._committed(codes_field(CODEC, CONTEXT_CODES))
        codes = {field: codes_field(CODEC, field) for field in (TARGET_CODES, CONTEXT_CODES)}
        self._check_with_lhotse(with_codes, {CUTS: CUTS, **codes})
        try:
            cuts = open_shar(self.dataset)
        except ConfigError:
            assert stage in ("prepare", "voices", "match", "write"), "a finished dataset has lost its index"
            return
        assert stage not in ("prepare", "voices", "match"), "a dataset exists too early"
        assert _load_all(cuts) == sum(self._counts())

    def check_published(self) -> None:
        """Check that every file under a final name has its final bytes; the index may be with or without the codes."""
        for top in sorted(self.dataset.glob("[!.]*")):
            for path in [top] if top.is_file() else sorted(top.rglob("[!.]*.*")):
                name = path.relative_to(self.dataset).as_posix()
                states = ("write", "encode") if name in _INDEX else ("encode",)
                assert path.read_bytes() in [(self.state(s) / "dataset" / name).read_bytes() for s in states], name

    def _committed(self, last_field: str) -> list[int]:
        final = [published_field(last_field).path(index) for index in range(len(self._counts()))]
        return [index for index, name in enumerate(final) if (self.dataset / name).exists()]

    def _counts(self) -> list[int]:
        return [shard.count for shard in read_shards(self.state("write") / "dataset")]

    def _check_with_lhotse(self, shards: list[int], fields: dict[str, str]) -> None:
        if shards:
            files = {
                name: [str(self.dataset / published_field(f).path(index)) for index in shards]
                for name, f in fields.items()
            }
            counts = self._counts()
            assert _load_all(CutSet.from_shar(fields=files)) == sum(counts[index] for index in shards)

    def _save(self, state: str) -> None:
        shutil.copytree(self.work, self.state(state))


def _load_all(cuts: CutSet) -> int:
    """Load all data of the cuts, and return the number of cuts."""
    count = 0
    for count, cut in enumerate(cuts, 1):  # noqa: B007
        for field in (TARGET_AUDIO, CONTEXT_AUDIO, TARGET_CODES, CONTEXT_CODES):
            if cut.has_custom(field):
                value = getattr(cut, field)
                shape = tuple(value.shape) if hasattr(value, "shape") else (1, value.num_samples)
                assert getattr(cut, f"load_{field}")().shape == shape
    return count


def lasting_files(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files in a run's folder that must be the same after every run, by relative name."""
    own = {*_PERSONAL, LOCK_NAME}
    names = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())
    lasting = [name for name in names if own.isdisjoint(name.split("/")) and name not in _PERSONAL_FILES]
    # Leave out the random token of the plan in names of folders.
    return {re.sub("/ranks/[0-9a-f]+-[0-9a-f]+/", "/ranks/", name): (folder / name).read_bytes() for name in lasting}


def is_temporary(name: str) -> bool:
    """Return True if a file or folder, by its name below the folder of a run, is left from a killed process."""
    own = name.rpartition("/")[2]
    in_staging = name.partition(f"{STAGING_NAME}/")[2]
    return (own.startswith(".") and own != STAGING_NAME) or own.endswith(".tmp") or "/" in in_staging


# The bytes of each file by its name below a folder, None for a folder.
State = Mapping[str, bytes | None]
# The folder is scanned before and after each of these calls. sharmill uses no others to rename, remove or sync.
_CALLS = ("fsync", "rename", "replace", "link", "unlink", "remove", "mkdir", "rmdir")
_FSYNC = os.fsync
# A file that was changed within this time may be changed again without a new time or size.
_CLOCK_TICK_NS = 50_000_000
_PROGRAM = str(REPOSITORY / "src")


@dataclass(eq=False)
class Node:
    """A folder, or a file with its bytes and with its size and time when they were read."""

    is_folder: bool
    data: bytes = b""
    seen: tuple[int, int] = (0, 0)


# A name in a folder.
Name = tuple[Node, str]
# A step about names: the new meaning of each name, None if it was removed.
Renaming = dict[Name, Node | None]


class Writing(NamedTuple):
    """A step about bytes: the new content of a file."""

    file: Node
    data: bytes


class Sync(NamedTuple):
    """An fsync of a file or folder, with the functions of the program that called it, the innermost function first."""

    node: Node
    site: str


class Crash(NamedTuple):
    """A power failure after some steps, with losses drawn from a number; 0 loses everything that can be lost."""

    after: int
    number: int


class Recording:
    """The steps of this process below a folder, and the states that a power failure may leave of them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.RLock()
        self._top = Node(is_folder=True)
        self._nodes: dict[tuple[int, int], Node] = {}
        self._names: Renaming = {}
        self.steps: list[Renaming | Writing | Sync] = []
        self._look()
        self._before = self._names, {node: node.data for node in self._nodes.values()}
        self.steps.clear()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the steps in the context."""
        with ExitStack() as patches:
            for name in _CALLS:
                patches.enter_context(mock.patch.object(os, name, partial(self._call, getattr(os, name))))
            yield
        self._look()

    def crashes(self, seed: int, rounds: int) -> Iterator[Crash]:
        """Yield one crash after each step per round, with the steps in a random order."""
        steps = list(range(1, len(self.steps) + 1))
        random.Random(seed).shuffle(steps)
        yield from (Crash(after, number) for number in range(rounds) for after in steps)

    def left(self, crash: Crash, without: str | None = None) -> State:
        """Return the state that a crash leaves.

        Args:
            without: fsyncs do nothing if their call site contains this text.
        """
        names, data = (dict(part) for part in self._before)
        written, unsynced = dict(data), []
        for step in self.steps[: crash.after]:
            if isinstance(step, dict):
                unsynced.append(step)
            elif isinstance(step, Writing):
                written[step.file] = step.data
            elif without is not None and without in step.site:
                continue
            elif step.node.is_folder:
                in_folder = [any(folder is step.node for folder, _ in one) for one in unsynced]
                unsynced = _apply(names, unsynced, in_folder)
            else:
                data[step.node] = written.get(step.node, b"")
        rng = random.Random(f"{crash.after} {crash.number}")
        share = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0)) if crash.number else 0.0
        _apply(names, unsynced, [rng.random() < share for _ in unsynced])
        for file, bytes_written in written.items():
            synced = data.get(file, b"")
            if bytes_written != synced:
                data[file] = _part(synced, bytes_written, rng) if crash.number else synced
        return self._tree(names, data)

    def _call(self, function: Callable[..., None], *arguments: Any, **options: Any) -> None:
        with self._lock:
            self._look()
            function(*arguments, **options)
            if function is not _FSYNC:
                self._look(is_one_step=True)
            elif node := self._nodes.get(_identity(os.fstat(arguments[0]))):
                self.steps.append(Sync(node, _site()))

    def _look(self, *, is_one_step: bool = False) -> None:
        """Add the changes since the last scan as steps.

        Args:
            is_one_step: True if all changes of names come from one call; otherwise each change is a step.
        """
        names, writings = self._scan()
        keys = self._names.keys() | names.keys()
        changes = {key: names.get(key) for key in keys if names.get(key) is not self._names.get(key)}
        if changes:
            self.steps += [changes] if is_one_step else [{key: node} for key, node in changes.items()]
        self.steps += writings
        self._names = names

    def _scan(self) -> tuple[Renaming, list[Writing]]:
        names: Renaming = {}
        writings = []
        nodes = {_identity(self._root.stat()): self._top}
        folders = [(str(self._root), self._top)]
        for path, folder in folders:
            for entry in os.scandir(path):
                status = entry.stat(follow_symlinks=False)
                # Removed files are forgotten, because a new file may get the same inode number.
                known = self._nodes.get(_identity(status)) or Node(entry.is_dir())
                node = nodes.setdefault(_identity(status), known)
                names[folder, entry.name] = node
                if node.is_folder:
                    folders.append((entry.path, node))
                    continue
                seen = status.st_size, status.st_mtime_ns
                if seen != node.seen or time.time_ns() - status.st_mtime_ns < _CLOCK_TICK_NS:
                    node.seen, before = seen, node.data
                    node.data = Path(entry.path).read_bytes()
                    writings += [Writing(node, node.data)] if node.data != before else []
        self._nodes = nodes
        return names, writings

    def _tree(self, names: Renaming, data: Mapping[Node, bytes]) -> State:
        found: dict[str, bytes | None] = {}
        folders = [("", self._top)]
        for prefix, folder in folders:
            for (above, name), node in names.items():
                if above is folder and node:
                    found[prefix + name] = None if node.is_folder else data.get(node, b"")
                    folders += [(f"{prefix}{name}/", node)] if node.is_folder else []
        return found


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _apply(names: Renaming, steps: Sequence[Renaming], wanted: Sequence[bool]) -> list[Renaming]:
    """Apply the wanted steps, and before each one all earlier steps about the same names; return the other steps."""
    kept: list[Renaming] = []
    left: list[Renaming] = []
    about: set[Name] = set()
    for step, is_wanted in zip(reversed(steps), reversed(wanted), strict=True):
        is_kept = is_wanted or not about.isdisjoint(step)
        (kept if is_kept else left).append(step)
        about |= step.keys() if is_kept else set()
    for step in reversed(kept):
        names.update(step)
    return left[::-1]


def _part(synced: bytes, written: bytes, rng: random.Random) -> bytes:
    """Return the remaining bytes of a file: the synced bytes, and a part of the bytes written since."""
    begin = len(synced) if written.startswith(synced) else 0
    torn = written[: rng.randint(begin, len(written))]
    return rng.choice((synced, written, torn, written[:begin].ljust(len(written), b"\0")))


def _site() -> str:
    codes = [frame.f_code for frame, _ in traceback.walk_stack(None)]
    own = [code for code in codes if code.co_filename.startswith(_PROGRAM)]
    return " < ".join(f"{Path(code.co_filename).stem}.{code.co_name}" for code in own) or "a thread"


# Number of losses drawn after each step; a small run has fewer distinct states.
_ROUNDS = 100
_FIELDS = (TARGET_AUDIO, CONTEXT_AUDIO, TARGET_CODES, CONTEXT_CODES)


@dataclass(frozen=True)
class PoweredRun:
    """A run with power failures.

    Attributes:
        name: the name of the run.
        prepare: prepares an empty folder for the run.
        run: does the work in that folder; it is called again after a power failure.
        datasets: the names of dataset directories, which are read after a power failure and before the relaunch.
        codec: the codec whose codes are read, if there are several.
    """

    name: str
    prepare: Callable[[Path], None]
    run: Callable[[Path], object]
    datasets: Sequence[str] = ()
    codec: str | None = None


class PowerCuts:
    """A recorded run in its own folder, and its relaunches after power failures.

    Args:
        without: fsyncs do nothing if their call site contains this text.
    """

    def __init__(self, run: PoweredRun, folder: Path, without: str | None = None) -> None:
        self._run = run
        self._without = without
        self._work = folder / "work"
        self._work.mkdir(parents=True)
        run.prepare(self._work)
        self._reads = {name: [self._read(name)] for name in run.datasets}
        self.recording = Recording(self._work)
        with self.recording.recording():
            run.run(self._work)
        self._expected = lasting_files(self._work)
        for name, reads in self._reads.items():
            reads.append(self._read(name))
            assert reads[-1] is not None

    def cut_all(self, seed: int) -> Iterator[tuple[Crash, int, str]]:
        """Cut the power at random moments; for each distinct state, yield the crash and the result of ``relaunch``."""
        end = Crash(len(self.recording.steps), 0)
        self._write(self.recording.left(end, self._without))
        if lost := self._changed():
            yield end, 0, f"finished work is lost: {', '.join(lost)}"
        seen = set()
        for crash in self.recording.crashes(seed, _ROUNDS):
            state = self.recording.left(crash, self._without)
            if (digest := _digest(state)) not in seen:
                seen.add(digest)
                yield crash, *self.relaunch(state)

    def relaunch(self, state: State) -> tuple[int, str]:
        """Read and run again from a state; return the number of readers that refused, and the problem, if any."""
        self._write(state)
        refused = 0
        try:
            refused = sum(self._is_refused(name, reads) for name, reads in self._reads.items())
            with _after_reboot():
                self._run.run(self._work)
        except Exception as error:  # noqa: BLE001 - any error is a result
            # A finished run may be refused; its bytes are compared below.
            if getattr(error, "code", "") != "foreign_output":
                return refused, traceback.format_exc()
        too_much = lasting_files(self._work).keys() - self._expected.keys()
        return refused, ", ".join([*self._changed(), *sorted(too_much)])

    def _write(self, state: State) -> None:
        shutil.rmtree(self._work)
        self._work.mkdir()
        for name, data in state.items():
            if data is None:
                (self._work / name).mkdir()
            else:
                (self._work / name).write_bytes(data)

    def _changed(self) -> list[str]:
        """Return the names of files that differ from those of a run without power failures, or are missing."""
        found = lasting_files(self._work)
        return sorted(name for name, data in self._expected.items() if found.get(name) != data)

    def _is_refused(self, name: str, reads: list[Any]) -> bool:
        """Return True if a reader refuses the dataset; raise if it gets data that never existed."""
        found = self._read(name)
        assert found is None or any(_is_part(found, whole) for whole in reads if whole is not None), (
            "a reader gets other cuts"
        )
        return found is None

    def _read(self, name: str) -> dict[str, dict[str, bytes]] | None:
        """Return the data of each cut of a dataset; None if the reader refuses the dataset."""
        try:
            return {
                cut.id: {name: getattr(cut, f"load_{name}")().tobytes() for name in _FIELDS if cut.has_custom(name)}
                for cut in open_shar(self._work / name, codec=self._run.codec)
            }
        except SharmillError:
            return None


def _digest(state: State) -> int:
    """Return the hash of a state, without logs and progress."""
    return hash(frozenset(one for one in state.items() if not {"logs", "progress"} & set(one[0].split("/"))))


def _is_part(found: dict[str, dict[str, bytes]], whole: dict[str, dict[str, bytes]]) -> bool:
    """Return True if these are all cuts of a dataset; their codes may still be missing."""
    return found.keys() == whole.keys() and all(values.items() <= whole[cut].items() for cut, values in found.items())


# Each reading of the clock is twenty seconds later, so that old leases expire at once.
_FAST_CLOCK = SimpleNamespace(monotonic=count(0, 20).__next__, time=time.time, sleep=lambda seconds: None)


@contextmanager
def _after_reboot() -> Iterator[None]:
    """Make earlier locks, drivers and ranks look like those of another kernel, which has been down for over a lease."""
    with (
        mock.patch("sharmill.files.host.this_kernel", return_value="after the reboot"),
        mock.patch("sharmill.engine.launch.time_of_folder", return_value=time.time() + 600.0),
        mock.patch("sharmill.files.locks.time", _FAST_CLOCK),
    ):
        yield
