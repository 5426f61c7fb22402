"""Stage 1: finds a context in the same voice for every utterance of a prepared manifest.

python pipelines/match_context.py CONFIG... [KEY=VALUE...] [--restart]
"""

import sys

from sharmill.cli.main import main

if __name__ == "__main__":
    main(["run", *sys.argv[1:], "match"])
