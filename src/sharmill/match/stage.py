"""Stage ``match`` (stage 1): a context for every utterance, from its speaker group."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec
import numpy as np

from sharmill.audio.resample import RESAMPLING_PACKAGES
from sharmill.audio.segments import SegmentReader
from sharmill.config import Config
from sharmill.engine.ahead import UnitsAhead
from sharmill.engine.delays import spent_on
from sharmill.engine.identity import versions
from sharmill.engine.ledger import read_ledger
from sharmill.engine.plan import load_plan
from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Advance, Processor, Stage, add_up
from sharmill.engine.unit import Commit, Output, Totals, Unit, make_unit, name_devices
from sharmill.errors import ConfigError, RejectRecord
from sharmill.files.staging import Staging
from sharmill.files.storage import open_atomic, open_stored, remove_for_good
from sharmill.files.stored import decode_stored, map_stored_array, read_stored, save_array
from sharmill.manifest import Reject, Segment, Utterance, read_lines_at, records_checksum, write_lines
from sharmill.match.candidates import (
    CANDIDATES_NAME,
    leave_out_strangers,
    mix_groups,
    segment_roots,
    write_candidates,
)
from sharmill.match.choose import ContextChooser, encoder_family, min_similarity
from sharmill.match.config import MatchConfig
from sharmill.match.embed import BegunSegments, EmbeddedSegment, Embedder
from sharmill.match.given import GivenContext, GivenContexts
from sharmill.match.groups import divide, index_manifest, order_by_group
from sharmill.match.voices import sample_voices
from sharmill.models import load_speaker_encoder, make_deterministic
from sharmill.models.arithmetic import fit_batch_seconds
from sharmill.models.device import check_device
from sharmill.models.measure import require_room
from sharmill.models.shapes import Padding, log_padding
from sharmill.prepare.config import PrepareConfig
from sharmill.prepare.speaker_key import make_speaker_key
from sharmill.prepare.stage import identify_roots, manifest_stem, prepared_manifest
from sharmill.speaker_tag import tagged_speaker

# Enough units for many ranks, each long enough to pay for its start and short enough to lose little when it dies. With
# fifty for each rank, the last ones to end are within 2 % of the others: 20,000 h on 1,024 ranks.
_UNITS_WANTED = 64
UNIT_SECONDS: Final = (60.0, 1200.0)
_MATCHED = "_withContextAudio"
# Of 8, 16, 32, 60 and 600 s: a small TitaNet and resemblyzer take a fifth longer with 8, and hardly less with more,
# until at 600 most of the time goes into new pages of memory.
_CPU_BATCH_SECONDS = 16.0


class _Limits(msgspec.Struct):
    # Texts where they came from the environment.
    min_duration: float | str
    min_similarity: float | str


class _Identity(msgspec.Struct):
    """The part of the identity of a plan that the name of its manifest has."""

    match: _Limits


class MatchStage(Stage):
    """The stage that chooses contexts; it writes ``manifests/<stem>_withContextAudio....json``."""

    kind: ClassVar[str] = "match"
    section: ClassVar = MatchConfig
    after: ClassVar = ("prepare",)
    resource: ClassVar = "gpu"
    looks_ahead: ClassVar[bool] = True

    def __init__(self, config: Config, settings: MatchConfig | None = None) -> None:
        super().__init__(config, settings)
        self.match: MatchConfig = self.settings

    @classmethod
    def check(cls, config: Config) -> None:
        match = config.section(MatchConfig)
        if match.contexts_from_dataset and config.append_to is None:
            raise ConfigError("match.contexts_from_dataset needs append_to", code="bad_config_value")
        encoder_family(match).resolve()
        min_similarity(match)

    def check_input(self) -> None:
        segment_roots(self.config).check()

    def identity(self) -> dict[str, Any]:
        prepared = prepared_manifest(self.config)
        if not prepared.exists():
            raise ConfigError(f"{prepared} is not there: run the stage prepare first", code="stage_not_run")
        encoder = encoder_family(self.match)
        match = dataclasses.asdict(self.match) | {"min_similarity": min_similarity(self.match)}
        del match["options"]  # the encoder's identity has them
        return {
            "match": match,
            "speaker_key": self.config.speaker_key,
            "encoder": encoder.identity(),
            "audio_roots": identify_roots(segment_roots(self.config), self.run_dir.path),
            "input": records_checksum(prepared),
            "versions": versions(*RESAMPLING_PACKAGES[self.match.resampling], *encoder.dependencies),
        }

    def modules(self) -> list[str]:
        return [*super().modules(), *encoder_family(self.match).modules]

    def require_models(self) -> None:
        encoder_family(self.match).check()

    def plan(self, folder: Path) -> Iterator[Unit]:
        match = self.match
        key, candidates = make_speaker_key(self.config.speaker_key), folder / CANDIDATES_NAME
        if match.contexts_from_dataset:
            roots = segment_roots(self.config).roots
            found = write_candidates(candidates, roots[-1].path, len(roots) - 1)
            index = index_manifest(prepared_manifest(self.config), key, candidates)
            num_records = len(index.groups) - found
            index = leave_out_strangers(index, num_records)
        else:
            index = index_manifest(prepared_manifest(self.config), key)
            num_records = len(index.groups)
        mixed = match.contexts_from_dataset and match.max_group is not None
        order = mix_groups(index) if mixed else order_by_group(index.groups)
        save_array(folder / "offsets.npy", index.offsets)
        save_array(folder / "order.npy", order)
        total = float(index.seconds.sum(dtype=np.float64))
        spans = divide(index, order, unit_seconds=self._unit_seconds(total), max_group=match.max_group)
        # Lines from this number on are candidates.
        further = {"num_records": num_records} if match.contexts_from_dataset else {}
        number = 0
        for span in spans:
            size = int(np.count_nonzero(order[span.start : span.stop] < num_records))
            if size:  # a part of a large group may have candidates only
                params = {"start": span.start, "stop": span.stop, **further}
                yield make_unit(number, cost=span.seconds, size=size, params=params)
                number += 1

    def expect_units(self, num_records: float, cost: float) -> int:
        return max(1, round(cost / self._unit_seconds(cost)))

    def _unit_seconds(self, total: float) -> float:
        return self.match.unit_seconds or float(np.clip(total / _UNITS_WANTED, *UNIT_SECONDS))

    def check_node(self) -> None:
        segment_roots(self.config).check_node()

    def open(self, device: str) -> Processor:
        kind = check_device(device)
        return MatchProcessor(self.config, self.dir.plan, self.make_embedder(device), kind)

    def make_embedder(self, device: str) -> Embedder:
        """Load the speaker encoder on a device, and return it with what feeds it.

        Raises:
            ConfigError: it cannot be loaded, or a batch does not fit.
        """
        threads = make_deterministic(device)
        roots = segment_roots(self.config)
        encoder = load_speaker_encoder(self.match.encoder, device, precision=self.match.precision, **self.match.options)
        require_room(encoder, device, self.match.batch_seconds, "match.batch_seconds")
        return Embedder(
            encoder=encoder,
            reader=SegmentReader(roots, self.config.section(PrepareConfig).duration_tolerance),
            batch_seconds=fit_batch_seconds(self.match.batch_seconds, device, _CPU_BATCH_SECONDS),
            threads=threads,
            resampling=self.match.resampling,
            pinned=device == "cuda",
        )

    def finalize(self, units: list[Unit], commits: Iterable[Commit]) -> Totals:
        commits = list(commits)
        with open_atomic(matched_manifest(self.config)) as merged:
            for commit in commits:
                with open_stored(self.root / commit.files[0].name) as part:
                    shutil.copyfileobj(part, merged)
        log_padding([commit.stats for commit in commits], "embedded")
        return add_up(commits)

    def products(self) -> list[Path]:
        return [matched_manifest(self.config)]

    def discard(self) -> None:
        # That of other limits too, which the plan tells: the stage write would take it for the output of a later plan.
        paths = {matched_manifest(self.config)}
        # A plan that is damaged does not tell, and is to be replaced.
        with suppress(ConfigError, FileNotFoundError):
            before = decode_stored(self.dir.identity, read_stored(self.dir.identity), _Identity).match
            found = _manifest(self.config, before.min_duration, before.min_similarity)
            # Of a stranger's plan the limits may be a path.
            if found.parent == self.run_dir.manifests:
                paths.add(found)
        remove_for_good(paths)


@dataclass(frozen=True)
class _BegunUnit:
    """A unit whose audio is being decoded.

    Attributes:
        groups: its speaker groups.
        given: contexts that records bring, by the number of the record.
        wanted: the segments whose voices are needed.
        held: closed once these are decoded.
    """

    groups: list[list[Utterance]]
    given: dict[int, GivenContext | RejectRecord]
    wanted: BegunSegments
    held: ExitStack


class MatchProcessor(Processor):
    """The choice of contexts for the speaker groups of a unit, in one rank.

    Args:
        plan: the folder of the stage's plan.
        device_kind: that of the encoder's device.
    """

    def __init__(self, config: Config, plan: Path, embed: Embedder, device_kind: str) -> None:
        self.device_kind = device_kind
        self.config = config
        self.match = config.section(MatchConfig)
        self._plan = plan
        self._embed = embed
        self._group_key = make_speaker_key(config.speaker_key)
        self._num_lines = len(map_stored_array(plan / "order.npy"))
        self._chooser = ContextChooser(self.match, embed.reader.roots, self._key)
        self._ahead = UnitsAhead(self._begin, drop=lambda begun: begun.held.close())

    def expect(self, unit: Unit | None) -> None:
        self._ahead.expect(unit)

    def close(self) -> None:
        self._ahead.close()

    def _begin(self, unit: Unit) -> _BegunUnit:
        groups = [list(group) for _, group in groupby(self._read(unit), key=self._key)]
        given = self._read_given(groups)
        candidates = [utterance for group in groups for utterance in self._to_embed(group, given)]
        # The batches of all groups are made together, and a context that is a record is embedded as that.
        segments = {utterance.segment for utterance in candidates}
        brought = [one.context.segment for one in given.values() if isinstance(one, GivenContext)]
        wanted = list(dict.fromkeys([*(one.segment for one in candidates), *(s for s in brought if s not in segments)]))
        with ExitStack() as stack:
            stack.enter_context(self._embed.reader.gather(wanted))
            return _BegunUnit(groups, given, self._embed.begin(wanted), stack.pop_all())

    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        with spent_on("decoding"):
            begun = self._ahead.take(unit)
        groups, given = begun.groups, begun.given
        # What lies behind comes from the dataset that is appended to, and can only be a context.
        num_records = unit.params.get("num_records", sys.maxsize)
        padding = Padding()
        with begun.held:
            embedded = self._embed.finish(begun.wanted, advance, padding, self._ahead.begin)
            found = dict(zip(begun.wanted.segments, embedded, strict=True))
        matched: list[Utterance] = []
        rejects: list[Reject] = []
        for group in groups:
            for utterance, outcome in self._match_found(group, given, found):
                if utterance.index >= num_records:
                    continue
                if isinstance(outcome, RejectRecord):
                    record = utterance.public_record()
                    rejects.append(Reject(MatchStage.kind, outcome.reason, outcome.detail, record))
                else:
                    matched.append(outcome)
        name = f"parts/{unit.index:06d}.jsonl"
        write_lines(staging.path(name), (utterance.to_json() for utterance in matched))
        seconds = sum(utterance.duration for utterance in matched)
        stats: dict[str, Any] = {"seconds": seconds, **padding.stats("embedded")}
        stats["voices"] = sample_voices(
            ((self._key(group[0]), _embeddings(group, found)) for group in groups),
            unit.id, unit.params["stop"] - unit.params["start"], self._num_lines,
        )  # fmt: skip
        return Output(files=[name], num_out=len(matched), rejects=rejects, stats=stats)

    def _read_given(self, groups: list[list[Utterance]]) -> dict[int, GivenContext | RejectRecord]:
        """Return the contexts that records bring, by the number of the record, where they are to be kept."""
        if self.match.contexts != "given":
            return {}
        contexts = GivenContexts((one for group in groups for one in group), self._embed.reader.roots)
        found = {one.index: contexts.read(one) for group in groups for one in group}
        return {index: context for index, context in found.items() if context is not None}

    def _to_embed(self, group: list[Utterance], given: dict[int, GivenContext | RejectRecord]) -> list[Utterance]:
        """Return the utterances of a group whose voices are needed."""
        if self._chooser.may_match(group) and any(one.index not in given for one in group):
            return group
        return [one for one in group if isinstance(given.get(one.index), GivenContext)]

    def _match_found(
        self,
        group: list[Utterance],
        given: dict[int, GivenContext | RejectRecord],
        found: dict[Segment, EmbeddedSegment | RejectRecord],
    ) -> Iterator[tuple[Utterance, Utterance | RejectRecord]]:
        """Yield each utterance of a group, and the same with its context, or why it has none."""
        left: list[Utterance] = []
        for utterance in group:
            own = found.get(utterance.segment)
            if isinstance(own, RejectRecord):
                yield utterance, own
                continue
            left.append(utterance)
            if own is not None:
                utterance.notes = own.notes
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
        lines = map_stored_array(self._plan / "order.npy")[start:stop]
        offsets = map_stored_array(self._plan / "offsets.npy")[lines]
        found: dict[int, Utterance] = {}
        is_record = lines < unit.params.get("num_records", sys.maxsize)
        manifests = {prepared_manifest(self.config): is_record, self._plan / CANDIDATES_NAME: ~is_record}
        for manifest, chosen in manifests.items():
            if chosen.any():
                read = map(Utterance.from_json, read_lines_at(manifest, offsets[chosen]))
                found |= zip(lines[chosen].tolist(), read, strict=True)
        for number, utterance in found.items():
            utterance.index = number
        return [found[number] for number in lines.tolist()]

    def _key(self, utterance: Utterance) -> str:
        return self._group_key(utterance.audio_filepath, tagged_speaker(utterance.speaker))


def _embeddings(group: list[Utterance], found: dict[Segment, EmbeddedSegment | RejectRecord]) -> list[tuple[str, Any]]:
    """Return the ids and the embeddings of the utterances of a group that have one."""
    return [
        (utterance.cut_id, own.embedding)
        for utterance in group
        if isinstance(own := found.get(utterance.segment), EmbeddedSegment)
    ]


def matched_manifest(config: Config) -> Path:
    """Return the path of the manifest that stage 1 leaves."""
    match = config.section(MatchConfig)
    return _manifest(config, match.min_duration, min_similarity(match))


def _manifest(config: Config, min_duration: Any, min_similarity: Any) -> Path:
    limits = f"MinDur{min_duration}MinSSIM{min_similarity}"
    return RunDir(Path(config.run_dir)).manifests / f"{manifest_stem(config)}{_MATCHED}{limits}.json"


def devices_of_match(config: Config) -> list[str]:
    """Return the kinds of device that contexts were chosen on; none for CPUs alone, or where nothing tells."""
    stage = MatchStage(config)
    if not stage.dir.units.exists():
        return []
    commits = read_ledger(stage.dir, load_plan(stage)).values()
    return name_devices(commit.device_kind for commit in commits)
