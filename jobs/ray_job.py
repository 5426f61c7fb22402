"""Run stages on a Ray cluster; the entry point of a Ray job.

ray job submit --address http://127.0.0.1:8265 --working-dir . -- \
    python jobs/ray_job.py stage1|stage2|stage3|prepare|validate|all CONFIG... [--root DIR] [OPTION ...] [key=value ...]

Configuration files are read from the working directory, which Ray copies. Paths in them must be absolute, or relative
to DIR, which all nodes must see. Options and exit status are the same as for `sharmill run`. Ray reports the job as
FAILED for any exit status but 0.
"""

import argparse
import os
import sys
from pathlib import Path

from sharmill.cli.main import main

_MEANINGS = {0: "all is done", 1: "something failed, see above", 2: "wrong use or configuration", 3: "findings"}


def run(arguments: list[str]) -> int:
    """Call ``sharmill run``, and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="base folder of relative paths in configurations")
    options, others = parser.parse_known_args(arguments)
    # Drop "all", which `sharmill run` does not need, and make file paths absolute before the folder changes.
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
