"""Stage ``assemble``: the codes of segments put together into the target and context codes of a dataset's shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from sharmill.config import Config
from sharmill.encode.config import CodecConfig, EncodeConfig
from sharmill.encode.segment_codes import EncodedRecord, SegmentCodes, read_encoded
from sharmill.encode.survey import SurveyStage
from sharmill.engine.identity import versions
from sharmill.engine.ledger import committed_files
from sharmill.engine.plan import count_planned
from sharmill.engine.rundir import StageDir
from sharmill.engine.stage import Advance, Processor, Stage, add_up
from sharmill.engine.unit import Commit, Output, Totals, Unit, make_unit
from sharmill.errors import ConfigError, UnitFailed
from sharmill.files.staging import Staging
from sharmill.files.storage import checksum
from sharmill.shar.arrays import array_to_bytes
from sharmill.shar.cut_lines import read_cut_ids
from sharmill.shar.index import CodecRecord, FieldFile
from sharmill.shar.items import FieldWriter, Item
from sharmill.shar.layout import CUTS, codec_fields, shard_file
from sharmill.shar.lhotse_json import array_json, temporal_array_json


class AssembleStage(Stage):
    """The codes of one codec, added to a dataset as fields and to its index. One unit is one shard."""

    kind: ClassVar[str] = "assemble"
    after: ClassVar = ("survey", "encode")
    part_of: ClassVar[str] = "encode"
    cost_unit: ClassVar = "records"
    # Other codes of any segment have to reach all shards that hold it; that takes no codec.
    replan_when_changed: ClassVar[bool] = True

    def __init__(self, config: Config, settings: CodecConfig) -> None:
        super().__init__(config, settings)
        self.root = Path(config.dataset_dir)
        self.survey = SurveyStage(config)
        self.codec = settings.name
        self._dataset = self.survey.dataset

    @classmethod
    def of(cls, config: Config) -> list[Self]:
        return [cls(config, codec) for codec in config.section(EncodeConfig).codecs]

    @property
    def folders(self) -> Sequence[str]:  # type: ignore[override]
        """The fields of its codes: those of contexts where the dataset has contexts, whatever the configuration."""
        return [field.name for field in self._dataset.codec_fields(self.codec)]

    @property
    def reserves(self) -> tuple[Path, Sequence[str]]:
        # Before there is a dataset it is not known whether it has contexts.
        return self.root, [field.name for field in codec_fields(self.codec)]

    @property
    def encoded(self) -> StageDir:
        """The folder of the stage that has encoded the segments."""
        return self.run_dir.stage(f"{self.part_of}/{self.codec}")

    def identity(self) -> dict[str, Any]:
        self._dataset.record()
        for stage in (self.survey.dir, self.encoded):
            self.survey.require_done(stage)
        return {
            "codes": read_encoded(self.encoded).codes,
            "input": self._dataset.audio_checksum(),
            "versions": versions(),
        }

    def plan(self, folder: Path) -> Iterator[Unit]:
        start = 0
        for shard in self._dataset.shards():
            cuts = shard.fields[CUTS]
            params = {"start": start, "cuts": [cuts.file, cuts.xxh3], "seconds": shard.target_seconds}
            yield make_unit(shard.index, cost=float(shard.count), size=shard.count, params=params)
            start += shard.count

    def open(self, device: str) -> Processor:
        return AssembleProcessor(self, read_encoded(self.encoded))

    def finalize(self, units: list[Unit], commits: Iterable[Commit]) -> Totals:
        commits = list(commits)
        # Nothing tells the codec's facts where there are no shards.
        codec = read_encoded(self.encoded).codec
        fields = self._dataset.codec_fields(self.codec) if codec else []
        files = [
            {
                field.name: FieldFile(file.name, file.size, file.xxh3)
                for field, file in zip(fields, commit.files, strict=True)
            }
            for commit in commits
        ]
        self._dataset.add_fields(fields, files, codec)
        return add_up(commits)

    def is_finalized(self) -> bool:
        # The index may have been made again without this codec, as when it was lost.
        return self.codec in [codec.name for codec in self._dataset.record().codecs]

    def discard(self) -> None:
        self._dataset.remove_fields(codec_fields(self.codec), count_planned(self))

    def check_output(self) -> None:
        """Raise ConfigError where the dataset has codes of this name that this run has not made."""
        own = committed_files(self)
        fields = self.reserves[1]
        if self.codec in self._dataset.stored_codecs() and not self._dataset.is_made_of(fields, own):
            raise ConfigError(
                f"{self.root} already has codes called {self.codec!r} that were not made from {self.run_dir.path}; "
                "give this codec another name",
                code="foreign_output",
            )


class AssembleProcessor(Processor):
    """The assembly of shards in one rank."""

    def __init__(self, stage: AssembleStage, encoded: EncodedRecord) -> None:
        assert encoded.codec is not None  # there are no units without segments
        self._stage = stage
        self._codec: CodecRecord = encoded.codec
        self._codes = SegmentCodes(stage.encoded, encoded.codec)
        self._numbers = stage.survey.numbers()
        self._folders = stage.folders

    def close(self) -> None:
        self._codes.close()

    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        file, expected = unit.params["cuts"]
        cuts = self._stage.root / file
        if checksum(cuts) != expected:
            raise UnitFailed(
                f"{cuts} has changed since it was written: remove it and run the stage write again",
                code="damaged_shard",
            )
        ids = list(read_cut_ids(cuts))
        start = unit.params["start"]
        numbers = np.array(self._numbers[:, start : start + unit.size])
        codes = dict(self._codes.read(np.unique(numbers)))
        frame_shift = self._codec.samples_per_frame / self._codec.sampling_rate
        files = [shard_file(field, unit.index) for field in self._folders]
        for field, (file, row) in enumerate(zip(files, numbers.tolist(), strict=True)):
            with FieldWriter(staging.path(file)) as writer:
                for cut_id, number in zip(ids, row, strict=True):
                    shape = codes[number].shape
                    # The context lies on another time line than the cut, so that it is no temporal array.
                    metadata = array_json(shape) if field else temporal_array_json(shape, frame_shift)
                    writer.add(Item(cut_id, "npy", array_to_bytes(codes[number]), metadata))
        return Output(files=files, num_out=unit.size, stats={"seconds": unit.params["seconds"]})
