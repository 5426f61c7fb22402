"""All stages: from manifests to a validated Shar dataset.

python pipelines/build_dataset.py CONFIG... [KEY=VALUE...] [--restart]
"""

import sys

from sharmill.cli.main import main

if __name__ == "__main__":
    main(["run", *sys.argv[1:]])
