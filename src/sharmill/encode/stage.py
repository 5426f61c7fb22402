"""Stages ``encode`` (stage 3), the codes of one codec for the unique segments of a dataset, and ``assemble``.

The stage ``survey`` has found the segments. Their codes lie in the run directory until ``assemble`` puts them together
into the target and context codes of the dataset's shards: a file for each block of segments.

A file is a table and the codes of each segment behind it, codebook by codebook. The table has the position of the codes
of each segment and their checksum, and at its end where the codes end and a checksum of the table itself, which single
segments are read without: in a wrong place are other codes. Behind the codes are counts: how often each code occurs in
each codebook.
"""

import base64
import dataclasses
import math
import os
import resource
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final, Self

import msgspec
import numpy as np
import xxhash

from sharmill.audio.files import decode_bytes
from sharmill.audio.resample import RESAMPLING_PACKAGES, resample
from sharmill.audio.segments import find_peak
from sharmill.config import Config
from sharmill.encode.config import CodecConfig, EncodeConfig
from sharmill.encode.survey import SurveyStage, hash_segment, seconds_of
from sharmill.engine.ahead import AheadProcessor, LoadedBatches
from sharmill.engine.balance import divide_evenly
from sharmill.engine.progress import spent_on
from sharmill.engine.stage import (
    Advance,
    Commit,
    Output,
    Processor,
    Stage,
    StageDir,
    Totals,
    Unit,
    add_up,
    make_unit,
    versions,
)
from sharmill.errors import ConfigError, DeviceError, FatalError, RejectRecord, UnitFailed
from sharmill.files.arrays import load_stored_array, map_stored_array, save_array
from sharmill.files.atomic import open_new, write_atomic
from sharmill.files.checksums import checksum_bytes
from sharmill.files.staging import Staging
from sharmill.files.stored import damaged_file, load_record, open_stored, read_record
from sharmill.manifest import Reject
from sharmill.models import Codec, ModelFamily, find_codec, load_codec, make_deterministic
from sharmill.models.batches import PIECE_SECONDS, Batch, find_pieces, log_padding, plan_batches
from sharmill.models.device import check_device, fit_batch_seconds
from sharmill.models.memory import ELSEWHERE, MemoryGuard, require_room
from sharmill.shar.arrays import array_to_bytes, codes_dtype, num_frames
from sharmill.shar.fields import Field, codec_fields, codec_of_field
from sharmill.shar.index import CodecRecord
from sharmill.shar.items import NO_DATA, FieldWriter, Item
from sharmill.shar.manifests import array_json, temporal_array_json
from sharmill.shar.tar import open_field
from sharmill.write.fields import FieldProcessor, FieldStage

# Enough units for many ranks, each long enough to pay for its start and short enough to lose little when it dies.
_UNITS_WANTED = 64
_MOST_NAMED: Final = 3
_BOUNDS: Final = "bounds.npy"
_ENTRY: Final = np.dtype([("position", "<i8"), ("xxh3", "<u8")])
_COUNT: Final = np.dtype("<i8")
# Files of codes that a rank keeps open at most, if its limit allows: those of 32,768 hours in blocks of two.
_MOST_KEPT: Final = 1 << 14
# Bytes between two ranges of a file that take no longer to read and drop than another read of a cached file.
_GAP: Final = 1 << 14
# Bytes of neighbouring ranges that are read at once.
_AT_ONCE: Final = 1 << 20
# Codebooks times their size: codecs with more codes are not counted.
_MAX_COUNTS: Final = 1 << 21
# Segments that tell a rank which gives no codes from a unit that has none.
_NUM_PROBES: Final = 16
# Advice about segments that no batch size helps.
_TOO_LONG_ADVICE: Final = f"all other units go on, and {ELSEWHERE}"


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
        save_array(folder / _BOUNDS, bounds)
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
        numbers, bounds = map_stored_array(self.survey.numbers_file), load_stored_array(self.dir.plan / _BOUNDS)
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
        return EncodeProcessor(self, codec, device, kind, threads)

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
        counts = "" if codec is None else _add_counts(self.dir, len(units), codec)
        write_atomic(_encoded_file(self.dir), msgspec.json.encode(_EncodedRecord(codec, codes, counts)))
        log_padding([commit.stats for commit in commits], "encoded")
        return add_up(commits)

    def products(self) -> list[Path]:
        return [_encoded_file(self.dir)]


