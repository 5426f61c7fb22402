"""Stage ``match`` (stage 1): a context for every utterance, from its speaker group."""

from __future__ import annotations

import dataclasses
import glob
import shutil
from collections.abc import Hashable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import xxhash

from sharmill.audio.roots import AudioRoots
from sharmill.audio.segments import SegmentReader
from sharmill.config import Config, MatchConfig
from sharmill.engine.identity import identify_folder, versions
from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Advance, Processor, Stage, add_up
from sharmill.engine.stored import map_stored_array
from sharmill.engine.unit import Commit, Output, Totals, Unit, make_unit
from sharmill.errors import ConfigError, RejectRecord
from sharmill.manifest import (
    CONTEXT_KEYS,
    Context,
    Reject,
    Utterance,
    parse_speaker_tag,
    read_lines_at,
    records_checksum,
    write_lines,
)
from sharmill.match.embed import EmbeddedSegment, Embedder
from sharmill.match.groups import divide, index_manifest
from sharmill.match.select import select_context
from sharmill.match.speaker_key import make_speaker_key
from sharmill.models import (
    describe_speaker_encoder,
    load_speaker_encoder,
    make_deterministic,
    own_min_similarity,
    require_speaker_encoder,
)
from sharmill.prepare.stage import manifest_stem, prepared_manifest
from sharmill.storage import Staging, open_atomic, open_stored, remove_tree

# Enough units for many ranks, each long enough to pay for its start and short enough to lose little when it dies.
_UNITS_WANTED = 64
_UNIT_SECONDS = (60.0, 3600.0)
_MATCHED = "_withContextAudio"


class MatchStage(Stage):
    """The stage that chooses contexts; it writes ``manifests/<stem>_withContextAudio....json``."""

    kind: ClassVar[str] = "match"
    uses_gpu: ClassVar[bool] = True

    def __init__(self, config: Config) -> None:
        self.config = config
        self.match = _match_config(config)
        self.run_dir = RunDir(Path(config.run_dir))
        self.root = self.dir.path

    def identity(self) -> dict[str, Any]:
        prepared = prepared_manifest(self.config)
        if not prepared.exists():
            raise ConfigError(f"{prepared} is not there: run the stage prepare first", code="stage_not_run")
        match = dataclasses.asdict(self.match) | {"min_similarity": min_similarity(self.match)}
        del match["allow_targets"]  # no output depends on it
        return {
            "match": match,
            "speaker_key": self.config.speaker_key,
            "encoder": describe_speaker_encoder(self.match.encoder, self.match.allow_targets),
            "audio_roots": [
                identify_folder(root.path, self.run_dir.path)
                for root in AudioRoots.of(source.audio_root for source in self.config.sources).roots
            ],
            "input": records_checksum(prepared),
            "versions": versions("torch", "torchaudio", "soxr", "numpy"),
        }

    def require_models(self) -> None:
        require_speaker_encoder(self.match.encoder)

    def plan(self, folder: Path) -> Iterator[Unit]:
        match = self.match
        index = index_manifest(prepared_manifest(self.config), make_speaker_key(self.config.speaker_key))
        order = np.argsort(index.groups, kind="stable")
        np.save(folder / "offsets.npy", index.offsets, allow_pickle=False)
        np.save(folder / "order.npy", order, allow_pickle=False)
        total = float(index.seconds.sum(dtype=np.float64))
        unit_seconds = match.unit_seconds or float(np.clip(total / _UNITS_WANTED, *_UNIT_SECONDS))
        spans = divide(index, order, unit_seconds=unit_seconds, max_group=match.max_group)
        for number, span in enumerate(spans):
            params = {"start": span.start, "stop": span.stop}
            yield make_unit(number, cost=span.seconds, size=span.stop - span.start, params=params)

    def open(self, device: str) -> Processor:
        threads = make_deterministic(device)
        roots = AudioRoots.of(source.audio_root for source in self.config.sources)
        embed = Embedder(
            encoder=load_speaker_encoder(self.match.encoder, device, self.match.allow_targets),
            reader=SegmentReader(roots, self.config.prepare.duration_tolerance),
            batch_seconds=self.match.batch_seconds,
            threads=threads,
            resampling=self.match.resampling,
        )
        return MatchProcessor(self.config, self.dir.plan, embed)

    def finalize(self, units: list[Unit], commits: Iterable[Commit]) -> Totals:
        commits = list(commits)
        with open_atomic(matched_manifest(self.config)) as merged:
            for commit in commits:
                with open_stored(self.root / commit.files[0].name) as part:
                    shutil.copyfileobj(part, merged)
        return add_up(commits)

    def products(self) -> list[Path]:
        return [matched_manifest(self.config)]

    def discard(self) -> None:
        # Those of other limits too: of one plan at a time, and taken for its output by the stage write.
        own = matched_manifest(self.config)
        for path in own.parent.glob(f"{glob.escape(manifest_stem(self.config))}{_MATCHED}*.json"):
            remove_tree(path)


