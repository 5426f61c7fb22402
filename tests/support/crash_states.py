"""States of a folder that a loss of power may leave, from the operations that were recorded there.

The model of crashes. What a file held at its last fsync is there. Of what was written to it later, in the order of the
writes, any part may be there: nothing, all, the first writes, the last of these torn anywhere, or its full length with
zeros for bytes. A name that was made, moved or removed is so for good after the next fsync of its folder; of those that
were not synced any may have happened and any not, in whatever order, but for two rules: a rename is one step, of
both its names (also between folders, where an fsync of either makes it last), and of steps about one name a later one
never without the earlier ones. The fsync of a file says nothing about its name, and that of a folder nothing about its
own name in the folder above. These rules are those of POSIX as ALICE reads them (Pillai et al., "All File Systems Are
Not Created Equal", OSDI 2014): weaker than any file system in use.

States in which names are as they were at some moment, and only bytes are missing, are those of ``JOURNAL``: ext4 and
XFS, which write names in order and with every fsync those before it. CrashMonkey (Mohan et al., "Finding Crash-
Consistency Bugs with Bounded Black-Box Crash Testing", OSDI 2018) tries those, at fsyncs; LazyFS (Ramos et al., VLDB
2024) those in which all that was not synced is lost, and torn writes.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Final

JOURNAL: Final = "journal"
POSIX: Final = "posix"
# The bytes of each file by its name below a folder, None for a folder.
State = Mapping[str, bytes | None]
# Of bytes that were not synced.
_LOSSES: Final = ("none", "all", "zeros", "first", "torn")
_RANDOM_SUBSETS: Final = 4


@dataclass(eq=False)
class Node:
    """A file, or a folder with its names, as the recorded process sees it."""

    is_folder: bool = False
    names: dict[str, Node] = field(default_factory=dict)
    data: bytes = b""


# A step about names is what each of them means from then on, None for nothing.
Name = tuple[Node, str]
Renaming = dict[Name, Node | None]


@dataclass(frozen=True, eq=False)
class Writing:
    """A step about bytes: those of a file from then on."""

    file: Node
    data: bytes


@dataclass(frozen=True, eq=False)
class Sync:
    """An fsync of a file or of a folder."""

    node: Node


@dataclass(frozen=True)
class Crash:
    """One way in which the power may go: after so many steps, without some of those that were not synced.

    Attributes:
        after: the number of steps that were done.
        names: which steps about names are lost of those that may be: ``none``, ``all``, ``drop:N`` for the N-th one
            with those that depend on it, ``keep:N`` for all that it does not depend on, ``random:N`` with N a seed.
        loss: what is lost of the bytes that were not synced: ``none``, ``all``, all but the length (``zeros``), all but
            the first writes (``first``), and in these a part of the last one (``torn``).
        file: the only file that loses bytes, by its number among those that may; -1 for all of them.
    """

    after: int
    names: str = "none"
    loss: str = "none"
    file: int = -1

    @property
    def model(self) -> str:
        """The model of crashes that has this one."""
        return JOURNAL if self.names == "none" else POSIX

    def __str__(self) -> str:
        return f"{self.after},{self.names},{self.loss},{self.file}"

    @classmethod
    def parse(cls, text: str) -> Crash:
        """Return the crash of this text."""
        after, names, loss, file = text.split(",")
        return cls(int(after), names, loss, int(file))


class Recording:
    """The steps that a process has done below a folder.

    Args:
        root: the folder.
        before: a copy of it from before the first step.
        log: the recording, by ``record_disk`` of faulty_disk.c.
    """

    def __init__(self, root: Path, before: Path, log: Path) -> None:
        self._root = root
        self._top = _load(before)
        self._names = {node: dict(node.names) for node in _nodes(self._top) if node.is_folder}
        self._data = {node: node.data for node in _nodes(self._top) if not node.is_folder}
        self.steps: list[Renaming | Writing | Sync] = []
        self.described: list[str] = []
        for operation in _read(log):
            self._note(*operation)
        self.end = _tree(self._top, lambda node: node.names, lambda node: node.data)

    def crashes(self, seed: int) -> Iterator[Crash]:
        """Yield crashes: one after each step, the steps in an order drawn from the seed, then a second one, and so on.

        Two may leave the same state.
        """
        rng = random.Random(seed)
        steps = list(range(1, len(self.steps) + 1))
        rng.shuffle(steps)
        rounds = zip_longest(*(self._crashes_after(step, random.Random(f"{seed} {step}")) for step in steps))
        yield from (crash for one in rounds for crash in one if crash is not None)

    def state(self, crash: Crash) -> State:
        """Return what a crash leaves: the bytes of each file by its name below the root, None for a folder."""
        rng = random.Random(str(crash))
        names, files = self._open(crash.after)
        lost = self._lost(crash, names, rng)
        folders = {node: dict(found) for node, found in self._names.items()}
        data = dict(self._data)
        for number, step in enumerate(self.steps[: crash.after]):
            if isinstance(step, Writing):
                data[step.file] = step.data
            elif isinstance(step, dict) and number not in lost:
                for (folder, name), node in step.items():
                    found = folders.setdefault(folder, {})
                    if node is None:
                        found.pop(name, None)
                    else:
                        found[name] = node
        for number, (file, (synced, written)) in enumerate(files.items()):
            if crash.file in (-1, number):
                data[file] = _lose(crash.loss, synced, written, rng)
        return _tree(self._top, lambda node: folders.get(node, {}), lambda node: data.get(node, b""))

    def ends(self) -> Iterator[Crash]:
        """Yield the loss of all that was not synced, at the end of each stage, and of the run."""
        published = [n for n, step in enumerate(self.described) if step.startswith("rename") and "/done.json" in step]
        synced = [n for n, step in enumerate(self.steps) if isinstance(step, Sync)]
        for number in (next(n for n in synced if n > done) for done in published):
            yield Crash(number + 1, "all", "all")
        yield Crash(len(self.steps), "all", "all")

    def _crashes_after(self, after: int, rng: random.Random) -> Iterator[Crash]:
        """Yield the crashes after a step, those of the two models by turns."""
        names, files = self._open(after)
        subsets = ["all", *(f"random:{seed}" for seed in range(_RANDOM_SUBSETS))]
        subsets += [f"{kind}:{number}" for kind in ("drop", "keep") for number in range(len(names))]
        posix = [Crash(after, subset, loss) for subset in (subsets if names else ()) for loss in _LOSSES]
        journal = [Crash(after)]
        journal += [Crash(after, "none", loss, file) for loss in _LOSSES[1:] for file in range(-1, len(files))]
        rng.shuffle(posix)
        rng.shuffle(journal)
        for pair in zip_longest(*rng.sample([posix, journal], 2)):
            yield from filter(None, pair)

    def _open(self, after: int) -> tuple[list[int], dict[Node, tuple[bytes, list[bytes]]]]:
        """Return the steps about names that may be lost, and of each file that may lose bytes the synced and the later.

        A step is synced with any of its folders, and with a later step about one of its names.
        """
        names: list[int] = []
        files: dict[Node, tuple[bytes, list[bytes]]] = {}
        for number, step in enumerate(self.steps[:after]):
            if isinstance(step, dict):
                names.append(number)
            elif isinstance(step, Writing):
                files.setdefault(step.file, (self._data.get(step.file, b""), []))[1].append(step.data)
            elif step.node.is_folder:
                kept = self._needed(names, [n for n in names if any(folder is step.node for folder, _ in self._of(n))])
                names = [number for number in names if number not in kept]
            elif step.node in files and files[step.node][1]:
                files[step.node] = files[step.node][1][-1], []
        return names, {file: found for file, found in files.items() if found[1]}

    def _of(self, number: int) -> Renaming:
        step = self.steps[number]
        assert isinstance(step, dict)
        return step

    def _needed(self, names: list[int], wanted: list[int]) -> set[int]:
        """Return the wanted steps and the earlier ones about the same names, and those about the names of these."""
        needed = set(wanted)
        about: set[Name] = set()
        for number in reversed(names):
            if number in needed or not about.isdisjoint(self._of(number)):
                needed.add(number)
                about.update(self._of(number))
        return needed

    def _lost(self, crash: Crash, names: list[int], rng: random.Random) -> set[int]:
        kind, _, number = crash.names.partition(":")
        if kind == "none":
            return set()
        if kind == "keep":
            return set(names) - self._needed(names, [names[int(number)]])
        lost = {"all": names, "drop": names[int(number or 0) :][:1], "random": []}[kind]
        share = rng.random()
        lost = set(lost) | {name for name in names if kind == "random" and rng.random() < share}
        about: set[Name] = set()
        for name in names:
            if name in lost or not about.isdisjoint(self._of(name)):
                lost.add(name)
                about.update(self._of(name))
        return lost

    def _note(self, name: str, path: str, other: str, offset: int, data: bytes) -> None:
        """Add the steps of a recorded operation."""
        self.described.append(f"{name} {self._below(path)} {self._below(other)}".rstrip())
        folder, own = self._find(path)
        node = folder.names.get(own) if own else self._top
        if name in ("create", "mkdir"):
            self._rename({(folder, own): Node(is_folder=name == "mkdir")})
        elif name == "unlink":
            self._rename({(folder, own): None})
        elif name in ("rename", "link"):
            assert node is not None
            gone: Renaming = {(folder, own): None} if name == "rename" else {}
            self._rename({**gone, self._find(other): node})
        elif name == "fsync":
            assert node is not None
            self._add(Sync(node))
        else:
            assert node is not None
            before = node.data.ljust(offset, b"\0")
            now = data if name == "content" else before[:offset] + data + before[offset + len(data) :]
            if now != node.data:
                node.data = now
                self._add(Writing(node, now))
        # What led to the last step.
        self.described[len(self.steps) :] = []

    def _rename(self, step: Renaming) -> None:
        for (folder, name), node in step.items():
            if node is None:
                del folder.names[name]
            else:
                folder.names[name] = node
        self._add(step)

    def _add(self, step: Renaming | Writing | Sync) -> None:
        self.steps.append(step)

    def _below(self, path: str) -> str:
        return path.removeprefix(str(self._root)).lstrip("/")

    def _find(self, path: str) -> Name:
        """Return the folder of a name, and the name in it."""
        *parents, name = self._below(path).split("/")
        folder = self._top
        for parent in parents:
            folder = folder.names[parent]
        return folder, name


def write_tree(root: Path, state: State) -> None:
    """Make a folder hold what a crash has left."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for name, data in state.items():
        if data is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(data)


