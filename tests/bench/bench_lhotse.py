"""Prints time and peak memory of planning and reading lhotse manifests: ``python tests/bench/bench_lhotse.py [N]``.

Every figure comes from a process of its own, since the peak of a process never goes down. By default there are a
million cuts, and as many recordings and supervisions.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from sharmill.sources.lhotse import LhotseSource

RECORDS_PER_PIECE = 2000


def write_manifests(folder: Path, count: int) -> None:
    """Cuts, recordings and supervisions, in gzip; the supervisions are in another order than their recordings."""
    with contextlib.ExitStack() as stack:
        recordings, supervisions, cuts = (
            stack.enter_context(gzip.open(folder / f"{name}.jsonl.gz", "wt", compresslevel=1))
            for name in ("recordings", "supervisions", "cuts")
        )
        for number in range(count):
            name, other = f"{number % 9973}/{number}", number * 7919 % count
            source = f'[{{"type": "file", "channels": [0], "source": "/data/speech/{name}.flac"}}]'
            recording = (
                f'{{"id": "{name}", "sources": {source}, "sampling_rate": 16000, "num_samples": {32000 + number}, '
                '"duration": 15.0, "channel_ids": [0]}'
            )
            said = (
                f'{{"id": "{name}", "recording_id": "{other % 9973}/{other}", "start": 0.0, "duration": 2.0, '
                f'"channel": 0, "text": "the words that were said in number {number}", "speaker": "a"}}'
            )
            recordings.write(recording + "\n")
            supervisions.write(said + "\n")
            cuts.write(
                f'{{"id": "{name}", "start": 0.0, "duration": 2.0, "channel": 0, "supervisions": [{said}], '
                f'"recording": {recording}, "type": "MonoCut"}}\n'
            )


def cuts_source(folder: Path, *, split: bool = False) -> LhotseSource:
    return LhotseSource(cuts=str(folder / "cuts.jsonl.gz"), audio_root="/data/speech", split=split)


def sets_source(folder: Path) -> LhotseSource:
    files = {name: str(folder / f"{name}.jsonl.gz") for name in ("recordings", "supervisions")}
    return LhotseSource(**files, audio_root="/data/speech")


def plan(source: LhotseSource) -> int:
    source.identity()
    return sum(piece.num_records for piece in source.pieces(RECORDS_PER_PIECE))


def read(source: LhotseSource) -> int:
    """Reads every tenth piece, as one of ten ranks does."""
    pieces = [piece.params for piece in source.pieces(RECORDS_PER_PIECE)][::10]
    return sum(1 for piece in pieces for _ in source.read(piece))


STEPS: dict[str, Callable[[Path], int]] = {
    "plan cuts": lambda folder: plan(cuts_source(folder)),
    "plan cuts, split": lambda folder: plan(cuts_source(folder, split=True)),
    "plan recordings and supervisions": lambda folder: plan(sets_source(folder)),
    "plan cuts, and read a tenth": lambda folder: read(cuts_source(folder)),
    "plan recordings and supervisions, and read a tenth": lambda folder: read(sets_source(folder)),
}


def measure(step: str, folder: Path) -> dict[str, float]:
    """Runs one step and returns its seconds, the peak of this process and what the step returned."""
    started = time.perf_counter()
    result = STEPS[step](folder)
    seconds = time.perf_counter() - started
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    return {"seconds": seconds, "peak_mib": peak, "result": result}


def main() -> None:
    if len(sys.argv) == 3:
        print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]))))
        return
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_manifests(folder, count)
        sizes = {path.name: f"{path.stat().st_size / 2**20:.0f} MiB" for path in sorted(folder.iterdir())}
        print(f"{count:,} records: {sizes}")
        for step in STEPS:
            output = subprocess.run([sys.executable, __file__, step, name], capture_output=True, text=True, check=True)
            found = json.loads(output.stdout)
            print(
                f"{step}: {found['seconds']:.1f} s, peak {found['peak_mib']:.0f} MiB, {found['result']:,}", flush=True
            )


if __name__ == "__main__":
    main()
