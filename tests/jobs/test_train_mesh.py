"""The training example on a mesh of four ranks, 2 x 2: the steps of one rank, and resumes on other layouts."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict, replace

import pytest
import torch
from parallelize import clip_gradients, parallelize
from speech_lm import SpeechLM
from support.example import make_example
from support.ranks import run_ranks
from support.sequences import CODEBOOKS, CODES_SIZE, HEARD, SAMPLES, TEXT, TEXT_SIZE, TTS, make_batch
from torch import nn
from train import main
from train_config import ModelConfig, TrainConfig
from train_world import world_of

from sharmill.shar import open_shar
from sharmill.training.speech_text import Kind

pytestmark = pytest.mark.slow

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
    entry = {"type": "sharmill", "dataset": str(speech), "fields": ["target_codes", "context_codes"]}
    order = {"shuffle": True, "shuffle_buffer_size": 4, "num_workers": 0, "canonical": 4}
    (tmp_path / "loader.yaml").write_text(json.dumps({"input_cfg": [entry], "batch_duration": 1.5} | order))
    keys = {"loader": str(tmp_path / "loader.yaml"), "batches_per_step": 4, "validation": str(speech)}
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


def test_every_cut_comes_once_per_epoch_from_four_ranks_to_two_in_either_layout(speech, tmp_path):
    example = make_example(tmp_path, "moved", speech, num_workers=1, seed=None)
    cuts, before = [], 0
    for size, tensor_parallel, max_steps in ((4, 2, 3), (2, 1, 5), (2, 2, 20)):
        # One reader alone gives what is left of an epoch before it begins the next one.
        workers = f"num_workers={int(max_steps < 20)}"
        keys = [f"max_steps={max_steps}", f"tensor_parallel={tensor_parallel}", workers, "precision=bf16"]
        run_ranks(train_rank, size, str(example.config), keys)
        for first in range(0, size, tensor_parallel):
            ids = [
                [values["ids"] for values in example.steps(rank) if values["step"] > before]
                for rank in range(first, first + tensor_parallel)
            ]
            assert ids[0] == ids[-1], "ranks of a group train on the same cuts"
            cuts += [cut_id for of_step in ids[0] for cut_id in of_step]
        before = max_steps
    every = Counter(cut.id for cut in open_shar(speech, []))
    assert Counter(cuts[: every.total()]) == every
    begins = [json.loads(line) for line in (example.out_dir / "steps.rank0.jsonl").read_text().splitlines()]
    seeds = [values["seed"] for values in begins if "begin" in values]
    assert len(seeds) == 3
    assert len(set(seeds)) == 1, "one seed for the whole training"


def check_gradients() -> None:
    """Check on a rank that gradients are those of the whole model on all batches, clipped alike."""
    layout = TrainConfig(dataset="", out_dir="", device="cpu", tensor_parallel=2, model=MODEL)
    # An odd number of positions, which two ranks cannot divide; and one rank has text alone.
    batches = [make_batch(HEARD, [*TTS, (Kind.TEXT, 1, False)]), make_batch(TEXT, seed=2)]
    with world_of(layout) as world:
        for sequence_parallel, max_norm in ((False, 0.1), (True, 0.1), (True, 100.0)):
            model, whole = make_model(), make_model()
            parallelize(model, world.mesh, replace(layout, sequence_parallel=sequence_parallel))
            model(batches[world.data_rank]).total.backward()
            sum(whole(batch).total for batch in batches).backward()
            clip_gradients(model.parameters(), max_norm)
            norm = nn.utils.clip_grad_norm_(whole.parameters(), max_norm)
            assert max_norm > 99 or norm > 2 * max_norm
            for (name, parameter), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad, atol=1e-5, rtol=1e-4, msg=name)


def make_model() -> SpeechLM:
    torch.manual_seed(0)
    return SpeechLM(MODEL, TEXT_SIZE, CODEBOOKS, CODES_SIZE, SAMPLES)


def test_gradients_of_divided_layers_are_those_of_whole_ones():
    run_ranks(check_gradients, 4)
