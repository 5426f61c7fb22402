"""Runs stages on a Ray cluster; the entry point of a Ray job.

ray job submit --address http://127.0.0.1:8265 --working-dir . -- \
    python jobs/ray_job.py stage1|stage2|stage3|prepare|validate|all CONFIG... [--root DIR] [key=value ...]

Configuration files are found in the working directory, of which Ray makes a copy. Paths in them must be absolute, or
relative to DIR, which all nodes see. The exit status is that of `sharmill run`; any but 0 makes the job FAILED.
"""

import argparse
import os
import sys
from pathlib import Path

from sharmill.cli.arguments import split_arguments
from sharmill.cli.main import main
from sharmill.errors import ConfigError

_MEANINGS = {0: "all is done", 1: "something failed, see above", 2: "wrong use or configuration", 3: "findings"}


def run(arguments: list[str]) -> int:
    """Returns the exit status of ``sharmill run``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arguments", nargs="+", metavar="STAGE|all CONFIG... [KEY=VALUE...]")
    parser.add_argument("--root", type=Path, help="the folder from which relative paths in configurations are meant")
    parser.add_argument("--restart", action="store_true", help="begin the stages anew")
    parser.add_argument("--redo", type=Path, metavar="FINDINGS.json", help="do the shards again that it names")
    parser.add_argument("--take-over", action="store_true", help="run where SLURM cannot be asked about submitted jobs")
    options = parser.parse_intermixed_args(arguments)
    try:
        paths, overrides, stages = split_arguments(options.arguments)
        if not stages:
            raise ConfigError("name a stage, or 'all'", code="bad_usage")
        configs = [str(Path(path).absolute()) for path in paths]
        redo = [] if options.redo is None else ["--redo", str(options.redo.absolute())]
        if options.root is not None:
            os.chdir(options.root)
    except (ConfigError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    stages = [] if stages == ["all"] else stages
    flags = [flag for flag, given in (("--restart", options.restart), ("--take-over", options.take_over)) if given]
    try:
        main(["run", *flags, *redo, *configs, *stages, *overrides, "executor.kind=ray"])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


if __name__ == "__main__":
    status = run(sys.argv[1:])
    print(f"ray_job: ended with exit status {status}: {_MEANINGS.get(status, 'interrupted')}", flush=True)
    sys.exit(status)
