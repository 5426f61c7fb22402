"""Stage ``write`` (stage 2): cuts, target audio and context audio as shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from sharmill.audio.roots import AudioRoots
from sharmill.audio.segments import SegmentReader
from sharmill.config import Config
from sharmill.engine.fence import require_own_output
from sharmill.engine.identity import identify_folder, versions
from sharmill.engine.ledger import committed_files
from sharmill.engine.plan import load_plan
from sharmill.engine.rundir import RunDir, StageDir
from sharmill.engine.stage import Advance, Processor, Stage, add_up
from sharmill.engine.unit import Commit, Output, Totals, Unit, make_unit
from sharmill.errors import ConfigError, RejectRecord
from sharmill.manifest import Context, Reject, Utterance, read_lines_at, records_checksum
from sharmill.match.stage import matched_manifest, min_similarity
from sharmill.shar.cut_lines import write_cuts
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.index import DatasetRecord, FieldFile, ShardRecord
from sharmill.shar.items import FieldWriter, Item
from sharmill.shar.layout import BASE_FIELDS, CONTEXT_AUDIO, CUTS, FORMAT_VERSION, TARGET_AUDIO, context_id, shard_file
from sharmill.shar.lhotse_json import cut_json, recording_json
from sharmill.storage import Staging
from sharmill.write.encoder import SegmentEncoder, StoredAudio
from sharmill.write.order import index_matched, order_lines


class WriteStage(Stage):
    """The stage that writes the dataset directory from the matched manifest. One unit is one shard."""

    kind: ClassVar[str] = "write"
    replaces_root: ClassVar[bool] = True

    def __init__(self, config: Config) -> None:
        self.config = config
        self.run_dir = RunDir(Path(config.run_dir))
        self.root = Path(config.dataset_dir)
        self.folders = BASE_FIELDS
        self._dataset = ShardedDataset(self.root)

    def identity(self) -> dict[str, Any]:
        require_own_output(self)
        matched = matched_manifest(self.config)
        if not matched.exists():
            raise ConfigError(f"{matched} is not there: run the stage match first", code="stage_not_run")
        return {
            "write": dataclasses.asdict(self.config.write),
            "name": self.config.name,
            "audio_roots": [
                identify_folder(root.path, self.run_dir.path)
                for root in AudioRoots.of(source.audio_root for source in self.config.sources).roots
            ],
            "limits": self._limits(),
            "input": records_checksum(matched),
            "versions": versions("soundfile", "torchaudio"),
        }

    def plan(self, folder: Path) -> Iterator[Unit]:
        index = index_matched(matched_manifest(self.config))
        write = self.config.write
        order = order_lines(index, write.order, write.seed)
        np.save(folder / "offsets.npy", index.offsets[order], allow_pickle=False)
        for number, start in enumerate(range(0, len(order), write.shard_size)):
            lines = order[start : start + write.shard_size]
            params = {"start": start, "stop": start + len(lines)}
            yield make_unit(number, cost=round(float(index.seconds[lines].sum()), 3), size=len(lines), params=params)

    def open(self, device: str) -> Processor:
        return WriteProcessor(self.config, self.dir.plan)

    def finalize(self, units: list[Unit], commits: Iterable[Commit]) -> Totals:
        commits = list(commits)
        shards = [_shard_record(commit) for commit in commits]
        self._dataset.write_index(self._dataset_record(shards), shards)
        return add_up(commits)

    def products(self) -> list[Path]:
        return self._dataset.index_files

    def discard(self) -> None:
        self._dataset.remove(len(load_plan(self)))

    def later(self) -> list[StageDir]:
        encoded = sorted((self.run_dir.path / "encode").glob("*"))
        return [self.run_dir.stage(f"encode/{path.name}") for path in encoded if path.is_dir()]

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
        match = self.config.match
        return {
            "min_similarity": min_similarity(match),
            "min_duration": match.min_duration,
            "max_duration": match.max_duration,
        }

    def _dataset_record(self, shards: list[ShardRecord]) -> DatasetRecord:
        return DatasetRecord(
            format_version=FORMAT_VERSION,
            name=self.config.name,
            fields=list(BASE_FIELDS),
            num_shards=len(shards),
            num_cuts=sum(shard.count for shard in shards),
            target_seconds=round(sum(shard.target_seconds for shard in shards), 3),
            context_seconds=round(sum(shard.context_seconds for shard in shards), 3),
            audio_format=self.config.write.audio_format,
            sampling_rate=self.config.write.sampling_rate,
            limits=self._limits(),
            codecs=[],
        )


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
        roots = AudioRoots.of(source.audio_root for source in self.config.sources)
        reader = SegmentReader(roots, self.config.prepare.duration_tolerance)
        uses = [segment for u in utterances for segment in (u.segment, _context(u).segment)]
        encode = SegmentEncoder(self.config.write, reader, uses)
        files = {field: shard_file(field, unit.index) for field in BASE_FIELDS}
        rejects: list[Reject] = []
        cuts: list[dict[str, Any]] = []
        seconds = context_seconds = 0.0
        with ExitStack() as stack:
            targets = stack.enter_context(FieldWriter(staging.path(files[TARGET_AUDIO])))
            contexts = stack.enter_context(FieldWriter(staging.path(files[CONTEXT_AUDIO])))
            for utterance in utterances:
                target, context, why = _encode_pair(encode, utterance)
                advance(utterance.duration + _context(utterance).segment.duration)
                if target is None or context is None:
                    assert why is not None
                    rejects.append(Reject(WriteStage.kind, why.reason, why.detail, utterance.public_record()))
                    continue
                targets.add(_item(utterance.cut_id, utterance.cut_id, target))
                contexts.add(_item(utterance.cut_id, _context_id(_context(utterance)), context))
                cuts.append(cut_json(utterance, sampling_rate=target.sampling_rate, num_samples=target.num_samples))
                seconds += target.seconds
                context_seconds += context.seconds
        write_cuts(staging.path(files[CUTS]), cuts)
        return Output(
            files=[files[TARGET_AUDIO], files[CONTEXT_AUDIO], files[CUTS]],
            num_out=len(cuts),
            rejects=rejects,
            stats={"seconds": seconds, "context_seconds": context_seconds},
        )

    def _read(self, unit: Unit) -> list[Utterance]:
        offsets = np.load(self._plan / "offsets.npy", mmap_mode="r")[unit.params["start"] : unit.params["stop"]]
        return [Utterance.from_json(line) for line in read_lines_at(matched_manifest(self.config), offsets)]


def _encode_pair(
    encode: SegmentEncoder, utterance: Utterance
) -> tuple[StoredAudio | None, StoredAudio | None, RejectRecord | None]:
    """Return target and context, or why the record has to go; both are always asked for, as the encoder counts uses."""
    outcomes: list[StoredAudio | None] = []
    why: RejectRecord | None = None
    for segment, role in ((utterance.segment, "target"), (_context(utterance).segment, "context")):
        try:
            outcomes.append(encode(segment))
        except RejectRecord as reject:
            outcomes.append(None)
            why = why or RejectRecord(reject.reason, f"{role}: {reject.detail}")
    return outcomes[0], outcomes[1], why


def _item(cut_id: str, recording_id: str, stored: StoredAudio) -> Item:
    recording = recording_json(recording_id, stored.sampling_rate, stored.num_samples)
    return Item(cut_id, stored.extension, stored.data, recording)


def _context(utterance: Utterance) -> Context:
    assert utterance.context is not None, "the matched manifest has utterances with a context only"
    return utterance.context


def _context_id(context: Context) -> str:
    return context_id(context.recording_id, context.segment.offset, context.segment.duration)


def _shard_record(commit: Commit) -> ShardRecord:
    by_name = {file.name: FieldFile(file.name, file.size, file.xxh3) for file in commit.files}
    return ShardRecord(
        index=commit.index,
        count=commit.num_out,
        target_seconds=round(commit.stats["seconds"], 3),
        context_seconds=round(commit.stats["context_seconds"], 3),
        fields={field: by_name[shard_file(field, commit.index)] for field in BASE_FIELDS},
    )
