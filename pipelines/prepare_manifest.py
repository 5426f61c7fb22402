"""Check the manifests of a dataset, and write one clean manifest and the rejects.

python pipelines/prepare_manifest.py CONFIG [KEY=VALUE...]

The exit status is 0 if the stage is done, 1 if something failed, and 2 if the configuration is wrong.
"""

import sys

from recipe import PrintProgress, exit_status

from sharmill.config import load_config
from sharmill.pipeline import run_dataset


def main(path: str, *overrides: str) -> int:
    config = load_config(path, overrides)
    return 0 if run_dataset(config, PrintProgress(), stages=["prepare"]).ok else 1


if __name__ == "__main__":
    sys.exit(exit_status(main, *sys.argv[1:]))
