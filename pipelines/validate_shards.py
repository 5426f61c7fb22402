"""Check a dataset directory, whatever made it.

python pipelines/validate_shards.py DATASET

The exit status is 0 without errors, 1 if the check itself failed, and 3 if it found errors.
"""

import tempfile
from pathlib import Path

from recipe import PrintProgress, exit_with

from sharmill.engine.stage import RunDir
from sharmill.executors.local import run_alone
from sharmill.validate.stage import ValidateConfig, ValidateStage


def main(dataset: str) -> int:
    # The check keeps its ledger in a run directory; for a single check a temporary one will do.
    with tempfile.TemporaryDirectory() as scratch:
        stage = ValidateStage(Path(dataset), RunDir(Path(scratch) / "run"), ValidateConfig(deep=True))
        with run_alone(stage, listener=PrintProgress(), resumes=False):
            report = stage.report()
    for finding in report.findings:
        print(f"{finding['code']}: {finding['sentence']}")
    return 3 if report.errors else 0


if __name__ == "__main__":
    exit_with(main)
