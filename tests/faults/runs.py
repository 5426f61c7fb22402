"""Runs in trouble: one that can be put back to the moment before any of its stages, and runs whose power is cut.

Each stage is run once without trouble; what it left is kept and is what every troubled run has to come to as well. A
run whose power is cut is recorded once, then done again from each state that a cut may have left on the disk.

The model of crashes. What a file held at its last fsync is there. Of what was written to it later nothing may be there,
all, a first part, or its full length with zeros for bytes. A name that was made, moved or removed is so for good after
the next fsync of its folder. Of those that were not synced any may have happened and any not, in whatever order, but
for two rules: a rename is one step, of both its names (also between folders, where an fsync of either makes it last),
and of steps about one name a later one never without the earlier ones. The fsync of a file says nothing about its name,
and that of a folder nothing about its own name in the folder above. These rules are those of POSIX as ALICE reads them
(Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014): weaker than any file system in use. States in
which only bytes are missing, as on ext4 and XFS, are among them.
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

STAGES = ("prepare", "match", "write", "encode", "validate")
CODEC = "tiny"
# Of one run only: who did what and when. Each of them may differ from run to run.
_PERSONAL = {
    "claims", "end.json", "given.json", "id", "jobs", "launch.json", "ledger", "logs", "progress",
    "reserved", "resolved_config.yaml", "state.json", "token",
}  # fmt: skip
# It has the times of the dataset's files.
_PERSONAL_FILES = {"run/validate/plan/identity.json"}
_INDEX = {"dataset.json", "shards.jsonl"}


class SmallRun:
    """``work`` has the run directory and the dataset directory; ``states/<stage>`` is ``work`` after that stage."""

    def __init__(self, folder: Path, *, num_voices: int = 8, utterances_per_voice: int = 4, **units: int) -> None:
        self.folder = folder
        self.work = folder / "work"
        self.dataset = self.work / "dataset"
        corpus = make_corpus(folder / "corpus", num_voices=num_voices, utterances_per_voice=utterances_per_voice)
        self.config = write_config(
            folder, corpus.manifest, corpus.audio_root, run_dir=str(self.work / "run"), dataset_dir=str(self.dataset),
            prepare={"unit_records": units.get("records", 3)}, write={"shard_size": units.get("shard", 2)},
            match={"encoder": TINY_ENCODER, "min_similarity": 0.0, "unit_seconds": units.get("seconds", 2.0)},
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
        """The folders in the run directory of what the command line runs under the name of a stage."""
        names = ("encode.segments", f"encode/{CODEC}", f"encode.shards/{CODEC}") if stage == "encode" else (stage,)
        return [self.work / "run" / name for name in names]

    def state(self, stage: str) -> Path:
        """The folder that has ``work`` as the stage left it."""
        return self.folder / "states" / stage

    def before(self, stage: str) -> Path:
        """The folder that has ``work`` as the stage finds it."""
        return self.state(("begin", *STAGES)[STAGES.index(stage)])

    def restore(self, stage: str) -> None:
        """Puts ``work`` back to the moment before the stage; the folder itself stays, for it may be a mount."""
        for path in self.work.iterdir():
            shutil.rmtree(path)
        shutil.copytree(self.before(stage), self.work, dirs_exist_ok=True)

    def commits(self, stage: str) -> int:
        """How many commits are in the ledger."""
        ledgers = (path for folder in self.stage_dirs(stage) for path in folder.glob("ranks/*/ledger/*.jsonl"))
        return sum(path.read_bytes().count(b"\n") for path in ledgers)

    def differences(self, stage: str) -> list[str]:
        """How ``work`` differs from what the stage leaves without trouble: nothing may."""
        expected, found = lasting_files(self.state(stage)), lasting_files(self.work)
        wrong = [f"{name} is missing" for name in expected.keys() - found.keys()]
        wrong += [f"{name} is too much" for name in found.keys() - expected.keys()]
        for name in expected.keys() & found.keys():
            if expected[name] != found[name]:
                wrong.append(f"{name} has other bytes")
        staging = [path.parent.relative_to(self.work) for path in self.work.rglob(f"{STAGING_NAME}/*")]
        return sorted(wrong) + [f"{name} is left over" for name in (*self.leftovers(), *staging)]

    def leftovers(self, below: str = "") -> list[str]:
        """Temporary files and folders, wherever they are; in a staging folder what an attempt has left."""
        names = (path.relative_to(self.work).as_posix() for path in sorted((self.work / below).rglob("*")))
        return [name for name in names if is_temporary(name)]

    def check_readers(self, stage: str) -> None:
        """Proves that who reads the dataset directory at this moment, while a stage is at work, gets nothing bad."""
        self.check_published()
        shards = self._committed(CUTS)
        self._check_with_lhotse(shards, {field: field for field in BASE_FIELDS})
        # Of the codes, those of the contexts come last.
        with_codes = self._committed(codes_field(CODEC, CONTEXT_CODES))
        codes = {field: codes_field(CODEC, field) for field in (TARGET_CODES, CONTEXT_CODES)}
        self._check_with_lhotse(with_codes, {CUTS: CUTS, **codes})
        try:
            cuts = open_shar(self.dataset)
        except ConfigError:
            assert stage in ("prepare", "match", "write"), "a finished dataset has lost its index"
            return
        assert stage not in ("prepare", "match"), "there is a dataset already"
        assert _load_all(cuts) == sum(self._counts())

    def check_published(self) -> None:
        """Every file under a final name has its final bytes; the index may be that before the codes came or after."""
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
    """Load all that the cuts have; return how many they are."""
    count = 0
    for count, cut in enumerate(cuts, 1):  # noqa: B007
        for field in (TARGET_AUDIO, CONTEXT_AUDIO, TARGET_CODES, CONTEXT_CODES):
            if cut.has_custom(field):
                value = getattr(cut, field)
                shape = tuple(value.shape) if hasattr(value, "shape") else (1, value.num_samples)
                assert getattr(cut, f"load_{field}")().shape == shape
    return count


def lasting_files(folder: Path) -> dict[str, bytes]:
    """Return, by relative name, the files of the folder of a run whose bytes must be the same after every run."""
    own = {*_PERSONAL, LOCK_NAME}
    names = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())
    lasting = [name for name in names if own.isdisjoint(name.split("/")) and name not in _PERSONAL_FILES]
    # The folder of a plan's ranks is called by a random token.
    return {re.sub("/ranks/[0-9a-f]+-[0-9a-f]+/", "/ranks/", name): (folder / name).read_bytes() for name in lasting}


def is_temporary(name: str) -> bool:
    """Return True for what only a process that was ended leaves, by its name below the folder of a run."""
    own = name.rpartition("/")[2]
    in_staging = name.partition(f"{STAGING_NAME}/")[2]
    return (own.startswith(".") and own != STAGING_NAME) or own.endswith(".tmp") or "/" in in_staging


# The bytes of each file by its name below a folder, None for a folder.
State = Mapping[str, bytes | None]
# Before and after each of these calls the folder is looked at. Nothing else in sharmill renames, removes or syncs.
_CALLS = ("fsync", "rename", "replace", "link", "unlink", "remove", "mkdir", "rmdir")
_FSYNC = os.fsync
# A file that was changed so recently may be changed again without another time and size.
_CLOCK_TICK_NS = 50_000_000
_PROGRAM = str(REPOSITORY / "src")


@dataclass(eq=False)
class Node:
    """A file, with its bytes and the size and time that it had when they were read, or a folder."""

    is_folder: bool
    data: bytes = b""
    seen: tuple[int, int] = (0, 0)


# A name in a folder.
Name = tuple[Node, str]
# A step about names is what each of them means from then on, None for nothing.
Renaming = dict[Name, Node | None]


class Writing(NamedTuple):
    """A step about bytes: those of a file from then on."""

    file: Node
    data: bytes


class Sync(NamedTuple):
    """An fsync of a file or of a folder, and the functions of the program that led to it, the innermost one first."""

    node: Node
    site: str


class Crash(NamedTuple):
    """A power loss after so many steps, with losses drawn from a number; 0 loses all that can be lost."""

    after: int
    number: int


class Recording:
    """The steps that this process does below a folder, and what a power loss may leave of them."""

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
        """Record what is done in the context."""
        with ExitStack() as patches:
            for name in _CALLS:
                patches.enter_context(mock.patch.object(os, name, partial(self._call, getattr(os, name))))
            yield
        self._look()

    def crashes(self, seed: int, rounds: int) -> Iterator[Crash]:
        """Yield a crash after each step, the steps in an order drawn from the seed, then a second one, and so on."""
        steps = list(range(1, len(self.steps) + 1))
        random.Random(seed).shuffle(steps)
        yield from (Crash(after, number) for number in range(rounds) for after in steps)

    def left(self, crash: Crash, without: str | None = None) -> State:
        """Return what a crash leaves; the fsyncs of the sites that ``without`` is a part of do nothing."""
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
        """Add the steps from what was there at the last look to what is there now.

        Args:
            is_one_step: all changes of names come from one call; else each of them is a step.
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
                # What is gone is forgotten: another file may have its identity later.
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
    """Do the wanted steps, and before each the earlier ones about the same names; return those that are left."""
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
    """Return what is left of a file: what was synced, and a part of what was written since."""
    begin = len(synced) if written.startswith(synced) else 0
    torn = written[: rng.randint(begin, len(written))]
    return rng.choice((synced, written, torn, written[:begin].ljust(len(written), b"\0")))


