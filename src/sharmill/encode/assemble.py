"""Stage ``assemble``: the codes of segments put together into the target and context codes of a dataset's shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from sharmill.config import Config
from sharmill.encode.config import CodecConfig, EncodeConfig
from sharmill.encode.segment_codes import EncodedRecord, SegmentCodes, read_encoded
from sharmill.encode.survey import SurveyStage
from sharmill.engine.identity import versions
from sharmill.engine.rundir import StageDir
from sharmill.engine.stage import Processor
from sharmill.engine.unit import Unit
from sharmill.shar.arrays import array_to_bytes
from sharmill.shar.index import CodecRecord
from sharmill.shar.items import FieldWriter, Item
from sharmill.shar.layout import Field, codec_fields, codec_of_field
from sharmill.shar.lhotse_json import array_json, temporal_array_json
from sharmill.write.fields import FieldProcessor, FieldStage


class AssembleStage(FieldStage):
    """The codes of one codec, added to a dataset as fields and to its index. One unit is one shard."""

    kind: ClassVar[str] = "assemble"
    after: ClassVar[Sequence[str]] = ("survey", "encode")
    part_of: ClassVar[str] = "encode"
    # Other codes of any segment have to reach all shards that hold it; that takes no codec.
    replan_when_changed: ClassVar[bool] = True

    def __init__(self, config: Config, settings: CodecConfig) -> None:
        super().__init__(config, settings)
        self.survey = SurveyStage(config)

    @classmethod
    def of(cls, config: Config) -> list[Self]:
        return [cls(config, codec) for codec in config.section(EncodeConfig).codecs]

    def fields(self) -> list[Field]:
        # Those of contexts where the dataset has contexts, whatever the configuration.
        return self.dataset.codec_fields(self.settings.name)

    @property
    def possible_fields(self) -> list[Field]:
        # Before there is a dataset it is not known whether it has contexts.
        return codec_fields(self.settings.name)

    @property
    def encoded(self) -> StageDir:
        """The folder of the stage that has encoded the segments."""
        return self.run_dir.stage(f"{self.part_of}/{self.settings.name}")

    def identity(self) -> dict[str, Any]:
        self.dataset.record()
        for stage in (self.survey.dir, self.encoded):
            self.survey.require_done(stage)
        return {
            "codes": read_encoded(self.encoded).codes,
            "input": self.dataset.audio_checksum(),
            "versions": versions(),
        }

    def open(self, device: str) -> Processor:
        return AssembleProcessor(self, read_encoded(self.encoded))

    def codec(self) -> CodecRecord | None:
        return read_encoded(self.encoded).codec

    def describe_fields(self) -> str:
        return f"codes called {self.settings.name!r}"

    @classmethod
    def mender(cls, field: str, *, content: bool) -> str | None:
        codec = None if content else codec_of_field(field)
        return codec and f"{cls.kind}/{codec}"

    def redo(self, shards: Mapping[str, set[int]], *, of_index: bool) -> set[int] | None:
        """See ``Stage.redo``; what is encoded again is put together again."""
        own = shards.get(self.name, set()) | shards.get(f"{self.part_of}/{self.settings.name}", set())
        return own if own or of_index else None


class AssembleProcessor(FieldProcessor):
    """The assembly of shards in one rank."""

    def __init__(self, stage: AssembleStage, encoded: EncodedRecord) -> None:
        assert encoded.codec is not None  # there are no units without segments
        super().__init__(stage)
        self._codec: CodecRecord = encoded.codec
        self._codes = SegmentCodes(stage.encoded, encoded.codec)
        self._numbers = stage.survey.numbers()

    def close(self) -> None:
        self._codes.close()

    def write(self, unit: Unit, ids: list[str], paths: list[Path]) -> None:
        start = unit.params["start"]
        numbers = np.array(self._numbers[:, start : start + unit.size])
        codes = dict(self._codes.read(np.unique(numbers)))
        frame_shift = self._codec.samples_per_frame / self._codec.sampling_rate
        for field, (path, row) in enumerate(zip(paths, numbers.tolist(), strict=True)):
            with FieldWriter(path) as writer:
                for cut_id, number in zip(ids, row, strict=True):
                    shape = codes[number].shape
                    # The context lies on another time line than the cut, so that it is no temporal array.
                    metadata = array_json(shape) if field else temporal_array_json(shape, frame_shift)
                    writer.add(Item(cut_id, "npy", array_to_bytes(codes[number]), metadata))
