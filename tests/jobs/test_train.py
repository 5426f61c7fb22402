"""The training example in real processes under torchrun: it learns, is killed, and goes on with the same data."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sharmill.shar import open_shar

pytestmark = pytest.mark.slow

LIMIT_SECONDS = 120


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.02)


def write_loader(folder: Path, dataset: Path, **settings: Any) -> str:
    """The settings of NeMo's loader for a dataset, as a file."""
    entry = {"type": "sharmill", "dataset": str(dataset), "fields": ["target_codes", "context_codes"]}
    path = folder / "loader.yaml"
    path.write_text(json.dumps({"input_cfg": [entry], "batch_duration": 1.5} | settings))  # JSON is YAML
    return str(path)


def rank_pids(process: subprocess.Popen[str]) -> list[int]:
    """The ranks that torchrun started."""
    return [pid for pid in child_pids(process.pid) if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def child_pids(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def test_killed_and_resumed_it_has_the_data_of_an_uninterrupted_training(example) -> None:
    whole, killed = example("whole"), example("killed")
    whole.run()
    moment = random.Random(time.time_ns()).randrange(6, 38)
    process = killed.start()
    wait_for(lambda: len(killed.steps(0)) >= moment, process)
    os.kill(random.choice(rank_pids(process)), signal.SIGKILL)
    process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode != 0
    assert 0 < killed.saved_step() < 40, "it was to be killed half-way"
    killed.run()
    for rank in range(2):
        assert killed.ids_by_step(rank) == whole.ids_by_step(rank)
        assert sorted(whole.ids_by_step(rank)) == list(range(1, 41))


@pytest.mark.parametrize("data", ["our reader", "NeMo's loader"])
def test_told_to_leave_it_saves_and_goes_on_with_other_ranks_and_workers(
    example, speech: Path, tmp_path: Path, data: str
) -> None:
    loader = write_loader(tmp_path, speech, num_workers=2) if data == "NeMo's loader" else None
    options = {"batch_seconds": 1.5, "loader": loader, "seed": None}
    elastic = example("elastic", checkpoint_every=1000, max_steps=1000, **options)
    # Ranks along tp read nothing with NeMo's loader: the first of them sends its batches.
    size, tensor_parallel = (2, 1) if loader is None else (4, 2)
    process = elastic.start("num_workers=2", f"tensor_parallel={tensor_parallel}", ranks=size)
    wait_for(lambda: len(elastic.steps(0)) >= 3, process)
    # As SLURM does it: every process gets the signal, those that read the data too.
    ranks = rank_pids(process)
    for pid in [*ranks, *(worker for rank in ranks for worker in child_pids(rank))]:
        os.kill(pid, signal.SIGTERM)
    printed, _ = process.communicate(timeout=LIMIT_SECONDS)
    left_at = elastic.saved_step()
    assert left_at >= 3
    assert f"told to leave at step {left_at}" in printed
    readers = range(0, size, tensor_parallel)
    before = [cut_id for rank in readers for ids in elastic.ids_by_step(rank).values() for cut_id in ids]
    every = Counter(cut.id for cut in open_shar(speech, []))
    # A worker that is ahead may have begun the second epoch by then, but none the third.
    assert len(before) < 1.5 * len(every), "it went on for too long before it left"
    if loader is not None:
        write_loader(tmp_path, speech, num_workers=0)
    # One reader alone gives what is left of an epoch before it begins the next one.
    elastic.run(f"max_steps={left_at + 90}", "num_workers=0", ranks=1)
    after = [cut_id for values in elastic.steps(0) if values["step"] > left_at for cut_id in values["ids"]]
    # Each cut once in each of two epochs.
    assert Counter(before + after[: 2 * len(every) - len(before)]) == every + every


@pytest.mark.parametrize("where", ["in a process that reads", "in a step"])
def test_an_error_ends_it_at_once(example, speech: Path, tmp_path: Path, where: str) -> None:
    """The processes that read, which outlive SIGTERM, do not keep it."""
    dataset = tmp_path / "dataset"
    shutil.copytree(speech, dataset)
    broken = example("broken", dataset=str(dataset), num_workers=2, max_steps=100_000, checkpoint_every=3)
    # Of two ranks one reads the damaged shard; the other, which waits for it, does not hide the cause.
    process = broken.start(ranks=1 if where == "in a step" else 2)
    wait_for(lambda: broken.saved_step() >= 3, process)
    checkpoints = broken.out_dir / "checkpoints"
    if where == "in a step":
        checkpoints.rename(tmp_path / "away")
        checkpoints.touch()
    else:
        path = min(dataset.glob("codes_*/target_codes/*"))
        path.write_bytes(bytes(path.stat().st_size))
    printed, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode != 0
    assert (str(checkpoints) if where == "in a step" else "codes.0000") in printed
