"""Stage 2: writes cuts, target audio and context audio as Shar shards.

python pipelines/write_shar.py CONFIG... [KEY=VALUE...] [--restart]
"""

import sys

from sharmill.cli.main import main

if __name__ == "__main__":
    main(["run", *sys.argv[1:], "write"])
