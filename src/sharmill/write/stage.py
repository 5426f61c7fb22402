"""Stage ``write`` (stage 2): cuts, target audio and, in a dataset with contexts, context audio as shards."""

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
import numpy as np

from sharmill.audio.decoder import check_encoder, count_clipped, encode, encoder_problem, to_float
from sharmill.audio.resample import resample
from sharmill.audio.segments import FileCopy, Location, SegmentAudio, SegmentReader, SegmentsOnce
from sharmill.audio.sound import Sound
from sharmill.config import Config, Positive, Presence, StageSection, require
from sharmill.engine.balance import divide_evenly
from sharmill.engine.fence import require_own_output
from sharmill.engine.hashes import find_first
from sharmill.engine.plan import committed_files, count_planned
from sharmill.engine.stage import Advance, Commit, Output, Processor, Stage, Totals, Unit, add_up, make_unit, versions
from sharmill.errors import ConfigError, RejectRecord
from sharmill.files.arrays import map_stored_array, save_array
from sharmill.files.staging import Staging
from sharmill.manifest import CLIPPED_KEYS, CONTEXT_KEYS, Reject, Segment, Utterance, read_lines_at, records_checksum
from sharmill.match.choose import min_similarity
from sharmill.match.config import MatchConfig
from sharmill.match.groups import index_lines, order_by_group, segment_roots
from sharmill.match.stage import devices_of_match, matched_manifest
from sharmill.prepare.check import PrepareConfig
from sharmill.prepare.speaker_key import make_speaker_key
from sharmill.prepare.stage import identify_roots, prepared_manifest
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.fields import BASE_FIELDS, CONTEXT_AUDIO, CUTS, TARGET_AUDIO, base_fields
from sharmill.shar.histograms import CutMeasures, cut_values, sound_values
from sharmill.shar.index import FORMAT_VERSION, DatasetRecord
from sharmill.shar.items import FieldWriter, Item
from sharmill.shar.json_lines import write_cuts
from sharmill.shar.manifests import context_id, cut_json, recording_json
from sharmill.write.fields import added_fields, shard_record

_DEFAULT_SHARD_SIZE: Final = 1000
_ORIGINAL: Final = "original"
_FALLBACK_FORMAT: Final = "flac"


@dataclass(frozen=True, kw_only=True)
class WriteConfig(StageSection):
    """Form of the shards: their size, their order and the format of their audio."""

    presence: ClassVar[Presence] = "always"

    shard_size: Positive | None = None
    """Number of cuts in one shard; 1000 where neither this nor one of the next two keys is given. Only one can be
    given: ``write.shard_size=null write.num_shards=64`` replaces that of the file."""
    num_shards: Positive | None = None
    """Number of shards. Their numbers of cuts differ by one at most; there are never more shards than cuts."""
    shard_seconds: float | None = None
    """Seconds of target audio in one shard, about: the number of shards is the total divided by this, rounded, and
    each shard ends where the sum so far is closest to its share."""
    audio_format: Literal["flac", "wav", "mp3", "opus", "original"] = "flac"
    """Format of the stored audio; ``original`` is that of each source file (FLAC where it cannot be written). A
    record that is a whole mono file in this format and at ``sampling_rate`` is copied byte for byte. All other
    FLAC and WAV have 16 bits: samples of more bits are rounded. Samples beyond full scale are clipped and counted. Opus
    and MP3 have libsndfile's variable bit rates: for speech at 16, 24 and 48 kHz about 28, 37 and 62 kbit/s (Opus) and
    43, 55 and 68 kbit/s (MP3)."""
    sampling_rate: Positive | None = None
    """Sampling rate of the stored audio, in Hz; ``null`` keeps the rate of each recording."""
    order: Literal["manifest", "speaker", "shuffle"] = "shuffle"
    """Order of the cuts: as in the manifest, by speaker group (by speaker where ``match`` is null), or shuffled by
    ``seed``."""
    seed: Annotated[int, msgspec.Meta(ge=0)] = 42
    """Seed of ``order: shuffle``."""

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("shard_size", "num_shards", "shard_seconds")}
        given = {name: value for name, value in sizes.items() if value is not None}
        seconds = self.shard_seconds
        require(seconds is None or 0 < seconds < math.inf, "shard_seconds must be a positive number")
        named = " and ".join(f"{name} ({value:g})" for name, value in given.items())
        require(len(given) < 2, f"{named} are given, and only one of them can be: set the others to null")
        if not given:
            object.__setattr__(self, "shard_size", _DEFAULT_SHARD_SIZE)


