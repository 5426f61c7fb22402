"""Stage ``write`` (stage 2): cuts, target audio and, in a dataset with contexts, context audio as shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from sharmill.audio.encoding import check_encoder
from sharmill.audio.segments import SegmentReader
from sharmill.audio.sound import Sound
from sharmill.config import Config
from sharmill.engine.identity import versions
from sharmill.engine.ledger import committed_files
from sharmill.engine.plan import count_planned
from sharmill.engine.reservations import require_own_output
from sharmill.engine.stage import Advance, Processor, Stage, add_up
from sharmill.engine.unit import Commit, Output, Totals, Unit, make_unit
from sharmill.errors import ConfigError, RejectRecord
from sharmill.files.staging import Staging
from sharmill.files.stored import map_stored_array, save_array
from sharmill.manifest import CONTEXT_KEYS, Reject, Segment, Utterance, read_lines_at, records_checksum
from sharmill.match.candidates import segment_roots
from sharmill.match.choose import min_similarity
from sharmill.match.config import MatchConfig
from sharmill.match.stage import devices_of_match, matched_manifest
from sharmill.prepare.config import PrepareConfig
from sharmill.prepare.stage import identify_roots, prepared_manifest
from sharmill.shar.cut_lines import write_cuts
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.histograms import CutMeasures, cut_values, sound_values
from sharmill.shar.index import DatasetRecord, FieldFile, ShardRecord
from sharmill.shar.items import FieldWriter, Item
from sharmill.shar.layout import (
    BASE_FIELDS,
    CONTEXT_AUDIO,
    CUTS,
    FORMAT_VERSION,
    TARGET_AUDIO,
    Field,
    base_fields,
    context_id,
)
from sharmill.shar.lhotse_json import cut_json, recording_json
from sharmill.write.config import WriteConfig
from sharmill.write.encoder import SegmentEncoder, StoredAudio
from sharmill.write.fields import added_fields
from sharmill.write.order import divide_into_shards, index_matched, index_prepared, order_lines


class WriteStage(Stage):
    """The stage that writes the dataset directory from the manifest of the stage before it. One unit is one shard."""

    kind: ClassVar[str] = "write"
    section: ClassVar = WriteConfig
    after: ClassVar = ("prepare", "match")
    replaces_root: ClassVar[bool] = True

    def __init__(self, config: Config, settings: WriteConfig | None = None) -> None:
        super().__init__(config, settings)
        self.write: WriteConfig = self.settings
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
            "write": dataclasses.asdict(self.write),
            "name": self.config.name,
            "audio_roots": identify_roots(segment_roots(self.config), self.run_dir.path),
            "limits": self._limits(),
            "input": records_checksum(manifest),
            "versions": versions("soundfile", "av", "torchaudio"),
        }

    def plan(self, folder: Path) -> Iterator[Unit]:
        manifest, write = input_manifest(self.config), self.write
        index = index_matched(manifest) if self.config.has_contexts else index_prepared(manifest)
        order = order_lines(index, write.order, write.seed)
        save_array(folder / "offsets.npy", index.offsets[order])
        for number, (start, stop) in enumerate(pairwise(divide_into_shards(index.target_seconds[order], write))):
            cost = round(float(index.seconds[order[start:stop]].sum(dtype=np.float64)), 3)
            yield make_unit(number, cost=cost, size=stop - start, params={"start": start, "stop": stop})

    def check_node(self) -> None:
        segment_roots(self.config).check_node()

    def open(self, device: str) -> Processor:
        return WriteProcessor(self.config, self.dir.plan)

    def finalize(self, units: list[Unit], commits: Iterable[Commit]) -> Totals:
        commits = list(commits)
        shards = [_shard_record(commit, self._fields) for commit in commits]
        match = self.config.find(MatchConfig)
        record = DatasetRecord(
            format_version=FORMAT_VERSION,
            name=self.config.name,
            fields=list(self.folders),
            num_shards=len(shards),
            num_cuts=sum(shard.count for shard in shards),
            target_seconds=round(sum(shard.target_seconds for shard in shards), 3),
            context_seconds=round(sum(shard.context_seconds for shard in shards), 3),
            audio_format=self.write.audio_format,
            sampling_rate=self.write.sampling_rate,
            limits=self._limits(),
            codecs=[],
            match_precision="fp32" if match is None else match.precision,
            match_devices=devices_of_match(self.config) if self.config.has_contexts else [],
        )
        self._dataset.write_index(record, shards)
        return add_up(commits)

    def products(self) -> list[Path]:
        return self._dataset.index_files

    def discard(self) -> None:
        fields = [field for fields in added_fields(self.config).values() for field in fields]
        self._dataset.remove(count_planned(self), fields)

    @classmethod
    def mender(cls, field: str, *, content: bool) -> str | None:
        return cls.kind if field in BASE_FIELDS else None

    def redo(self, shards: Mapping[str, set[int]], *, of_index: bool) -> set[int] | None:
        own = shards.get(self.name, set())
        return own if own or of_index else None

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


class WriteProcessor(Processor):
    """Writes shards.

    Args:
        plan: the folder of the stage's plan.
    """

    def __init__(self, config: Config, plan: Path) -> None:
        self.config = config
        self._plan = plan

    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        utterances = self._read(unit)
        reader = SegmentReader(segment_roots(self.config), self.config.section(PrepareConfig).duration_tolerance)
        uses = [use for u in utterances for use in _segments(u).values()]
        encode = SegmentEncoder(self.config.section(WriteConfig), reader, uses)
        fields = base_fields(contexts=self.config.has_contexts)
        files = {field.name: field.path(unit.index) for field in fields}
        rejects: list[Reject] = []
        cuts: list[dict[str, Any]] = []
        values: list[dict[str, float]] = []
        seconds = {TARGET_AUDIO: 0.0, CONTEXT_AUDIO: 0.0}
        with ExitStack() as stack:
            stack.enter_context(reader.gather(uses))
            writers = {
                field: stack.enter_context(FieldWriter(staging.path(file)))
                for field, file in files.items() if field != CUTS
            }  # fmt: skip
            for utterance in utterances:
                stored = _encode_all(encode, utterance)
                advance(sum(segment.duration for segment in _segments(utterance).values()))
                if isinstance(stored, RejectRecord):
                    rejects.append(Reject(WriteStage.kind, stored.reason, stored.detail, utterance.public_record()))
                    continue
                for field, audio in stored.items():
                    writers[field].add(_item(utterance.cut_id, _recording_id(utterance, field), audio))
                    seconds[field] += audio.seconds
                target = stored[TARGET_AUDIO]
                cuts.append(cut_json(utterance, sampling_rate=target.sampling_rate, num_samples=target.num_samples))
                sounds = {field: Sound.unpack(audio.sound) for field, audio in stored.items() if audio.sound}
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
                "cuts": CutMeasures.of(values, unit.index).pack(),
            },
        )

    def _read(self, unit: Unit) -> list[Utterance]:
        offsets = map_stored_array(self._plan / "offsets.npy")[unit.params["start"] : unit.params["stop"]]
        utterances = [Utterance.from_json(line) for line in read_lines_at(input_manifest(self.config), offsets)]
        for utterance in utterances if not self.config.has_contexts else ():
            # A source may have contexts of its own, which are not in the dataset.
            utterance.custom = {key: value for key, value in utterance.custom.items() if key not in CONTEXT_KEYS}
        return utterances


def input_manifest(config: Config) -> Path:
    """Return the path of the manifest that the dataset is written from: that of the stage before."""
    return matched_manifest(config) if config.has_contexts else prepared_manifest(config)


def _segments(utterance: Utterance) -> dict[str, Segment]:
    """Return the segments of an utterance by their fields: the target and, if it has one, the context."""
    context = {} if utterance.context is None else {CONTEXT_AUDIO: utterance.context.segment}
    return {TARGET_AUDIO: utterance.segment, **context}


def _encode_all(encode: SegmentEncoder, utterance: Utterance) -> dict[str, StoredAudio] | RejectRecord:
    """Return the audio of an utterance by field, or why the record has to go.

    All segments are always asked for, as the encoder counts uses.
    """
    stored: dict[str, StoredAudio] = {}
    why: RejectRecord | None = None
    for field, segment in _segments(utterance).items():
        try:
            stored[field] = encode(segment)
        except RejectRecord as reject:
            why = why or RejectRecord(reject.reason, f"{field.removesuffix('_audio')}: {reject.detail}")
    return why or stored


def _item(cut_id: str, recording_id: str, stored: StoredAudio) -> Item:
    recording = recording_json(recording_id, stored.sampling_rate, stored.num_samples)
    return Item(cut_id, stored.extension, stored.data, recording)


def _recording_id(utterance: Utterance, field: str) -> str:
    """Return the id of the Recording that an utterance has in a field of audio."""
    context = utterance.context
    if field == TARGET_AUDIO or context is None:
        return utterance.cut_id
    return context_id(context.recording_id, context.segment.offset, context.segment.duration)


def _shard_record(commit: Commit, fields: Sequence[Field]) -> ShardRecord:
    by_name = {file.name: FieldFile(file.name, file.size, file.xxh3) for file in commit.files}
    return ShardRecord(
        index=commit.index,
        count=commit.num_out,
        target_seconds=round(commit.stats["seconds"], 3),
        context_seconds=round(commit.stats["context_seconds"], 3),
        fields={field.name: by_name[field.path(commit.index)] for field in fields},
    )