class MatchProcessor(Processor):
    """The choice of contexts for the speaker groups of a unit, in one rank.

    Args:
        plan: the folder of the stage's plan.
    """

    def __init__(self, config: Config, plan: Path, embed: Embedder) -> None:
        self.config = config
        self.match = _match_config(config)
        self._plan = plan
        self._embed = embed
        self._group_key = make_speaker_key(config.speaker_key)

    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        groups = [list(group) for _, group in groupby(self._read(unit), key=self._key)]
        candidates = [utterance for group in groups if self._may_match(group) for utterance in group]
        # The batches of all groups are made together.
        wanted = [utterance.segment for utterance in candidates]
        with self._embed.reader.gather(wanted):
            segments = self._embed(wanted, advance)
        found = {utterance.index: segment for utterance, segment in zip(candidates, segments, strict=True)}
        matched: list[Utterance] = []
        rejects: list[Reject] = []
        for group in groups:
            left: list[Utterance] = []
            embedded: list[EmbeddedSegment] = []
            for utterance in group:
                segment = found.get(utterance.index)
                if isinstance(segment, RejectRecord):
                    rejects.append(self._reject(utterance, segment))
                    continue
                left.append(utterance)
                if segment is not None:
                    utterance.notes = segment.notes
                    embedded.append(segment)
            for utterance, outcome in zip(left, self._match_group(left, embedded), strict=True):
                if isinstance(outcome, RejectRecord):
                    rejects.append(self._reject(utterance, outcome))
                else:
                    matched.append(outcome)
        name = f"parts/{unit.index:06d}.jsonl"
        write_lines(staging.path(name), (utterance.to_json() for utterance in matched))
        seconds = sum(utterance.duration for utterance in matched)
        return Output(files=[name], num_out=len(matched), rejects=rejects, stats={"seconds": seconds})

    def _read(self, unit: Unit) -> list[Utterance]:
        start, stop = unit.params["start"], unit.params["stop"]
        lines = map_stored_array(self._plan / "order.npy")[start:stop]
        offsets = map_stored_array(self._plan / "offsets.npy")[lines]
        utterances = [Utterance.from_json(line) for line in read_lines_at(prepared_manifest(self.config), offsets)]
        for utterance, number in zip(utterances, lines, strict=True):
            utterance.index = int(number)
        return utterances

    def _key(self, utterance: Utterance) -> str:
        return self._group_key(utterance.audio_filepath, parse_speaker_tag(utterance.speaker).speaker)

    def _may_match(self, group: list[Utterance]) -> bool:
        """Return False where the durations rule out every context; there is no need to embed the group then."""
        return len(group) > 1 and any(self._long_enough(utterance) for utterance in group)

    def _long_enough(self, utterance: Utterance) -> bool:
        match = self.match
        return utterance.duration >= match.min_duration and (
            match.max_duration is None or utterance.duration <= match.max_duration
        )

    def _match_group(self, group: list[Utterance], segments: list[EmbeddedSegment]) -> list[Utterance | RejectRecord]:
        """Return each utterance of a group with its context, or why it has none; ``segments`` are of the group."""
        if len(group) < 2:
            detail = "the group {!r} has no other usable utterance"
            return [RejectRecord("single_utterance_speaker", detail.format(self._key(one))) for one in group]
        if not self._may_match(group):
            detail = f"no utterance of its group has {self._limits()}"
            return [RejectRecord("no_long_context", detail) for _ in group]
        match = self.match
        options: dict[str, Any] = {
            "min_similarity": min_similarity(match),
            "min_duration": match.min_duration,
            "max_duration": match.max_duration,
            "choice": match.choice,
            "sample_size": match.sample_size,
            "seed": xxhash.xxh3_64_intdigest(f"{match.seed}\n{group[0].cut_id}".encode()),
        }
        problem: dict[str, Any] = {
            "embeddings": np.stack([segment.embedding for segment in segments]),
            "durations": np.array([utterance.duration for utterance in group]),
            # Equal for the same file, by whatever links and roots it is named.
            "recordings": _number([self._embed.reader.roots.real_name(utterance.segment) for utterance in group]),
            "offsets": np.array([utterance.offset for utterance in group]),
        }
        if match.exclude_same_text:
            # Equal for equal texts, case and spacing aside; -1 for an utterance without text.
            problem["texts"] = _number((" ".join(said.text.lower().split()) for said in group), {"": -1})
        contents = _number([segment.content for segment in segments])
        index, similarity = select_context(**problem, contents=contents, max_similarity=match.max_similarity, **options)
        copies = self._find_copies(problem, contents, options, np.flatnonzero(index < 0))
        outcomes: list[Utterance | RejectRecord] = []
        for row, utterance in enumerate(group):
            if index[row] >= 0:
                outcomes.append(_with_context(utterance, group[index[row]], float(similarity[row])))
            elif row in copies:
                outcomes.append(_only_copies(group[copies[row][0]], copies[row][1]))
            else:
                outcomes.append(self._no_context(float(similarity[row])))
        return outcomes

    def _find_copies(
        self, problem: dict[str, Any], contents: np.ndarray, options: dict[str, Any], rows: np.ndarray
    ) -> dict[int, tuple[int, float]]:
        """Return the copy that would be the context, and its similarity, for those of ``rows`` that have one."""
        if self.match.max_similarity is None:
            # All that could be found are utterances with the samples of one of these rows: few, if any.
            repeated = np.bincount(contents) > 1
            rows = rows[repeated[contents[rows]]]
            chosen = np.flatnonzero(np.isin(contents, contents[rows]))
        else:
            chosen = np.arange(len(contents))
        if not len(rows):
            return {}
        index, similarity = select_context(**{name: values[chosen] for name, values in problem.items()}, **options)
        of_rows = np.searchsorted(chosen, rows)
        return {
            int(row): (int(chosen[index[at]]), float(similarity[at]))
            for row, at in zip(rows, of_rows, strict=True)
            if index[at] >= 0
        }

    def _no_context(self, best_similarity: float) -> RejectRecord:
        if best_similarity == -np.inf:
            return RejectRecord("no_long_context", f"no other utterance of its group has {self._limits()}")
        limit = min_similarity(self.match)
        return RejectRecord(
            "no_similar_context",
            f"the best candidate has a similarity of {best_similarity:.4f}, below {limit:g} (match.min_similarity)",
        )

    def _limits(self) -> str:
        match = self.match
        longest = "" if match.max_duration is None else f" and at most {match.max_duration:g} s (match.max_duration)"
        return f"at least {match.min_duration:g} s (match.min_duration){longest} and satisfies the other limits"

    def _reject(self, utterance: Utterance, why: RejectRecord) -> Reject:
        return Reject(MatchStage.kind, why.reason, why.detail, utterance.public_record())