def _site() -> str:
    codes = [frame.f_code for frame, _ in traceback.walk_stack(None)]
    own = [code for code in codes if code.co_filename.startswith(_PROGRAM)]
    return " < ".join(f"{Path(code.co_filename).stem}.{code.co_name}" for code in own) or "a thread"


# Losses after each step; a small run has fewer distinct states than are asked for.
_ROUNDS = 100
_FIELDS = (TARGET_AUDIO, CONTEXT_AUDIO, TARGET_CODES, CONTEXT_CODES)


@dataclass(frozen=True)
class PoweredRun:
    """A run whose power is cut.

    Attributes:
        prepare: makes what is there before the run, in an empty folder.
        run: does the work in that folder; called again after a cut.
        datasets: the names of dataset directories, which are read after a cut and before the run is done again.
        codec: whose codes are read, where there are several.
    """

    name: str
    prepare: Callable[[Path], None]
    run: Callable[[Path], object]
    datasets: Sequence[str] = ()
    codec: str | None = None


class PowerCuts:
    """A run that was recorded, in a folder of its own, and is ready to be cut.

    Args:
        without: fsyncs do nothing at the sites that this is a part of.
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
        """Cut the power at moments drawn from a seed; yield of each distinct state what ``relaunch`` returns."""
        end = Crash(len(self.recording.steps), 0)
        self._write(self.recording.left(end, self._without))
        if lost := self._changed():
            yield end, 0, f"what was done is lost: {', '.join(lost)}"
        seen = set()
        for crash in self.recording.crashes(seed, _ROUNDS):
            state = self.recording.left(crash, self._without)
            if (digest := _digest(state)) not in seen:
                seen.add(digest)
                yield crash, *self.relaunch(state)

    def relaunch(self, state: State) -> tuple[int, str]:
        """Read and run again from a state; return how many readers refused, and the problem, if any."""
        self._write(state)
        refused = 0
        try:
            refused = sum(self._is_refused(name, reads) for name, reads in self._reads.items())
            with _after_reboot():
                self._run.run(self._work)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the outcome
            # What is done already may be refused: its bytes are compared.
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
        """Return the names of the files that an undisturbed run leaves, and that are not as it leaves them."""
        found = lasting_files(self._work)
        return sorted(name for name, data in self._expected.items() if found.get(name) != data)

    def _is_refused(self, name: str, reads: list[Any]) -> bool:
        """Return True where a reader refuses; raise where it gets what was never there."""
        found = self._read(name)
        assert found is None or any(_is_part(found, whole) for whole in reads if whole is not None), (
            "a reader gets other cuts"
        )
        return found is None

    def _read(self, name: str) -> dict[str, dict[str, bytes]] | None:
        """Return of each cut of a dataset what it holds; None where a reader refuses."""
        try:
            return {
                cut.id: {name: getattr(cut, f"load_{name}")().tobytes() for name in _FIELDS if cut.has_custom(name)}
                for cut in open_shar(self._work / name, codec=self._run.codec)
            }
        except SharmillError:
            return None


def _digest(state: State) -> int:
    """Return the hash of a state; what is said in logs and records of progress does not count."""
    return hash(frozenset(one for one in state.items() if not {"logs", "progress"} & set(one[0].split("/"))))


def _is_part(found: dict[str, dict[str, bytes]], whole: dict[str, dict[str, bytes]]) -> bool:
    """Return True if these are all cuts of a dataset; the codes may be still to come."""
    return found.keys() == whole.keys() and all(values.items() <= whole[cut].items() for cut, values in found.items())


# Each look at the clock is twenty seconds later, so that leases of before are over at once.
_FAST_CLOCK = SimpleNamespace(monotonic=count(0, 20).__next__, time=time.time, sleep=lambda seconds: None)


@contextmanager
def _after_reboot() -> Iterator[None]:
    """Make locks, drivers and ranks of before those of another kernel, which is down for over a lease."""
    with (
        mock.patch("sharmill.files.host.this_kernel", return_value="after the reboot"),
        mock.patch("sharmill.engine.launch.time_of_folder", return_value=time.time() + 600.0),
        mock.patch("sharmill.files.locks.time", _FAST_CLOCK),
    ):
        yield
