"""Stage ``match`` (stage 1), which chooses a context for every utterance from its speaker group."""

import dataclasses
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import groupby
from typing import Any, Final

import numpy as np

from sharmill.audio.resample import RESAMPLING_PACKAGES
from sharmill.audio.roots import AudioRoots
from sharmill.audio.segments import SegmentReader
from sharmill.config import Config
from sharmill.engine.ahead import AheadProcessor
from sharmill.engine.hashes import find_first
from sharmill.engine.run import merge_files
from sharmill.engine.stage import Advance, Processor, Stage, StageRun, versions
from sharmill.engine.unit import Output, Totals, Unit, add_up, make_unit, name_devices
from sharmill.errors import ConfigError, RejectRecord
from sharmill.files.arrays import map_stored_array, save_array
from sharmill.files.staging import Staging
from sharmill.manifest import (
    Context,
    Reject,
    Segment,
    Utterance,
    read_lines_at,
)
from sharmill.match.choose import ContextChooser, encoder_family, min_similarity
from sharmill.match.config import MatchConfig
from sharmill.match.embed import EmbeddedSegment, Embedder, PendingSegments, sample_voices
from sharmill.match.groups import divide, write_candidates
from sharmill.models import ModelFamily, load_speaker_encoder, make_deterministic
from sharmill.models.batches import log_padding
from sharmill.models.device import check_device, fit_batch_seconds
from sharmill.models.memory import require_room
from sharmill.stages.inputs import (
    identify_roots,
    manifest_stem,
    segment_reader,
    segment_roots,
    stage_before_match,
)
from sharmill.stages.lines import (
    FIRST_OF_GROUP,
    OFFSET,
    column,
    finish_manifest,
    identify_manifest,
    merge_columns,
    offsets_of,
    order_by_group,
    write_part,
)
from sharmill.stages.speaker_key import make_speaker_key

# Units should be numerous enough for many ranks, long enough to outweigh their overhead, and short enough that little
# is lost if a rank dies. With 50 units per rank (20,000 h on 1,024 ranks), all ranks finish within 2 % of each other.
_UNITS_WANTED = 64
_UNIT_SECONDS: Final = (60.0, 1200.0)
# This limits the number of claim files in a folder, since each unit has one. For a million hours of audio, each unit
# then has ten hours.
_MAX_UNITS = 100_000
CANDIDATES: Final = "candidates.jsonl"
CANDIDATE_OFFSETS: Final = "candidates.npy"
# Chosen from 8, 16, 32, 60 and 600 s, based on measurements with a small TitaNet and resemblyzer. Compared with 16 s,
# batches of 8 s take a fifth longer, batches of 32 and 60 s gain almost nothing, and batches of 600 s spend most of the
# time on page faults.
_CPU_BATCH_SECONDS = 16.0
_OF_VOICES: Final = ("index", "similarities")
_OF_CLIPS: Final = ("embedding", "content")


