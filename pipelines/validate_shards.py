"""Check a dataset directory, whatever made it.

python pipelines/validate_shards.py DATASET

The exit status is 0 without errors, 1 if the check itself failed, and 3 if it found errors.
"""

import sys
import tempfile
from pathlib import Path

from recipe import PrintProgress, exit_status

from sharmill.pipeline import validate_dataset
from sharmill.validate.config import ValidateConfig


def main(dataset: str) -> int:
    # The check keeps its ledger in a run directory; for a single check a temporary one will do.
    with tempfile.TemporaryDirectory() as scratch:
        report = validate_dataset(Path(dataset), Path(scratch), PrintProgress(), ValidateConfig(deep=True))
    for finding in report.findings:
        print(f"{finding['code']}: {finding['sentence']}")
    return 3 if report.errors else 0


if __name__ == "__main__":
    sys.exit(exit_status(main, *sys.argv[1:]))