def read_tree(root: Path) -> State:
    """Return what a folder holds: the bytes of each file by its name, None for a folder; folders before their files."""
    found = sorted(root.rglob("*"))
    return {path.relative_to(root).as_posix(): None if path.is_dir() else path.read_bytes() for path in found}


def _lose(loss: str, synced: bytes, written: list[bytes], rng: random.Random) -> bytes:
    """Return what is left of a file: what was synced, and a part of what was written since."""
    states = [synced, *written]
    if loss == "all":
        return synced
    if loss == "zeros":
        kept = synced if written[-1].startswith(synced) else b""
        return kept.ljust(len(written[-1]), b"\0")
    if loss == "none":
        return written[-1]
    last = rng.randint(1, len(written))
    if loss == "first":
        return states[last - 1]
    before, now = states[last - 1], states[last]
    begin = len(before) if now.startswith(before) else 0
    return now[: rng.randint(begin, max(begin, len(now) - 1))]


def _load(folder: Path) -> Node:
    if not folder.is_dir():
        return Node(data=folder.read_bytes())
    return Node(is_folder=True, names={path.name: _load(path) for path in folder.iterdir()})


def _nodes(node: Node) -> Iterator[Node]:
    yield node
    for below in node.names.values():
        yield from _nodes(below)


def _tree(top: Node, names: Callable[[Node], dict[str, Node]], data: Callable[[Node], bytes]) -> State:
    found: dict[str, bytes | None] = {}

    def add(folder: Node, prefix: str) -> None:
        for name, node in sorted(names(folder).items()):
            found[prefix + name] = None if node.is_folder else data(node)
            add(node, f"{prefix}{name}/")

    add(top, "")
    return found


def _read(log: Path) -> Iterator[tuple[str, str, str, int, bytes]]:
    """Yield the operations of a recording: name, path, other path, offset, bytes."""
    with log.open("rb") as stream:
        for line in stream:
            name, path, other, offset, size = line.decode().rstrip("\n").split("\t")
            yield name, path, other, int(offset), stream.read(int(size))