class MatchStage(Stage):
    """The stage that chooses contexts and writes ``manifests/<stem>_withContextAudio....json``."""

    kind = "match"
    section = MatchConfig
    after = ("prepare", "voices")
    resource = "gpu"

    def check(self, config: Config) -> None:
        match = config.section(MatchConfig)
        if match.contexts_from_dataset and config.append_to is None:
            raise ConfigError(
                "match.contexts_from_dataset needs append_to: set it, or remove contexts_from_dataset",
                code="bad_config_value",
            )
        if match.max_other_similarity is not None and stage_before_match(config) != "voices":
            raise ConfigError(
                "match.max_other_similarity needs the stage voices: add voices, or remove max_other_similarity",
                code="bad_config_value",
            )
        encoder_family(match).resolve()
        min_similarity(match)

    def input(self, run: StageRun) -> AudioRoots:
        return segment_roots(run.config)

    def model(self, run: StageRun) -> ModelFamily:
        return encoder_family(run.settings)

    def identity(self, run: StageRun) -> dict[str, Any]:
        encoder, settings = self.model(run), run.settings
        match = asdict(settings) | {"min_similarity": min_similarity(settings)}
        del match["options"]  # already part of the encoder's identity
        before = stage_before_match(run.config)
        found = {}
        if settings.max_other_similarity is not None:
            # Changed similarities to voices exclude other candidates, even if the records are unchanged.
            found["similarities"] = run.totals_of(before, "similarities").products["similarities"].xxh3
        return found | {
            "match": match,
            "speaker_key": run.config.matched_key,
            "encoder": encoder.identity(),
            "audio_roots": identify_roots(self.input(run), run.run_dir.path),
            "input": identify_manifest(run, before),
            "versions": versions(*RESAMPLING_PACKAGES[settings.resampling], "torch", *encoder.packages),
        }

    def plan(self, run: StageRun) -> Iterator[Unit]:
        match, before = run.settings, stage_before_match(run.config)
        seconds, firsts = column(run, before, "seconds"), column(run, before, FIRST_OF_GROUP)
        num_records = len(seconds)
        if match.contexts_from_dataset:
            key, roots = make_speaker_key(run.config.matched_key), self.input(run).roots
            candidates = write_candidates(run.plan_folder / CANDIDATES, roots[-1].path, len(roots) - 1, key)
            save_array(run.plan_folder / CANDIDATE_OFFSETS, offsets_of(candidates["length"]))
            seconds = np.append(seconds, candidates["seconds"])
            groups = np.append(column(run, before, "group"), candidates["group"], axis=0)
            firsts = find_first(*groups.T)
        order = order_by_group(firsts)
        if match.contexts_from_dataset:
            # Groups without new records are excluded, so that they do not affect the order of the other groups.
            wanted = np.flatnonzero(np.isin(firsts, np.unique(firsts[:num_records]))).astype(np.uint32)
            order = wanted[order_by_group(firsts[wanted], mixed=match.max_group is not None)]
        save_array(run.plan_folder / "order.npy", order)
        seconds = seconds[order]
        spans = divide(
            seconds, firsts[order], unit_seconds=unit_seconds(match, float(seconds.sum(dtype=np.float64))),
            max_group=match.max_group,
        )  # fmt: skip
        # Lines with this or a higher number are candidates from the existing dataset.
        further = {"num_records": num_records} if match.contexts_from_dataset else {}
        number = 0
        for start, stop in spans:
            size = int(np.count_nonzero(order[start:stop] < num_records))
            if size:  # a part of a large group may contain only candidates
                yield make_unit(
                    number, cost=round(float(seconds[start:stop].sum(dtype=np.float64)), 3), size=size,
                    params={"start": start, "stop": stop, **further},
                )  # fmt: skip
                number += 1

    def expect_units(self, run: StageRun, num_records: float, cost: float) -> int:
        return max(1, round(cost / unit_seconds(run.settings, cost)))

    def open(self, run: StageRun, device: str) -> Processor:
        kind = check_device(device)
        match: MatchConfig = run.settings
        # If the records have stored embeddings, only given contexts and cuts of the dataset may need embedding.
        embeds = stage_before_match(run.config) != "voices" or match.contexts == "given" or match.contexts_from_dataset
        feeders = run.options.num_feeders(device) if embeds else 0
        embed = make_embedder(match, segment_reader(run), device, feeders)
        return MatchProcessor(run, embed, kind)

    def finalize(self, run: StageRun) -> Totals:
        match, least = run.settings, min_similarity(run.settings)
        name = f"{manifest_stem(run.config)}_withContextAudioMinDur{match.min_duration}MinSSIM{least}.json"
        manifest, commits, totals = run.run_dir.manifests / name, run.commits, add_up(run.commits)
        merge_files((run.root / commit.files[0].name for commit in commits), manifest)
        parts = [run.root / commit.files[1].name for commit in commits]
        columns = merge_columns(run.dir.merged, parts, ["index", "seconds", "context"], count=totals.num_out)
        log_padding([commit.stats for commit in commits], "embedded")
        facts = facts_of(match, name_devices(commit.device_kind for commit in commits))
        return finish_manifest(run, manifest, columns, totals, **facts)


def facts_of(match: MatchConfig, devices: list[str]) -> dict[str, Any]:
    """Return the facts about contexts for a dataset's index: their limits, and the encoder's precision and devices."""
    limits = {
        "min_similarity": min_similarity(match), "min_duration": match.min_duration, "max_duration": match.max_duration,
    }  # fmt: skip
    return {"limits": limits, "precision": match.precision, "devices": devices}


