"""Checks datasets: a directory, or those of configurations.

python pipelines/validate_shards.py DATASET|CONFIG... [--deep] [--against MANIFEST] [--json FILE]
"""

import sys

from sharmill.cli.main import main

if __name__ == "__main__":
    main(["validate", *sys.argv[1:]])