class WriteStage(Stage):
    """The stage that writes the dataset directory from the manifest of the stage before it. One unit is one shard."""

    kind: ClassVar[str] = "write"
    section: ClassVar = WriteConfig
    after: ClassVar = ("prepare", "match")
    replaces_root: ClassVar[bool] = True

    def __init__(self, config: Config, settings: WriteConfig | None = None) -> None:
        super().__init__(config, settings)
        self.root = Path(config.dataset_dir)
        self._fields = base_fields(contexts=config.has_contexts)
        self.folders = [field.name for field in self._fields]
        self._dataset = ShardedDataset(self.root)

    @classmethod
    def check(cls, config: Config) -> None:
        write = config.section(WriteConfig)
        if write.sampling_rate is not None and write.audio_format != "original":
            check_encoder(write.audio_format, write.sampling_rate)

    def check_input(self) -> None:
        segment_roots(self.config).check()
        require_own_output(self)

    def identity(self) -> dict[str, Any]:
        manifest = input_manifest(self.config)
        if not manifest.exists():
            before = self.after[self.config.has_contexts]
            raise ConfigError(f"{manifest} is not there: run the stage {before} first", code="stage_not_run")
        return {
            "write": asdict(self.settings),
            "name": self.config.name,
            "audio_roots": identify_roots(segment_roots(self.config), self.run_dir.path),
            "limits": self._limits(),
            "input": records_checksum(manifest),
            "versions": versions("soundfile", "av", "torchaudio"),
        }

    def plan(self, folder: Path) -> Iterator[Unit]:
        manifest, write = input_manifest(self.config), self.settings
        lines = index_lines(manifest, group_key=None if self.config.has_contexts else make_speaker_key("speaker"))
        order = order_lines(lines, write.order, write.seed)
        save_array(folder / "offsets.npy", lines["offset"][order])
        seconds = lines["seconds"] + lines["context"]
        for number, (start, stop) in enumerate(pairwise(divide_into_shards(lines["seconds"][order], write))):
            yield make_unit(
                number, cost=round(float(seconds[order[start:stop]].sum(dtype=np.float64)), 3), size=stop - start,
                params={"start": start, "stop": stop},
            )  # fmt: skip

    def check_node(self) -> None:
        segment_roots(self.config).check_node()

    def open(self, device: str) -> Processor:
        return WriteProcessor(self.config, self.dir.plan)

    def finalize(self, units: list[Unit], commits: list[Commit]) -> Totals:
        shards = [shard_record(commit, self._fields, commit.index) for commit in commits]
        match = self.config.find(MatchConfig)
        record = DatasetRecord(
            format_version=FORMAT_VERSION,
            name=self.config.name,
            fields=list(self.folders),
            num_shards=len(shards),
            num_cuts=sum(shard.count for shard in shards),
            target_seconds=round(sum(shard.target_seconds for shard in shards), 3),
            context_seconds=round(sum(shard.context_seconds for shard in shards), 3),
            audio_format=self.settings.audio_format,
            sampling_rate=self.settings.sampling_rate,
            limits=self._limits(),
            codecs=[],
            match_precision="fp32" if match is None else match.precision,
            match_devices=devices_of_match(self.config) if self.config.has_contexts else [],
        )
        self._dataset.write_index(record, shards)
        return replace(add_up(commits), notes=_describe_clipping(commits))

    def products(self) -> list[Path]:
        return self._dataset.index_files

    def discard(self) -> None:
        fields = [field for fields in added_fields(self.config).values() for field in fields]
        self._dataset.remove(count_planned(self), fields)

    @classmethod
    def mender(cls, field: str, *, content: bool) -> str | None:
        return cls.kind if field in BASE_FIELDS else None

    def check_output(self) -> None:
        """Raise ConfigError where the dataset directory holds what this run has not written."""
        if self.root.exists() and not self.root.is_dir():
            raise ConfigError(f"dataset_dir {self.root} is not a folder", code="foreign_output")
        if self._dataset.is_empty():
            return
        if not self.dir.token_file.exists() or not self._dataset.is_made_of(BASE_FIELDS, committed_files(self)):
            raise ConfigError(
                f"dataset_dir {self.root} is not empty and was not written from {self.run_dir.path}; "
                "choose another dataset_dir, or empty it yourself",
                code="foreign_output",
            )

    def _limits(self) -> dict[str, Any]:
        if (match := self.config.find(MatchConfig)) is None:
            return {}
        return {
            "min_similarity": min_similarity(match), "min_duration": match.min_duration,
            "max_duration": match.max_duration,
        }  # fmt: skip


