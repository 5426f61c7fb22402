"""The training example in real processes: kills, exact resume, errors, and a mesh of ranks."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from support.example import make_example, run_ranks
from train import main
from train_config import ModelConfig

from sharmill.shar import open_shar

pytestmark = pytest.mark.slow

LIMIT_SECONDS = 120


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "the condition took too long"
        time.sleep(0.02)


def write_loader(folder: Path, dataset: Path, **settings: Any) -> str:
    """Write the settings of NeMo's loader for a dataset, and return the file."""
    entry = {"type": "sharmill", "dataset": str(dataset), "fields": ["target_codes", "context_codes"]}
    path = folder / "loader.yaml"
    path.write_text(json.dumps({"input_cfg": [entry], "batch_duration": 1.5} | settings))  # JSON is YAML
    return str(path)


def rank_pids(process: subprocess.Popen[str]) -> list[int]:
    """Return the ranks that torchrun started."""
    return [pid for pid in child_pids(process.pid) if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def child_pids(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def test_a_killed_training_resumes_with_the_same_data(example) -> None:
    whole, killed = example("whole"), example("killed")
    whole.run()
    moment = random.Random(time.time_ns()).randrange(6, 38)
    process = killed.start()
    wait_for(lambda: len(killed.steps(0)) >= moment, process)
    os.kill(random.choice(rank_pids(process)), signal.SIGKILL)
    process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode != 0
    assert 0 < killed.saved_step() < 40, "the training should be killed half-way"
    killed.run()
    for rank in range(2):
        assert killed.ids_by_step(rank) == whole.ids_by_step(rank)
        assert sorted(whole.ids_by_step(rank)) == list(range(1, 41))


@pytest.mark.parametrize("data", ["our reader", "NeMo's loader"])
def test_after_sigterm_it_resumes_on_other_ranks_and_workers(example, speech: Path, tmp_path: Path, data: str) -> None:
    loader = write_loader(tmp_path, speech, num_workers=2) if data == "NeMo's loader" else None
    options = {"batch_seconds": 1.5, "loader": loader, "seed": None}
    elastic = example("elastic", checkpoint_every=1000, max_steps=1000, **options)
    # Ranks along tp train on the same cuts; with NeMo's loader, only the first of them reads.
    size, tensor_parallel = 4, 2
    process = elastic.start("num_workers=2", f"tensor_parallel={tensor_parallel}", ranks=size)
    wait_for(lambda: len(elastic.steps(0)) >= 3, process)
    # SLURM sends the signal to every process, including the workers.
    ranks = rank_pids(process)
    for pid in [*ranks, *(worker for rank in ranks for worker in child_pids(rank))]:
        os.kill(pid, signal.SIGTERM)
    printed, _ = process.communicate(timeout=LIMIT_SECONDS)
    left_at = elastic.saved_step()
    assert left_at >= 3
    assert f"told to leave at step {left_at}" in printed
    assert [elastic.ids_by_step(rank) for rank in (0, 2)] == [elastic.ids_by_step(rank) for rank in (1, 3)]
    readers = range(0, size, tensor_parallel)
    before = [cut_id for rank in readers for ids in elastic.ids_by_step(rank).values() for cut_id in ids]
    every = Counter(cut.id for cut in open_shar(speech, []))
    # A fast worker may be in the second epoch by then, but not in the third.
    assert len(before) < 1.5 * len(every), "the training ran for too long after the signal"
    if loader is not None:
        write_loader(tmp_path, speech, num_workers=0)
    # A single reader finishes an epoch before it starts the next one.
    elastic.run(f"max_steps={left_at + 90}", "num_workers=0", ranks=1)
    after = [cut_id for values in elastic.steps(0) if values["step"] > left_at for cut_id in values["ids"]]
    # Each cut comes once in each of two epochs.
    assert Counter(before + after[: 2 * len(every) - len(before)]) == every + every


@pytest.mark.parametrize("where", ["in a worker", "in a step"])
def test_an_error_ends_the_training_at_once(example, speech: Path, tmp_path: Path, where: str) -> None:
    """The workers, which ignore SIGTERM, do not keep the training alive."""
    dataset = tmp_path / "dataset"
    shutil.copytree(speech, dataset)
    broken = example("broken", dataset=str(dataset), num_workers=2, max_steps=100_000, checkpoint_every=3)
    # One of two ranks reads the damaged shard; the other, which waits for it, must not hide the cause.
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


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("data_timeout=6", "got no batch within 6 seconds (data_timeout)"),
        ("leave_timeout=3", "got no batch in time after SIGTERM"),
    ],
)
def test_a_wait_for_missing_data_ends(example, override: str, told: str) -> None:
    waiting = example("waiting", max_steps=100_000, checkpoint_every=3)
    process = waiting.start(override, ranks=1)
    wait_for(lambda: waiting.saved_step() >= 3, process)
    (rank,) = rank_pids(process)
    for pid in child_pids(rank):
        os.kill(pid, signal.SIGSTOP)
    if "SIGTERM" in told:
        # The training first uses the prefetched batches.
        counts: list[int] = []
        wait_for(lambda: counts.append(len(waiting.steps(0))) or counts[-1:] * 100 == counts[-100:], process)
        os.kill(rank, signal.SIGTERM)
    printed, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert told in printed
    assert process.returncode != 0