# The batches of a unit, their items, and the number of frames of each.
_Begun = tuple[list[Batch], LoadedBatches[Item, np.ndarray], list[int]]


class EncodeProcessor(AheadProcessor[_Begun]):
    """A codec that encodes blocks of segments, whose audio is decoded ahead of it in batches of like length.

    Args:
        device: of the codec: ``cpu``, or ``cuda``, for which batches may have other sizes and come from pinned memory.
        device_kind: that of the device.
        threads: how many may decode and resample audio beside the codec.
    """

    def __init__(self, stage: EncodeStage, codec: Codec, device: str, device_kind: str, threads: int) -> None:
        super().__init__()
        self.device_kind = device_kind
        self._stage = stage
        self._codec = codec
        self._device = device
        self._threads = threads
        self._batch_seconds = seconds = stage.encode.batch_seconds
        room = require_room(codec, device, seconds, "encode.batch_seconds")
        self._pieces = find_pieces(codec)
        # The longest segment that the memory of a GPU can hold.
        self._most_seconds = room if self._pieces is None else math.inf
        self._max_frames = fit_batch_seconds(seconds, device) * codec.sampling_rate / codec.samples_per_frame
        self._guard = MemoryGuard("the codec", "encode.batch_seconds")
        self._segments = map_stored_array(stage.survey.segments_file)
        self._files = stage.survey.audio_files()

    def begin(self, unit: Unit) -> _Begun:
        """Begin to decode the audio of a unit, and return when its first segment is decoded.

        Raises:
            UnitFailed: a segment takes more memory than there is, or the audio is not as the survey found it.
        """
        segments = self._segments_of(unit)
        seconds = seconds_of(segments)
        number = int(np.count_nonzero(seconds > self._most_seconds))
        if number:
            longest = segments[int(seconds.argmax())]
            path = self._files[int(longest["shard"])][int(longest["field"])]
            raise UnitFailed(
                f"{number} of {len(segments)} segments are longer than the {self._most_seconds:.0f} s that fit "
                f"in the memory of the device: the longest, of {seconds.max():.0f} s, is in {path} at byte "
                f"{longest['place']['offset']}; {_TOO_LONG_ADVICE}",
                code="out_of_memory",
            )
        items = self._read(segments)
        codec = self._codec
        frames = list(map(self._count_frames, items))
        batches = self._plan_batches(frames)
        loaded = LoadedBatches(
            items,
            [batch.items for batch in batches],
            partial(_load, sampling_rate=codec.sampling_rate),
            threads=self._threads,
            weigh=self._count_frames,
            batch_weight=self._batch_seconds * codec.sampling_rate / codec.samples_per_frame,
        )
        return batches, loaded, frames

    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        batches, loaded, frames = self.take(unit)
        share = unit.cost / max(1, sum(frames))
        dtype = codes_dtype(self._codec.codebook_size)
        # A segment that the codec gives no codes for has no frames.
        codes: list[np.ndarray] = [np.empty((self._codec.num_codebooks, 0), dtype)] * len(frames)
        problems: dict[int, str] = {}
        for batch, samples in zip(batches, loaded.take(self.begin_next), strict=True):
            items = [loaded.items[index] for index in batch.items]
            for index, found in zip(batch.items, self._encode_each(batch, samples, items), strict=True):
                if isinstance(found, str):
                    problems[index] = found
                else:
                    codes[index] = np.ascontiguousarray(found.astype(dtype))
            advance(sum(frames[index] for index in batch.items) * share)
        self._guard.unit_done()
        if len(problems) == unit.size:
            self._require_sound(unit, problems[0])
        name = _codes_file(unit.index)
        _write_codes(staging.path(name), codes, self._codec.codebook_size)
        seconds = seconds_of(self._segments_of(unit))
        padded = sum(batch.num_rows * batch.num_frames for batch in batches)
        rejects = [
            Reject(
                self._stage.name, "bad_codes", problem,
                {"segment": unit.params["start"] + index, "place": loaded.items[index].cut_id},
            )
            for index, problem in sorted(problems.items())
        ]  # fmt: skip
        return Output(
            files=[name],
            num_out=unit.size - len(rejects),
            rejects=rejects,
            stats={
                "seconds": float(np.delete(seconds, list(problems)).sum()),
                "encoded_seconds": float(seconds.sum()),
                "padded_seconds": padded * self._codec.samples_per_frame / self._codec.sampling_rate,
                "codec": msgspec.to_builtins(self._record()),
            },
        )

    def _count_frames(self, item: Item) -> int:
        return num_frames(item.metadata or {}, self._codec.sampling_rate, self._codec.samples_per_frame)

    def _segments_of(self, unit: Unit) -> np.ndarray:
        return self._segments[unit.params["start"] : unit.params["stop"]]

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
                    items[index] = Item(
                        f"{path} at byte {offset}", "", data, {"num_samples": num_samples, "sampling_rate": rate}
                    )
        return [items[index] for index in range(len(segments))]

    def _plan_batches(self, frames: Sequence[int]) -> list[Batch]:
        """Return the batches of items with these numbers of frames; one that is cut is a batch of its own."""
        cut = [index for index, number in enumerate(frames) if self._is_cut(number)]
        whole = [index for index, number in enumerate(frames) if not self._is_cut(number)]
        encode = self._stage.encode
        planned = plan_batches(
            [frames[index] for index in whole],
            encode.batch_seconds,
            self._codec,
            self._device,
            canonical=encode.canonical_shapes,
        )
        return [
            *(Batch([index], frames[index], 1) for index in cut),
            *(dataclasses.replace(batch, items=[whole[index] for index in batch.items]) for batch in planned),
        ]

    def _is_cut(self, num_frames: int) -> bool:
        return self._pieces is not None and num_frames > self._pieces.length

    def _require_sound(self, unit: Unit, problem: str) -> None:
        """Raise UnitFailed if this rank gives no codes for segments of other units either: it may be what is broken."""
        numbers = np.unique(np.linspace(0, len(self._segments) - 1, _NUM_PROBES, dtype=np.int64))
        probes = self._segments[numbers[(numbers < unit.params["start"]) | (numbers >= unit.params["stop"])]]
        for item in self._read(probes[seconds_of(probes) <= self._most_seconds]):
            (batch,) = self._plan_batches([self._count_frames(item)])
            (found,) = self._encode(batch, [_load(item, self._codec.sampling_rate)], [item])
            if not isinstance(found, str):
                return
        raise UnitFailed(
            f"there are codes for none of the {unit.size} segments, nor for segments of other units: this device is "
            f"broken, or the codec cannot be used; the first: {problem}",
            code="bad_codes",
        )

    def _encode_each(
        self, batch: Batch, samples: Sequence[np.ndarray], items: Sequence[Item]
    ) -> Iterator[np.ndarray | str]:
        """Yield what ``_encode`` returns; in a batch another segment may be to blame, so that each is tried alone."""
        for item, own, found in zip(items, samples, self._encode(batch, samples, items), strict=True):
            if isinstance(found, str) and len(items) > 1:
                (alone,) = self._plan_batches([self._count_frames(item)])
                (found,) = self._encode(alone, [own], [item])
            yield found

    def _encode(self, batch: Batch, samples: Sequence[np.ndarray], items: Sequence[Item]) -> list[np.ndarray | str]:
        """Return for each segment of a batch its codes (codebooks, frames), or a sentence that says what is wrong.

        Raises:
            UnitFailed: the batch does not fit in memory.
            FatalError: nothing has fitted in memory yet.
        """
        names = [item.cut_id for item in items]
        try:
            with spent_on("model"):
                rows = self._run(batch, samples)
        except RejectRecord as reject:
            # A larger device gives it codes: it is not left out.
            raise UnitFailed(
                f"the segment {names[0]}: {reject.detail}; {_TOO_LONG_ADVICE}", code="out_of_memory"
            ) from reject
        except (FatalError, UnitFailed) as error:
            if error.code == "bad_codes":
                return [str(error)] * len(items)
            if isinstance(error, FatalError):
                raise
            more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
            raise UnitFailed(f"{error} (segments {', '.join(names[:_MOST_NAMED])}{more})", code=error.code) from error
        # Rows beyond the items are silence.
        return [self._check(row, batch, self._count_frames(item)) for row, item in zip(rows, items, strict=False)]

    def _check(self, row: np.ndarray, batch: Batch, num_frames: int) -> np.ndarray | str:
        """Return the codes of the first frames of a row, or what is wrong: not every codec looks itself."""
        shape, size = (self._codec.num_codebooks, batch.num_frames), self._codec.codebook_size
        codes = row[:, :num_frames]
        if row.shape != shape:
            return f"the codec gave codes of the shape {row.shape} where codebooks and frames are {shape}"
        # Neither comparison holds for NaN.
        if not (codes.min() >= 0 and codes.max() < size):
            return f"the codec gave the indices {codes.min()} to {codes.max()}, outside its {size}"
        return codes

    def _run(self, batch: Batch, samples: Sequence[np.ndarray]) -> np.ndarray:
        """Run the codec on a batch; raise RejectRecord for one segment that is too long, and as ``_encode``."""
        codec, pinned = self._codec, self._device == "cuda"
        if self._pieces is not None and self._is_cut(batch.num_frames):
            rows = self._pieces.rows(self._max_frames)
            with self._guard.batch(rows * PIECE_SECONDS, rows, is_least=rows == 1):
                return self._pieces.encode(codec, samples[0], self._max_frames, pinned=pinned)[None]
        audio, num_samples = batch.fill(samples, codec.samples_per_frame, pinned=pinned)
        seconds = audio.numel() / codec.sampling_rate
        is_long = len(batch.items) == 1 and seconds > self._batch_seconds
        with self._guard.batch(seconds, batch.num_rows, is_long=is_long):
            return codec.encode(audio, num_samples).numpy()

    def _record(self) -> CodecRecord:
        codec, stage = self._codec, self._stage
        place = (stage.kind, "codecs", stage.encode.codecs.index(stage.settings), "model")
        return CodecRecord(
            name=stage.settings.name,
            # The name has no folders of this machine and no values of the environment.
            model=stage.references.hide_at(place, stage.model().published_name),
            checksum=codec.checksum,
            trained=codec.trained,
            sampling_rate=codec.sampling_rate,
            samples_per_frame=codec.samples_per_frame,
            num_codebooks=codec.num_codebooks,
            codebook_size=codec.codebook_size,
            precision=stage.encode.precision,
        )


