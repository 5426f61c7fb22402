"""Build a dataset in Python, without the command line and without a YAML file.

python examples/build_dataset.py MANIFEST AUDIO_ROOT OUTPUT

``OUTPUT/dataset`` is the dataset. Give the same command again after an interruption: it goes on.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from sharmill.config import to_config
from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import StageResult
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Commit, Unit
from sharmill.pipeline import run_dataset


class PrintStages(Listener):
    """A listener that prints a line when a stage begins and when it ends."""

    def stage_started(self, stage: Stage, units: Sequence[Unit], done: Sequence[Commit]) -> None:
        print(f"{stage.name}: {len(units)} units, {len(done)} of them done already")

    def stage_ended(self, stage: Stage, result: StageResult) -> None:
        if result.totals is not None:
            print(f"{stage.name}: {result.totals.num_in} records in, {result.totals.num_out} out")


def main(manifest: str, audio_root: str, output: Path) -> int:
    # The keys are those of a YAML configuration; what is left out has its default.
    config = to_config(
        {
            "name": "example",
            "run_dir": str(output / "run"),
            "dataset_dir": str(output / "dataset"),
            "sources": [{"manifest": manifest, "audio_root": audio_root}],
            "write": {"shard_size": 100},
            "executor": {"workers": 2},
        },
        origin="examples/build_dataset.py",
    )
    result = run_dataset(config, PrintStages())
    report = result.report  # of the stage validate; None if a stage before it has failed units
    return 0 if report is not None and not report.errors else 1


if __name__ == "__main__":
    # Ranks are processes that import this file again, so that work must stand below this line.
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
