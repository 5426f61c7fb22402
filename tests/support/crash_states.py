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
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Final

from support.recorded_steps import Name, Node, RecordedSteps, Renaming, State, Sync, Writing, tree_of

JOURNAL: Final = "journal"
POSIX: Final = "posix"
NODE: Final = "node"
# Of bytes that were not synced.
_LOSSES: Final = ("none", "all", "zeros", "first", "torn")
_RANDOM_SUBSETS: Final = 4


@dataclass(frozen=True)
class Crash:
    """One way in which the power may go: after so many steps, without some of those that were not synced.

    Attributes:
        after: the number of steps that were done.
        names: which steps about names are lost of those that may be: ``none``, ``all``, ``drop:N+M`` for the N-th and
            the M-th one with those that depend on them, ``keep:N`` for all that it does not depend on, ``random:N``
            with N a seed.
        loss: what is lost of the bytes that were not synced: ``none``, ``all``, all but the length (``zeros``), all but
            the first writes (``first``), and in these a part of the last one (``torn``).
        file: the only file that loses bytes, by its number among those that may; -1 for all of them.
        process: of the node that alone is lost; -1 where the power goes everywhere.
        since: the number of steps after which that node is lost; the other processes go on, up to ``after``.
    """

    after: int
    names: str = "none"
    loss: str = "none"
    file: int = -1
    process: int = -1
    since: int = 0

    @property
    def model(self) -> str:
        """The model of crashes that has this one."""
        return NODE if self.process >= 0 else JOURNAL if self.names == "none" else POSIX

    def __str__(self) -> str:
        of_node = f",{self.process},{self.since}" if self.process >= 0 else ""
        return f"{self.after},{self.names},{self.loss},{self.file}{of_node}"

    @classmethod
    def parse(cls, text: str) -> Crash:
        """Return the crash of this text."""
        after, names, loss, *numbers = text.split(",")
        return cls(int(after), names, loss, *map(int, numbers))


@dataclass(frozen=True)
class _Moment:
    """A folder as it is after some steps, if nothing more is done.

    Attributes:
        lasting: the names in each folder that are so for good.
        data: the bytes of each file, all that was written.
        names: the steps about names that may be lost, in their order.
        files: of each file that may lose bytes those that were synced, and the steps that wrote later.
    """

    lasting: Mapping[Node, Mapping[str, Node]]
    data: Mapping[Node, bytes]
    names: tuple[int, ...]
    files: Mapping[Node, tuple[bytes, tuple[int, ...]]]