def _load(item: Item, sampling_rate: int) -> np.ndarray:
    try:
        samples, rate = decode_bytes(item.data or b"")
        find_peak(samples)
    except RejectRecord as error:
        raise UnitFailed(f"the stored audio of {item.cut_id} cannot be used: {error}", code="damaged_shard") from error
    promised = tuple((item.metadata or {}).get(key) for key in ("num_samples", "sampling_rate"))
    if (len(samples), rate) != promised:
        raise UnitFailed(
            f"the stored audio of {item.cut_id} has {len(samples)} samples at {rate} Hz, not {promised}",
            code="damaged_shard",
        )
    return resample(samples, rate, sampling_rate)


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
        return AssembleProcessor(self)

    def read_encoded(self) -> "_EncodedRecord":
        """Read the outcome of the finished stage that has encoded the segments."""
        return load_record(_encoded_file(self.encoded), _EncodedRecord)

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


class AssembleProcessor(FieldProcessor):
    """The assembly of shards in one rank."""

    def __init__(self, stage: AssembleStage) -> None:
        codec = stage.codec()
        assert codec is not None  # there are no units without segments
        super().__init__(stage)
        self._codec = codec
        self._codes = _SegmentCodes(stage.encoded, codec)
        self._numbers = map_stored_array(stage.survey.numbers_file)

    def close(self) -> None:
        self._codes.close()

    def write(self, unit: Unit, ids: list[str], paths: list[Path]) -> list[Reject]:
        start = unit.params["start"]
        numbers = np.array(self._numbers[:, start : start + unit.size])
        codes = dict(self._codes.read(np.unique(numbers)))
        frame_shift = self._codec.samples_per_frame / self._codec.sampling_rate
        lacking: dict[str, list[str]] = {}
        for field, (path, row) in enumerate(zip(paths, numbers.tolist(), strict=True)):
            with FieldWriter(path) as writer:
                for cut_id, number in zip(ids, row, strict=True):
                    shape = codes[number].shape
                    if not shape[1]:
                        writer.add(Item(cut_id, NO_DATA, None, None))
                        lacking.setdefault(cut_id, []).append(self.fields[field].attribute)
                        continue
                    # The context lies on another time line than the cut, so that it is no temporal array.
                    metadata = array_json(shape) if field else temporal_array_json(shape, frame_shift)
                    writer.add(Item(cut_id, "npy", array_to_bytes(codes[number]), metadata))
        return [
            Reject(self.stage.name, "bad_codes", f"it has no {' and no '.join(fields)}", {"cut": cut_id})
            for cut_id, fields in lacking.items()
        ]


