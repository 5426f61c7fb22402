"""What a program did to the names and bytes below a folder, and the states that a power loss may leave of that.

The model of crashes. What a file held at its last fsync is there. Of what was written to it later nothing may be there,
all, a first part, or its full length with zeros for bytes. A name that was made, moved or removed is so for good after
the next fsync of its folder. Of those that were not synced any may have happened and any not, in whatever order, but
for two rules: a rename is one step, of both its names (also between folders, where an fsync of either makes it last),
and of steps about one name a later one never without the earlier ones. The fsync of a file says nothing about its name,
and that of a folder nothing about its own name in the folder above. These rules are those of POSIX as ALICE reads them
(Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014): weaker than any file system in use. States in
which only bytes are missing, as on ext4 and XFS, are among them.
"""

from __future__ import annotations

import os
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from support.paths import REPOSITORY

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
