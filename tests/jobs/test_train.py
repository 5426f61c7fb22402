"""The training example in real processes: it learns, is killed, goes on with the same data, and on a mesh of ranks."""

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
    # Ranks along tp train on the same cuts, of which NeMo's loader reads those of the first alone.
    size, tensor_parallel = 4, 2
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
    assert [elastic.ids_by_step(rank) for rank in (0, 2)] == [elastic.ids_by_step(rank) for rank in (1, 3)]
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


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("data_timeout=6", "got no batch in data_timeout: 6 seconds"),
        ("leave_timeout=3", "got no batch soon after SIGTERM"),
    ],
)
def test_a_wait_for_data_that_do_not_come_has_an_end(example, override: str, told: str) -> None:
    waiting = example("waiting", max_steps=100_000, checkpoint_every=3)
    process = waiting.start(override, ranks=1)
    wait_for(lambda: waiting.saved_step() >= 3, process)
    (rank,) = rank_pids(process)
    for pid in child_pids(rank):
        os.kill(pid, signal.SIGSTOP)
    if "SIGTERM" in told:
        # It trains on what was read ahead first.
        counts: list[int] = []
        wait_for(lambda: counts.append(len(waiting.steps(0))) or counts[-1:] * 100 == counts[-100:], process)
        os.kill(rank, signal.SIGTERM)
    printed, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert told in printed
    assert process.returncode != 0


TOLERANCE = 1e-4
MODEL = ModelConfig(dim=16, num_layers=2, num_heads=2)


def train_rank(config: str, *stages: list[str]) -> None:
    """Run a rank's trainings one after the other, each with its overrides."""
    sys.exit(max(main([config, *overrides]) for overrides in stages))


def ids_by_step(example, ranks):
    """The cuts of each step, of these ranks together."""
    found = {}
    for rank in ranks:
        for values in example.steps(rank):
            found.setdefault(values["step"], Counter()).update(values["ids"])
    return found


def losses(example):
    return [values["loss"] for values in example.steps(0)]


def test_steps_on_two_by_two_ranks_are_those_of_one_also_through_resumes(speech, tmp_path):
    loader = write_loader(tmp_path, speech, shuffle=True, shuffle_buffer_size=4, num_workers=0, canonical=4)
    keys = {"loader": loader, "batches_per_step": 4, "validation": str(speech)}
    keys |= {"validate_every": 13, "checkpoint_every": 100, "keep": 9, "model": asdict(MODEL)}
    one, mesh = (make_example(tmp_path, name, speech, **keys) for name in ("one", "mesh"))
    # One rank stops and goes on as often, since data are mixed anew then.
    run_ranks(train_rank, 1, str(one.config), *([f"max_steps={steps}"] for steps in (20, 23, 26)))
    for size, *overrides in (
        (4, "max_steps=20", "tensor_parallel=2", "sequence_parallel=true"),
        (2, "max_steps=23"),
        (2, "max_steps=26", "tensor_parallel=2"),
    ):
        run_ranks(train_rank, size, str(mesh.config), overrides)
    # They are logged with four digits.
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
    # In the first twenty steps ranks 0 and 1 have the same data, and so have 2 and 3.
    for ranks in ([0, 2], [1, 3]):
        assert {step: ids for step, ids in ids_by_step(mesh, ranks).items() if step <= 20} == {
            step: ids for step, ids in ids_by_step(one, [0]).items() if step <= 20
        }
    # In bfloat16, sums of parts differ from whole ones in their last digits: of 8 bits.
    for step, precision, dtype in ((27, "bf16", torch.float32), (28, "bf16-true", torch.bfloat16)):
        bf16 = [f"max_steps={step}", f"precision={precision}"]
        run_ranks(train_rank, 1, str(one.config), bf16)
        run_ranks(train_rank, 4, str(mesh.config), [*bf16, "tensor_parallel=2", "sequence_parallel=true"])
        assert losses(mesh)[-1] == pytest.approx(losses(one)[-1], rel=0.02)
        assert {tensor.dtype for tensor in mesh.weights(step).values()} == {dtype}
