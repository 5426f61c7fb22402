"""Base of stages that add fields to a finished dataset: files beside those of its shards, and their names in its index.

A stage of another package derives from ``FieldStage``, says which fields it adds and gives a ``FieldProcessor`` that
writes them.
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from sharmill.config import Config
from sharmill.engine.plan import committed_files, count_planned
from sharmill.engine.stage import (
    Advance,
    Commit,
    Output,
    Processor,
    Stage,
    Totals,
    Unit,
    add_up,
    make_unit,
    stage_classes,
    versions,
)
from sharmill.errors import ConfigError, UnitFailed, refuse
from sharmill.files.checksums import checksum
from sharmill.files.staging import Staging
from sharmill.manifest import Reject
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.fields import BASE_FIELDS, CUTS, Field
from sharmill.shar.index import CodecRecord, FieldFile, ShardRecord
from sharmill.shar.items import read_field
from sharmill.shar.json_lines import read_cut_ids


class FieldStage(Stage):
    """A stage that adds fields to a dataset. One unit is one shard.

    Attributes:
        dataset: the dataset that gets the fields.
    """

    after: ClassVar[Sequence[str]] = ("write",)
    cost_unit: ClassVar = "records"

    def __init__(self, config: Config, settings: Any = None) -> None:
        super().__init__(config, settings)
        self.root = Path(config.dataset_dir)
        self.dataset = ShardedDataset(self.root)

    @abstractmethod
    def fields(self) -> list[Field]:
        """Return the fields that the stage adds to the dataset as it is."""

    @property
    def possible_fields(self) -> list[Field]:
        """The fields that it may add, also as long as there is no dataset."""
        return self.fields()

    def check_input(self) -> None:
        made = added_fields(self.config)
        own = [field for field in made.pop(self.name) if not field.is_published]
        others = {word: name for name, fields in made.items() for one in fields for word in (one.name, one.attribute)}
        others |= dict.fromkeys(BASE_FIELDS, "write")
        for field in own:
            # It imports torch, and so does who looks at the datasets of such a stage.
            from sharmill.shar.reading.cuts import is_method_of_cuts

            other = others.get(field.name) or others.get(field.attribute)
            refuse(
                (
                    other,
                    f"{self.name} and {other} both make the field {field.name}, cut.{field.attribute}: give it another "
                    "name",
                ),
                (
                    is_method_of_cuts(field.attribute),
                    f"the stage {self.name}: the field {field.name} cannot be called {field.attribute!r} on a cut: "
                    "lhotse has something else of that name",
                ),
            )

    @property
    def folders(self) -> Sequence[str]:  # type: ignore[override]
        return [field.name for field in self.fields()]

    @property
    def reserves(self) -> tuple[Path, Sequence[str]]:
        return self.root, [field.name for field in self.possible_fields]

    def identity(self) -> dict[str, Any]:
        self.dataset.record()
        return {
            "settings": dataclasses.asdict(self.settings),
            "input": self.dataset.audio_checksum(),
            "versions": versions(),
        }

    def plan(self, folder: Path) -> Iterator[Unit]:
        start = 0
        for shard in self.dataset.shards():
            cuts = shard.fields[CUTS]
            yield make_unit(
                shard.index, cost=float(shard.count), size=shard.count,
                params={"start": start, "cuts": [cuts.file, cuts.xxh3], "seconds": shard.target_seconds},
            )  # fmt: skip
            start += shard.count

    def codec(self) -> CodecRecord | None:
        """Return the codec that the index is to list, where the fields are its codes."""
        return None

    def finalize(self, units: list[Unit], commits: list[Commit]) -> Totals:
        lacks = any(commit.num_rejected for commit in commits)
        fields = [
            msgspec.structs.replace(self._describe(field), optional=field.optional or lacks)
            for field in (self.fields() if commits else ())
        ]
        files = [
            {
                field.name: FieldFile(file.name, file.size, file.xxh3)
                for field, file in zip(fields, commit.files, strict=True)
            }
            for commit in commits
        ]
        self.dataset.add_fields(fields, files, self.codec())
        return add_up(commits)

    def _describe(self, field: Field) -> Field:
        """Return a field as the dataset is to have it: with what made it."""
        if field.is_published:
            return field
        settings = {key: value for key, value in dataclasses.asdict(self.settings).items() if key != "name"}
        return msgspec.structs.replace(field, by=self.name, settings=self.references.hide(settings))

    def is_finalized(self) -> bool:
        # The index may have been made again without these fields, as when it was lost.
        return set(self.folders) <= set(self.dataset.record().fields)

    def discard(self) -> None:
        self.dataset.remove_fields(self.possible_fields, count_planned(self))

    def check_output(self) -> None:
        """Raise ConfigError where the dataset has fields of these names that this run has not made."""
        fields, own = [field.name for field in self.possible_fields], committed_files(self)
        if self.dataset.has_files(fields) and not self.dataset.is_made_of(fields, own):
            raise ConfigError(
                f"{self.root} already has {self.describe_fields()} that were not made from {self.run_dir.path}; "
                "choose another name",
                code="foreign_output",
            )

    def describe_fields(self) -> str:
        """Return how messages call the fields."""
        return f"fields called {' and '.join(self.folders)}"


def shard_record(commit: Commit, fields: Iterable[Field], index: int, folder: str = "") -> ShardRecord:
    """Return the record of a shard of a dataset in a folder of what a unit has published."""
    names = {file.name.removeprefix(folder): file for file in commit.files}
    files = {field.name: (field.path(index), names[field.path(index)]) for field in fields}
    return ShardRecord(
        index=index,
        count=commit.num_out,
        target_seconds=round(commit.stats["seconds"], 3),
        context_seconds=round(commit.stats["context_seconds"], 3),
        fields={field: FieldFile(name, file.size, file.xxh3) for field, (name, file) in files.items()},
    )


def added_fields(config: Config) -> dict[str, list[Field]]:
    """Return the fields that stages of a configuration may add to the dataset, by the names of the stages.

    Raises:
        ConfigError: a stage says so of a field that cannot be.
    """
    found = {}
    for kind in stage_classes(config).values():
        for stage in kind.of(config) if issubclass(kind, FieldStage) else ():
            try:
                found[stage.name] = stage.possible_fields
            except ValueError as error:
                raise ConfigError(f"the stage {stage.name}: {error}", code="bad_config_value") from error
            if not found[stage.name]:
                raise ConfigError(f"the stage {stage.name} has no fields", code="bad_plugin")
    return found


class FieldProcessor(Processor):
    """The processor of a stage that adds fields."""

    def __init__(self, stage: FieldStage) -> None:
        self.stage = stage
        self.fields = stage.fields()

    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        file, expected = unit.params["cuts"]
        cuts = self.stage.root / file
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
                raise UnitFailed(f"what was written of {field.name} is not of the cuts of the shard", code="bad_plugin")
        return Output(
            files=files,
            num_out=unit.size - len(rejects),
            rejects=rejects,
            stats={"seconds": unit.params["seconds"]},
        )

    @abstractmethod
    def write(self, unit: Unit, ids: list[str], paths: list[Path]) -> list[Reject] | None:
        """Write the files of the fields for one shard, with something for each of its cuts in their order.

        A stage that ``keeps_cuts`` returns a reject for each cut that has a placeholder in a field.
        """