def min_similarity(match: MatchConfig) -> float:
    """Return the least similarity that a context must have: the configuration's, or else the speaker encoder's own.

    Raises:
        ConfigError: neither says one.
    """
    own = match.min_similarity if match.min_similarity is not None else own_min_similarity(match.encoder)
    if own is None:
        raise ConfigError(
            f"the speaker encoder {match.encoder!r} brings no min_similarity of its own, since none was measured for "
            "it: set match.min_similarity, for example to 0.6 as is usual for TitaNet",
            code="missing_key",
        )
    return own


def matched_manifest(config: Config) -> Path:
    """Return the path of the manifest that stage 1 leaves."""
    match = _match_config(config)
    limits = f"MinDur{match.min_duration}MinSSIM{min_similarity(match)}"
    return RunDir(Path(config.run_dir)).manifests / f"{manifest_stem(config)}{_MATCHED}{limits}.json"


def _match_config(config: Config) -> MatchConfig:
    assert config.match is not None, "a dataset without contexts has no stage match"
    return config.match


def _number(values: Iterable[Hashable], numbers: dict[Any, int] | None = None) -> np.ndarray:
    """Return equal numbers for equal values, from 0 on; ``numbers`` are those given already."""
    numbers = {} if numbers is None else numbers
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)


def _only_copies(copy: Utterance, similarity: float) -> RejectRecord:
    return RejectRecord(
        "only_copies",
        f"nothing else could be its context: {copy.audio_filepath} at {copy.offset:g} s has the same samples, or more "
        f"than max_similarity: {similarity:.4f}",
    )


def _with_context(utterance: Utterance, context: Utterance, similarity: float) -> Utterance:
    """Return the utterance with its context; keys that a source had for one of its own go."""
    chosen = Context(
        segment=context.segment,
        recording_id=context.recording_id,
        text=context.text,
        similarity=round(similarity, 6),
        normalized_text=context.custom.get("normalized_text"),
    )
    custom = {key: value for key, value in utterance.custom.items() if key not in CONTEXT_KEYS}
    return dataclasses.replace(utterance, custom=custom, context=chosen)