class _EncodedRecord(msgspec.Struct, frozen=True):
    """The outcome of a stage ``encode``: codec, None where there are no segments, and checksum of all codes.

    ``counts`` has how often each code occurs in the segments, packed, or is "" where that was not counted.
    """

    codec: CodecRecord | None
    codes: str
    counts: str = ""


def _codes_file(block: int) -> str:
    """Return the path of the codes of a block, relative to the folder of the stage."""
    return f"parts/{block:06d}.codes"


def _encoded_file(paths: StageDir) -> Path:
    """Return the path of the ``_EncodedRecord`` of a stage."""
    return paths.merged / "codes.json"


def _write_codes(path: Path, codes: Sequence[np.ndarray], codebook_size: int) -> None:
    """Write the codes (codebooks, frames) of the segments of a block, in their order, and their counts.

    A segment without codes has an array without frames.
    """
    table = np.empty(len(codes) + 1, _ENTRY)
    table["position"] = table.nbytes + np.concatenate([[0], np.cumsum([array.nbytes for array in codes])])
    table["xxh3"][:-1] = [xxhash.xxh3_64_intdigest(array.tobytes()) for array in codes]
    table["xxh3"][-1] = xxhash.xxh3_64_intdigest(table[:-1].tobytes() + table["position"][-1].tobytes())
    with open_new(path) as stream:
        stream.write(table.tobytes())
        for array in codes:
            stream.write(array.tobytes())
        if len(codes[0]) * codebook_size <= _MAX_COUNTS:
            books = (np.concatenate([array[book] for array in codes]) for book in range(len(codes[0])))
            counts = np.stack([np.bincount(book, minlength=codebook_size) for book in books])
            stream.write(zlib.compress(counts.astype(_COUNT).tobytes(), 6))


