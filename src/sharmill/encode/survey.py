"""First round of the stage ``encode``: a list of the unique segments of a dataset's stored audio, shared by all codecs.

For shards written by the stage ``write``, the places of segments are taken from its notes. All other audio files are
read, so this works for datasets of any origin.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec.structs import replace

from sharmill.encode.config import EncodeConfig
from sharmill.encode.segments import list_segments
from sharmill.engine.stage import Advance, Processor, Publication, Stage, StageRun, display_name, versions
from sharmill.engine.unit import Output, Totals, Unit, add_up, make_unit
from sharmill.errors import ConfigError, UnitFailed
from sharmill.files.arrays import map_stored_array, save_array
from sharmill.files.checksums import checksum
from sharmill.files.staging import Staging
from sharmill.files.stored import load_record
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.fields import CUTS
from sharmill.shar.index import ShardRecord
from sharmill.shar.items import ItemTable
from sharmill.shar.json_lines import read_cut_ids
from sharmill.shar.places import PLACE, make_place
from sharmill.stages.fields import dataset_of

_MAX_UINT32: Final = (1 << 32) - 1


class SurveyStage(Stage):
    """Round that lists the unique segments of a dataset in the run directory.

    A unit is a shard for which the stage ``write`` left no usable notes.
    """

    kind = "encode.segments"
    is_cheap = True
    section = EncodeConfig
    after = ("write",)

    def publication(self, run: StageRun) -> "SegmentsPublication":
        return SegmentsPublication(dataset_of(run).directory)

    def identity(self, run: StageRun) -> dict[str, Any]:
        return {"input": dataset_of(run).audio_checksum(), "versions": versions()}

    def plan(self, run: StageRun) -> Iterator[Unit]:
        num_fields = len(dataset_of(run).record().audio_fields)
        unknown = [
            (shard, files) for shard, files, notes in _shards(run) if not _are_places(notes, (num_fields, shard.count))
        ]
        for index, (shard, files) in enumerate(unknown):
            yield make_unit(
                index, cost=round(shard.target_seconds + shard.context_seconds, 3), size=shard.count,
                params={"shard": shard.index, "files": files},
            )  # fmt: skip

    def open(self, run: StageRun, device: str) -> Processor:
        return SurveyProcessor(dataset_of(run).directory)

    def finalize(self, run: StageRun) -> Totals:
        paired = zip(run.units, run.commits, strict=True)
        read = {unit.params["shard"]: run.root / commit.files[0].name for unit, commit in paired}
        tables = [(read.get(shard.index, notes), shard.count) for shard, _, notes in _shards(run)]
        segments, numbers = run.dir.merged / "segments.npy", run.dir.merged / "numbers.npy"
        list_segments(tables, len(dataset_of(run).record().audio_fields), segments, numbers)
        return replace(add_up(run.commits), products=run.record_products(segments=segments, numbers=numbers))


class SegmentsPublication(Publication):
    """Publication without files in the dataset, since the list of segments stays in the run directory."""

    in_place = False
    counts = "segments"


def _shards(run: StageRun) -> list[tuple[ShardRecord, dict[str, str], Path]]:
    """Return each shard, the checksums of its cuts and audio files, and the path of its notes, which may not exist."""
    dataset, written = dataset_of(run), run.run_dir.stage("write").ranks
    fields = (CUTS, *dataset.record().audio_fields)
    found = []
    for shard in dataset.shards():
        files = {shard.fields[field].file: shard.fields[field].xxh3 for field in fields}
        found.append((shard, files, written.notes_on(files.values())))
    return found


def _are_places(notes: Path, shape: tuple[int, int]) -> bool:
    """Return True if notes contain places of this shape. Damaged notes count as missing: the audio is read instead."""
    try:
        places = map_stored_array(notes)
    except (FileNotFoundError, ConfigError):
        return False
    return bool(places.dtype == PLACE and places.shape == shape)


def require_same_audio(run: StageRun, stage: str) -> None:
    """Raise ConfigError if a round of ``encode`` is not finished, or was run on different audio."""
    run.totals_of(stage)
    identity = load_record(run.run_dir.stage(stage).identity, dict[str, Any])
    if identity.get("input") != dataset_of(run).audio_checksum():
        name = display_name(stage)
        raise ConfigError(f"the dataset has changed since {name} was run: run {name} again", code="stage_not_run")


def require_segments(run: StageRun) -> None:
    """Raise ConfigError if the list of the dataset's segments is missing, outdated or damaged.

    The list is verified before the stage is planned, since ranks trust it: damaged numbers would assign codes to the
    wrong cuts.
    """
    require_same_audio(run, "encode.segments")
    for name in run.totals_of("encode.segments", "segments", "numbers").products:
        run.product(f"encode.segments/{name}", verify=True)


def audio_files(dataset: ShardedDataset) -> list[list[Path]]:
    """Return the paths of the audio files, indexed by shard and by audio field."""
    fields = dataset.record().audio_fields
    return [[dataset.directory / shard.fields[field].file for field in fields] for shard in dataset.shards()]


class SurveyProcessor(Processor):
    """Processor that lists the places of segments in shards, in one rank."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        for file, expected in unit.params["files"].items():
            # Damaged audio must be detected here, since the codec would encode it without an error.
            if checksum(self._directory / file) != expected:
                raise UnitFailed(
                    f"{self._directory / file} has changed since it was written: delete it and run the stage write "
                    "again",
                    code="damaged_shard",
                )
        cuts, *audio = [self._directory / file for file in unit.params["files"]]
        ids = list(read_cut_ids(cuts))
        if len(ids) != unit.size:
            raise UnitFailed(
                f"{cuts} has {len(ids)} cuts instead of {unit.size}: restore or rebuild it", code="damaged_shard"
            )
        table = np.stack([_survey_file(path, ids) for path in audio])
        name = f"parts/{unit.index:06d}.npy"
        save_array(staging.path(name), table)
        return Output(
            files=[name],
            num_out=unit.size,
            stats={"seconds": float((table[0]["num_samples"] / table[0]["sampling_rate"]).sum())},
        )


def _survey_file(path: Path, ids: list[str]) -> np.ndarray:
    """Return the ``PLACE`` records of the items in an audio file.

    Args:
        ids: the ids of the cuts to which the items belong, in order.

    Raises:
        UnitFailed, DamagedShard: the items belong to other cuts, or lack audio or metadata.
    """
    table = np.empty(len(ids), PLACE)
    items = ItemTable(path, ids=ids)
    for number, cut_id in enumerate(ids):
        item = items.item(number)
        if item.data is None or item.metadata is None:
            raise UnitFailed(f"{path}: {cut_id} has no audio: restore or rebuild the shard", code="damaged_shard")
        num_samples, rate = (item.metadata.get(key, 0) for key in ("num_samples", "sampling_rate"))
        if not all(isinstance(value, int) and 0 <= value <= _MAX_UINT32 for value in (num_samples, rate)) or not rate:
            raise UnitFailed(
                f"{path}: the metadata of {cut_id} lacks num_samples or sampling_rate: restore or rebuild the shard",
                code="damaged_shard",
            )
        offset, _ = items.place(2 * number)
        table[number] = make_place(item.data, offset, num_samples, rate)
    return table
