"""Stage ``encode`` (stage 3): codes of a codec for the unique segments of a dataset, added to its shards.

The stage has three rounds: ``sharmill.encode.survey`` lists the segments, ``EncodeStage`` encodes them and writes the
codes to the run directory, and ``ShardsStage`` writes target and context codes to the shards of the dataset.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Final

import msgspec
import numpy as np
from msgspec.structs import replace

from sharmill.audio.resample import RESAMPLING_PACKAGES
from sharmill.config import Config
from sharmill.encode.assembly import AssembleProcessor
from sharmill.encode.codes import BOUNDS_FILE, SegmentCodes, merge_blocks
from sharmill.encode.config import EncodeConfig
from sharmill.encode.encoder import EncodeProcessor
from sharmill.encode.segments import seconds_of
from sharmill.encode.survey import audio_files, require_same_audio, require_segments
from sharmill.engine.balance import divide_evenly
from sharmill.engine.stage import Processor, Stage, StageRun, versions
from sharmill.engine.unit import Totals, Unit, add_up, make_unit
from sharmill.errors import ConfigError, DeviceError, FatalError
from sharmill.files.arrays import load_stored_array, map_stored_array, save_array
from sharmill.models import Codec, ModelFamily, find_codec, load_codec, make_deterministic
from sharmill.models.batches import PIECE_SECONDS, log_padding
from sharmill.models.config import CodecConfig
from sharmill.models.device import check_device
from sharmill.shar.fields import Field, codec_fields
from sharmill.shar.index import CodecRecord
from sharmill.stages.fields import FieldPublication, FieldStage, add_fields, dataset_of

# Number of units to aim for, which is enough for many ranks. A unit should be much longer than its overhead, but short
# enough that little is lost if a rank dies.
_UNITS_WANTED: Final = 64


class EncodeStage(Stage):
    """Round that encodes the unique segments of a dataset with one codec. A unit is a block of segments.

    The round writes only to its folder in the run directory, but reserves the dataset's fields for the codes.

    Attributes:
        unit_limits: minimum and maximum seconds of audio in a unit, if ``unit_seconds`` is null.
    """

    kind = "encode"
    section = EncodeConfig
    after = ("encode.segments",)
    resource = "gpu"
    unit_limits: ClassVar[tuple[float, float]] = (60.0, 7200.0)

    def check(self, config: Config) -> None:
        for codec in config.section(EncodeConfig).codecs:
            find_codec(codec.model, **codec.options).resolve()

    def model(self, run: StageRun) -> ModelFamily:
        return find_codec(run.settings.model, **run.settings.options)

    def publication(self, run: StageRun) -> "BlocksPublication":
        return BlocksPublication(run)

    def identity(self, run: StageRun) -> dict[str, Any]:
        dataset, encode, model = dataset_of(run), run.config.section(EncodeConfig), self.model(run)
        dataset.record()
        require_segments(run)
        return {
            "codec": model.identity(),
            "batch_seconds": encode.batch_seconds,
            "precision": encode.precision,
            "canonical_shapes": encode.canonical_shapes,
            "unit_seconds": encode.unit_seconds,
            "pieces": PIECE_SECONDS,
            "input": dataset.audio_checksum(),
            "versions": versions(*RESAMPLING_PACKAGES["sinc"], "torch", *model.packages),
        }

    def plan(self, run: StageRun) -> Iterator[Unit]:
        seconds = seconds_of(map_stored_array(run.product("encode.segments/segments"))["place"])
        number = min(len(seconds), self.expect_units(run, len(seconds), float(seconds.sum())))
        bounds = np.array(divide_evenly(seconds, number) if number else [0], np.int64)
        save_array(run.plan_folder / BOUNDS_FILE, bounds)
        for block, (start, stop) in enumerate(pairwise(bounds.tolist())):
            yield make_unit(
                block, cost=round(float(seconds[start:stop].sum()), 3), size=stop - start,
                params={"start": start, "stop": stop},
            )  # fmt: skip

    def expect_units(self, run: StageRun, num_records: float, cost: float) -> int:
        chosen = run.config.section(EncodeConfig).unit_seconds
        return max(1, round(cost / (chosen or float(np.clip(cost / _UNITS_WANTED, *self.unit_limits)))))

    def open(self, run: StageRun, device: str) -> Processor:
        make_deterministic()
        kind = check_device(device)
        encode, settings = run.config.section(EncodeConfig), run.settings
        try:
            codec = load_codec(settings.model, device, precision=encode.precision, **settings.options)
        except ConfigError as error:
            if error.code != "bad_codes":
                raise
            # The device may be the cause, since the same model may work on another device.
            raise DeviceError(str(error), code=error.code) from error
        segments, files = map_stored_array(run.product("encode.segments/segments")), audio_files(dataset_of(run))
        feeders = run.options.num_feeders(device)
        return EncodeProcessor(encode, self._describe(run, codec), codec, segments, files, device, kind, feeders)

    def _describe(self, run: StageRun, codec: Codec) -> CodecRecord:
        """Return the record of the codec for the index of the dataset, without local paths or environment values."""
        encode = run.config.section(EncodeConfig)
        place = (self.kind, "codecs", encode.codecs.index(run.settings), "model")
        return CodecRecord(
            name=run.settings.name,
            model=run.options.references.hide_at(place, self.model(run).published_name),
            checksum=codec.checksum,
            trained=codec.trained,
            sampling_rate=codec.sampling_rate,
            samples_per_frame=codec.samples_per_frame,
            num_codebooks=codec.num_codebooks,
            codebook_size=codec.codebook_size,
            precision=encode.precision,
        )

    def finalize(self, run: StageRun) -> Totals:
        commits = run.commits
        # Compare the records after conversion, since commits omit keys with default values.
        records = [msgspec.convert(commit.stats["codec"], CodecRecord) for commit in commits]
        codec = records[0] if records else None
        if any(record != codec for record in records):
            raise FatalError(
                f"{run.name}: ranks used different models with the same name: run with --restart", code="bad_model"
            )
        if codec is not None:
            codec = replace(codec, devices=sorted({commit.device_kind for commit in commits} - {""}))
        products = merge_blocks(run.dir, len(run.units), sum(unit.size for unit in run.units))
        log_padding([commit.stats for commit in commits], "encoded")
        facts = {"codec": msgspec.to_builtins(codec)}
        return replace(add_up(commits), products=run.record_products(**products), facts=facts)


class CodesPublication(FieldPublication):
    """Publication of the code fields of one codec."""

    def __init__(self, run: StageRun) -> None:
        codec: CodecConfig = run.settings
        # The actual fields are determined later: before the dataset exists, it is unknown whether it has contexts.
        super().__init__(run, partial(codes_of, run), codec_fields(codec.name), f"codes called {codec.name!r}")


class BlocksPublication(CodesPublication):
    """Reservation of the code fields; a later round adds the codes to them."""

    in_place = False
    counts = "segments"

    def __init__(self, run: StageRun) -> None:
        # The fields belong to the round ``encode.shards``, whose plan has its own token.
        super().__init__(dataclasses.replace(run, declaration=ShardsStage(), token=""))
        self._plan = run.plan_folder

    def units_of(self, shards: set[int]) -> set[int]:
        numbers = map_stored_array(self.run.product("encode.segments/numbers"))
        bounds = load_stored_array(self._plan / BOUNDS_FILE)
        starts = np.cumsum([0, *(shard.count for shard in dataset_of(self.run).shards())])
        blocks: set[int] = set()
        for shard in shards:
            inside = numbers[:, starts[shard] : starts[shard + 1]]
            blocks.update(np.unique(np.searchsorted(bounds, inside, side="right") - 1).tolist())
        return blocks

    def is_complete(self) -> bool:
        return True

    def discard(self) -> None:
        """Do nothing: the round that fills the fields also removes them."""


def codes_of(run: StageRun) -> list[Field]:
    """Return the code fields of a codec in the existing dataset."""
    # Context fields depend on the dataset, not on the configuration.
    return codec_fields(run.settings.name, contexts=dataset_of(run).record().has_contexts)


class ShardsStage(FieldStage):
    """Round that adds the codes of one codec to a dataset and its index as fields. A unit is a shard."""

    kind = "encode.shards"
    is_cheap = True
    section = EncodeConfig
    after: ClassVar[Sequence[str]] = ("write", "encode.segments", "encode")

    def fields(self, run: StageRun) -> list[Field]:
        return codes_of(run)

    def publication(self, run: StageRun) -> CodesPublication:
        return CodesPublication(run)

    def identity(self, run: StageRun) -> dict[str, Any]:
        dataset = dataset_of(run)
        dataset.record()
        require_segments(run)
        require_same_audio(run, f"encode/{run.settings.name}")
        # The file of places contains checksums of all codes, so its checksum identifies the codes.
        totals = run.totals_of(f"encode/{run.settings.name}", "places", codec=CodecRecord | None)
        codes = totals.products["places"].xxh3
        return {"codes": codes, "input": dataset.audio_checksum(), "versions": versions()}

    def open(self, run: StageRun, device: str) -> Processor:
        codec = _codec_of(run)
        assert codec is not None  # without segments there are no units
        key = f"encode/{run.settings.name}"
        codes = SegmentCodes(run.run_dir.stage(key), run.product(f"{key}/places"), codec)
        return AssembleProcessor(run, codec, codes, map_stored_array(run.product("encode.segments/numbers")))

    def finalize(self, run: StageRun) -> Totals:
        return add_fields(run, self.fields(run), _codec_of(run))


def _codec_of(run: StageRun) -> CodecRecord | None:
    """Return the codec that encoded the segments; None if there are no segments."""
    codec: CodecRecord | None = run.totals_of(f"encode/{run.settings.name}", codec=CodecRecord | None).facts["codec"]
    return codec
