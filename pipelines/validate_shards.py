"""Check a dataset directory, whatever made it.

python pipelines/validate_shards.py DATASET

The exit status is 0 without errors, 1 if the check itself failed, and 3 if it found errors.
"""

import sys
import tempfile
from pathlib import Path

from recipe import PrintProgress, exit_status

from sharmill.executors.local import LocalExecutor
from sharmill.validate.config import ValidateConfig
from sharmill.validate.stage import validate_dataset


def main(dataset: str) -> int:
    # The check keeps its ledger in a run directory; for a single check a temporary one will do.
    with tempfile.TemporaryDirectory() as scratch:
        level = ValidateConfig(deep=True)
        report = validate_dataset(Path(dataset), Path(scratch), PrintProgress(), level, LocalExecutor())
    for finding in report.findings:
        print(f"{finding['code']}: {finding['sentence']}")
    return 3 if report.errors else 0


if __name__ == "__main__":
    sys.exit(exit_status(main, *sys.argv[1:]))
