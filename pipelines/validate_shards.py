"""Checks a finished dataset.

python pipelines/validate_shards.py DATASET [--deep] [--json FILE]
"""

import sys

from sharmill.cli import main

if __name__ == "__main__":
    main(["validate", *sys.argv[1:]])
