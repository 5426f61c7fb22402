"""Benchmarks on a GPU: ``python tests/bench_gpu [--device cpu]``, as in ``make bench-gpu``.

The rows run until a deadline. Each line is printed at once, and all lines are written as JSON.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench_gpu.rows import Bench, Line, model_rows, save_models
from bench_gpu.tuning import tuning_rows
from sharmill.errors import DeviceError
from sharmill.models import make_deterministic
from sharmill.models.device import check_device, driver_version

# Least time to start another line of a row.
_LEAST_SECONDS = 8.0


def _run(lines: Iterator[Line], least: float, deadline: float) -> Iterator[Line]:
    """Yield the lines of a row while time is left, or the error if the row fails."""
    try:
        while (left := deadline - time.time()) >= least:
            line = next(lines, None)
            if line is None:
                return
            yield line
            least = min(least, _LEAST_SECONDS)
        yield {"left out": f"{left:.0f} s are left, and it needs {least:.0f}"}
    except Exception as error:  # noqa: BLE001 - the other rows should still run
        traceback.print_exc()
        yield {"failed": f"{type(error).__name__}: {error}"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/bench_gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=520.0, help="time for all rows (default %(default)s)")
    parser.add_argument("--json", type=Path, default=Path("bench-gpu.json"), help="all figures (default %(default)s)")
    parser.add_argument("--rows", nargs="*", default=[""], help="run only rows whose names start with these words")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        return _measure(parser, options, Path(folder))


def _measure(parser: argparse.ArgumentParser, options: argparse.Namespace, folder: Path) -> int:
    deadline = time.time() + options.seconds
    make_deterministic()
    logging.getLogger("sharmill").setLevel(logging.ERROR)
    on_cpu = options.device == "cpu"
    try:
        kind = check_device(options.device)
    except DeviceError as error:
        parser.error(str(error))
    found: dict[str, Any] = {
        "device": kind, "driver": driver_version(), "torch": torch.__version__,
        "python": sys.version.split()[0], "cores": os.cpu_count(), "weights": "random", "rows": {},
    }  # fmt: skip
    if on_cpu:
        found["note"] = "simulated on the CPU, with small models: no figures for GPUs"
    print(json.dumps(found), flush=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    models = save_models(folder, is_small=on_cpu)
    bench = Bench(options.device, folder, models)
    rows = [*model_rows(bench), *tuning_rows(bench)]
    for begin in options.rows:
        if not any(name.startswith(begin) for name, *_ in rows):
            parser.error(f"there is no row {begin!r}; use one of {', '.join(name for name, *_ in rows)}")
    for name, least, make_lines in rows:
        if not name.startswith(tuple(options.rows)):
            continue
        started = time.time()
        row: dict[str, Any] = {"lines": []}
        found["rows"][name] = row
        for line in _run(make_lines(), least, deadline):
            row["lines"].append(line)
            row["seconds"] = round(time.time() - started, 1)
            print(f"{name}: {json.dumps(line)}", flush=True)
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any("failed" in line for row in found["rows"].values() for line in row["lines"]))


if __name__ == "__main__":
    sys.exit(main())
