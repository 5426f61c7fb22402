"""First round of the stage ``encode``: a list of the unique segments of a dataset's stored audio, for all codecs.

It reads every audio file once, so that a dataset needs nothing but its files: whoever wrote it, however it has grown.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec.structs import replace

from sharmill.encode.config import EncodeConfig
from sharmill.encode.segments import PLACE, hash_segment, merge_tables
from sharmill.engine.stage import Advance, Processor, Stage, StageRun, display_name, versions
from sharmill.engine.unit import Output, Totals, Unit, add_up, make_unit
from sharmill.errors import ConfigError, UnitFailed
from sharmill.files.arrays import save_array
from sharmill.files.checksums import checksum
from sharmill.files.staging import Staging
from sharmill.files.stored import load_record
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.fields import CUTS
from sharmill.shar.items import ItemTable
from sharmill.shar.json_lines import read_cut_ids
from sharmill.stages.fields import dataset_of

_MAX_UINT32: Final = (1 << 32) - 1


class SurveyStage(Stage):
    """The round that lists the unique segments of a dataset in the run directory. One unit is one shard."""

    kind = "encode.segments"
    section = EncodeConfig
    after = ("write",)

    def identity(self, run: StageRun) -> dict[str, Any]:
        return {"input": dataset_of(run).audio_checksum(), "versions": versions()}

    def plan(self, run: StageRun) -> Iterator[Unit]:
        dataset = dataset_of(run)
        fields = (CUTS, *dataset.record().audio_fields)
        for shard in dataset.shards():
            files = [shard.fields[field] for field in fields]
            yield make_unit(
                shard.index, cost=round(shard.target_seconds + shard.context_seconds, 3), size=shard.count,
                params={"files": {file.file: file.xxh3 for file in files}},
            )  # fmt: skip

    def open(self, run: StageRun, device: str) -> Processor:
        return SurveyProcessor(dataset_of(run).directory)

    def finalize(self, run: StageRun) -> Totals:
        shape = len(dataset_of(run).record().audio_fields), sum(commit.num_out for commit in run.commits)
        # The segments: an array (segments,) of SEGMENT. Their numbers at all places: (audio fields, cuts) uint32.
        segments, numbers = run.dir.merged / "segments.npy", run.dir.merged / "numbers.npy"
        merge_tables([run.root / commit.files[0].name for commit in run.commits], shape, segments, numbers)
        return replace(add_up(run.commits), products=run.record_products(segments=segments, numbers=numbers))


def require_same_audio(run: StageRun, stage: str) -> None:
    """Raise ConfigError if a round of codes is not finished, or was finished with other audio."""
    run.totals_of(stage)
    identity = load_record(run.run_dir.stage(stage).identity, dict[str, Any])
    if identity.get("input") != dataset_of(run).audio_checksum():
        raise ConfigError(f"the dataset has changed since {display_name(stage)}: run that again", code="stage_not_run")


def audio_files(dataset: ShardedDataset) -> list[list[Path]]:
    """Return for each shard its files of audio."""
    fields = dataset.record().audio_fields
    return [[dataset.directory / shard.fields[field].file for field in fields] for shard in dataset.shards()]


class SurveyProcessor(Processor):
    """The survey of shards in one rank."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        for file, expected in unit.params["files"].items():
            # Damaged audio would give codes as well.
            if checksum(self._directory / file) != expected:
                raise UnitFailed(
                    f"{self._directory / file} has changed since it was written: remove it and run the stage write "
                    "again",
                    code="damaged_shard",
                )
        cuts, *audio = [self._directory / file for file in unit.params["files"]]
        ids = list(read_cut_ids(cuts))
        if len(ids) != unit.size:
            raise UnitFailed(f"{cuts} has {len(ids)} cuts instead of {unit.size}", code="damaged_shard")
        table = np.stack([_survey_file(path, ids) for path in audio])
        name = f"parts/{unit.index:06d}.npy"
        save_array(staging.path(name), table)
        return Output(
            files=[name],
            num_out=unit.size,
            stats={"seconds": float((table[0]["num_samples"] / table[0]["sampling_rate"]).sum())},
        )


def _survey_file(path: Path, ids: list[str]) -> np.ndarray:
    """Return the ``PLACE`` records of an audio file, whose items belong to the cuts with these ids.

    Raises:
        UnitFailed, DamagedShard: they do not, or say too little of themselves.
    """
    table = np.empty(len(ids), PLACE)
    items = ItemTable(path, ids=ids)
    for number, cut_id in enumerate(ids):
        item = items.item(number)
        if item.data is None or item.metadata is None:
            raise UnitFailed(f"{path}: {cut_id} has no audio", code="damaged_shard")
        num_samples, rate = (item.metadata.get(key, 0) for key in ("num_samples", "sampling_rate"))
        if not all(isinstance(value, int) and 0 <= value <= _MAX_UINT32 for value in (num_samples, rate)) or not rate:
            raise UnitFailed(f"{path}: {cut_id} has no number of samples and rate", code="damaged_shard")
        offset, size = items.place(2 * number)
        table[number] = (hash_segment(item.data, num_samples, rate), offset, size, num_samples, rate)
    return table
