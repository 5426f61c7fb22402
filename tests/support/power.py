"""Runs whose power is cut: recorded once, then done again from each state that a cut may have left on the disk.

See ``crash_states.py`` for the states, and ``power_runs.py`` for the runs.
"""

from __future__ import annotations

import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from sharmill.errors import SharmillError
from sharmill.shar import open_shar
from sharmill.shar.layout import CONTEXT_AUDIO, CONTEXT_CODES, TARGET_AUDIO, TARGET_CODES
from support.crash_states import Crash, Recording, State
from support.small_run import lasting_files

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
        mock.patch("sharmill.files.locks.this_kernel", return_value="after the reboot"),
        mock.patch("sharmill.engine.progress.this_kernel", return_value="after the reboot"),
        mock.patch("sharmill.engine.state.time_of_folder", return_value=time.time() + 600.0),
        mock.patch("sharmill.files.locks.time", _FAST_CLOCK),
    ):
        yield
