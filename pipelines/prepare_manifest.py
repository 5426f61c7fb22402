"""Checks the manifests of a dataset and writes one clean manifest and the rejects.

python pipelines/prepare_manifest.py CONFIG... [KEY=VALUE...] [--restart]
"""

import sys

from sharmill.cli.main import main

if __name__ == "__main__":
    main(["run", *sys.argv[1:], "prepare"])