TOLERANCE = 1e-4
MODEL = ModelConfig(dim=16, num_layers=2, num_heads=2)


def train_rank(config: str, *stages: list[str]) -> None:
    """Run the trainings of a rank one after another, each with its overrides."""
    sys.exit(max(main([config, *overrides]) for overrides in stages))


def ids_by_step(example, ranks):
    """Return the cuts of each step, summed over these ranks."""
    found = {}
    for rank in ranks:
        for values in example.steps(rank):
            found.setdefault(values["step"], Counter()).update(values["ids"])
    return found


def losses(example):
    return [values["loss"] for values in example.steps(0)]


def test_steps_on_two_by_two_ranks_equal_those_on_one_rank(speech, tmp_path):
    loader = write_loader(tmp_path, speech, shuffle=True, shuffle_buffer_size=4, num_workers=0, canonical=4)
    keys = {"loader": loader, "batches_per_step": 4, "validation": str(speech)}
    keys |= {"validate_every": 13, "checkpoint_every": 100, "keep": 9, "model": asdict(MODEL)}
    one, mesh = (make_example(tmp_path, name, speech, **keys) for name in ("one", "mesh"))
    # The single rank stops equally often, because a resume mixes the data again.
    run_ranks(train_rank, 1, str(one.config), *([f"max_steps={steps}"] for steps in (20, 23, 26)))
    for size, *overrides in (
        (4, "max_steps=20", "tensor_parallel=2", "sequence_parallel=true"),
        (2, "max_steps=23"),
        (2, "max_steps=26", "tensor_parallel=2"),
    ):
        run_ranks(train_rank, size, str(mesh.config), overrides)
    # Losses are logged with four digits.
    assert len(losses(one)) == 26
    assert losses(one) == pytest.approx(losses(mesh), abs=1.01 * TOLERANCE)
    for step in (20, 26):
        first, second = one.weights(step), mesh.weights(step)
        differences = {name: float((first[name] - second[name]).abs().max()) for name in first}
        assert max(differences.values()) <= TOLERANCE, differences
    first, second = (
        [json.loads(line) for line in (example.out_dir / "validation.jsonl").read_text().splitlines()]
        for example in (one, mesh)
    )
    assert [values["step"] for values in first] == [13, 26]
    assert all(values == pytest.approx(other, abs=TOLERANCE) for values, other in zip(first, second, strict=True))
    assert first[1]["loss"] < first[0]["loss"]
    # In the first twenty steps, ranks 0 and 1 have the same data, and so do ranks 2 and 3.
    for ranks in ([0, 2], [1, 3]):
        assert {step: ids for step, ids in ids_by_step(mesh, ranks).items() if step <= 20} == {
            step: ids for step, ids in ids_by_step(one, [0]).items() if step <= 20
        }
    # In bfloat16, partial sums differ in the last of 8 bits.
    for step, precision, dtype in ((27, "bf16", torch.float32), (28, "bf16-true", torch.bfloat16)):
        bf16 = [f"max_steps={step}", f"precision={precision}"]
        run_ranks(train_rank, 1, str(one.config), bf16)
        run_ranks(train_rank, 4, str(mesh.config), [*bf16, "tensor_parallel=2", "sequence_parallel=true"])
        assert losses(mesh)[-1] == pytest.approx(losses(one)[-1], rel=0.02)
        assert {tensor.dtype for tensor in mesh.weights(step).values()} == {dtype}
