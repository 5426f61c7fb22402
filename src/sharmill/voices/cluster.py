"""Second round of the stage ``voices``: the clips of each group, clustered by voice."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

import msgspec
import numpy as np

from sharmill.config import Config
from sharmill.engine.stage import Advance, Processor, Stage, StageRun, versions
from sharmill.engine.unit import Output, Totals, Unit, add_up, make_unit
from sharmill.files.arrays import load_stored_array, map_stored_array, publish_array, save_array
from sharmill.files.staging import Staging
from sharmill.match.groups import divide
from sharmill.stages.lines import FIRST_OF_GROUP, column, identify_manifest, order_by_group
from sharmill.voices.config import VoicesConfig
from sharmill.voices.linkage import BLOCK, link_cores
from sharmill.voices.similarity import core_similarity, voice_similarity

# The number of lines in a unit.
_UNIT_LINES: Final = 16_384


class ClusterStage(Stage):
    """The round that clusters the clips of each group by voice. A unit is a span of clips ordered by group.

    A group is a speaker group or, with ``labels: find``, the clips in which a voice is searched for (``within``). A
    large group is clustered in parts, whose clusters are merged at the end of the round.
    """

    kind = "voices.cluster"
    is_cheap = True
    section = VoicesConfig
    after = ("prepare", "voices.embed")
    cost_unit = "records"

    def identity(self, run: StageRun) -> dict[str, Any]:
        # A changed encoder gives a file of the same size, so the embeddings are identified by their checksum.
        embedded = run.totals_of("voices.embed", "embedding", "manifest")
        return {
            "similarities": [core_similarity(run.config), voice_similarity(run.config)],
            "groups": identify_manifest(run, "prepare"),
            "embeddings": embedded.products["embedding"].xxh3,
            "versions": versions("numpy"),
        }

    def plan(self, run: StageRun) -> Iterator[Unit]:
        firsts = column(run, "prepare", FIRST_OF_GROUP)
        order = order_by_group(firsts)
        save_array(run.plan_folder / "order.npy", order)
        spans = divide(np.ones(len(order)), firsts[order], unit_seconds=_UNIT_LINES, max_group=BLOCK)
        for number, (start, stop) in enumerate(spans):
            yield make_unit(number, cost=float(stop - start), size=stop - start, params={"start": start, "stop": stop})

    def expect_units(self, run: StageRun, num_records: float, cost: float) -> int:
        return max(1, round(num_records / _UNIT_LINES))

    def open(self, run: StageRun, device: str) -> Processor:
        return ClusterProcessor(run)

    def finalize(self, run: StageRun) -> Totals:
        order, firsts = load_stored_array(run.plan_folder / "order.npy"), column(run, "prepare", FIRST_OF_GROUP)
        found = np.empty(len(order), np.uint32)
        for unit, commit in zip(run.units, run.commits, strict=True):
            lines = order[unit.params["start"] : unit.params["stop"]]
            found[lines] = load_stored_array(run.root / commit.files[0].name)
        sizes = np.bincount(firsts, minlength=1) if len(firsts) else np.zeros(0, np.int64)
        embeddings = map_stored_array(run.product("voices.embed/embedding"))
        ordered = firsts[order]
        for group in np.flatnonzero(sizes > BLOCK):
            lines = order[slice(*np.searchsorted(ordered, [group, group + 1]))]
            found[lines] = _merge_clusters(run.config, embeddings, lines, found[lines])
        run.dir.merged.mkdir(exist_ok=True)
        path = run.dir.merged / "clusters.npy"
        publish_array(path, found.dtype, found.shape, [found])
        return msgspec.structs.replace(add_up(run.commits), products=run.record_products(clusters=path))


def _merge_clusters(config: Config, embeddings: np.ndarray, lines: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """Merge the clusters (N,) of a group that was clustered in parts, and return the new clusters (N,)."""
    heads, numbers, counts = np.unique(clusters, return_inverse=True, return_counts=True)
    sums = np.zeros((len(heads), embeddings.shape[1]))
    for start in range(0, len(lines), BLOCK):
        np.add.at(sums, numbers[start : start + BLOCK], embeddings[lines[start : start + BLOCK]].astype(np.float64))
    merged = link_cores(sums / counts[:, None], counts, core_similarity(config), voice_similarity(config))
    return np.asarray(heads[merged][numbers])


class ClusterProcessor(Processor):
    """Processor that clusters the clips of spans of groups, in one rank."""

    def __init__(self, run: StageRun) -> None:
        self._order = map_stored_array(run.plan_folder / "order.npy")
        self._firsts = column(run, "prepare", FIRST_OF_GROUP)
        self._embeddings = map_stored_array(run.product("voices.embed/embedding"))
        self._sizes = np.bincount(self._firsts, minlength=1)
        self._core, self._least = core_similarity(run.config), voice_similarity(run.config)

    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        lines = self._order[unit.params["start"] : unit.params["stop"]]
        firsts, found = self._firsts[lines], np.array(lines)
        begins = np.flatnonzero(np.diff(firsts.astype(np.int64), prepend=-1))
        for begin, end in pairwise([*begins.tolist(), len(lines)]):
            rows = np.asarray(self._embeddings[lines[begin:end]], np.float64)
            # In parts of a large group, only cores are found; they are merged at the end of the round.
            least = self._least if self._sizes[firsts[begin]] <= BLOCK else self._core
            clusters = link_cores(rows, np.ones(len(rows)), self._core, least)
            found[begin:end] = lines[begin:end][clusters]
            advance(float(end - begin))
        name = f"parts/{unit.index:06d}.npy"
        save_array(staging.path(name), found)
        return Output(files=[name], num_out=unit.size)
