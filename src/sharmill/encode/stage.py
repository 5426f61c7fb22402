"""Stage ``encode`` (stage 3): the codes of one codec for the unique segments of a dataset, in the run directory.

The stage ``survey`` has found the segments; the stage ``assemble`` puts their codes into the dataset.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec
import numpy as np

from sharmill.audio.resample import RESAMPLING_PACKAGES
from sharmill.config import Config
from sharmill.encode.assemble import AssembleStage
from sharmill.encode.codec_batches import TOO_LONG_ADVICE, BegunItems, CodecBatches
from sharmill.encode.config import CodecConfig, EncodeConfig
from sharmill.encode.segment_codes import EncodedRecord, add_counts, bounds_file, codes_file, encoded_file, write_codes
from sharmill.encode.segments import hash_segment, seconds_of
from sharmill.encode.survey import SurveyStage
from sharmill.engine.ahead import UnitsAhead
from sharmill.engine.balance import divide_evenly
from sharmill.engine.delays import spent_on
from sharmill.engine.identity import versions
from sharmill.engine.stage import Advance, Processor, Stage, add_up
from sharmill.engine.unit import Commit, Output, Totals, Unit, make_unit
from sharmill.errors import FatalError, UnitFailed
from sharmill.files.staging import Staging
from sharmill.files.storage import checksum_bytes, write_atomic
from sharmill.files.stored import load_stored_array, save_array
from sharmill.models import ModelFamily, find_codec, load_codec, make_deterministic
from sharmill.models.device import check_device
from sharmill.models.pieces import PIECE_SECONDS, find_pieces
from sharmill.models.shapes import Padding, log_padding
from sharmill.shar.index import CodecRecord
from sharmill.shar.items import Item
from sharmill.shar.layout import codec_of_field
from sharmill.shar.tar import open_field

# Enough units for many ranks, each long enough to pay for its start and short enough to lose little when it dies.
_UNITS_WANTED = 64
UNIT_SECONDS = (60.0, 7200.0)


class EncodeStage(Stage):
    """The codes of one codec for the unique segments of a dataset. One unit is a block of segments.

    It publishes in its own folder, but reserves the fields of the dataset that its codes are for.
    """

    kind: ClassVar[str] = "encode"
    section: ClassVar = EncodeConfig
    after: ClassVar = ("survey",)
    resource: ClassVar = "gpu"
    counts: ClassVar = "segments"
    looks_ahead: ClassVar[bool] = True

    def __init__(self, config: Config, settings: CodecConfig) -> None:
        super().__init__(config, settings)
        self.survey = SurveyStage(config)
        self.assemble = AssembleStage(config, settings)
        self.codec_config = settings
        self.encode = config.section(EncodeConfig)
        self._place = (self.kind, "codecs", self.encode.codecs.index(settings), "model")

    @classmethod
    def of(cls, config: Config) -> list[Self]:
        return [cls(config, codec) for codec in config.section(EncodeConfig).codecs]

    @classmethod
    def check(cls, config: Config) -> None:
        for codec in config.section(EncodeConfig).codecs:
            find_codec(codec.model, **codec.options).resolve()

    def model(self) -> ModelFamily:
        """Return the codec, not loaded; the package that brings it may be imported."""
        return find_codec(self.codec_config.model, **self.codec_config.options)

    @property
    def published_model(self) -> str:
        """The codec as the dataset names it, without folders of this machine and values of the environment."""
        return self.references.hide_at(self._place, self.model().published_name)

    @property
    def reserves(self) -> tuple[Path, Sequence[str]]:
        return self.assemble.reserves

    def is_published_later(self) -> bool:
        return not self.assemble.dir.done.exists()

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
            "versions": versions(*RESAMPLING_PACKAGES["sinc"], *model.dependencies),
        }

    def modules(self) -> list[str]:
        return [*super().modules(), *self.model().modules]

    def require_models(self) -> None:
        self.model().check()

    def check_output(self) -> None:
        self.assemble.check_output()

    def plan(self, folder: Path) -> Iterator[Unit]:
        seconds = self.survey.seconds()
        total = float(seconds.sum())
        number = min(len(seconds), self.expect_units(len(seconds), total))
        bounds = np.array(divide_evenly(seconds, number) if number else [0], np.int64)
        save_array(bounds_file(folder), bounds)
        for block, (start, stop) in enumerate(pairwise(bounds.tolist())):
            cost = round(float(seconds[start:stop].sum()), 3)
            yield make_unit(block, cost=cost, size=stop - start, params={"start": start, "stop": stop})

    def expect_units(self, num_records: float, cost: float) -> int:
        unit_seconds = self.encode.unit_seconds or float(np.clip(cost / _UNITS_WANTED, *UNIT_SECONDS))
        return max(1, round(cost / unit_seconds))

    def blocks_of(self, shards: Iterable[int]) -> set[int]:
        """Return the units of the finished plan that encode what lies in some shards."""
        numbers, bounds = self.survey.numbers(), load_stored_array(bounds_file(self.dir.plan))
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
        config = self.codec_config
        codec = load_codec(config.model, device, precision=self.encode.precision, **config.options)
        batches = CodecBatches(
            codec,
            batch_seconds=self.encode.batch_seconds,
            device=device,
            canonical=self.encode.canonical_shapes,
            pieces=find_pieces(codec),
            threads=threads,
        )
        return EncodeProcessor(self, batches, kind)

    def finalize(self, units: list[Unit], commits: Iterable[Commit]) -> Totals:
        commits = list(commits)
        # Compared as records: a commit may lack a key that has its default.
        records = [msgspec.convert(commit.stats["codec"], CodecRecord) for commit in commits]
        codec = records[0] if records else None
        if any(record != codec for record in records):
            raise FatalError(
                f"{self.name}: ranks used different models under the same name; run with --restart", code="bad_model"
            )
        if codec is not None:
            devices = sorted({commit.device_kind for commit in commits} - {""})
            codec = msgspec.structs.replace(codec, devices=devices)
        codes = checksum_bytes(b"".join(file.xxh3.encode() for commit in commits for file in commit.files))
        counts = "" if codec is None else add_counts(self.dir, len(units), codec)
        write_atomic(encoded_file(self.dir), msgspec.json.encode(EncodedRecord(codec, codes, counts)))
        log_padding([commit.stats for commit in commits], "encoded")
        return add_up(commits)

    def products(self) -> list[Path]:
        return [encoded_file(self.dir)]


class EncodeProcessor(Processor):
    """A codec that encodes blocks of segments.

    Args:
        device_kind: that of the codec's device.
    """

    def __init__(self, stage: EncodeStage, encode: CodecBatches, device_kind: str) -> None:
        self.device_kind = device_kind
        self._stage = stage
        self._codec = encode.codec
        self._encode = encode
        self._segments = stage.survey.segments()
        self._files = stage.survey.audio_files()
        self._ahead = UnitsAhead(self._begin)

    def expect(self, unit: Unit | None) -> None:
        self._ahead.expect(unit)

    def close(self) -> None:
        self._ahead.close()

    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        with spent_on("decoding"):
            begun = self._ahead.take(unit)
        share = unit.cost / max(1, sum(map(self._encode.num_frames, begun.items)))
        padding = Padding()
        codes = self._encode.finish(begun, lambda frames: advance(frames * share), padding, self._ahead.begin)
        name = codes_file(unit.index)
        write_codes(staging.path(name), codes, self._codec.codebook_size)
        stats = {
            "seconds": float(seconds_of(self._segments_of(unit)).sum()),
            **padding.stats("encoded"),
            "codec": msgspec.to_builtins(self._record()),
        }
        return Output(files=[name], num_out=unit.size, stats=stats)

    def _segments_of(self, unit: Unit) -> np.ndarray:
        return self._segments[unit.params["start"] : unit.params["stop"]]

    def _begin(self, unit: Unit) -> BegunItems:
        segments = self._segments_of(unit)
        self._refuse_too_long(segments)
        return self._encode.begin(self._read(segments))

    def _refuse_too_long(self, segments: np.ndarray) -> None:
        """Raise UnitFailed where a segment takes more memory than the device has, before anything is decoded."""
        seconds = seconds_of(segments)
        number = int(np.count_nonzero(seconds > self._encode.most_seconds))
        if number:
            longest = segments[int(seconds.argmax())]
            path = self._files[int(longest["shard"])][int(longest["field"])]
            raise UnitFailed(
                f"{number} of {len(segments)} segments are longer than the {self._encode.most_seconds:.0f} s that fit "
                f"in the memory of the device: the longest, of {seconds.max():.0f} s, is in {path} at byte "
                f"{longest['place']['offset']}; {TOO_LONG_ADVICE}",
                code="out_of_memory",
            )

    def _read(self, segments: np.ndarray) -> list[Item]:
        """Return the stored audio of segments, if it is as the survey found it: damaged audio would give codes as well.

        Each file is opened once and read forward.
        """
        items: dict[int, Item] = {}
        order = np.lexsort((segments["place"]["offset"], segments["shard"], segments["field"]))
        files = segments[["field", "shard"]][order]
        begins = np.flatnonzero(np.concatenate([[True], files[1:] != files[:-1]]))
        for begin, end in pairwise([*begins.tolist(), len(order)]):
            field, shard = files[begin].tolist()
            path = self._files[shard][field]
            with open_field(path) as stream:
                for index in order[begin:end].tolist():
                    found, offset, size, num_samples, rate = segments["place"][index].tolist()
                    stream.seek(offset)
                    data = stream.read(size)
                    if hash_segment(data, num_samples, rate) != tuple(found):
                        raise UnitFailed(
                            f"{path} has changed since it was written: remove it and run the stage write again",
                            code="damaged_shard",
                        )
                    where = f"{path} at byte {offset}"
                    items[index] = Item(where, "", data, {"num_samples": num_samples, "sampling_rate": rate})
        return [items[index] for index in range(len(segments))]

    def _record(self) -> CodecRecord:
        codec, config = self._codec, self._stage.codec_config
        return CodecRecord(
            name=config.name,
            model=self._stage.published_model,
            checksum=codec.checksum,
            trained=codec.trained,
            sampling_rate=codec.sampling_rate,
            samples_per_frame=codec.samples_per_frame,
            num_codebooks=codec.num_codebooks,
            codebook_size=codec.codebook_size,
            precision=self._stage.encode.precision,
        )
