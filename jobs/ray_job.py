"""Runs stages on a Ray cluster; the entry point of a Ray job.

ray job submit --address http://127.0.0.1:8265 --working-dir . -- \
    python jobs/ray_job.py stage1|stage2|stage3|prepare|validate|all CONFIG... [--root DIR] [OPTION ...] [key=value ...]

Configuration files are found in the working directory, of which Ray makes a copy. Paths in them must be absolute, or
relative to DIR, which all nodes see. Options and exit status are those of `sharmill run`; any status but 0 makes the
job FAILED.
"""

import argparse
import os
import sys
from pathlib import Path

from sharmill.cli.main import main

_MEANINGS = {0: "all is done", 1: "something failed, see above", 2: "wrong use or configuration", 3: "findings"}


def run(arguments: list[str]) -> int:
    """Returns the exit status of ``sharmill run``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="the folder from which relative paths in configurations are meant")
    options, others = parser.parse_known_args(arguments)
    # "all" is the default of `sharmill run`. Its files are in the working directory.
    passed = [str(Path(one).absolute()) if Path(one).is_file() else one for one in others if one != "all"]
    try:
        if options.root is not None:
            os.chdir(options.root)
        main(["run", *passed, "executor.kind=ray"])
    except OSError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    except SystemExit as end:
        return int(end.code or 0)
    return 0


if __name__ == "__main__":
    status = run(sys.argv[1:])
    print(f"ray_job: ended with exit status {status}: {_MEANINGS.get(status, 'interrupted')}", flush=True)
    sys.exit(status)
