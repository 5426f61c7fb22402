"""Stages ``encode`` (stage 3), the codes of one codec for the unique segments of a dataset, and ``assemble``.

The stage ``survey`` has found the segments. Their codes lie in the run directory until ``assemble`` puts them together
into the target and context codes of the dataset's shards.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import msgspec
import numpy as np

from sharmill.audio.resample import RESAMPLING_PACKAGES
from sharmill.config import Config
from sharmill.encode.assembly import AssembleProcessor
from sharmill.encode.codes import BOUNDS_FILE, EncodedRecord, SegmentCodes, add_counts, encoded_file
from sharmill.encode.config import CodecConfig, EncodeConfig
from sharmill.encode.encoder import EncodeProcessor
from sharmill.encode.segments import seconds_of
from sharmill.encode.survey import SurveyStage
from sharmill.engine.balance import divide_evenly
from sharmill.engine.stage import Commit, Processor, Stage, StageDir, Totals, Unit, add_up, make_unit, versions
from sharmill.errors import ConfigError, DeviceError, FatalError
from sharmill.files.arrays import load_stored_array, map_stored_array, save_array
from sharmill.files.atomic import write_atomic
from sharmill.files.checksums import checksum_bytes
from sharmill.files.stored import load_record
from sharmill.models import Codec, ModelFamily, find_codec, load_codec, make_deterministic
from sharmill.models.batches import PIECE_SECONDS, log_padding
from sharmill.models.device import check_device
from sharmill.shar.fields import Field, codec_fields, codec_of_field
from sharmill.shar.index import CodecRecord
from sharmill.write.fields import FieldStage

# Enough units for many ranks, each long enough to pay for its start and short enough to lose little when it dies.
_UNITS_WANTED: Final = 64


class EncodeStage(Stage):
    """The codes of one codec for the unique segments of a dataset. One unit is a block of segments.

    It publishes in its own folder, but reserves the fields of the dataset that its codes are for.

    Attributes:
        unit_limits: seconds of audio in a unit, where the configuration does not say how many.
    """

    kind: ClassVar[str] = "encode"
    section: ClassVar = EncodeConfig
    after: ClassVar = ("survey",)
    resource: ClassVar = "gpu"
    counts: ClassVar = "segments"
    keeps_cuts: ClassVar[bool] = True
    looks_ahead: ClassVar[bool] = True
    unit_limits: ClassVar[tuple[float, float]] = (60.0, 7200.0)

    def __init__(self, config: Config, settings: CodecConfig) -> None:
        super().__init__(config, settings)
        self.survey = SurveyStage(config)
        self.assemble = AssembleStage(config, settings)
        self.encode = config.section(EncodeConfig)

    @classmethod
    def of(cls, config: Config) -> list[Self]:
        return [cls(config, codec) for codec in config.section(EncodeConfig).codecs]

    @classmethod
    def check(cls, config: Config) -> None:
        for codec in config.section(EncodeConfig).codecs:
            find_codec(codec.model, **codec.options).resolve()

    def model(self) -> ModelFamily:
        """Return the codec, not loaded; the package that brings it may be imported."""
        return find_codec(self.settings.model, **self.settings.options)

    @property
    def reserves(self) -> tuple[Path, Sequence[str]]:
        return self.assemble.reserves

    def identity(self) -> dict[str, Any]:
        self.survey.dataset.record()
        self.survey.require_done(self.survey.dir)
        model = self.model()
        return {
            "codec": model.identity(),
            "batch_seconds": self.encode.batch_seconds,
            "precision": self.encode.precision,
            "canonical_shapes": self.encode.canonical_shapes,
            "unit_seconds": self.encode.unit_seconds,
            "pieces": PIECE_SECONDS,
            "input": self.survey.dataset.audio_checksum(),
            "versions": versions(*RESAMPLING_PACKAGES["sinc"], "torch", *model.packages),
        }

    def modules(self) -> list[str]:
        return [*super().modules(), *self.model().modules]

    def require_models(self) -> None:
        self.model().check()

    def check_output(self) -> None:
        self.assemble.check_output()

    def plan(self, folder: Path) -> Iterator[Unit]:
        seconds = seconds_of(map_stored_array(self.survey.segments_file))
        number = min(len(seconds), self.expect_units(len(seconds), float(seconds.sum())))
        bounds = np.array(divide_evenly(seconds, number) if number else [0], np.int64)
        save_array(folder / BOUNDS_FILE, bounds)
        for block, (start, stop) in enumerate(pairwise(bounds.tolist())):
            yield make_unit(
                block, cost=round(float(seconds[start:stop].sum()), 3), size=stop - start,
                params={"start": start, "stop": stop},
            )  # fmt: skip

    def expect_units(self, num_records: float, cost: float) -> int:
        unit_seconds = self.encode.unit_seconds or float(np.clip(cost / _UNITS_WANTED, *self.unit_limits))
        return max(1, round(cost / unit_seconds))

    def blocks_of(self, shards: Iterable[int]) -> set[int]:
        """Return the units of the finished plan that encode what lies in some shards."""
        numbers, bounds = map_stored_array(self.survey.numbers_file), load_stored_array(self.dir.plan / BOUNDS_FILE)
        starts = np.cumsum([0, *(shard.count for shard in self.survey.dataset.shards())])
        blocks: set[int] = set()
        for shard in shards:
            inside = numbers[:, starts[shard] : starts[shard + 1]]
            blocks.update(np.unique(np.searchsorted(bounds, inside, side="right") - 1).tolist())
        return blocks

    @classmethod
    def mender(cls, field: str, *, content: bool) -> str | None:
        codec = codec_of_field(field) if content else None
        return codec and f"{cls.kind}/{codec}"

    def redo(self, shards: Mapping[str, set[int]], *, of_index: bool) -> set[int] | None:
        own = shards.get(self.name, set())
        return (self.blocks_of(own) if own and self.dir.units.exists() else own) or None

    def open(self, device: str) -> Processor:
        threads = make_deterministic(device)
        kind = check_device(device)
        try:
            codec = load_codec(self.settings.model, device, precision=self.encode.precision, **self.settings.options)
        except ConfigError as error:
            if error.code != "bad_codes":
                raise
            # The device may be to blame: on another one the same model may give codes.
            raise DeviceError(str(error), code=error.code) from error
        segments, files = map_stored_array(self.survey.segments_file), self.survey.audio_files()
        return EncodeProcessor(self.encode, self._describe(codec), codec, segments, files, device, kind, threads)

    def _describe(self, codec: Codec) -> CodecRecord:
        """Return the record of the codec for the index of the dataset."""
        place = (self.kind, "codecs", self.encode.codecs.index(self.settings), "model")
        return CodecRecord(
            name=self.settings.name,
            # The name has no folders of this machine and no values of the environment.
            model=self.references.hide_at(place, self.model().published_name),
            checksum=codec.checksum,
            trained=codec.trained,
            sampling_rate=codec.sampling_rate,
            samples_per_frame=codec.samples_per_frame,
            num_codebooks=codec.num_codebooks,
            codebook_size=codec.codebook_size,
            precision=self.encode.precision,
        )

    def finalize(self, units: list[Unit], commits: list[Commit]) -> Totals:
        # Compared as records: a commit may lack a key that has its default.
        records = [msgspec.convert(commit.stats["codec"], CodecRecord) for commit in commits]
        codec = records[0] if records else None
        if any(record != codec for record in records):
            raise FatalError(
                f"{self.name}: ranks used different models under the same name; run with --restart", code="bad_model"
            )
        if codec is not None:
            codec = msgspec.structs.replace(codec, devices=sorted({commit.device_kind for commit in commits} - {""}))
        codes = checksum_bytes(b"".join(file.xxh3.encode() for commit in commits for file in commit.files))
        counts = "" if codec is None else add_counts(self.dir, len(units), codec)
        write_atomic(encoded_file(self.dir), msgspec.json.encode(EncodedRecord(codec, codes, counts)))
        log_padding([commit.stats for commit in commits], "encoded")
        return add_up(commits)

    def products(self) -> list[Path]:
        return [encoded_file(self.dir)]


class AssembleStage(FieldStage):
    """The codes of one codec, added to a dataset as fields and to its index. One unit is one shard."""

    kind: ClassVar[str] = "assemble"
    after: ClassVar[Sequence[str]] = ("survey", "encode")
    part_of: ClassVar[str] = "encode"
    keeps_cuts: ClassVar[bool] = True
    # Other codes of any segment have to reach all shards that hold it; that takes no codec.
    replan_when_changed: ClassVar[bool] = True

    def __init__(self, config: Config, settings: CodecConfig) -> None:
        super().__init__(config, settings)
        self.survey = SurveyStage(config)

    @classmethod
    def of(cls, config: Config) -> list[Self]:
        return [cls(config, codec) for codec in config.section(EncodeConfig).codecs]

    def fields(self) -> list[Field]:
        # There are fields of contexts if the dataset has contexts, whatever the configuration says.
        return codec_fields(self.settings.name, contexts=self.dataset.record().has_contexts)

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
            "codes": self.read_encoded().codes,
            "input": self.dataset.audio_checksum(),
            "versions": versions(),
        }

    def open(self, device: str) -> Processor:
        codec = self.codec()
        assert codec is not None  # there are no units without segments
        codes = SegmentCodes(self.encoded, codec)
        return AssembleProcessor(self, codec, codes, map_stored_array(self.survey.numbers_file))

    def read_encoded(self) -> EncodedRecord:
        """Read the outcome of the finished stage that has encoded the segments."""
        return load_record(encoded_file(self.encoded), EncodedRecord)

    def codec(self) -> CodecRecord | None:
        return self.read_encoded().codec

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
