"""Build a dataset in Python, without the command line and without a YAML file.

python examples/build_dataset.py MANIFEST AUDIO_ROOT OUTPUT

``OUTPUT/dataset`` is the dataset. Repeat the command after an interruption to continue.
"""

import sys
from pathlib import Path

from sharmill.config import to_config
from sharmill.engine.executor import Listener
from sharmill.pipeline import run_dataset


def main(manifest: str, audio_root: str, output: Path) -> int:
    # The keys are the same as in a YAML configuration; omitted keys get their default values.
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
    # pipelines/recipe.py has a listener that prints progress.
    result = run_dataset(config, Listener())
    for stage, outcome in result.stages:
        if outcome.totals is not None:
            print(f"{stage.name}: {outcome.totals.num_in} records in, {outcome.totals.num_out} out")
    report = result.report  # the report of the stage validate; None if units of an earlier stage have failed
    return 0 if report is not None and not report.errors else 1


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    # Ranks are processes that import this file again, so all work must start below this line.
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