class Recording:
    """What a loss of power may leave of recorded steps.

    Args:
        without: sites whose fsyncs do nothing, as if the program had none there.
    """

    def __init__(self, recorded: RecordedSteps, without: Collection[str] = ()) -> None:
        self._recorded = recorded
        self._without = without
        self.steps = recorded.steps
        self.described = recorded.described
        moment = _Moment(recorded.names, recorded.data, (), {})
        self._moments = [moment]
        for number in range(len(self.steps)):
            moment = self._next(moment, number)
            self._moments.append(moment)

    @property
    def sites(self) -> list[str]:
        """The places in the program from which there are fsyncs."""
        return sorted({step.site for step in self.steps if isinstance(step, Sync) and step.site})

    def crashes(self, seed: int) -> Iterator[Crash]:
        """Yield crashes: one after each step, the steps in an order drawn from the seed, then a second one, and so on.

        Two may leave the same state.
        """
        rng = random.Random(seed)
        steps = list(range(1, len(self.steps) + 1))
        rng.shuffle(steps)
        rounds = zip_longest(*(self.crashes_after(step, random.Random(f"{seed} {step}")) for step in steps))
        yield from (crash for one in rounds for crash in one if crash is not None)

    def crashes_after(self, after: int, rng: random.Random) -> Iterator[Crash]:
        """Yield the crashes after a step, those of the models by turns."""
        moment = self._moments[after]
        subsets = ["all", *(f"random:{seed}" for seed in range(_RANDOM_SUBSETS))]
        subsets += [f"{kind}:{number}" for kind in ("drop", "keep") for number in range(len(moment.names))]
        posix = [Crash(after, subset, loss) for subset in (subsets if moment.names else ()) for loss in _LOSSES]
        journal = [Crash(after)]
        journal += [Crash(after, "none", loss, file) for loss in _LOSSES[1:] for file in range(-1, len(moment.files))]
        node = list(self._losses_of_nodes(after))
        for crashes in (posix, journal, node):
            rng.shuffle(crashes)
        for turn in zip_longest(*rng.sample([posix, journal, node], 3)):
            yield from filter(None, turn)

    def crashes_without(self, other: Recording, *, is_mixed: bool = False) -> Iterator[Crash]:
        """Yield crashes that are possible since sites were left out, and were not in the recording with them.

        Lost is what the fsyncs of these sites have made last there, by itself or with all else that is not synced:
        first just before something else makes it last, then just after them, then in moments ever closer to one
        another, up to all of them.

        Args:
            is_mixed: in the same moments, but of all that is not synced any part is lost, as by a seed of the site; of
                these some are possible with the fsyncs, too.
        """
        occurrences = [number for site in self._without for number in self._of_site(site)]
        for turn in zip_longest(*(self._losses_without(number, other, is_mixed) for number in occurrences)):
            yield from (crash for crash in turn if crash is not None)

    def _losses_without(self, number: int, other: Recording, is_mixed: bool) -> Iterator[Crash]:
        """Yield the crashes of ``crashes_without`` after an fsync that does nothing here, but does in the other one."""
        settled = {*other._moments[number].names} - {*other._moments[number + 1].names}
        bytes_of = {*other._moments[number].files} - {*other._moments[number + 1].files}
        names, files, afters = settled, bytes_of, []
        for after in range(number + 1, len(self.steps) + 1):
            moment = self._moments[after]
            if isinstance(self.steps[after - 1], Sync):
                names = {n for n in names if n in moment.names and self._is_placed(moment, n)}
                files = files & {*moment.files}
            if not names and not files:
                break
            afters.append(after)
        for after in _spread(afters):
            yield from self._mixed_losses(after) if is_mixed else self._losses_of(after, settled, bytes_of)

    def _removals_of_folders(self, moment: _Moment, settled: Collection[int]) -> list[int]:
        """Return the steps that may be lost and that removed the folders of these steps, or the folders of those."""
        folders = {folder for number in settled for folder, _ in self._of(number)}
        names: dict[Name, Node | None] = {
            (folder, name): node for folder, found in moment.lasting.items() for name, node in found.items()
        }
        removals = []
        for index, number in enumerate(moment.names):
            step = self._of(number)
            above = {name[0] for name, node in step.items() if node is None and names.get(name) in folders}
            if above:
                removals.append(index)
                folders |= above
            names.update(step)
        return removals

    def _mixed_losses(self, after: int) -> list[Crash]:
        """Return losses of all steps about names but one, of one, and of some, with bytes and without."""
        subsets = [f"{kind}:{number}" for kind in ("drop", "keep") for number in range(len(self._moments[after].names))]
        mixed = [Crash(after, subset, loss) for subset in subsets for loss in ("none", "all")]
        mixed += [Crash(after, f"random:{seed}", loss) for seed in range(_RANDOM_SUBSETS) for loss in _LOSSES]
        random.Random(f"{sorted(self._without)} {after}").shuffle(mixed)
        return mixed

    def _is_placed(self, moment: _Moment, number: int) -> bool:
        """Return True unless the folders of a step about names are gone for good, or those that these were in."""
        placed = {folder for folder, _ in self._of(number)}
        todo = list(placed)
        while todo:
            node = todo.pop()
            above = {folder for folder, names in moment.lasting.items() if node in names.values()}
            above.update(f for n in moment.names for (f, _), there in self._of(n).items() if there is node)
            todo += above - placed
            placed |= above
        return self._recorded.top in placed

    def _losses_of(self, after: int, settled: Collection[int], files: Collection[Node]) -> Iterator[Crash]:
        """Yield the losses of steps about names, together and each by itself, of the bytes of files, and of all."""
        moment = self._moments[after]
        indexes = [index for index, number in enumerate(moment.names) if number in settled]
        if len(indexes) > 1:
            yield _dropping(after, indexes)
        # What was in a folder that is removed since is there again only with that.
        if indexes and (removals := self._removals_of_folders(moment, settled)):
            yield _dropping(after, [*indexes, *removals])
        yield from (_dropping(after, [index]) for index in indexes)
        numbers = [index for index, file in enumerate(moment.files) if file in files]
        yield from (Crash(after, "none", loss, index) for loss in _LOSSES[1:] for index in numbers)
        # With a folder that comes back what was in it may come back.
        yield Crash(after, "all", "all")

    def state(self, crash: Crash) -> State:
        """Return what a crash leaves: the bytes of each file by its name below the root, None for a folder."""
        rng = random.Random(str(crash))
        moment = self._moments[crash.after]
        if crash.process >= 0:
            moment = self._without_process(crash)
        lost = self._lost(crash, moment.names, rng)
        folders = self._apply(moment.lasting, [number for number in moment.names if number not in lost])
        data = dict(moment.data)
        for number, (file, (synced, written)) in enumerate(moment.files.items()):
            if crash.file in (-1, number):
                data[file] = _lose(crash.loss, synced, [self._written(step) for step in written], rng)
        return tree_of(self._recorded.top, lambda node: folders.get(node, {}), lambda node: data.get(node, b""))

    def ends(self) -> Iterator[Crash]:
        """Yield the loss of all that was not synced, at the end of each stage, and of the run."""
        published = [n for n, step in enumerate(self.described) if step.startswith("rename") and "/done.json" in step]
        synced = [n for n, step in enumerate(self.steps) if isinstance(step, Sync)]
        for number in (next(n for n in synced if n > done) for done in published):
            yield Crash(number + 1, "all", "all")
        yield Crash(len(self.steps), "all", "all")

    def _next(self, moment: _Moment, number: int) -> _Moment:
        """Return the moment after one more step.

        A step about names is synced with any of its folders, and with a later step about one of its names.
        """
        step = self.steps[number]
        if isinstance(step, dict):
            return replace(moment, names=(*moment.names, number))
        if isinstance(step, Writing):
            synced, written = moment.files.get(step.file, (moment.data.get(step.file, b""), ()))
            files = {**moment.files, step.file: (synced, (*written, number))}
            return replace(moment, data={**moment.data, step.file: step.data}, files=files)
        if step.site in self._without:
            return moment
        if not step.node.is_folder:
            return replace(moment, files={file: found for file, found in moment.files.items() if file is not step.node})
        wanted = [n for n in moment.names if any(folder is step.node for folder, _ in self._of(n))]
        kept = self._needed(moment.names, wanted)
        lasting = self._apply(moment.lasting, sorted(kept))
        return replace(moment, lasting=lasting, names=tuple(n for n in moment.names if n not in kept))

    def _apply(self, folders: Mapping[Node, Mapping[str, Node]], numbers: list[int]) -> dict[Node, Mapping[str, Node]]:
        """Return the names in folders after steps about names."""
        changed: dict[Node, dict[str, Node]] = {}
        for number in numbers:
            for (folder, name), node in self._of(number).items():
                found = changed.get(folder)
                if found is None:
                    found = changed[folder] = dict(folders.get(folder, {}))
                if node is None:
                    found.pop(name, None)
                else:
                    found[name] = node
        return {**folders, **changed}

    def _losses_of_nodes(self, after: int) -> Iterator[Crash]:
        """Yield the losses of one rank's node after which others go on up to this step: ranks, not their driver.

        The driver would notice, so that its later steps need not be those that were recorded.
        """
        processes = self._recorded.processes
        begin = after
        while begin and processes[begin - 1] != 0:
            begin -= 1
        for process in sorted({*processes[begin:after]}):
            own = [n + 1 for n in range(begin, after) if processes[n] == process]
            for since in own:
                yield from (Crash(after, "none", loss, -1, process, since) for loss in _LOSSES)

    def _without_process(self, crash: Crash) -> _Moment:
        """Return the moment to which others have got since a process was lost, of which nothing but bytes is lost.

        The names are those that the server has; what others do to names that the lost process would have made first is
        left out.
        """
        moment = self._moments[crash.since]
        processes = self._recorded.processes
        about: set[Name] = set()
        names, data = list(moment.names), dict(moment.data)
        for number in range(crash.since, crash.after):
            step = self.steps[number]
            if isinstance(step, dict):
                if processes[number] == crash.process or not about.isdisjoint(step):
                    about.update(step)
                else:
                    names.append(number)
            elif isinstance(step, Writing) and processes[number] != crash.process:
                data[step.file] = step.data
        files = {file: (synced, own) for file, (synced, written) in moment.files.items()
                 if (own := tuple(n for n in written if processes[n] == crash.process))}  # fmt: skip
        return _Moment(self._apply(moment.lasting, names), data, (), files)

    def _of_site(self, site: str) -> list[int]:
        return [n for n, step in enumerate(self.steps) if isinstance(step, Sync) and step.site == site]

    def _of(self, number: int) -> Renaming:
        step = self.steps[number]
        assert isinstance(step, dict)
        return step

    def _written(self, number: int) -> bytes:
        step = self.steps[number]
        assert isinstance(step, Writing)
        return step.data

    def _needed(self, names: tuple[int, ...], wanted: list[int]) -> set[int]:
        """Return the wanted steps and the earlier ones about the same names, and those about the names of these."""
        needed = set(wanted)
        about: set[Name] = set()
        for number in reversed(names):
            if number in needed or not about.isdisjoint(self._of(number)):
                needed.add(number)
                about.update(self._of(number))
        return needed

    def _lost(self, crash: Crash, names: tuple[int, ...], rng: random.Random) -> set[int]:
        kind, _, number = crash.names.partition(":")
        if kind == "none":
            return set()
        if kind == "keep":
            return set(names) - self._needed(names, [names[int(number)]])
        share = rng.random()
        if kind == "drop":
            lost = {names[int(one)] for one in number.split("+")}
        else:
            lost = {name for name in names if kind == "all" or rng.random() < share}
        about: set[Name] = set()
        for name in names:
            if name in lost or not about.isdisjoint(self._of(name)):
                lost.add(name)
                about.update(self._of(name))
        return lost


def _dropping(after: int, indexes: list[int]) -> Crash:
    return Crash(after, f"drop:{'+'.join(map(str, indexes))}")


def _spread(moments: list[int]) -> Iterator[int]:
    """Yield the last one, the first one, and then those in the middle of what is between, down to all of them."""
    yield from moments[-1:]
    yield from moments[:-1][:1]
    gaps = deque([(0, len(moments) - 1)])
    while gaps:
        low, high = gaps.popleft()
        if high - low > 1:
            middle = (low + high) // 2
            yield moments[middle]
            gaps += [(low, middle), (middle, high)]


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
