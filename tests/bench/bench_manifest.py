"""Prints files per second of ``sharmill manifest``, and of one process per file.

    python tests/bench/bench_manifest.py [FILES [WORKERS...]]

Makes a tree of FILES short recordings (default 20,000), each with a text. The process per file reads the header with
soundfile, as people do who call a program for each file; its rate is taken of 30 files.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import soundfile as sf

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.audio import speech_like

SAMPLE = 30
ONE_FILE = "import soundfile, sys; info = soundfile.info(sys.argv[1]); print(info.frames / info.samplerate)"


def make_tree(root: Path, num_files: int) -> list[Path]:
    """Write FLAC files of a tenth of a second, 1,000 to a folder, with texts beside them."""
    stream = io.BytesIO()
    sf.write(stream, speech_like(1600, 16000), 16000, format="FLAC")
    files = []
    for number in range(num_files):
        path = root / f"{number // 1000:05d}" / f"{number:08d}.flac"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(stream.getvalue())
        path.with_suffix(".txt").write_text("hello there")
        files.append(path)
    return files


def seconds_of(*command: str) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main(num_files: int = 20_000, workers: tuple[int, ...] = (1, 2)) -> None:
    folder = Path(tempfile.mkdtemp(prefix="bench-manifest-"))
    try:
        files = make_tree(folder / "speech", num_files)
        each = sum(seconds_of(sys.executable, "-c", ONE_FILE, str(path)) for path in files[:SAMPLE]) / SAMPLE
        print(f"one process per file: {1 / each:.1f} files/s")
        for count in workers:
            output = folder / f"m{count}.json"
            command = [sys.executable, "-m", "sharmill", "manifest", str(folder / "speech"), "-o", str(output)]
            seconds = seconds_of(*command, "--speaker", "{path[0]}", "--workers", str(count))
            rate = num_files / seconds
            print(f"{count} workers: {rate:.0f} files/s, {rate * each:.0f} times as many ({seconds:.1f} s)")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[1:]]
    main(*numbers[:1], *([tuple(numbers[1:])] if numbers[1:] else []))
