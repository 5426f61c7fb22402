"""Run all stages: from manifests to a validated Shar dataset.

python pipelines/build_dataset.py CONFIG [KEY=VALUE...]

The exit status is 0 if the dataset is finished and validation found no errors, 1 if something failed, 2 if the
configuration is wrong, and 3 if validation found errors. The same command continues after an interruption.
"""

from recipe import PrintProgress, exit_with

from sharmill.config import load_config
from sharmill.pipeline import run_dataset


def main(path: str, *overrides: str) -> int:
    result = run_dataset(load_config(path, overrides), PrintProgress())
    if not result.ok:
        return 1
    report = result.report
    for finding in report.findings:
        print(f"{finding['code']}: {finding['sentence']}")
    return 3 if report.errors else 0


if __name__ == "__main__":
    exit_with(main)
