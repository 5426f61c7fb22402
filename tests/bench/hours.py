"""Predict hours, disk and files of 10,000 and 1,000,000 hours from rates that are measured on a small corpus.

``python tests/bench/hours.py MANIFEST AUDIO_ROOT [KEY=VALUE...]`` runs all stages in this process, and prints the table
of docs/benchmarks.md. The time of a unit is that of the processor, so that other work on the machine does not count.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from unittest import mock

from sharmill.config import Config, load_config
from sharmill.engine.run import run_stage
from sharmill.executors.local.executor import LocalExecutor
from sharmill.pilot.predict import StagePrediction, predict_stage
from sharmill.pilot.rates import StageRate, measure_rates
from sharmill.pipeline import make_stages
from sharmill.ports import clock

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.manifests import KeepErrors

HOURS = (10_000, 1_000_000)
# What stages publish in the dataset directory; all else lies in the run directory.
IN_DATASET = ("write", "assemble")


def measure(folder: Path, manifest: str, audio_root: str, overrides: list[str]) -> tuple[Config, dict[str, StageRate]]:
    """Run all stages on a corpus, and return the configuration and the rates."""
    path = folder / "hours.yaml"
    sources = json.dumps([{"type": "nemo", "manifest": manifest, "audio_root": audio_root}])
    path.write_text(f"name: hours\nrun_dir: {folder}/run\ndataset_dir: {folder}/dataset\nsources: {sources}\n")
    small = load_config(str(path), [*overrides, "write.shard_size=20", "executor.workers=1"])
    with mock.patch.object(clock, "monotonic", time.process_time):
        for stage in make_stages(small):
            assert run_stage(stage, LocalExecutor(1), KeepErrors(), max_reject_fraction=1.0).ok, stage.name
    num_records = len(Path(manifest).read_bytes().splitlines())
    rates = {rate.name: rate for rate in measure_rates(make_stages(small), num_records)}
    return load_config(str(path), [*overrides, "write.shard_size=1000"]), rates


def predict(config: Config, rates: dict[str, StageRate], hours: float) -> dict[str, StagePrediction]:
    """Return the predictions of all stages for so many hours, on one rank."""
    num_records = round(hours * 3600 / rates["match"].cost_per_record)
    return {
        stage.name: predict_stage(
            config, stage, rates[stage.name], ranks=1, num_records=num_records, costs=None
        )
        for stage in make_stages(config)
    }  # fmt: skip


def main(manifest: str, audio_root: str, *overrides: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config, rates = measure(Path(folder), manifest, audio_root, list(overrides))
        found = {hours: predict(config, rates, hours) for hours in HOURS}
    print("| stage | times as fast as speech, a core |", *(f"{h:,} h: core h | GB | files | inodes |" for h in HOURS))
    print("|---" * (2 + 4 * len(HOURS)) + "|")
    totals: dict[tuple[str, float], list[float]] = defaultdict(lambda: [0.0] * 4)
    for name in found[HOURS[0]]:
        cells = []
        for hours, predictions in found.items():
            one = predictions[name]
            figures = [one.rank_seconds / 3600, one.num_bytes / 1e9, one.num_files, one.num_inodes]
            place = "dataset" if name.partition("/")[0] in IN_DATASET else "run directory"
            for total in (totals[place, hours], totals["all", hours]):
                total[:] = [a + b for a, b in zip(total, figures, strict=True)]
            cells += [f"{figure:,.{1 if figure < 100 else 0}f}" for figure in figures]
        speed = HOURS[-1] / (found[HOURS[-1]][name].rank_seconds / 3600)
        print(f"| {name} | {speed:,.0f} | {' | '.join(cells)} |")
    for place in ("dataset", "run directory", "all"):
        cells = [f"{figure:,.{1 if figure < 100 else 0}f}" for hours in HOURS for figure in totals[place, hours]]
        print(f"| **{place}** | | {' | '.join(cells)} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
