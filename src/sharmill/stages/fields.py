"""Base classes for stages that add fields to a finished dataset: new files for each shard, and entries in the index.

A stage of another package derives from ``FieldStage``, declares the fields that it adds, and provides a
``FieldProcessor`` that writes them.
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from sharmill.engine.plan import committed_files, count_planned
from sharmill.engine.stage import Advance, CostUnit, Processor, Publication, Stage, StageRun, versions
from sharmill.engine.unit import Commit, Output, Totals, Unit, add_up, make_unit
from sharmill.errors import ConfigError, UnitFailed, refuse
from sharmill.files.checksums import checksum
from sharmill.files.staging import Staging
from sharmill.manifest import Reject
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.fields import BASE_FIELDS, CUTS, Field
from sharmill.shar.index import CodecRecord, FieldFile, ShardRecord
from sharmill.shar.items import Item, ItemTable, read_field
from sharmill.shar.json_lines import read_cut_ids


class FieldStage(Stage):
    """A stage that adds fields to a dataset. One unit is one shard.

    Attributes:
        processor: the class of the processor. A stage that loads a model overrides ``open`` instead.
    """

    processor: "ClassVar[type[FieldProcessor]]"
    after: ClassVar[Sequence[str]] = ("write",)
    cost_unit: ClassVar[CostUnit] = "records"

    @abstractmethod
    def fields(self, run: StageRun) -> list[Field]:
        """Return the fields that the stage adds to the existing dataset."""

    def publication(self, run: StageRun) -> "FieldPublication":
        return FieldPublication(run, partial(self.fields, run))

    def identity(self, run: StageRun) -> dict[str, Any]:
        dataset = dataset_of(run)
        dataset.record()
        return {
            "settings": dataclasses.asdict(run.settings),
            "input": dataset.audio_checksum(),
            "versions": versions(),
        }

    def plan(self, run: StageRun) -> Iterator[Unit]:
        start = 0
        for shard in dataset_of(run).shards():
            cuts = shard.fields[CUTS]
            cost = shard.target_seconds if self.cost_unit == "seconds of audio" else float(shard.count)
            yield make_unit(
                shard.index, cost=cost, size=shard.count,
                params={"start": start, "cuts": [cuts.file, cuts.xxh3], "seconds": shard.target_seconds},
            )  # fmt: skip
            start += shard.count

    def open(self, run: StageRun, device: str) -> Processor:
        return self.processor(run)

    def finalize(self, run: StageRun) -> Totals:
        return add_fields(run, self.fields(run))


def dataset_of(run: StageRun) -> ShardedDataset:
    """Return the dataset of a run."""
    return ShardedDataset(Path(run.config.dataset_dir))


def add_fields(run: StageRun, fields: Sequence[Field], codec: CodecRecord | None = None) -> Totals:
    """Add the files of all units to the index of the dataset, as fields, and return the totals of the stage.

    Args:
        codec: the codec to add to the index, if the fields are its codes.
    """
    lacks = any(commit.num_rejected for commit in run.commits)
    found = [
        msgspec.structs.replace(_describe(field, run), optional=field.optional or lacks)
        for field in (fields if run.commits else ())
    ]
    files = [
        {
            field.name: FieldFile(file.name, file.size, file.xxh3)
            for field, file in zip(found, commit.files, strict=True)
        }
        for commit in run.commits
    ]
    dataset_of(run).add_fields(found, files, codec)
    return add_up(run.commits)


def _describe(field: Field, run: StageRun) -> Field:
    """Return the description of a field for the dataset, with the name of the stage that made it.

    Unless the field has settings of its own, it gets those of the stage.
    """
    if field.is_published:
        return field
    settings = field.settings or {
        key: value for key, value in dataclasses.asdict(run.settings).items() if key != "name"
    }
    return msgspec.structs.replace(field, by=run.name, settings=run.options.references.hide(settings))


class FieldPublication(Publication):
    """Fields that a stage adds to a dataset.

    Args:
        fields: a function that returns the fields that the stage adds to the existing dataset.
        possible: all fields that the stage may add, known even before the dataset exists; by default the result of
            ``fields``.
        words: the name of the fields in messages.
    """

    rejects_keep_cut = True

    def __init__(
        self, run: StageRun, fields: Callable[[], list[Field]], possible: Sequence[Field] = (), words: str = ""
    ) -> None:
        super().__init__(Path(run.config.dataset_dir))
        self.run = run
        self.fields = fields
        self.possible = possible or fields()
        self.words = words or f"fields called {' and '.join(self.reserves())}"

    def folders(self) -> Sequence[str]:
        return [field.name for field in self.fields()]

    def reserves(self) -> Sequence[str]:
        return [field.name for field in self.possible]

    def is_complete(self) -> bool:
        # The index may have been rebuilt without these fields after it was lost.
        return set(self.folders()) <= set(dataset_of(self.run).record().fields)

    def discard(self) -> None:
        dataset_of(self.run).remove_fields(self.possible, count_planned(self.run))

    def check_output(self) -> None:
        """Raise ConfigError if the dataset has fields with these names that this run has not made."""
        dataset, names = dataset_of(self.run), self.reserves()
        if dataset.has_files(names) and not dataset.is_made_of(names, committed_files(self.run)):
            raise ConfigError(
                f"{self.root} already has {self.words} that were not made by the run in {self.run.run_dir.path}: "
                "choose another name",
                code="foreign_output",
            )


def shard_record(commit: Commit, fields: Iterable[Field], index: int, folder: str = "") -> ShardRecord:
    """Return the index record of a shard from the commit of its unit.

    Args:
        index: the number of the shard.
        folder: the prefix of the published files' names that stands for the folder of the dataset.
    """
    names = {file.name.removeprefix(folder): file for file in commit.files}
    files = {field.name: (field.path(index), names[field.path(index)]) for field in fields}
    return ShardRecord(
        index=index,
        count=commit.num_out,
        target_seconds=round(commit.stats["seconds"], 3),
        context_seconds=round(commit.stats["context_seconds"], 3),
        fields={field: FieldFile(name, file.size, file.xxh3) for field, (name, file) in files.items()},
    )


def added_fields(stages: Iterable[StageRun]) -> dict[str, list[Field]]:
    """Return the fields that the stages of a run may add to the dataset, by stage name.

    Raises:
        ConfigError: a stage declares an invalid field, or no field.
    """
    found = {}
    for stage in stages:
        try:
            publication = stage.publication
        except ValueError as error:
            raise ConfigError(f"the stage {stage.name}: {error}", code="bad_config_value") from error
        if isinstance(publication, FieldPublication):
            found[stage.name] = list(publication.possible)
            if not publication.possible:
                raise ConfigError(f"the stage {stage.name} declares no fields", code="bad_plugin")
    return found


def require_distinct_fields(stages: Iterable[StageRun]) -> None:
    """Raise ConfigError if two stages make the same field, or a plug-in's field has a name that lhotse's cuts use."""
    made = added_fields(stages)
    for name, fields in made.items():
        rest = {other: its for other, its in made.items() if other != name}
        others = {word: other for other, its in rest.items() for one in its for word in (one.name, one.attribute)}
        others |= dict.fromkeys(BASE_FIELDS, "write")
        for field in [field for field in fields if not field.is_published]:
            # Import this late, because it imports torch, which is needed only for stages of other packages.
            from sharmill.shar.reading.cuts import is_method_of_cuts

            other = others.get(field.name) or others.get(field.attribute)
            refuse(
                (
                    other,
                    f"{name} and {other} both make the field {field.name}, cut.{field.attribute}: rename one of them",
                ),
                (
                    is_method_of_cuts(field.attribute),
                    f"the stage {name}: the field {field.name} cannot have the attribute {field.attribute!r}, because "
                    "lhotse's cuts already use this name: choose another one",
                ),
            )


class FieldProcessor(Processor):
    """The processor of a stage that adds fields."""

    def __init__(self, run: StageRun) -> None:
        assert isinstance(run.publication, FieldPublication)
        self.run = run
        self.dataset = dataset_of(run)
        self.fields = run.publication.fields()

    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        file, expected = unit.params["cuts"]
        cuts = self.run.root / file
        if checksum(cuts) != expected:
            raise UnitFailed(
                f"{cuts} has changed since it was written: remove it and run the stage write again",
                code="damaged_shard",
            )
        files = [field.path(unit.index) for field in self.fields]
        ids, paths = list(read_cut_ids(cuts)), [staging.path(path) for path in files]
        rejects = self.write(unit, ids, paths) or []
        for field, path in zip(self.fields, paths, strict=True):
            if not field.is_published and [item.cut_id for item in read_field(path)] != ids:
                raise UnitFailed(
                    f"the items of the field {field.name} do not match the cuts of the shard", code="bad_plugin"
                )
        return Output(
            files=files,
            num_out=unit.size - len(rejects),
            rejects=rejects,
            stats={"seconds": unit.params["seconds"]},
        )

    def items(self, field: str, unit: Unit, ids: list[str]) -> Iterator[Item]:
        """Yield the items of an existing field for the cuts of a unit's shard; ``ids`` has the ids of these cuts."""
        table = ItemTable(self.dataset.file(field, unit.index), ids=ids)
        yield from map(table.item, range(len(ids)))

    @abstractmethod
    def write(self, unit: Unit, ids: list[str], paths: list[Path]) -> list[Reject] | None:
        """Write the files of the fields for one shard, with one item per cut, in order.

        Returns:
            A reject for each cut that has a placeholder in a field; the cut stays in the dataset.
        """
