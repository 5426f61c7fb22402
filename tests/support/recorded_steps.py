"""Steps that processes have done to names and bytes below a folder, from the log that ``record_disk`` has left."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

# The bytes of each file by its name below a folder, None for a folder.
State = Mapping[str, bytes | None]


@dataclass(eq=False)
class Node:
    """A file, or a folder with its names, as the recorded processes see it."""

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
    """An fsync of a file or of a folder, and the place in the program from which it was done, where that is known."""

    node: Node
    site: str = ""


Step = Renaming | Writing | Sync


class RecordedSteps:
    """The steps below a folder, in their order.

    Args:
        root: the folder.
        before: a copy of it from before the first step.
        log: the recording, by ``record_disk`` of faulty_disk.c.

    Attributes:
        top: the folder as it was before.
        names: the names in each folder that was there before, by folder.
        data: the bytes of each file that was there before.
        described: of each step the recorded operation.
        processes: of each step the process, by a number: 0 is the one that did the first step.
        end: what the folder holds in the end.
    """

    def __init__(self, root: Path, before: Path, log: Path) -> None:
        self._root = root
        self.top = _load(before)
        self.names = {node: dict(node.names) for node in _nodes(self.top) if node.is_folder}
        self.data = {node: node.data for node in _nodes(self.top) if not node.is_folder}
        self.steps: list[Step] = []
        self.described: list[str] = []
        self.processes: list[int] = []
        numbers: dict[str, int] = {}
        for name, path, other, offset, data, process, site in _read(log):
            for step in self._do(name, path, other, offset, data, site):
                self.steps.append(step)
                self.described.append(f"{name} {self._below(path)} {self._below(other)}".rstrip())
                self.processes.append(numbers.setdefault(process, len(numbers)))
        self.end = tree_of(self.top, lambda node: node.names, lambda node: node.data)

    def _do(self, name: str, path: str, other: str, offset: int, data: bytes, site: str) -> Iterator[Step]:
        """Do a recorded operation, and yield its steps: none where it changes nothing."""
        folder, own = self._find(path)
        if name in ("create", "mkdir"):
            yield self._rename({(folder, own): Node(is_folder=name == "mkdir")})
            return
        if name == "unlink":
            yield self._rename({(folder, own): None})
            return
        if own and own not in folder.names:
            # Made by a call that is not seen, as that of a library in C++.
            yield self._rename({(folder, own): Node()})
        node = folder.names[own] if own else self.top
        if name in ("rename", "link"):
            gone: Renaming = {(folder, own): None} if name == "rename" else {}
            yield self._rename({**gone, self._find(other): node})
        elif name == "fsync":
            yield Sync(node, site)
        else:
            before = node.data.ljust(offset, b"\0")
            now = data if name == "content" else before[:offset] + data + before[offset + len(data) :]
            if now != node.data:
                node.data = now
                yield Writing(node, now)

    def _rename(self, step: Renaming) -> Renaming:
        for (folder, name), node in step.items():
            if node is None:
                del folder.names[name]
            else:
                folder.names[name] = node
        return step

    def _below(self, path: str) -> str:
        return path.removeprefix(str(self._root)).lstrip("/")

    def _find(self, path: str) -> Name:
        """Return the folder of a name, and the name in it."""
        *parents, name = self._below(path).split("/")
        folder = self.top
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


def tree_of(top: Node, names: Callable[[Node], Mapping[str, Node]], data: Callable[[Node], bytes]) -> State:
    """Return what a folder holds, given the names in each folder and the bytes of each file."""
    found: dict[str, bytes | None] = {}

    def add(folder: Node, prefix: str) -> None:
        for name, node in sorted(names(folder).items()):
            found[prefix + name] = None if node.is_folder else data(node)
            if node.is_folder:
                add(node, f"{prefix}{name}/")

    add(top, "")
    return found


def _load(folder: Path) -> Node:
    if not folder.is_dir():
        return Node(data=folder.read_bytes())
    return Node(is_folder=True, names={path.name: _load(path) for path in folder.iterdir()})


def _nodes(node: Node) -> Iterator[Node]:
    yield node
    for below in node.names.values():
        yield from _nodes(below)


def _read(log: Path) -> Iterator[tuple[str, str, str, int, bytes, str, str]]:
    """Yield the operations of a recording: name, path, other path, offset, bytes, process, site."""
    with log.open("rb") as stream:
        for line in stream:
            name, path, other, offset, size, process, site = line.decode().rstrip("\n").split("\t")
            yield name, path, other, int(offset), stream.read(int(size)), process, site
