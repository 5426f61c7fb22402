"""Stage ``write`` (stage 2): shards with cuts, target audio and, in a dataset with contexts, context audio."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from msgspec.structs import replace

from sharmill.audio.encoding import check_encoder
from sharmill.audio.roots import AudioRoots
from sharmill.audio.segments import SegmentsOnce
from sharmill.audio.sound import Sound
from sharmill.config import Config, Precision
from sharmill.engine.balance import divide_evenly
from sharmill.engine.order import make_stages
from sharmill.engine.plan import committed_files, count_planned
from sharmill.engine.stage import Advance, Processor, Publication, Stage, StageRun, versions
from sharmill.engine.unit import Commit, Output, Totals, Unit, add_up, make_unit
from sharmill.errors import ConfigError, RejectRecord
from sharmill.files.arrays import map_stored_array, save_array
from sharmill.files.staging import Staging
from sharmill.manifest import CLIPPED_KEYS, CONTEXT_KEYS, Reject, Segment, Utterance, read_utterances_at
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.fields import BASE_FIELDS, CONTEXT_AUDIO, CUTS, TARGET_AUDIO, base_fields
from sharmill.shar.histograms import CutMeasures, cut_values, sound_values
from sharmill.shar.index import FORMAT_VERSION, DatasetRecord
from sharmill.shar.items import FieldWriter, Item
from sharmill.shar.json_lines import write_cuts
from sharmill.shar.manifests import context_id, cut_json, recording_json
from sharmill.shar.places import PLACE, make_place
from sharmill.stages.fields import added_fields, dataset_of, shard_record
from sharmill.stages.inputs import identify_roots, segment_reader, segment_roots
from sharmill.stages.lines import FIRST_OF_GROUP, OFFSET, column, identify_manifest, order_by_group
from sharmill.write.audio import ORIGINAL, StoredAudio, store_segments
from sharmill.write.config import WriteConfig


class WriteStage(Stage):
    """Stage that writes the dataset directory from the manifest of the preceding stage. A unit is a shard."""

    kind = "write"
    section = WriteConfig
    after = ("prepare", "match")

    def check(self, config: Config) -> None:
        write = config.section(WriteConfig)
        if write.sampling_rate is not None and write.audio_format != ORIGINAL:
            check_encoder(write.audio_format, write.sampling_rate)

    def input(self, run: StageRun) -> AudioRoots:
        return segment_roots(run.config)

    def publication(self, run: StageRun) -> "DatasetPublication":
        return DatasetPublication(run)

    def identity(self, run: StageRun) -> dict[str, Any]:
        return {
            "write": asdict(run.settings),
            "name": run.config.name,
            "audio_roots": identify_roots(segment_roots(run.config), run.run_dir.path),
            "limits": _match_facts(run).get("limits", {}),
            "input": identify_manifest(run, _before(run)),
            "versions": versions("soundfile", "av", "torchaudio"),
        }

    def plan(self, run: StageRun) -> Iterator[Unit]:
        order = _order(run)
        save_array(run.plan_folder / "offsets.npy", column(run, _before(run), OFFSET)[order])
        targets = column(run, _before(run), "seconds")[order]
        contexts = column(run, "match", "context")[order] if run.config.has_contexts else np.zeros_like(targets)
        for number, (start, stop) in enumerate(pairwise(divide_into_shards(targets, run.settings))):
            seconds = (targets[start:stop] + contexts[start:stop]).sum(dtype=np.float64)
            yield make_unit(
                number, cost=round(float(seconds), 3), size=stop - start, params={"start": start, "stop": stop}
            )

    def open(self, run: StageRun, device: str) -> Processor:
        return WriteProcessor(run)

    def finalize(self, run: StageRun) -> Totals:
        fields, matched = base_fields(contexts=run.config.has_contexts), _match_facts(run)
        shards = [shard_record(commit, fields, commit.index) for commit in run.commits]
        record = DatasetRecord(
            format_version=FORMAT_VERSION,
            name=run.config.name,
            fields=[field.name for field in fields],
            num_shards=len(shards),
            num_cuts=sum(shard.count for shard in shards),
            target_seconds=round(sum(shard.target_seconds for shard in shards), 3),
            context_seconds=round(sum(shard.context_seconds for shard in shards), 3),
            audio_format=run.settings.audio_format,
            sampling_rate=run.settings.sampling_rate,
            limits=matched.get("limits", {}),
            codecs=[],
            match_precision=matched.get("precision", "fp32"),
            match_devices=matched.get("devices", []),
        )
        dataset_of(run).write_index(record, shards)
        return replace(add_up(run.commits), notes=_describe_clipping(run.commits))


class DatasetPublication(Publication):
    """Publication of the whole dataset directory, including the output of later stages."""

    replaces_root = True

    def __init__(self, run: StageRun) -> None:
        super().__init__(Path(run.config.dataset_dir))
        self._run = run
        self._dataset = ShardedDataset(self.root)

    def folders(self) -> list[str]:
        return [field.name for field in base_fields(contexts=self._run.config.has_contexts)]

    def is_complete(self) -> bool:
        return all(path.exists() for path in self._dataset.index_files)

    def discard(self) -> None:
        config = self._run.config
        added = added_fields(make_stages(config)).values()
        self._dataset.remove(count_planned(self._run), [field for fields in added for field in fields])

    def check_output(self) -> None:
        """Raise ConfigError if the dataset directory contains files that this run has not written."""
        if self.root.exists() and not self.root.is_dir():
            raise ConfigError(f"dataset_dir {self.root} is not a folder: choose another one", code="foreign_output")
        if self._dataset.is_empty():
            return
        has_plan = self._run.dir.token_file.exists()
        if not has_plan or not self._dataset.is_made_of(BASE_FIELDS, committed_files(self._run)):
            raise ConfigError(
                f"dataset_dir {self.root} is not empty and was not written from {self._run.run_dir.path}; "
                "choose another dataset_dir, or empty it yourself",
                code="foreign_output",
            )


def _before(run: StageRun) -> str:
    """Return the name of the preceding stage, whose manifest is the input."""
    return "match" if run.config.has_contexts else "prepare"


def _match_facts(run: StageRun) -> dict[str, Any]:
    """Return the facts from ``match`` for the index of the dataset; an empty mapping without contexts."""
    if not run.config.has_contexts:
        return {}
    return run.totals_of("match", limits=dict[str, Any], precision=Precision, devices=list[str]).facts


def _describe_clipping(commits: Sequence[Commit]) -> list[str]:
    """Return a list with a sentence about clipped samples; an empty list if none were clipped."""
    cuts = sum(commit.stats.get("clipped_cuts", 0) for commit in commits)
    clipped = sum(commit.stats.get("clipped_seconds", 0.0) for commit in commits)
    seconds = sum(commit.stats["seconds"] + commit.stats["context_seconds"] for commit in commits)
    share = f"{100 * clipped / (seconds or 1.0):.3g}% of all samples"
    return [f"samples that exceed full scale were clipped in {cuts:,} cuts, {share}"] if cuts else []


def _order(run: StageRun) -> np.ndarray:
    """Return the line numbers (N,) uint32 of the manifest in the order of the dataset's cuts."""
    write: WriteConfig = run.settings
    numbers = np.arange(len(column(run, _before(run), OFFSET)), dtype=np.uint32)
    if write.order == "speaker":
        # The manifest of ``match`` is already ordered by group.
        return numbers if run.config.has_contexts else order_by_group(column(run, "prepare", FIRST_OF_GROUP))
    return order_lines(column(run, "match", "index") if run.config.has_contexts else numbers, write.order, write.seed)