def _add_counts(paths: StageDir, num_blocks: int, codec: CodecRecord) -> str:
    """Return how often each code occurs in all blocks, packed; "" where there are too many codes to count.

    Raises:
        ConfigError: a file is damaged.
    """
    size = codec.num_codebooks * codec.codebook_size
    total = np.zeros(size if size <= _MAX_COUNTS else 0, _COUNT)
    for block in range(num_blocks if len(total) else 0):
        path = paths.path / _codes_file(block)
        try:
            with open_stored(path) as stream:
                # The table ends where the first codes begin, and its last entry has where the last ones end.
                for shift in (_ENTRY.itemsize, 0):
                    (position,) = np.frombuffer(stream.read(_ENTRY.itemsize), _ENTRY)["position"].tolist()
                    stream.seek(max(0, position - shift))
                packed = stream.read()
            total += _unpack_counts(packed)
        except (ValueError, zlib.error) as error:
            raise damaged_file(path, f"the counts of its codes: {error}") from error
    return base64.b64encode(zlib.compress(total.tobytes(), 6)).decode() if len(total) else ""


def read_counts(paths: StageDir) -> np.ndarray | None:
    """Return how often each code occurs in all segments (codebooks, codebook size); None where it was not counted.

    Args:
        paths: the folder of a stage ``encode``, which need not be finished.

    Raises:
        ConfigError: the record is damaged.
    """
    encoded = read_record(_encoded_file(paths), _EncodedRecord)
    if encoded is None or encoded.codec is None or not encoded.counts:
        return None
    shape = encoded.codec.num_codebooks, encoded.codec.codebook_size
    try:
        return _unpack_counts(base64.b64decode(encoded.counts)).reshape(shape)
    except (ValueError, zlib.error) as error:
        raise damaged_file(_encoded_file(paths), f"the counts of the codes: {error}") from error