def unit_seconds(match: MatchConfig, total: float) -> float:
    return match.unit_seconds or max(float(np.clip(total / _UNITS_WANTED, *_UNIT_SECONDS)), total / _MAX_UNITS)


def make_embedder(
    match: MatchConfig, reader: SegmentReader, device: str, num_feeders: int, window_seconds: float | None = None
) -> Embedder:
    """Load the speaker encoder on a device, and return it with its feeders; the caller must close the result.

    Raises:
        ConfigError: the encoder cannot be loaded, or a batch does not fit in memory.
        DeviceError: the feeders cannot be started.
    """
    make_deterministic()
    encoder = load_speaker_encoder(match.encoder, device, precision=match.precision, **match.options)
    require_room(encoder, device, match.batch_seconds, "match.batch_seconds")
    return Embedder(
        encoder=encoder,
        reader=reader,
        batch_seconds=fit_batch_seconds(match.batch_seconds, device, _CPU_BATCH_SECONDS),
        num_feeders=num_feeders,
        resampling=match.resampling,
        pinned=device == "cuda",
        window_seconds=window_seconds,
    )


_Found = dict[Segment, EmbeddedSegment | RejectRecord]
_Begun = tuple[list[list[Utterance]], dict[int, Context | RejectRecord], _Found, PendingSegments]


class StoredEmbeddings:
    """The embeddings of the records and their similarities to voices, computed by the stage ``voices``."""

    def __init__(self, run: StageRun) -> None:
        self._rows, self._similarities = (map_stored_array(run.product(f"voices/{name}")) for name in _OF_VOICES)
        self._embeddings, self._contents = (map_stored_array(run.product(f"voices.embed/{name}")) for name in _OF_CLIPS)

    def find(self, utterances: Iterable[Utterance], num_records: int) -> _Found:
        """Return the embeddings of the utterances with numbers below ``num_records``, keyed by segment."""
        found: _Found = {}
        for utterance in utterances:
            if utterance.index < num_records:
                row, segment = self._rows[utterance.index], utterance.segment
                own, other = map(float, self._similarities[utterance.index])
                high, low = map(int, self._contents[row])
                found[segment] = EmbeddedSegment(
                    np.asarray(self._embeddings[row], np.float32), high << 64 | low, segment.notes,
                    own=own, other=other,
                )  # fmt: skip
        return found


