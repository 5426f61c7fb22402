"""Stage ``manifest``: manifests of what there is, made from headers alone, in units that any number of ranks do."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec
from yaml import YAMLError

from sharmill.collect.complete import RecordCompletion
from sharmill.collect.inputs import RECIPE_LOG, Input
from sharmill.collect.vocabulary import Vocabulary
from sharmill.engine.identity import identify_folder, versions
from sharmill.engine.plan import iterate_plan
from sharmill.engine.reject_examples import describe_rejects
from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Advance, Processor, Stage, add_up
from sharmill.engine.stored import read_stored
from sharmill.engine.unit import Commit, Output, Totals, Unit, make_unit
from sharmill.errors import ConfigError, FatalError, RejectRecord
from sharmill.manifest import Reject, write_lines
from sharmill.sources import Unreadable
from sharmill.staging import Staging
from sharmill.storage import open_atomic, open_regular, open_stored, remove_for_good, remove_tree, write_atomic

# Enough that commits cost little beside the work, and few enough that an interruption loses seconds.
_RECORDS_PER_UNIT: Final = 2000
_MAX_INFO_BYTES: Final = 1 << 20
_COUNTS: Final = ("text", "speaker", "channels")


@dataclass(frozen=True, kw_only=True)
class Destination:
    """The files of a manifest.

    Attributes:
        path: of the manifest; with splits each has its own, ``manifest.train.json`` for ``manifest.json``.
        root: the folder that all paths in it are relative to.
        vocabulary: where to write the vocabulary of the texts, or None.
        of_words: it is one of words, not of characters.
    """

    path: Path
    root: Path
    vocabulary: Path | None = None
    of_words: bool = False

    def of_split(self, split: str) -> Path:
        """Return the path of the manifest of a split; "" is the only one."""
        return self._named(f".{split}{self.path.suffix}") if split else self.path

    @property
    def rejects(self) -> Path:
        return self._named(".rejects.jsonl")

    @property
    def recipe_log(self) -> Path:
        """The warnings of the recipe of a corpus: what it leaves out."""
        return self._named(".recipe.log")

    @property
    def info(self) -> Path:
        """Written last of all: the root, the files and the numbers."""
        return self._named(".info.yaml")

    @property
    def state(self) -> Path:
        """The run directory, which is removed at the end."""
        return self.path.with_name(f".{self.path.name}.state")

    def _named(self, end: str) -> Path:
        return self.path.with_name(self.path.stem + end)


class ManifestStage(Stage):
    """The stage that completes every record of its inputs and writes the manifest of each split."""

    kind: ClassVar[str] = "manifest"
    cost_unit: ClassVar = "records"

    def __init__(self, inputs: list[Input], destination: Destination) -> None:
        self.inputs = inputs
        self.destination = destination
        self.run_dir = RunDir(destination.state)
        self.root = self.dir.path

    def identity(self) -> dict[str, Any]:
        state = self.run_dir.path
        return {
            "sources": [entry.identity(state) for entry in self.inputs],
            "audio_root": identify_folder(self.destination.root, state),
            "versions": versions(),
        }

    def plan(self, folder: Path) -> Iterator[Unit]:
        index = 0
        for number, entry in enumerate(self.inputs):
            for split, piece in entry.pieces(folder, number, _RECORDS_PER_UNIT):
                params = {"input": number, "split": split, "piece": piece.params}
                self._refuse_foreign(self.destination.of_split(split))
                yield make_unit(index, cost=float(piece.num_records), size=piece.num_records, params=params)
                index += 1
        for path in (self.destination.rejects, self.destination.recipe_log):
            self._refuse_foreign(path)

    def open(self, device: str) -> Processor:
        return ManifestProcessor(self)

    def finalize(self, units: list[Unit], commits: Iterable[Commit]) -> Totals:
        commits = list(commits)
        totals = add_up(commits)
        self._publish_rejects(totals)
        if not totals.num_out:
            self._refuse_empty(totals)
        vocabulary = Vocabulary(of_words=self.destination.of_words) if self.destination.vocabulary else None
        splits = list(dict.fromkeys(unit.params["split"] for unit in units))
        numbers = {}
        for split in splits:
            chosen = [c for unit, c in zip(units, commits, strict=True) if unit.params["split"] == split]
            self._publish_split(split, chosen, vocabulary if _is_of_training(split, splits) else None)
            numbers[self.destination.of_split(split).name] = _numbers(chosen)
        if vocabulary is not None and self.destination.vocabulary is not None:
            write_atomic(self.destination.vocabulary, vocabulary.to_lines())
        notes = _notes(numbers.values()) + self._publish_recipe_log()
        write_atomic(self.destination.info, self._describe(totals, numbers))
        return dataclasses.replace(totals, notes=notes)

    def products(self) -> list[Path]:
        return [self.destination.info]

    def discard(self) -> None:
        # Of a manifest that was finished before, all stays until the new one replaces it.
        if not self.destination.info.exists():
            splits: set[str] = set()
            # A plan that is damaged tells of some, and is to be replaced.
            with suppress(ConfigError, FileNotFoundError):
                splits.update(unit.params["split"] for unit in iterate_plan(self))
            files = [self.destination.of_split(split) for split in splits - {""}]
            remove_for_good((*files, self.destination.rejects, self.destination.recipe_log))

    def _refuse_foreign(self, path: Path) -> None:
        """Raise ConfigError where a file that the user has not named is there and of no manifest of this name."""
        if path != self.destination.path and path.exists() and not self._is_described(path):
            raise ConfigError(
                f"{path} is there already, and {self.destination.info} does not say that it belongs to a manifest of "
                "this name: move it away, or name another file",
                code="foreign_output",
            )

    def _is_described(self, path: Path) -> bool:
        """Return True if the description of an earlier manifest of this name says that a file belongs to it."""
        try:
            with open_regular(self.destination.info) as stream:
                found = msgspec.yaml.decode(stream.read(_MAX_INFO_BYTES), type=_Info)
        except (FileNotFoundError, ValueError, msgspec.MsgspecError, YAMLError):
            return False
        return path.name in found.manifests or path in (self.destination.rejects, self.destination.recipe_log)

    def _publish_recipe_log(self) -> list[str]:
        log = self.dir.plan / RECIPE_LOG
        remove_tree(self.destination.recipe_log)
        if not log.exists():
            return []
        # Recipes look at files in the order of the file system.
        lines = sorted(read_stored(log).decode("utf-8", "replace").splitlines())
        write_atomic(self.destination.recipe_log, "".join(f"{line}\n" for line in lines).encode())
        return [f"the recipe warns {len(lines)} times, first: {lines[0]} (see {self.destination.recipe_log})"]

    def _publish_rejects(self, totals: Totals) -> None:
        if not totals.rejects:
            remove_tree(self.destination.rejects)
            return
        with open_atomic(self.destination.rejects) as published, open_stored(self.dir.rejects) as merged:
            shutil.copyfileobj(merged, published)

    def _publish_split(self, split: str, commits: list[Commit], vocabulary: Vocabulary | None) -> None:
        with open_atomic(self.destination.of_split(split)) as manifest:
            for commit in commits:
                with open_stored(self.root / commit.files[0].name) as part:
                    if vocabulary is None:
                        shutil.copyfileobj(part, manifest)
                    for line in part if vocabulary is not None else ():
                        vocabulary.add(msgspec.json.decode(line, type=_Text).text)  # type: ignore[union-attr]
                        manifest.write(line)

    def _refuse_empty(self, totals: Totals) -> None:
        lines = describe_rejects(self.dir.unit_rejects(0).parent, totals.rejects)
        summary = (
            f"none of the {totals.num_in} records can be used, so {self.destination.path} is not written; mend the "
            f"input, then begin anew with --restart. The commonest reasons (all: {self.destination.rejects}):"
        )
        raise FatalError(summary, code="too_many_rejects", details=lines)

    def _describe(self, totals: Totals, numbers: dict[str, dict[str, Any]]) -> bytes:
        values = {"audio_root": str(self.destination.root), "manifests": numbers,
                  "rejects": dict(sorted(totals.rejects.items()))}  # fmt: skip
        return msgspec.yaml.encode(values)


class ManifestProcessor(Processor):
    """The completion of the records of pieces, in one rank."""

    def __init__(self, stage: ManifestStage) -> None:
        self._inputs = stage.inputs
        self._folder = stage.dir.plan
        self._complete = RecordCompletion(stage.inputs)

    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        number = unit.params["input"]
        lines: list[bytes] = []
        rejects: list[Reject] = []
        counts: Counter[str] = Counter(dict.fromkeys(_COUNTS, 0))
        seconds = 0.0
        for raw in self._inputs[number].read(self._folder, unit.params["piece"]):
            try:
                record, info = self._complete(raw, number)
            except RejectRecord as reject:
                shown = raw.record if isinstance(raw, Unreadable) else raw.decode("utf-8", "replace")
                rejects.append(Reject(ManifestStage.kind, reject.reason, reject.detail, _parsed(raw, shown), number))
            else:
                lines.append(msgspec.json.encode(record))
                seconds += record["duration"]
                counts.update(text="text" in record, speaker="speaker" in record)
                counts.update(channels=info.channels > 1 and "channel" not in record)
            advance(1.0)
        part = f"parts/{unit.index:06d}.jsonl"
        write_lines(staging.path(part), lines)
        return Output(files=[part], num_out=len(lines), rejects=rejects, stats={"seconds": seconds, **counts})


class _Info(msgspec.Struct):
    """The part of the description of a manifest by which it is known."""

    audio_root: str
    manifests: dict[str, Any]


class _Text(msgspec.Struct):
    text: str = ""


def _parsed(raw: bytes | Unreadable, shown: str) -> Any:
    """Return the record of a reject as JSON has it, or its text where it is none."""
    try:
        return shown if isinstance(raw, Unreadable) else msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return shown


def _is_of_training(split: str, splits: list[str]) -> bool:
    """Return True if the vocabulary is made of a split: of those for training, where there are such."""
    training = [name for name in splits if "train" in name]
    return not training or split in training


def _numbers(commits: list[Commit]) -> dict[str, Any]:
    """Return the numbers of a manifest: records, hours, and how many have a text, a speaker, an unchosen channel."""
    counts = {name: sum(commit.stats[name] for commit in commits) for name in _COUNTS}
    seconds = sum(commit.stats["seconds"] for commit in commits)
    return {
        "records": sum(commit.num_out for commit in commits),
        "hours": round(seconds / 3600, 6),
        "with_text": counts["text"],
        "with_speaker": counts["speaker"],
        "of_several_channels": counts["channels"],
    }


def _notes(numbers: Iterable[dict[str, Any]]) -> list[str]:
    """Return sentences about what the records lack that a dataset may need."""
    total = Counter[str]()
    for row in numbers:
        total.update({key: row[key] for key in ("records", "with_text", "with_speaker", "of_several_channels")})
    notes = []
    if without := total["records"] - total["with_text"]:
        notes.append(f"{without} records have no text: a dataset takes them with prepare.require_text=false")
    if without := total["records"] - total["with_speaker"]:
        notes.append(f"{without} records have no speaker: --speaker makes one of the path, as {{path[0]}}")
    if several := total["of_several_channels"]:
        notes.append(f"{several} records are audio of several channels: --channel chooses one, or downmix their mean")
    return notes