def _unpack_counts(packed: bytes) -> np.ndarray:
    # No more than there can be: a damaged text could unfold to gigabytes.
    return np.frombuffer(zlib.decompressobj().decompress(packed, _COUNT.itemsize * _MAX_COUNTS), _COUNT)


def _num_kept(num_files: int) -> int:
    """Return how many of so many files may stay open: half of the limit, which is raised for this process if needed."""
    wanted = min(num_files, _MOST_KEPT)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft not in (hard, resource.RLIM_INFINITY) and soft < 2 * wanted:
        soft = 2 * wanted if hard == resource.RLIM_INFINITY else min(2 * wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else min(wanted, soft // 2)


def _read_ranges(file: int, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    """Yield the bytes of ranges (start, stop) of a file; those that lie close behind each other are read at once."""
    begin = 0
    while begin < len(ranges):
        first, last = ranges[begin]
        end = begin + 1
        while end < len(ranges) and first <= ranges[end][0] <= last + _GAP and ranges[end][1] <= first + _AT_ONCE:
            last = max(last, ranges[end][1])
            end += 1
        data = os.pread(file, last - first, first)
        yield from (data[start - first : stop - first] for start, stop in ranges[begin:end])
        begin = end


class _SegmentCodes:
    """The codes of all segments, by their numbers.

    Of a file little more is read than the places and the codes of the segments that are asked for. The first files stay
    open, as many as the limit of open files allows, so that they are opened once however often segments are asked for.

    Args:
        paths: the folder of the stage that made them.
        codec: what the codes are of.
    """

    def __init__(self, paths: StageDir, codec: CodecRecord) -> None:
        self._folder = paths.path
        self._bounds = load_stored_array(paths.plan / _BOUNDS)
        self._num_codebooks = codec.num_codebooks
        self._dtype = codes_dtype(codec.codebook_size).newbyteorder("<")
        self._num_kept = _num_kept(len(self._bounds) - 1)
        self._kept: dict[int, BinaryIO] = {}

    def read(self, numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yield segments and their codes (codebooks, frames); ``numbers`` are sorted, and each file is read forward.

        Raises:
            UnitFailed: a file is not there, or damaged.
        """
        blocks = np.searchsorted(self._bounds, numbers, side="right") - 1
        starts = np.flatnonzero(np.diff(blocks, prepend=-1)).tolist()
        for begin, end in pairwise([*starts, len(blocks)]):
            block = int(blocks[begin])
            with ExitStack() as stack:
                # A file that cannot be read is closed, and opened again the next time.
                stream = self._kept.pop(block, None) or open_stored(self._folder / _codes_file(block), buffering=0)
                yield from self._read_block(block, stack.enter_context(stream), numbers[begin:end])
                if len(self._kept) < self._num_kept:
                    self._kept[block] = stream
                    stack.pop_all()

    def close(self) -> None:
        """Close the files that were kept open."""
        for stream in self._kept.values():
            stream.close()

    def _read_block(self, block: int, stream: BinaryIO, numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yield segments of a block and their codes."""
        path, file, size = self._folder / _codes_file(block), stream.fileno(), _ENTRY.itemsize
        # The entry behind a segment's own has where its codes end.
        starts = (size * (numbers - self._bounds[block])).tolist()
        table = b"".join(_read_ranges(file, [(start, start + 2 * size) for start in starts]))
        if len(table) < 2 * size * len(numbers):
            raise _damaged(path)
        entries = np.frombuffer(table, _ENTRY).reshape(-1, 2)
        places = [(start, stop) for start, stop in entries["position"].tolist()]
        end = os.fstat(file).st_size
        if not all(0 <= start <= stop <= end for start, stop in places):
            raise _damaged(path)
        found = zip(numbers.tolist(), entries["xxh3"][:, 0].tolist(), _read_ranges(file, places), strict=True)
        for number, expected, data in found:
            # A damaged table shows here too: it has other codes at the place.
            if xxhash.xxh3_64_intdigest(data) != expected:
                raise _damaged(path)
            yield number, np.frombuffer(data, self._dtype).reshape(self._num_codebooks, -1)


def _damaged(path: Path) -> UnitFailed:
    return UnitFailed(
        f"{path} is damaged: remove it and run the stage encode, which makes it again", code="damaged_run_dir"
    )
