"""Validate a dataset directory, which any tool may have written.

python pipelines/validate_shards.py DATASET

The exit status is 0 without errors, 1 if the validation itself failed, and 3 if it found errors.
"""

import tempfile
from pathlib import Path

from recipe import PrintProgress, exit_with

from sharmill.engine.run_dir import RunDir
from sharmill.executors.local import run_alone
from sharmill.validate.findings import read_report
from sharmill.validate.stage import Subject, ValidateConfig, ValidateStage


def main(dataset: str) -> int:
    # Validation keeps its ledger in a run directory; a temporary one suffices here.
    with tempfile.TemporaryDirectory() as scratch:
        stage = ValidateStage(Subject(dataset_dir=Path(dataset), level=ValidateConfig(deep=True)))
        with run_alone(stage, RunDir(Path(scratch) / "run"), listener=PrintProgress(), resumes=False) as (run, _):
            report = read_report(run.product("validate/report"))
    for finding in report.findings:
        shard = "" if finding["shard"] is None else f"shard {finding['shard']}, "
        print(f"{finding['code']}: {shard}{finding['where']}: {finding['sentence']}")
    return 3 if report.errors else 0


if __name__ == "__main__":
    exit_with(main)
