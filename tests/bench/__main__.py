"""Run benchmarks: ``python tests/bench [ROW...]``, by default all rows; ``--list`` names them.

Each row runs in a process of its own, on one thread of each library unless the row says otherwise. Each figure is the
median of the rounds; behind a ratio stand the lowest and the highest of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import ALL_ROWS
from bench.rows import Row, measure

LIBRARIES = ("sharmill", "lhotse", "soundfile", "av", "torch", "torchaudio", "nemo_toolkit", "numpy")


def machine() -> dict[str, Any]:
    """Return the processor, its cores and the versions of what is measured."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    versions = {name: metadata.version(name) for name in LIBRARIES if _is_installed(name)}
    return {"processor": model, "cores": len(os.sched_getaffinity(0)), "python": sys.version.split()[0], **versions}


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def measure_apart(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a row in a process of its own."""
    command = [sys.executable, __file__, row.name, "--here", "--repeats", str(options.repeats)]
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ}
    done = subprocess.run(
        [*command, *(["--tiny"] if options.tiny else [])],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        return {"row": row.name, "error": f"ended with {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def line(row: Row, found: dict[str, Any]) -> str:
    """Return a line of the table in Markdown."""
    if "error" in found:
        return f"| {row.name} | {found['error']} | | | |"
    ratio = ""
    if "ratio" in found:
        ratio = f"{found['ratio']:.2f} ({found['ratios'][0]:.2f} to {found['ratios'][-1]:.2f})"
    columns = [row.name, _way(found["ours"], found)]
    columns += [f"{_way(found['baseline'], found)}, {row.baseline}" if "baseline" in found else "", ratio, row.target]
    return f"| {' | '.join(columns)} |"


def _way(way: dict[str, Any], found: dict[str, Any]) -> str:
    further = [f"{name} {value:.4g}" for name, value in way.items() if isinstance(value, float) and name not in _TIMES]
    rate = [f"{found['amount'] / way[found['by']]:,.4g} {found['unit']} a second"] if found["amount"] else []
    times = f"{way['processor']:.3f} s of processors, {way['system']:.3f} of them system; {way['wall']:.3f} s"
    return ", ".join([*rate, *further, times])


_TIMES = ("wall", "processor", "system")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/bench", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="a row, or the beginning of its name")
    parser.add_argument("--list", action="store_true", help="name all rows")
    parser.add_argument("--repeats", type=int, default=5, help="rounds after the one that warms up (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--tiny", action="store_true", help="data of a test, whose figures mean nothing")
    parser.add_argument("--here", action="store_true", help="measure one row in this process, and print its JSON")
    options = parser.parse_args()
    wanted = [row for row in ALL_ROWS.values() if not options.rows or row.name.startswith(tuple(options.rows))]
    if options.list:
        print("\n".join(row.name for row in wanted))
        return 0
    if not wanted:
        parser.error(f"there is no such row; there are {', '.join(ALL_ROWS)}")
    if options.here:
        (row,) = [row for row in wanted if row.name == options.rows[0]]
        with tempfile.TemporaryDirectory(prefix="sharmill-bench-") as folder:
            print(json.dumps(measure(row, Path(folder), repeats=options.repeats, tiny=options.tiny)))
        return 0
    print("| row | sharmill | beside | ratio | target |\n|---|---|---|---|---|", flush=True)
    found = []
    for row in wanted:
        found.append(measure_apart(row, options))
        print(line(row, found[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "rows": found}, indent=1) + "\n")
    print("\n" + ", ".join(f"{name} {value}" for name, value in machine().items()))
    return 1 if any("error" in one for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
