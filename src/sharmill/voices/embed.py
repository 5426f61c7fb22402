"""First round of the stage ``voices``: the speaker embedding of every segment, in the order of the manifest."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from sharmill.audio.resample import RESAMPLING_PACKAGES
from sharmill.audio.roots import AudioRoots
from sharmill.engine.ahead import AheadProcessor
from sharmill.engine.run import merge_files
from sharmill.engine.stage import Advance, Processor, Stage, StageRun, versions
from sharmill.engine.unit import Output, Totals, Unit, add_up, make_unit
from sharmill.errors import REASONS_OF_NODES, RejectRecord
from sharmill.files.arrays import load_stored_array, map_stored_array, publish_array, save_array
from sharmill.files.atomic import open_new
from sharmill.files.staging import Staging
from sharmill.manifest import Utterance, read_utterances_at
from sharmill.match.choose import encoder_family
from sharmill.match.config import MatchConfig
from sharmill.match.embed import Embedder, PendingSegments, to_array
from sharmill.match.groups import divide
from sharmill.match.stage import make_embedder, unit_seconds
from sharmill.models import ModelFamily
from sharmill.models.batches import log_padding
from sharmill.models.device import check_device
from sharmill.stages.inputs import identify_roots, segment_reader, segment_roots
from sharmill.stages.lines import OFFSET, column, finish_manifest, identify_manifest, merge_columns, write_part
from sharmill.voices.config import VoicesConfig

# Arrays with an item for each line: the embedding as float16, a hash of the samples, and the change of the voice within
# the segment (see ``EmbeddedSegment.turn``). The round also writes a manifest with notes about the audio.
ARRAYS: Final = ("embedding", "content", "turn")
_Begun = tuple[list[Utterance], PendingSegments]


class EmbedStage(Stage):
    """The round that embeds all segments. A unit is a span of lines of the prepared manifest."""

    kind = "voices.embed"
    section = VoicesConfig
    after = ("prepare",)
    resource = "gpu"

    def input(self, run: StageRun) -> AudioRoots:
        return segment_roots(run.config)

    def model(self, run: StageRun) -> ModelFamily:
        return encoder_family(run.config.section(MatchConfig))

    def identity(self, run: StageRun) -> dict[str, Any]:
        match, encoder = run.config.section(MatchConfig), self.model(run)
        keys = ("batch_seconds", "precision", "resampling", "unit_seconds")
        return {
            "match": {key: value for key, value in asdict(match).items() if key in keys},
            "window_seconds": run.settings.window_seconds,
            "encoder": encoder.identity(),
            "audio_roots": identify_roots(self.input(run), run.run_dir.path),
            "input": identify_manifest(run, "prepare"),
            "versions": versions(*RESAMPLING_PACKAGES[match.resampling], "torch", *encoder.packages),
        }

    def plan(self, run: StageRun) -> Iterator[Unit]:
        seconds, match = column(run, "prepare", "seconds"), run.config.section(MatchConfig)
        unit = unit_seconds(match, float(seconds.sum(dtype=np.float64)))
        spans = divide(seconds, np.arange(len(seconds)), unit_seconds=unit, max_group=None)
        for number, (start, stop) in enumerate(spans):
            yield make_unit(
                number, cost=round(float(seconds[start:stop].sum(dtype=np.float64)), 3), size=stop - start,
                params={"start": start, "stop": stop},
            )  # fmt: skip

    def expect_units(self, run: StageRun, num_records: float, cost: float) -> int:
        return max(1, round(cost / unit_seconds(run.config.section(MatchConfig), cost)))

    def open(self, run: StageRun, device: str) -> Processor:
        kind, match = check_device(device), run.config.section(MatchConfig)
        feeders, window = run.options.num_feeders(device), run.settings.window_seconds
        return EmbedProcessor(run, make_embedder(match, segment_reader(run), device, feeders, window), kind)

    def finalize(self, run: StageRun) -> Totals:
        totals, folder = add_up(run.commits), run.dir.merged
        manifest = run.run_dir.manifests / "voices_embedded.json"
        lines, columns, arrays, rejected = (
            [run.root / commit.files[number].name for commit in run.commits] for number in range(4)
        )
        merge_files(lines, manifest)
        products = merge_columns(folder, columns, ["seconds"], count=totals.num_out)
        products |= {name: _merge_arrays(folder / f"{name}.npy", arrays, name, totals.num_out) for name in ARRAYS}
        merge_files(rejected, folder / "unusable.jsonl")
        log_padding([commit.stats for commit in run.commits], "embedded")
        return finish_manifest(run, manifest, products | {"unusable": folder / "unusable.jsonl"}, totals)


def _merge_arrays(goal: Path, parts: Iterable[Path], name: str, count: int) -> Path:
    """Merge one array of all units into a file, and return its path."""
    parts = list(parts)
    form = load_stored_array(parts[0]).dtype[name] if parts else np.dtype("f4")
    publish_array(goal, form.base, (count, *form.shape), (load_stored_array(part)[name] for part in parts))
    return goal


class EmbedProcessor(AheadProcessor[_Begun]):
    """Processor that embeds the segments of spans of lines, in one rank."""

    def __init__(self, run: StageRun, embed: Embedder, device_kind: str) -> None:
        super().__init__(embed.feeders)
        self.device_kind = device_kind
        self._manifest = run.product("prepare/manifest")
        self._offsets = map_stored_array(run.product(f"prepare/{OFFSET}"))
        self._embed = embed

    def begin(self, unit: Unit) -> _Begun:
        lines = np.arange(unit.params["start"], unit.params["stop"])
        utterances = read_utterances_at(self._manifest, self._offsets[lines])
        return utterances, self._embed.begin(list(dict.fromkeys(one.segment for one in utterances)))

    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        utterances, wanted = self.take(unit)
        found = dict(zip(wanted.items, self._embed.finish(wanted, advance, self.begin_next), strict=True))
        size = self._embed.encoder.embedding_size
        arrays = np.zeros(len(utterances), [("embedding", "f2", (size,)), ("content", "u8", 2), ("turn", "f4", 2)])
        lost: list[tuple[int, str, str]] = []
        for row, utterance in enumerate(utterances):
            utterance.index, outcome = unit.params["start"] + row, found[utterance.segment]
            if isinstance(outcome, RejectRecord):
                lost.append((utterance.index, outcome.reason, outcome.detail))
                continue
            utterance.segment = replace(utterance.segment, notes=outcome.notes)
            arrays[row] = _stored(outcome.embedding), divmod(outcome.content, 1 << 64), outcome.turn
        if REASONS_OF_NODES & {reason for _, reason, _ in lost}:
            # The engine does not see these rejects, because the last round writes them.
            self._embed.reader.roots.check_node()
        name = f"parts/{unit.index:06d}"
        save_array(staging.path(f"{name}.npy"), write_part(staging.path(f"{name}.jsonl"), utterances, lambda one: ""))
        save_array(staging.path(f"{name}.embeddings.npy"), arrays)
        with open_new(staging.path(f"{name}.unusable.jsonl")) as stream:
            stream.write(b"".join(msgspec.json.encode(row) + b"\n" for row in lost))
        stats = {
            "seconds": sum(utterance.segment.duration for utterance in utterances),
            **wanted.count_seconds(),
            "feeder_seconds": self.feeders.take_cpu_seconds(),
        }
        files = [f"{name}.{kind}" for kind in ("jsonl", "npy", "embeddings.npy", "unusable.jsonl")]
        return Output(files=files, num_out=len(utterances), stats=stats)


def _stored(embedding: Any) -> np.ndarray:
    """Return an embedding (D,) as float16; zeros, like the embedding of silence, if it is not finite."""
    row = to_array(embedding).astype(np.float16)
    return row if np.isfinite(row).all() else np.zeros_like(row)
