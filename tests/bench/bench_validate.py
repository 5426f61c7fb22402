"""Speed of the checker beside `cat` of the same files, both warm, and of its deep level.

    python tests/bench/bench_validate.py [--megabytes 400] [--manifest M.json --audio-root DIR] [--dataset DIR]

A dataset is made by the stage write from whole FLAC files (by default: glides in noise, about as long as read
sentences), repeated under other names, with the codes of a toy codec. `cat` is one process. What the command needs for
two shards of one cut (imports, processes, plan, ledger) is told apart, since it does not grow with the dataset.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.shar import Project, voice

from sharmill.validate.checked_dataset import read_checked_dataset
from sharmill.validate.shard import ShardCheck

SHARD_SIZE = 200


def make_voices(folder: Path) -> tuple[Path, Path]:
    """A manifest of 40 glides in noise of 8 to 16 s; they take as many bytes as read speech."""
    project = Project(folder)
    for number in range(40):
        seconds = 8 + number / 5
        noise = np.random.default_rng(number).standard_normal(round(seconds * 16000)) * 0.01
        samples = voice(seconds, pitch=120 + 3 * number, seed=number) + noise.astype(np.float32)
        project.add(f"{number}.flac", np.round(samples * 32767) / 32768)
    project.configure()
    return folder / "small.json", project.root


def make_dataset(folder: Path, manifest: Path, audio_root: Path, megabytes: float) -> Path:
    """As many copies of the manifest's files as make a dataset of that size."""
    folder.mkdir()
    project = Project(folder)
    records = [json.loads(line) for line in manifest.read_text().splitlines()]
    size = sum((audio_root / record["audio_filepath"]).stat().st_size for record in records)
    for repeat in range(max(1, round(megabytes * 1e6 / size / 2))):
        for record in records:
            name = f"{repeat}/{record['audio_filepath']}"
            (project.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(audio_root / record["audio_filepath"], project.root / name)
            project.records.append(record | {"audio_filepath": name, "text": record.get("text") or "text"})
    config = project.write(write={"shard_size": SHARD_SIZE}, match={"min_duration": 0.0})
    project.encode(config)
    return project.dataset


def best(function, repeats: int = 7) -> tuple[float, float]:
    """The least wall time and the least processor time of several runs: what others do on the machine only adds."""
    walls, processor = [], []
    for _ in range(repeats):
        started, before = time.perf_counter(), sum(os.times()[:4])
        function()
        walls.append(time.perf_counter() - started)
        processor.append(sum(os.times()[:4]) - before)
    return min(walls), min(processor)


def cat(files: list[Path]) -> None:
    subprocess.run(["cat", *files], stdout=subprocess.DEVNULL, check=True)


def check_all(dataset: Path, *, deep: bool = False) -> dict[str, float]:
    """All shards in this process, as a rank does, without plan and ledger; what was counted."""
    subject = read_checked_dataset(dataset)
    check = ShardCheck(subject, deep=deep)
    counted: dict[str, float] = {}
    for shard in subject.shards:
        checked = check(shard)
        assert not checked.findings, checked.findings[:3]
        for name, number in checked.stats.items():
            counted[name] = counted.get(name, 0) + number
    return counted


def command(dataset: Path, workers: int, *options: str) -> None:
    arguments = ["validate", dataset, "--workers", workers, *options]
    subprocess.run([sys.executable, "-m", "sharmill", *map(str, arguments)], stdout=subprocess.DEVNULL, check=True)


def line(name: str, times: tuple[float, float], reading: tuple[float, float] | None = None) -> None:
    ratios = "" if reading is None else "  {:5.2f} and {:5.2f} times cat".format(
        *(own / other for own, other in zip(times, reading, strict=True))
    )  # fmt: skip
    print(f"{name:<42}{times[0]:7.3f} s, {times[1]:7.3f} s of processors{ratios}")


def report(dataset: Path, small: Path) -> None:
    files = sorted(path for path in dataset.rglob("*") if path.is_file())
    size = sum(path.stat().st_size for path in files)
    counted = check_all(dataset)
    print(f"{size / 1e6:.0f} MB, {counted['cuts']:.0f} cuts in {len(read_checked_dataset(dataset).shards)} shards")
    reading = best(lambda: cat(files))
    line("cat, one process", reading)
    line("checks, one process", best(lambda: check_all(dataset)), reading)
    for workers in (1, 2):
        start_up = best(lambda workers=workers: command(small, workers), 4)
        line(f"command, two shards of a cut, {workers} rank(s)", start_up)
        whole = best(lambda workers=workers: command(dataset, workers), 4)
        beyond = whole[0] - start_up[0], whole[1] - start_up[1]
        line(f"command beyond that, {workers} rank(s)", beyond, reading)
    started = time.process_time()
    deep = check_all(dataset, deep=True)
    seconds = time.process_time() - started
    print(f"deep: {deep['seconds decoded'] / seconds:.0f} hours of audio decoded and looked at per core hour")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=400)
    parser.add_argument("--manifest", type=Path, help="JSON lines of whole files (default: manufactured ones)")
    parser.add_argument("--audio-root", type=Path)
    parser.add_argument("--dataset", type=Path, help="a finished dataset, instead of making one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "empty").mkdir()
        project = Project(folder / "empty")
        project.add("a.wav", voice(0.1))
        project.add("b.wav", voice(0.1, pitch=150.0))
        project.write(match={"min_duration": 0.0}, write={"shard_size": 1})
        dataset = options.dataset
        if dataset is None:
            (folder / "voices").mkdir()
            manifest, root = (
                (options.manifest, options.audio_root) if options.manifest else make_voices(folder / "voices")
            )
            dataset = make_dataset(folder / "many", manifest, root, options.megabytes)
        report(dataset, project.dataset)


if __name__ == "__main__":
    main()