def order_lines(index: np.ndarray, order: Literal["manifest", "shuffle"], seed: int) -> np.ndarray:
    """Return line numbers (N,) uint32 in the order of the input, or in a seeded permutation of it.

    Args:
        index: the position (N,) of each line in the input.
    """
    numbers = np.argsort(index, kind="stable").astype(np.uint32)
    if order == "shuffle":
        np.random.Generator(np.random.PCG64(seed)).shuffle(numbers)
    return numbers


def divide_into_shards(seconds: np.ndarray, write: WriteConfig) -> list[int]:
    """Divide cuts into non-empty shards of consecutive cuts.

    Args:
        seconds: durations (N,) of the targets, in the order of the cuts.
        write: the configuration with the size of shards.

    Returns:
        The bounds (shards + 1,): shard n contains the cuts from bound n up to, but not including, bound n + 1.

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


class WriteProcessor(Processor):
    """Processor that writes shards in one rank."""

    def __init__(self, run: StageRun) -> None:
        self._config: WriteConfig = run.settings
        self._has_contexts = run.config.has_contexts
        self._manifest = run.product(f"{_before(run)}/manifest")
        self._offsets = map_stored_array(run.plan_folder / "offsets.npy")
        self._reader = segment_reader(run)

    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        utterances = self._read(unit)
        audio = store_segments(
            self._config, self._reader,
            [segment for utterance in utterances for segment, _ in _parts(utterance).values()],
        )  # fmt: skip
        files = {field.name: field.path(unit.index) for field in base_fields(contexts=self._has_contexts)}
        rejects: list[Reject] = []
        cuts: list[dict[str, Any]] = []
        values: list[dict[str, float]] = []
        seconds = {TARGET_AUDIO: 0.0, CONTEXT_AUDIO: 0.0, "clipped": 0.0}
        with ExitStack() as stack:
            writers = {
                field: stack.enter_context(FieldWriter(staging.path(file)))
                for field, file in files.items() if field != CUTS
            }  # fmt: skip
            places: dict[str, list[tuple[object, ...]]] = {field: [] for field in writers}
            for utterance in utterances:
                items = _store_all(audio, utterance)
                advance(sum(segment.duration for segment, _ in _parts(utterance).values()))
                if isinstance(items, RejectRecord):
                    rejects.append(Reject(WriteStage.kind, items.reason, items.detail, utterance.public_record()))
                    continue
                for field, (item, stored) in items.items():
                    assert item.data is not None
                    place = make_place(item.data, writers[field].add(item), stored.num_samples, stored.sampling_rate)
                    places[field].append(place)
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
            # The cuts are published last, since they make the shard visible.
            files=[*(files[field] for field in writers), files[CUTS]],
            num_out=len(cuts),
            rejects=rejects,
            stats={
                "seconds": seconds[TARGET_AUDIO],
                "context_seconds": seconds[CONTEXT_AUDIO],
                "clipped_cuts": sum(not row.keys().isdisjoint(CLIPPED_KEYS.values()) for row in values),
                "clipped_seconds": seconds["clipped"],
                "cuts": CutMeasures.from_rows(values, unit.index).pack(),
            },
            notes=np.array(list(places.values()), PLACE),
        )

    def _read(self, unit: Unit) -> list[Utterance]:
        offsets = self._offsets[unit.params["start"] : unit.params["stop"]]
        utterances = read_utterances_at(self._manifest, offsets)
        for utterance in utterances if not self._has_contexts else ():
            # A source may provide contexts, but they do not belong in a dataset without contexts.
            utterance.custom = {key: value for key, value in utterance.custom.items() if key not in CONTEXT_KEYS}
        return utterances


def _parts(utterance: Utterance) -> dict[str, tuple[Segment, str]]:
    """Return, by audio field, each segment of an utterance and the id of its Recording."""
    parts = {TARGET_AUDIO: (utterance.segment, utterance.cut_id)}
    if (context := utterance.context) is not None:
        segment = context.segment
        parts[CONTEXT_AUDIO] = segment, context_id(context.recording_id, segment.offset, segment.duration)
    return parts


def _store_all(
    audio: SegmentsOnce[bytes, StoredAudio], utterance: Utterance
) -> dict[str, tuple[Item, StoredAudio]] | RejectRecord:
    """Return, by audio field, each item of an utterance and its audio's properties; or the reason for rejecting it.

    All segments are fetched even after an error, since ``SegmentsOnce`` counts their uses.
    """
    items: dict[str, tuple[Item, StoredAudio]] = {}
    problem: RejectRecord | None = None
    for field, (segment, recording_id) in _parts(utterance).items():
        try:
            data, stored = audio.get(segment)
        except RejectRecord as reject:
            problem = problem or RejectRecord(reject.reason, f"{field.removesuffix('_audio')}: {reject.detail}")
            continue
        recording = recording_json(recording_id, stored.sampling_rate, stored.num_samples)
        items[field] = Item(utterance.cut_id, stored.extension, data, recording), stored
    return problem or items
