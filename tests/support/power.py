"""Runs whose power is cut: recorded once, then relaunched from each state that a cut may have left on the disk.

Everything happens in forks of one warm process, which has faulty_disk.so preloaded: see ``crash_states.py`` for the
states, ``power_runs.py`` for the runs.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import xxhash

from sharmill.errors import SharmillError
from sharmill.ports import process
from sharmill.shar import open_shar
from sharmill.shar.layout import CONTEXT_AUDIO, CONTEXT_CODES, TARGET_AUDIO, TARGET_CODES
from support.crash_states import Crash, Recording
from support.paths import REPOSITORY
from support.recorded_steps import RecordedSteps, State, read_tree, write_tree
from support.small_run import is_temporary, lasting, lasting_files

# Crashes in one fork: making that takes as long as a relaunch.
_AT_ONCE = 16
_STORAGE = REPOSITORY / "src/sharmill/storage.py"
# A relaunch that lasts longer hangs.
_SECONDS_TO_RELAUNCH = 60
_FIELDS = (TARGET_AUDIO, CONTEXT_AUDIO, TARGET_CODES, CONTEXT_CODES)


@dataclass(frozen=True)
class PoweredRun:
    """A run whose power is cut.

    Attributes:
        prepare: makes what is there before the run, in an empty folder.
        run: does the work in that folder; called again after a cut.
        codec: whose codes are read, where there are several.
        recorded: does the same work and is recorded instead, as by several processes.
        datasets: the names of dataset directories, which are read after a cut and before the run is done again.
        outcome: returns what must be the same in the end, by name.
    """

    name: str
    prepare: Callable[[Path], None]
    run: Callable[[Path], None]
    datasets: Sequence[str] = ()
    codec: str | None = None
    recorded: Callable[[Path], None] | None = None
    outcome: Callable[[Path], dict[str, bytes]] = lasting_files


@dataclass
class Cuts:
    """Findings of cutting the power of a run.

    Attributes:
        steps: the number of steps of the run that were recorded.
        tried: the number of crashes, some of which leave the same state.
        distinct: the number of states, by the model of crashes that has them.
        seconds: how long all of it took.
        refused: how often a reader refused a dataset directory before the relaunch.
        problems: of each crash that shows one, what it is.
    """

    name: str
    steps: int = 0
    tried: int = 0
    distinct: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    seconds: float = 0.0
    problems: dict[str, str] = field(default_factory=dict)


@dataclass
class Broken:
    """The state that breaks without the fsyncs of a site, and what breaks there; empty where nothing does.

    Attributes:
        tried: the number of states that were tried, this one among them; 0 where what is done is lost without them.
    """

    tried: int
    problem: str = ""


class PowerCuts:
    """A run that was recorded, in a folder of its own, and is ready to be cut."""

    def __init__(self, run: PoweredRun, folder: Path) -> None:
        self._run = run
        self._work = folder / "work"
        self._work.mkdir(parents=True)
        run.prepare(self._work)
        before = shutil.copytree(self._work, folder / "before")
        self._reads = {name: [self._read(before / name)] for name in run.datasets}
        # Imports what the run imports, once for all forks.
        run.run(self._work)
        expected = run.outcome(self._work)
        write_tree(self._work, read_tree(before))
        assert _forked(lambda: self._record(folder / "log")) == "recorded"
        self._recorded = RecordedSteps(self._work, before, folder / "log")
        assert self._recorded.end == read_tree(self._work), "an operation was not recorded"
        self.recording = Recording(self._recorded)
        self._expected = run.outcome(self._work)
        self._usual = {_without_token(name) for name in self._temporary()}
        assert self._expected == expected, f"the run is not deterministic: {self._differences(expected)}"
        for name, reads in self._reads.items():
            reads.append(self._read(self._work / name))
            assert reads[-1] is not None
        self._seen: set[bytes] = set()

    def cut_all(self, seed: int, states: int, deadline: float) -> Cuts:
        """Cut the power at moments drawn from a seed, until there were so many distinct states or time is over."""
        found = Cuts(self._run.name, steps=len(self.recording.steps), problems=_lost_at_ends(self.recording))
        crashes, began = self.recording.crashes(seed), time.monotonic()
        while found.distinct.total() < states and time.monotonic() < deadline:
            batch = dict(islice(self._new(crashes, found), min(_AT_ONCE, states - found.distinct.total())))
            if not batch:
                break
            for crash, (refused, problem) in zip(batch, self._cut_many(batch), strict=True):
                found.distinct[crash.model] += 1
                found.refused += refused
                if problem:
                    found.problems[str(crash)] = f"{self.recording.described[crash.after - 1]}: {problem}"
        found.seconds = time.monotonic() - began
        return found

    def cut(self, crash: Crash) -> tuple[int, str]:
        """Read and relaunch after a cut, in a fork; return how many readers refused, and the problem, if any."""
        (found,) = self._cut_many({crash: self.recording.state(crash)})
        return found

    def _cut_many(self, crashes: dict[Crash, State]) -> list[tuple[int, str]]:
        """Do what ``cut`` does for several crashes in one fork; those with a problem again in forks of their own."""
        answer = _forked(lambda: json.dumps([self._outcome(state) for state in crashes.values()]))
        found = json.loads(answer) if answer else [[0, "the process has ended"]] * len(crashes)
        if len(crashes) == 1:
            return [(found[0][0], found[0][1])]
        return [
            self._cut_many({crash: state})[0] if problem else (refused, "")
            for (crash, state), (refused, problem) in zip(crashes.items(), found, strict=True)
        ]

    def _new(self, crashes: Iterable[Crash], found: Cuts) -> Iterator[tuple[Crash, State]]:
        """Yield the crashes that leave a state that was not there before, with that."""
        for crash in crashes:
            found.tried += 1
            state = self.recording.state(crash)
            if (digest := _digest(state)) not in self._seen:
                self._seen.add(digest)
                yield crash, state

    def break_without(self, site: str, states: int, *, is_mixed: bool = False) -> Broken:
        """Look for a state that breaks if the fsyncs from one site do nothing.

        Args:
            states: at most so many that did not hold before are tried.
            is_mixed: those of ``Recording.crashes_without`` that lose any part of what is not synced.
        """
        recording = Recording(self._recorded, [site])
        if lost := _lost_at_ends(recording):
            return Broken(0, "; ".join(f"{crash}: {problem}" for crash, problem in lost.items()))
        crashes, tried, at_once = recording.crashes_without(self.recording, is_mixed=is_mixed), 0, 1
        while tried < states:
            # Mostly one of the first breaks.
            at_once = min(2 * at_once, _AT_ONCE, states - tried)
            batch: dict[bytes, tuple[Crash, State]] = {}
            for crash in crashes:
                state = recording.state(crash)
                digest = _digest(state)
                if digest not in self._seen:
                    batch.setdefault(digest, (crash, state))
                if len(batch) == at_once:
                    break
            if not batch:
                break
            outcomes = self._cut_many(dict(batch.values()))
            for (digest, (crash, _)), (_, problem) in zip(batch.items(), outcomes, strict=True):
                tried += 1
                if problem:
                    return Broken(tried, f"{crash}: {recording.described[crash.after - 1]}: {problem}")
                # What breaks may break without the fsyncs of another site, too.
                self._seen.add(digest)
        return Broken(tried)

    def _record(self, log: Path) -> str:
        library = ctypes.CDLL(None)
        # For processes that this one starts.
        os.environ.update(RECORD_DISK_FOLDER=str(self._work), RECORD_DISK_LOG=str(log))
        library.record_disk(str(self._work).encode(), str(log).encode())
        sync = os.fsync

        def noted(file: int) -> None:
            library.record_site(site_of_caller().encode())
            sync(file)

        with mock.patch("os.fsync", new=noted):
            (self._run.recorded or self._run.run)(self._work)
        return "recorded"

    def _outcome(self, state: State) -> tuple[int, str]:
        refused = 0
        signal.alarm(_SECONDS_TO_RELAUNCH)
        write_tree(self._work, state)
        try:
            refused = sum(self._check_reader(name, reads) for name, reads in self._reads.items())
            with _after_reboot():
                self._run.run(self._work)
        except SharmillError as error:
            return refused, f"{error.code}: {error}"
        except Exception:  # noqa: BLE001 - whatever it is, it is the outcome
            return refused, traceback.format_exc()
        return refused, "; ".join(self._differences(self._expected))

    def _differences(self, expected: dict[str, bytes]) -> list[str]:
        """Differences between what is there and what an undisturbed run leaves: there may be none."""
        found = self._run.outcome(self._work)
        wrong = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
        wrong += [f"{name} is too much" for name in sorted(found.keys() - expected.keys())]
        both = sorted(found.keys() & expected.keys())
        wrong += [f"{name} has other bytes" for name in both if found[name] != expected[name]]
        left = [name for name in self._temporary() if _without_token(name) not in self._usual]
        return wrong + [f"{name} is left over" for name in sorted(left)]

    def _temporary(self) -> set[str]:
        """Names of temporary files and folders; a record of progress is written aside too, and only looked at."""
        names = (path.relative_to(self._work).as_posix() for path in self._work.rglob("*"))
        # Torch calls a lasting file of a checkpoint so.
        return {
            name
            for name in names
            if is_temporary(name) and not name.endswith("/.metadata") and "/progress/" not in name
        }

    def _check_reader(self, name: str, reads: list[Any]) -> int:
        """Return 1 where a reader refuses; raise where it gets what was never there."""
        found = self._read(self._work / name)
        if found is None:
            return 1
        assert any(_is_part(found, whole) for whole in reads if whole is not None), f"a reader gets {found}"
        return 0

    def _read(self, directory: Path) -> dict[str, dict[str, str]] | None:
        """Return of each cut of a dataset the digests of what it holds; None where a reader refuses, in one line."""
        found = {}
        try:
            for cut in open_shar(directory, codec=self._run.codec):
                values = {name: getattr(cut, f"load_{name}")() for name in _FIELDS if cut.has_custom(name)}
                found[cut.id] = {name: xxhash.xxh3_64_hexdigest(value.tobytes()) for name, value in values.items()}
        except SharmillError as error:
            if "\n" in str(error):
                raise
            return None
        return found


def _digest(state: State) -> bytes:
    """Return the hash of a state; what is said in logs and records of progress does not count."""
    counting = {name: data for name, data in state.items() if not {"logs", "progress"} & set(name.split("/"))}
    return xxhash.xxh3_128_digest(msgspec.msgpack.encode(counting))


def _lost_at_ends(recording: Recording) -> dict[str, str]:
    """Return what is lost of a stage, or of the run, if the power goes when it has ended."""
    problems = {}
    for crash in recording.ends():
        there, left = recording.state(Crash(crash.after)), recording.state(crash)
        lost = sorted(name for name in lasting(there) if there[name] != left.get(name, b"absent"))
        if lost:
            problems[str(crash)] = f"what was done is lost: {', '.join(lost[:5])} of {len(lost)}"
    return problems


def _without_token(name: str) -> str:
    """Return a name without the random part that it has in one run."""
    return re.sub("[0-9a-f]{16,}", "*", name)


def _is_part(found: dict[str, dict[str, str]], whole: dict[str, dict[str, str]]) -> bool:
    """Return True if these are all cuts of a dataset; the codes may be still to come."""
    return found.keys() == whole.keys() and all(values.items() <= whole[cut].items() for cut, values in found.items())


def site_of_caller() -> str:
    """Return from where in the program a sync is done: the functions of storage, and the one that calls these."""
    found = []
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if any(path.is_relative_to(REPOSITORY / folder) for folder in ("src", "jobs", "examples")):
            name = f"{path.parent.name}/{path.stem}.{frame.f_code.co_name}"
            # A function that calls itself, as for the folder above, is one place.
            found += [] if found[-1:] == [name] else [name]
            if path != _STORAGE:
                break
        frame = frame.f_back
    return " < ".join(found)


class _Clock:
    """In the place of the module ``clock``: waiting is over at once."""

    def __init__(self) -> None:
        self._waited = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._waited

    def time(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        self._waited += max(seconds, 20.0)


class _AtOnce(Executor):
    """In the place of a pool of threads."""

    def __init__(self, size: int, name: str = "") -> None:
        pass

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*arguments, **options))
        return done


@contextmanager
def _after_reboot() -> Iterator[None]:
    """Make locks of before those of another kernel, whose leases are waited for in no time."""
    with (
        mock.patch.object(process, "this_kernel", return_value="after the reboot"),
        # Threads that wait for each other take longer than the work.
        mock.patch.object(process, "ThreadPoolExecutor", new=_AtOnce),
        mock.patch("sharmill.engine.locks.clock", _Clock()),
    ):
        yield


def _forked(work: Callable[[], str]) -> str:
    """Return the result of a function in a fork; nothing if that has ended before."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # The child makes no use of the threads that it lacks.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        # It ends soon, and pages that it does not touch are its parent's.
        gc.disable()
        try:
            answer = work()
            with os.fdopen(writing, "w") as stream:
                stream.write(answer)
        except BaseException:  # noqa: BLE001 - shown, and then the child ends
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    return answer
