"""Steps of the training example: the same on any number of ranks, saved by time, validated, in bf16."""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
from collections import Counter

import pytest
import torch
from support.errors import raises
from support.example import make_example
from support.ranks import run_ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from train import Training, main
from train_config import TrainConfig
from train_world import World

from sharmill.errors import ConfigError

TOLERANCE = 1e-4


def train_rank(*arguments: str) -> None:
    """What a rank runs."""
    sys.exit(main(list(arguments)))


def weights(example, step):
    return torch.load(example.out_dir / "checkpoints" / f"step-{step:09d}.pt", weights_only=True)["model"]


def cuts_of_steps(example, world_size):
    """How often each cut was in each step, over all ranks."""
    found = {}
    for rank in range(world_size):
        for values in example.steps(rank):
            found.setdefault(values["step"], Counter()).update(values["ids"])
    return found


def losses(example):
    return [values["loss"] for values in example.steps(0)]


@pytest.mark.slow
def test_canonical_steps_are_those_of_one_rank_also_after_a_resume(speech, tmp_path):
    """One training begins on one rank and goes on on two, the other the other way round."""
    entry = {"type": "sharmill", "dataset": str(speech), "fields": ["target_codes", "context_codes"]}
    order = {"shuffle": True, "shuffle_buffer_size": 4, "num_workers": 0, "canonical": 4}
    (tmp_path / "loader.yaml").write_text(json.dumps({"input_cfg": [entry], "batch_duration": 1.5} | order))
    keys = {"loader": str(tmp_path / "loader.yaml"), "batches_per_step": 4, "validation": str(speech)}
    keys |= {"validate_every": 10, "checkpoint_every": 10, "keep": 5}
    one, two = (make_example(tmp_path, name, speech, **keys) for name in ("one", "two"))
    for max_steps, sizes in ((10, (1, 2)), (20, (2, 1))):
        for example, size in zip((one, two), sizes, strict=True):
            run_ranks(train_rank, size, str(example.config), f"max_steps={max_steps}")
    assert cuts_of_steps(one, 2) == cuts_of_steps(two, 2)
    assert len(losses(one)) == len(losses(two)) == 20
    # They are logged with four digits.
    assert losses(one) == pytest.approx(losses(two), abs=1.01 * TOLERANCE)
    for step in (10, 20):
        first, second = weights(one, step), weights(two, step)
        differences = {name: float((first[name] - second[name]).abs().max()) for name in first}
        assert max(differences.values()) <= TOLERANCE, differences
    validations = [
        [json.loads(line) for line in (example.out_dir / "validation.jsonl").read_text().splitlines()]
        for example in (one, two)
    ]
    assert [values["step"] for values in validations[0]] == [10, 20]
    for first, second in zip(*validations, strict=True):
        assert first == pytest.approx(second, abs=TOLERANCE)
    assert validations[0][1]["loss"] < validations[0][0]["loss"]


def test_it_saves_by_time_computes_in_bf16_and_draws_curves(speech, tmp_path):
    keys = {"checkpoint_every": 1000, "checkpoint_seconds": 1e-6, "keep": 10, "max_steps": 3, "num_workers": 0}
    keys |= {"tensorboard": True, "validation": str(speech), "validate_every": 3}
    example = make_example(tmp_path, "bf16", speech, precision="bf16", **keys)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert main([str(example.config)]) == 0
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert sorted(path.name for path in (example.out_dir / "checkpoints").iterdir()) == [
        f"step-{step:09d}.pt" for step in (1, 2, 3)
    ]
    assert {tensor.dtype for tensor in weights(example, 3).values()} == {torch.float32}
    curves = EventAccumulator(str(example.out_dir / "tensorboard")).Reload()
    assert [(point.step, round(point.value, 4)) for point in curves.Scalars("train/loss")] == [
        (step, pytest.approx(loss, abs=1e-4)) for step, loss in enumerate(losses(example), start=1)
    ]
    assert [point.step for point in curves.Scalars("validation/loss")] == [3]


def test_batches_that_cannot_be_divided_among_the_ranks_are_refused(speech, tmp_path):
    config = TrainConfig(dataset=str(speech), out_dir=str(tmp_path), seed=1, batches_per_step=3)
    with raises(ConfigError, "split_wrong", "batches_per_step: 3", "2 ranks"):
        Training(config, World(0, 2, torch.device("cpu")))
    with pytest.raises(ValueError, match="batches_per_step"):
        TrainConfig(dataset="d", out_dir="o", batches_per_step=0)
    with pytest.raises(ValueError, match="checkpoint_seconds"):
        TrainConfig(dataset="d", out_dir="o", checkpoint_seconds=0)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_every_rank_ends_at_once_where_the_package_for_curves_is_absent(rank, tmp_path, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find(name))
    # Without the others of two, a rank that waits for them has no place to.
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    example = make_example(tmp_path, "curves", tmp_path / "absent", tensorboard=True)
    assert main([str(example.config)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("Error: the package tensorboard is not installed")
    assert error.count("\n") == 1
