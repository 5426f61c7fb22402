"""Count what a stage asks of the file systems of its run directory and its dataset directory, per unit.

    PYTHONPATH=src:tests python tests/bench/count_operations.py [--paths] [--stages write ...]

Datasets of two sizes are made under strace, and what the larger one takes more is divided by its further units. On one
machine one rank does the units in the process of the driver; on SLURM a rank's task does them, here without a cluster.
The last column is a driver that finds everything done.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from support.operations import kind_of, mark, trace, why_not

SIZES = (4, 10)
STAGES = ("prepare", "match", "write", "survey", "encode", "assemble", "validate")
LOCAL, SLURM = "one machine", "SLURM"
RANK, DRIVER, AGAIN = "rank", "driver", "again"
_RECORDS = 2


def measure(folder: Path) -> dict[tuple[str, str, str], Counter[tuple[str, str]]]:
    """Return the operations of one unit, by executor, stage and who asks: of each kind, on each kind of path."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    folder = folder.resolve()
    found: dict[tuple[str, str, str], Counter[tuple[str, str]]] = {}
    for executor in (LOCAL, SLURM):
        sizes = []
        below = folder / executor.split()[0]
        roots = {"run": below / "run", "dataset": below / "dataset"}
        for size in SIZES:
            arguments = (__file__, "--here", executor, "--size", size, "--folder", below)
            phases = trace(arguments, folder / "trace", roots, environment)
            counts: dict[tuple[str, str], Counter[tuple[str, str]]] = {}
            for phase, operations in phases.items():
                stage, who = phase.split(":")
                kinds = counts.setdefault((stage, who), Counter())
                for (operation, path), number in operations.items():
                    kinds[operation, kind_of(path)] += number
            sizes.append(counts)
        small, large = sizes
        for key in large:
            more = Counter(large[key])
            more.subtract(small.get(key, Counter()))
            found[executor, *key] = Counter({kind: number for kind, number in more.items() if number})
    return found


def run_here(executor: str, size: int, folder: Path) -> None:
    """Makes a dataset of so many shards, telling the trace what it is at."""
    import shutil

    from support.shar import PitchEncoder, Project, ToyCodec, voice

    from sharmill.engine import progress
    from sharmill.engine.listener import Listener
    from sharmill.engine.outcomes import Finished
    from sharmill.engine.run import run_stage
    from sharmill.executors.local.executor import LocalExecutor
    from sharmill.executors.slurm.task import RankTask
    from sharmill.pipeline import make_stages, run_dataset

    class Marked(LocalExecutor):
        def run(self, stage: Any, units: Sequence[Any], rejects: Any, listener: Any) -> Finished:
            assert len(units) == size, (stage.name, len(units))
            mark(f"{stage.kind}:{RANK}")
            if executor == LOCAL:
                outcome = super().run(stage, units, rejects, listener)
            else:
                outcome = Finished({})
                assert RankTask(stage, 0, [unit.index for unit in units], "cpu", rejects)() == size
            mark(f"{stage.kind}:{DRIVER}")
            return outcome

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    project = Project(folder)
    for number in range(size * _RECORDS):
        project.add(f"{number}.wav", voice(0.3, pitch=200 + number, seed=number), speaker=f"s{number // _RECORDS}")
    config = project.configure(
        prepare={"min_duration": 0.0, "unit_records": _RECORDS},
        match={"min_duration": 0.0, "unit_seconds": 0.3 * _RECORDS},
        write={"shard_size": _RECORDS, "order": "manifest"},
        encode={"codecs": [{"name": "toy", "model": "builtin"}], "unit_seconds": 0.3 * _RECORDS},
    )
    with ExitStack() as stack:
        stack.enter_context(mock.patch("sharmill.match.stage.load_speaker_encoder", return_value=PitchEncoder()))
        stack.enter_context(mock.patch("sharmill.encode.stage.load_codec", return_value=ToyCodec()))
        # Records of progress come by time, not by unit.
        stack.enter_context(mock.patch.object(progress, "_LEAST_INTERVAL_SECONDS", 3600.0))
        for stage in make_stages(config):
            mark(f"{stage.kind}:{DRIVER}")
            assert run_stage(stage, Marked(1), Listener(), max_reject_fraction=1.0).ok
        mark(f"all:{AGAIN}")
        assert run_dataset(config, Listener(), executor=Marked(1)).ok
        mark("")


def per_unit(counts: Counter[tuple[str, str]]) -> float:
    """Return the operations of one unit."""
    return sum(counts.values()) / (SIZES[1] - SIZES[0])


def fsyncs_per_unit(counts: Counter[tuple[str, str]]) -> float:
    """Return how often a unit has something synced to disk."""
    return sum(number for (name, _), number in counts.items() if name == "fsync") / (SIZES[1] - SIZES[0])


def print_table(found: dict[tuple[str, str, str], Counter[tuple[str, str]]], *, paths: bool) -> None:
    print("stage | rank, one machine (fsyncs) | rank, SLURM (fsyncs) | driver")
    for stage in STAGES:
        cells = [
            f"{per_unit(found[executor, stage, RANK]):.1f} ({fsyncs_per_unit(found[executor, stage, RANK]):.1f})"
            for executor in (LOCAL, SLURM)
        ]
        print(f"{stage} | {' | '.join(cells)} | {per_unit(found[SLURM, stage, DRIVER]):.1f}")
    print(f"all stages once more, nothing to do: {per_unit(found[SLURM, 'all', AGAIN]):.1f}")
    for key, counts in found.items() if paths else ():
        print(f"\n{', '.join(key)}: {per_unit(counts):.1f}")
        for (operation, path), number in sorted(counts.items(), key=lambda item: (item[0][1], item[0][0])):
            print(f"{number / (SIZES[1] - SIZES[0]):8.2f} {operation:9} {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paths", action="store_true", help="print every kind of operation on every kind of path")
    parser.add_argument("--here", choices=(LOCAL, SLURM), help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        run_here(options.here, options.size, options.folder)
        return
    if reason := why_not():
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as folder:
        print_table(measure(Path(folder)), paths=options.paths)


if __name__ == "__main__":
    main()