class MatchProcessor(AheadProcessor[_Begun]):
    """The processor of one rank, which chooses contexts within the speaker groups of each unit.

    Args:
        device_kind: kind of the encoder's device.
    """

    def __init__(self, run: StageRun, embed: Embedder, device_kind: str) -> None:
        super().__init__(embed.feeders)
        self.device_kind = device_kind
        self._plan = run.plan_folder
        before = stage_before_match(run.config)
        self._manifest = run.product(f"{before}/manifest")
        # The offsets are memory-mapped, because a rank needs only the lines of its own units.
        self._offsets = map_stored_array(run.product(f"{before}/{OFFSET}"))
        self._stored = StoredEmbeddings(run) if before == "voices" else None
        self._embed = embed
        self._order = map_stored_array(self._plan / "order.npy")
        self._chooser = ContextChooser(run.settings, embed.reader.roots, make_speaker_key(run.config.matched_key))

    def begin(self, unit: Unit) -> _Begun:
        """Start decoding the audio of a unit.

        Returns:
            The speaker groups of the unit; the contexts given in its records, by record number, with a RejectRecord for
            each unusable context; the stored embeddings; and the segments that must be embedded.
        """
        utterances = self._read(unit)
        groups = [list(group) for _, group in groupby(utterances, key=self._chooser.group_key)]
        given = self._chooser.read_given(utterances) if self._chooser.match.contexts == "given" else {}
        candidates: list[Utterance] = []
        for group in groups:
            if self._chooser.may_match(group) and any(one.index not in given for one in group):
                candidates += group
            else:
                candidates += [one for one in group if isinstance(given.get(one.index), Context)]
        # Batches span all groups. A given context that is also the segment of a record is embedded only once.
        segments = {utterance.segment for utterance in candidates}
        brought = [one.segment for one in given.values() if isinstance(one, Context)]
        wanted = list(dict.fromkeys([*(one.segment for one in candidates), *(s for s in brought if s not in segments)]))
        stored = (
            {} if self._stored is None else self._stored.find(utterances, unit.params.get("num_records", sys.maxsize))
        )
        wanted = [segment for segment in wanted if segment not in stored]
        return groups, given, stored, self._embed.begin(wanted)

    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        groups, given, stored, wanted = self.take(unit)
        # Utterances with higher numbers come from the dataset that is appended to, and can only serve as contexts.
        num_records = unit.params.get("num_records", sys.maxsize)
        found = stored | dict(zip(wanted.items, self._embed.finish(wanted, advance, self.begin_next), strict=True))
        matched: list[Utterance] = []
        rejects: list[Reject] = []
        for group in groups:
            for utterance, outcome in self._match_found(group, given, found):
                if utterance.index >= num_records:
                    continue
                if isinstance(outcome, RejectRecord):
                    rejects.append(Reject(MatchStage.kind, outcome.reason, outcome.detail, utterance.public_record()))
                else:
                    matched.append(outcome)
        name = f"parts/{unit.index:06d}.jsonl"
        columns = write_part(staging.path(name), matched, self._chooser.group_key)
        save_array(staging.path(f"parts/{unit.index:06d}.npy"), columns)
        stats = {
            "seconds": sum(utterance.segment.duration for utterance in matched),
            **wanted.count_seconds(),
            "feeder_seconds": self.feeders.take_cpu_seconds(),
            "voices": sample_voices(
                ((self._chooser.group_key(group[0]), _embeddings(group, found)) for group in groups),
                unit.id, unit.params["stop"] - unit.params["start"], len(self._order),
            ),
        }  # fmt: skip
        return Output(files=[name, f"parts/{unit.index:06d}.npy"], num_out=len(matched), rejects=rejects, stats=stats)

    def _match_found(
        self,
        group: list[Utterance],
        given: dict[int, Context | RejectRecord],
        found: _Found,
    ) -> Iterator[tuple[Utterance, Utterance | RejectRecord]]:
        """Yield each utterance of a group, with either a copy of it that has a context or a RejectRecord."""
        left: list[Utterance] = []
        for utterance in group:
            own = found.get(utterance.segment)
            if isinstance(own, RejectRecord):
                yield utterance, own
                continue
            left.append(utterance)
            if own is not None:
                utterance.segment = dataclasses.replace(utterance.segment, notes=own.notes)
        embedded = [own for one in left if isinstance(own := found.get(one.segment), EmbeddedSegment)]
        choose = any(one.index not in given for one in left)
        chosen = (
            dict(zip((one.index for one in left), self._chooser.choose(left, embedded), strict=True)) if choose else {}
        )
        for utterance in left:
            context = given.get(utterance.index)
            yield (
                utterance,
                chosen[utterance.index] if context is None else self._chooser.keep(utterance, context, found),
            )

    def _read(self, unit: Unit) -> list[Utterance]:
        start, stop = unit.params["start"], unit.params["stop"]
        lines = self._order[start:stop]
        num_records = unit.params.get("num_records", sys.maxsize)
        is_record = lines < num_records
        texts = np.empty(len(lines), object)
        texts[is_record] = read_lines_at(self._manifest, self._offsets[lines[is_record]])
        if not is_record.all():
            offsets = map_stored_array(self._plan / CANDIDATE_OFFSETS)
            texts[~is_record] = read_lines_at(self._plan / CANDIDATES, offsets[lines[~is_record] - num_records])
        utterances = list(map(Utterance.from_json, texts))
        for utterance, number in zip(utterances, lines.tolist(), strict=True):
            utterance.index = number
        return utterances


def _embeddings(group: list[Utterance], found: dict[Segment, EmbeddedSegment | RejectRecord]) -> list[tuple[str, Any]]:
    """Return the ids and embeddings of the utterances of a group, except those that could not be embedded."""
    return [
        (utterance.cut_id, own.embedding)
        for utterance in group
        if isinstance(own := found.get(utterance.segment), EmbeddedSegment)
    ]