def _describe_clipping(commits: list[Commit]) -> list[str]:
    """Return a sentence about the samples that were clipped, if there are any."""
    cuts = sum(commit.stats.get("clipped_cuts", 0) for commit in commits)
    clipped = sum(commit.stats.get("clipped_seconds", 0.0) for commit in commits)
    seconds = sum(commit.stats["seconds"] + commit.stats["context_seconds"] for commit in commits)
    share = f"{100 * clipped / (seconds or 1.0):.3g}% of all samples"
    return [f"samples beyond full scale were clipped in {cuts:,} cuts, {share}"] if cuts else []


def order_lines(lines: np.ndarray, order: Literal["manifest", "speaker", "shuffle"], seed: int) -> np.ndarray:
    """Return the numbers of lines (N,) uint32: as in the input, by speaker group, or in a seeded permutation.

    The permutation is of the input's order, so it does not depend on how groups were found.

    Args:
        lines: (N,) of ``match.groups.LINE``.
    """
    if order == "speaker":
        return order_by_group(find_first(*lines["group"].T))
    numbers = np.argsort(lines["index"], kind="stable").astype(np.uint32)
    if order == "shuffle":
        np.random.Generator(np.random.PCG64(seed)).shuffle(numbers)
    return numbers


def divide_into_shards(seconds: np.ndarray, write: WriteConfig) -> list[int]:
    """Divide cuts into shards of consecutive ones, none of them empty.

    Args:
        seconds: (N,) durations of the targets, in the order of the cuts.
        write: says how large shards are.

    Returns:
        The bounds (shards + 1,): shard n has the cuts from bound n to before bound n + 1.

    >>> divide_into_shards(np.ones(5), WriteConfig(shard_size=2))
    [0, 2, 4, 5]
    >>> divide_into_shards(np.ones(5), WriteConfig(num_shards=2))
    [0, 2, 5]
    >>> divide_into_shards(np.array([4.0, 1.0, 1.0, 1.0, 1.0]), WriteConfig(shard_seconds=4.0))
    [0, 1, 5]
    """
    count = len(seconds)
    if not count:
        return [0]
    if write.shard_seconds is not None:
        total = float(seconds.sum(dtype=np.float64))
        return divide_evenly(seconds, min(count, max(1, round(total / write.shard_seconds))))
    if write.num_shards is not None:
        number = min(count, write.num_shards)
        return [count * shard // number for shard in range(number + 1)]
    assert write.shard_size is not None
    return [*range(0, count, write.shard_size), count]


@dataclass(frozen=True)
class WriteProcessor(Processor):
    """Writes shards.

    Args:
        plan: the folder of the stage's plan.
    """

    config: Config
    plan: Path

    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        utterances = self._read(unit)
        reader = SegmentReader(segment_roots(self.config), self.config.section(PrepareConfig).duration_tolerance)
        audio = store_segments(
            self.config.section(WriteConfig), reader,
            [segment for utterance in utterances for segment, _ in _parts(utterance).values()],
        )  # fmt: skip
        files = {field.name: field.path(unit.index) for field in base_fields(contexts=self.config.has_contexts)}
        rejects: list[Reject] = []
        cuts: list[dict[str, Any]] = []
        values: list[dict[str, float]] = []
        seconds = {TARGET_AUDIO: 0.0, CONTEXT_AUDIO: 0.0, "clipped": 0.0}
        with ExitStack() as stack:
            writers = {
                field: stack.enter_context(FieldWriter(staging.path(file)))
                for field, file in files.items() if field != CUTS
            }  # fmt: skip
            for utterance in utterances:
                items = _store_all(audio, utterance)
                advance(sum(segment.duration for segment, _ in _parts(utterance).values()))
                if isinstance(items, RejectRecord):
                    rejects.append(Reject(WriteStage.kind, items.reason, items.detail, utterance.public_record()))
                    continue
                for field, (item, stored) in items.items():
                    writers[field].add(item)
                    seconds[field] += stored.num_samples / stored.sampling_rate
                    if stored.num_clipped:
                        utterance.custom[CLIPPED_KEYS[field]] = round(stored.num_clipped / stored.num_samples, 9)
                        seconds["clipped"] += stored.num_clipped / stored.sampling_rate
                target = items[TARGET_AUDIO][1]
                cuts.append(cut_json(utterance, sampling_rate=target.sampling_rate, num_samples=target.num_samples))
                sounds = {field: Sound.unpack(stored.sound) for field, (_, stored) in items.items() if stored.sound}
                values.append(cut_values(cuts[-1]) | sound_values(sounds.get(TARGET_AUDIO), sounds.get(CONTEXT_AUDIO)))
        write_cuts(staging.path(files[CUTS]), cuts)
        return Output(
            # The cuts last of all.
            files=[*(files[field] for field in writers), files[CUTS]],
            num_out=len(cuts),
            rejects=rejects,
            stats={
                "seconds": seconds[TARGET_AUDIO],
                "context_seconds": seconds[CONTEXT_AUDIO],
                "clipped_cuts": sum(not row.keys().isdisjoint(CLIPPED_KEYS.values()) for row in values),
                "clipped_seconds": seconds["clipped"],
                "cuts": CutMeasures.of(values, unit.index).pack(),
            },
        )

    def _read(self, unit: Unit) -> list[Utterance]:
        offsets = map_stored_array(self.plan / "offsets.npy")[unit.params["start"] : unit.params["stop"]]
        utterances = [Utterance.from_json(line) for line in read_lines_at(input_manifest(self.config), offsets)]
        for utterance in utterances if not self.config.has_contexts else ():
            # A source may have contexts of its own, which are not in the dataset.
            utterance.custom = {key: value for key, value in utterance.custom.items() if key not in CONTEXT_KEYS}
        return utterances


def input_manifest(config: Config) -> Path:
    """Return the path of the manifest that the dataset is written from: that of the stage before."""
    return matched_manifest(config) if config.has_contexts else prepared_manifest(config)


@dataclass(frozen=True, slots=True)
class StoredAudio:
    """An audio file as it is stored: the extension for its format, and what a decoder gives for it.

    ``sound`` has the measures of the segment's sound, packed, or is "" where they are not known. ``num_clipped``
    samples were beyond full scale, and were clipped.
    """

    extension: str
    sampling_rate: int
    num_samples: int
    sound: str
    num_clipped: int = 0


def store_segments(config: WriteConfig, reader: SegmentReader, uses: Iterable[Segment]) -> SegmentsOnce[StoredAudio]:
    """Return the audio of segments as it is stored: copied where the file already is what is wanted, else encoded."""

    def may_copy(location: Location) -> bool:
        info = location.info
        return (
            location.is_whole_file
            and info.common
            and info.channels == 1
            and config.audio_format in (_ORIGINAL, info.format)
            and config.sampling_rate in (None, info.sampling_rate)
        )

    def store(found: SegmentAudio | FileCopy) -> tuple[bytes, StoredAudio]:
        info = found.location.info
        if isinstance(found, FileCopy):
            return found.data, StoredAudio(info.format, info.sampling_rate, found.location.num_samples, found.sound)
        samples, rate = found.samples, found.sampling_rate
        if config.sampling_rate not in (None, rate):
            samples, rate = resample(to_float(samples), rate, config.sampling_rate), config.sampling_rate
        extension: str = config.audio_format
        if extension == _ORIGINAL:
            extension = info.format if info.common and not encoder_problem(info.format, rate) else _FALLBACK_FORMAT
        if problem := encoder_problem(extension, rate):
            raise RejectRecord("unsupported_rate", problem)
        return encode(samples, rate, extension), StoredAudio(
            extension, rate, len(samples), found.notes.sound, count_clipped(samples)
        )

    return SegmentsOnce(reader, uses, store, may_copy)


def _parts(utterance: Utterance) -> dict[str, tuple[Segment, str]]:
    """Return, by field of audio, the segments of an utterance and the ids of their Recordings."""
    parts = {TARGET_AUDIO: (utterance.segment, utterance.cut_id)}
    if (context := utterance.context) is not None:
        segment = context.segment
        parts[CONTEXT_AUDIO] = segment, context_id(context.recording_id, segment.offset, segment.duration)
    return parts


def _store_all(
    audio: SegmentsOnce[StoredAudio], utterance: Utterance
) -> dict[str, tuple[Item, StoredAudio]] | RejectRecord:
    """Return the items of an utterance by field of audio, or why the record has to go.

    All segments are always asked for, as their uses are counted.
    """
    items: dict[str, tuple[Item, StoredAudio]] = {}
    why: RejectRecord | None = None
    for field, (segment, recording_id) in _parts(utterance).items():
        try:
            data, stored = audio.get(segment)
        except RejectRecord as reject:
            why = why or RejectRecord(reject.reason, f"{field.removesuffix('_audio')}: {reject.detail}")
            continue
        recording = recording_json(recording_id, stored.sampling_rate, stored.num_samples)
        items[field] = Item(utterance.cut_id, stored.extension, data, recording), stored
    return why or items
