"""Rows of the time before any work: startup of commands and ranks, and plans for millions of records.

Rows of plans measure time, and the peak memory added to the process.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from support.models import save_titanet
from support.project import Project, stage_of, voice

from bench.rows import Case, records, row, with_peak
from sharmill.config import Config, to_config
from sharmill.encode.segments import list_segments
from sharmill.engine.executor import Listener
from sharmill.engine.order import make_stages
from sharmill.engine.progress import RankProgress
from sharmill.engine.run import run_stage
from sharmill.engine.stage import StageRun
from sharmill.engine.unit import Commit, Totals, Unit
from sharmill.executors.local import LocalExecutor
from sharmill.files.arrays import save_array
from sharmill.match.config import MatchConfig
from sharmill.match.stage import facts_of
from sharmill.prepare.duplicates import HASH_FIELDS, Ids
from sharmill.shar.places import PLACE
from sharmill.stages.lines import FIRST_OF_GROUP, LINE, finish_manifest, merge_columns, number_groups

RECORDS_PER_SPEAKER = 50
HASHES_AT_ONCE = 100_000


def write_manifest(path: Path, num_records: int) -> None:
    """Yield short records with the keys that planning reads, with the speakers scattered over the file."""
    num_speakers = max(1, num_records // RECORDS_PER_SPEAKER)
    with path.open("w") as stream:
        for number in range(num_records):
            speaker = number * 7919 % num_speakers
            stream.write(
                f'{{"audio_filepath":"{speaker}/{number}.flac","duration":{2 + number % 97 / 10},'
                f'"speaker":"| Language:en Dataset:Bench Speaker:{speaker} |",'
                f'"_index":{number},"context_audio_duration":5.0}}\n'
            )


def leave_manifests(path: Path, num_records: int) -> None:
    """Write a manifest for the plans of match and write, with the columns that ranks write beside it."""
    numbers, rows = np.arange(num_records), np.zeros(num_records, LINE)
    with path.open("rb") as stream:
        rows["length"] = np.fromiter(map(len, stream), np.uint32)
    rows["index"], rows["seconds"], rows["context"] = numbers, 2 + numbers % 97 / 10, 5.0
    rows["group"][:, 1] = numbers * 7919 % max(1, num_records // RECORDS_PER_SPEAKER)
    for run in make_stages(_config(path), ["prepare", "match"]):
        manifest, part = run.run_dir.manifests / f"{run.kind}.json", run.dir.path / "part.npy"
        for file in (manifest, part):
            file.parent.mkdir(parents=True, exist_ok=True)
        manifest.hardlink_to(path)
        save_array(part, rows)
        columns = merge_columns(run.dir.merged, [part], ["index", "seconds", "context", "group"], count=len(rows))
        columns[FIRST_OF_GROUP] = number_groups(columns["group"])
        totals = Totals(num_in=num_records, num_out=num_records, rejects={}, hours=0.0)
        done = finish_manifest(run, manifest, columns, totals, duration_tolerance=0.1, **facts_of(MatchConfig(), []))
        run.dir.done.write_bytes(msgspec.json.encode(done))


def plan_prepare(path: Path) -> int:
    """Check an input manifest, and divide it into units."""
    return _plan(path, "prepare")


def write_hashes(path: Path, num_records: int) -> None:
    """Write the hashes that prepare stores for records, of which one in a hundred repeats the previous segment."""
    rng = np.random.default_rng(1)
    with path.open("wb") as stream:
        for begin in range(0, num_records, HASHES_AT_ONCE):
            part = np.empty(min(HASHES_AT_ONCE, num_records - begin), HASH_FIELDS)
            for name in HASH_FIELDS.names or ():
                part[name] = rng.integers(0, 2**64 - 1, part[name].shape, dtype=np.uint64, endpoint=True)
            part[99::100] = part[98::100][: len(part[99::100])]
            stream.write(part.data)


def find_duplicates(path: Path) -> int:
    """Find duplicates and ambiguous ids among the hashes of all records, as at the end of prepare."""
    return int(Ids.from_hashes(np.fromfile(path, HASH_FIELDS)).duplicates.sum())


def plan_match(path: Path) -> int:
    """Check a manifest, and divide its groups into units."""
    return _plan(path, "match")


def plan_write(path: Path) -> int:
    """Check a matched manifest, and shuffle its records."""
    return _plan(path, "write")


def _config(path: Path) -> Config:
    return to_config({
        "name": "bench",
        "run_dir": str(path.parent / "run"),
        "dataset_dir": str(path.parent / "dataset"),
        "sources": [{"manifest": str(path), "audio_root": str(path.parent)}],
        "speaker_key": "speaker",
        "write": {"shard_size": 1000},
    }, "bench")  # fmt: skip


def _plan(path: Path, name: str) -> int:
    """Check the input of a stage, and plan it."""
    stage = stage_of(_config(path), name)
    stage.declaration.identity(stage)
    return _count_units(stage, path)


def _count_units(stage: StageRun, path: Path) -> int:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        return len(list(stage.declaration.plan(replace(stage, plan_draft=Path(folder)))))


def write_tables(folder: Path, num_records: int) -> None:
    """Write a survey of a shuffled dataset in shards of 1,000, whose contexts are other targets."""
    folder.mkdir()
    rng = np.random.default_rng(1)
    for shard, start in enumerate(range(0, num_records, 1000)):
        numbers = np.arange(start, min(start + 1000, num_records), dtype=np.uint64)
        table = np.zeros((2, len(numbers)), PLACE)
        table["hash"][0, :, 1] = numbers
        table["hash"][1, :, 1] = rng.integers(0, num_records, len(numbers))
        table["hash"][..., 0] = table["hash"][..., 1] * np.uint64(0x9E3779B97F4A7C15)
        table["num_samples"] = 32000 + table["hash"][..., 1] % 97 * 1600
        table["sampling_rate"] = 16000
        np.save(folder / f"{shard:06d}.npy", table)


def merge_survey(path: Path) -> int:
    """Find the unique segments in the tables of a survey."""
    run = stage_of(_config(path), "encode.segments")
    segments, numbers = run.dir.path / "segments.npy", run.dir.path / "numbers.npy"
    segments.parent.mkdir(parents=True, exist_ok=True)
    tables = [(table, np.load(table, mmap_mode="r").shape[1]) for table in sorted((path.parent / "tables").iterdir())]
    list_segments(tables, 2, segments, numbers)
    totals = Totals(num_in=0, num_out=0, rejects={}, hours=0.0, products=run.record_products(segments=segments))
    run.dir.done.write_bytes(msgspec.json.encode(totals))
    return len(np.load(segments, mmap_mode="r"))


def plan_encode(path: Path) -> int:
    """Divide the unique segments into blocks of equal duration."""
    _, stage, _ = make_stages(_config(path), ["encode"])
    return _count_units(stage, path)


STEPS: dict[str, Callable[[Path], int]] = {
    "plan prepare": plan_prepare,
    "plan duplicates": find_duplicates,
    "plan match": plan_match,
    "plan write": plan_write,
    "plan segments": merge_survey,
    "plan encode": plan_encode,
}


def _add_row(name: str, step: Callable[[Path], int]) -> None:
    def make(folder: Path, tiny: bool) -> Case:
        num_records = 500 if tiny else records()
        path = folder / "m.json"
        if step in (merge_survey, plan_encode):
            write_tables(folder / "tables", num_records)
        elif step is find_duplicates:
            write_hashes(path, num_records)
        else:
            write_manifest(path, num_records)
        if step in (plan_match, plan_write):
            leave_manifests(path, num_records)
        if step is plan_encode:
            merge_survey(path)
        return Case(amount=num_records, unit="records", by="wall", ours=lambda: with_peak(lambda: step(path)))

    make.__doc__ = step.__doc__
    row(name, group="scale", targets={"MiB above": "<= 2048", "wall": "<= 600"})(make)


for _name, _step in STEPS.items():
    _add_row(_name, _step)


def _run(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


@row("start help", baseline="an empty Python", targets={"wall": "<= 0.2"}, inverse=True)
def help_page(folder: Path, tiny: bool) -> Case:
    """``sharmill --help``."""
    return Case(
        amount=1, unit="starts", by="wall",
        ours=lambda: _run("-m", "sharmill", "--help"), baseline=lambda: _run("-c", "pass"),
    )  # fmt: skip


class _Starts(Listener):
    """Return the seconds from the start of a stage until each rank is ready for its first unit."""

    def __init__(self) -> None:
        self.ready: list[float] = []

    def stage_started(self, stage: StageRun, units: Sequence[Unit], done: Sequence[Commit]) -> None:
        self._began = time.perf_counter()

    def looked(self, ranks: Sequence[RankProgress]) -> None:
        num_new = sum(rank.ready > 0 for rank in ranks) - len(self.ready)
        self.ready += [time.perf_counter() - self._began] * num_new


@row(
    "start rank",
    targets={"seconds of the first rank": "<= 8", "seconds of the further rank": "<= 3"},
)
def rank(folder: Path, tiny: bool) -> Case:
    """Startup of match ranks with a NeMo encoder until their first unit, on one core: one rank, and two."""
    project = Project(folder)
    for number in range(12):
        project.add(f"{number}.wav", voice(2.0, seed=number), speaker=f"s{number}")
        project.add(f"{number}b.wav", voice(2.0, seed=number), speaker=f"s{number}")
    encoder = "resemblyzer" if tiny else f"nemo:{save_titanet(folder / 'titanet.nemo')}"
    match: dict[str, Any] = {"encoder": encoder, "min_similarity": -1.0, "min_duration": 0.0, "unit_seconds": 4.0}
    config = project.configure(match=match)
    project.prepare(config)

    def seconds_of(num_ranks: int) -> list[float]:
        starts = _Starts()
        executor = LocalExecutor(num_ranks, device="cpu")
        stage = stage_of(config, "match")
        # With a time limit, even a single rank is a separate process.
        options = replace(stage.options, unit_time_limit=3600.0, max_reject_fraction=1.0)
        stage = replace(stage, options=options)
        assert run_stage(stage, executor, starts, restart=True).ok
        return starts.ready

    def ours() -> dict[str, float]:
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cores)})
        try:
            (alone,), several = seconds_of(1), seconds_of(2)
        finally:
            os.sched_setaffinity(0, cores)
        return {"seconds of the first rank": alone, "seconds of the further rank": several[-1] - alone}

    return Case(amount=3, unit="ranks", by="wall", ours=ours)
