"""Run benchmarks: ``python tests/bench [ROW...]``, by default the rows of the group ``reach``; ``--list`` lists all.

Each row runs in a separate process, on one thread of each library unless the row states otherwise. Each figure is the
median of the rounds, and ratios also show the lowest and highest round.
"""

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
from bench.rows import HEADER, Row, measure, table_line

LIBRARIES = ("sharmill", "lhotse", "soundfile", "av", "torch", "torchaudio", "nemo_toolkit", "numpy")


def machine() -> dict[str, Any]:
    """Return the processor, its cores, and the versions of the measured packages."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    found = {one.name.replace("-", "_"): one.version for one in metadata.distributions()}
    versions = {name: found[name] for name in LIBRARIES if name in found}
    return {
        "processor": model, "cores": len(os.sched_getaffinity(0)), "python": sys.version.split()[0],
        "load": f"{os.getloadavg()[0]:.1f}", **versions,
    }  # fmt: skip


def measure_apart(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a row in a separate process."""
    command = [sys.executable, __file__, row.name, "--here"]
    command += ["--repeats", str(options.repeats), "--seconds", str(options.seconds)]
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ}
    if options.records is not None:
        environment["BENCH_RECORDS"] = str(options.records)
    command += ["--tiny"] if options.tiny else []
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {"row": row.name, "error": f"ended with {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def parse_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    groups = sorted({row.group for row in ALL_ROWS.values()})
    parser.add_argument("rows", nargs="*", metavar="ROW", help="a row, or the start of its name")
    parser.add_argument("--group", choices=[*groups, "all"], help="run the rows of a group (default reach)")
    parser.add_argument("--list", action="store_true", help="list the rows")
    parser.add_argument("--repeats", type=int, default=5, help="rounds after the warm-up round (default 5)")
    parser.add_argument("--seconds", type=float, default=20.0, help="time limit for new rounds (default 20)")
    parser.add_argument("--records", type=int, help="number of records in the group scale (default 1,000,000)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--tiny", action="store_true", help="use tiny data, for tests only")
    parser.add_argument("--here", action="store_true", help="measure one row in this process, and print its JSON")
    return parser.parse_args()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/bench", description=__doc__)
    options = parse_options(parser)
    if options.here:
        row = ALL_ROWS[options.rows[0]]
        with tempfile.TemporaryDirectory(prefix="sharmill-bench-") as folder:
            sizes = {"repeats": options.repeats, "seconds": options.seconds, "tiny": options.tiny}
            found = measure(row, Path(folder), **sizes)
        print(json.dumps(found))
        return 0
    group = options.group or ("all" if options.rows or options.list else "reach")
    wanted = [row for row in ALL_ROWS.values() if group in (row.group, "all")]
    wanted = [row for row in wanted if not options.rows or row.name.startswith(tuple(options.rows))]
    if not wanted:
        parser.error(f"there is no such row; use one of {', '.join(ALL_ROWS)}")
    if options.list:
        print("\n".join(f"{row.group:8} {row.name}: {row.what}" for row in wanted))
        return 0
    print(HEADER, flush=True)
    found = []
    for row in wanted:
        found.append(measure_apart(row, options))
        print(table_line(row, found[-1]), flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine(), "rows": found}, indent=1) + "\n")
    print("\n" + ", ".join(f"{name} {value}" for name, value in machine().items()))
    return 1 if any("error" in one for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
