"""The runs whose power is cut: the pipeline, and what changes a finished dataset. The models are stand-ins."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint

from sharmill.config import Config, ValidateConfig
from sharmill.engine.listener import Listener
from sharmill.errors import ConfigError
from sharmill.grow.append import append_dataset
from sharmill.grow.merge import merge_datasets
from sharmill.grow.split import split_dataset
from sharmill.pipeline import run_dataset, validate_dataset
from sharmill.shar.layout import TARGET_AUDIO, shard_file
from sharmill.shar.rebuild import rebuild_index
from sharmill.shar.sidecars import write_sidecars
from sharmill.validate.findings import encode_report, read_report
from sharmill.validate.redo import take_back_commits
from support.growing import make_dataset
from support.paths import REPOSITORY
from support.power import PoweredRun
from support.shar import PitchEncoder, Project, ToyCodec, voice
from support.small_run import STAGES


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Makes an encoder that hears pitch and a codec that hears loudness what is loaded, and looks for versions once."""
    with (
        mock.patch("sharmill.match.stage.load_speaker_encoder", new=_load_encoder),
        mock.patch("sharmill.encode.stage.load_codec", new=_load_codec),
        mock.patch("sharmill.engine.identity.version", new=_version),
    ):
        yield


def _load_encoder(*arguments: Any) -> PitchEncoder:
    return PitchEncoder()


def _load_codec(*arguments: Any) -> ToyCodec:
    return ToyCodec()


_version = cache(version)


@cache
def _config(work: Path, **write: Any) -> Config:
    """The configuration of six utterances of two voices, and of one that is not there, in two shards."""
    project = Project(work.parent)
    is_new = not project.root.exists()
    for number in range(6):
        samples = voice(0.3, pitch=200 + 2 * number, seed=number) if is_new else None
        project.add(f"{number}.wav", samples, duration=0.3, speaker=f"s{number % 2}")
    project.add("absent.wav", duration=0.3)
    project.run_dir, project.dataset = work / "run", work / "dataset"
    return project.configure(
        prepare={"min_duration": 0.0, "unit_records": 4}, match={"min_duration": 0.0, "unit_seconds": 0.6},
        write={"shard_size": 3} | write, encode={"codecs": [{"name": "toy", "model": "builtin"}]},
        executor={"workers": 1, "device": "cpu"},
    )  # fmt: skip


def _run_all(work: Path, *, restart: bool = False, **write: Any) -> None:
    with _stand_ins():
        result = run_dataset(_config(work, **write), Listener(), restart=restart)
    assert result.ok
    assert result.report is not None
    assert result.report.findings == []


def _damage(work: Path) -> None:
    """Leaves a finished dataset with a damaged shard, and the report about it."""
    _run_all(work)
    shard = work / "dataset" / shard_file(TARGET_AUDIO, 1)
    shard.write_bytes(bytes(shard.stat().st_size))
    report = validate_dataset(work / "dataset", work.parent / "scratch", Listener(), ValidateConfig(), workers=1)
    assert report.errors
    (work.parent / "report.json").write_bytes(encode_report(report))


def _redo(work: Path) -> None:
    config = _config(work)
    take_back_commits(config, read_report(work.parent / "report.json"), config.stages)
    _run_all(work)


def _make_datasets(work: Path) -> None:
    """Leaves two datasets of four cuts in two shards, with codes."""
    for name in "ab":
        made = make_dataset(work.parent / name, name, codecs="t")
        shutil.copytree(made.dataset, work / name)


@contextmanager
def _unless_done() -> Iterator[None]:
    """Lets what is done already be refused: the bytes that are there are compared in any case."""
    try:
        yield
    except ConfigError as error:
        if error.code != "foreign_output":
            raise


def _merge(work: Path) -> None:
    with _unless_done():
        merge_datasets([work / "a", work / "b"], work / "c")


def _split(work: Path) -> None:
    with _unless_done():
        split_dataset(work / "a", work / "s", {"valid": 0.4}, workers=1)


def _lose_index(work: Path) -> None:
    _make_datasets(work)
    (work / "a/shards.jsonl").unlink()


def _run_stages(work: Path, *stages: str) -> None:
    with _stand_ins():
        for name in stages:
            assert run_dataset(_config(work), Listener(), stages=[name]).ok


def _of_stage(name: str, *before: str) -> PoweredRun:
    """The run of one stage, behind those that are named."""
    datasets = [] if name in ("prepare", "match") else ["dataset"]
    return PoweredRun(name, lambda work: _run_stages(work, *before), lambda work: _run_stages(work, name), datasets)


def _train(work: Path) -> None:
    """Three steps of a training that saves its model after each, and goes on from what was saved."""
    sys.path.insert(0, str(REPOSITORY / "jobs"))
    from train_checkpoints import Checkpoints
    from train_config import TrainConfig
    from train_world import world_of

    with world_of(TrainConfig(dataset="", out_dir=str(work), device="cpu")) as world:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        checkpoints = Checkpoints(work, 2, world)
        facts = {"seed": 0, "sizes": {}, "data_kind": "none", "data": None}
        if (record := checkpoints.read_record()) is not None:
            checkpoints.load(model, optimizer, record["files"])
        for step in range(record["step"] if record else 0, 3):
            model(torch.full((1, 4), float(step))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.save(model, optimizer, facts | {"step": step + 1})


def _trained(work: Path) -> dict[str, bytes]:
    """The records and the weights of the last two checkpoints, whose files have ids of their own."""
    found = {}
    for path in sorted((work / "checkpoints").iterdir())[-2:]:
        weights = torch.nn.Linear(4, 4).state_dict()
        torch.distributed.checkpoint.load({"model": weights}, checkpoint_id=path, no_dist=True)
        record = json.loads((path / "record.json").read_text())
        # Their checksums are looked at when they are loaded.
        del record["files"]
        found[path.name] = f"{record} {weights}".encode()
    return found


# Those of the fewest steps first: what they leave of their time is the others'.
RUNS = [
    PoweredRun("index", _lose_index, lambda work: list(rebuild_index(work / "a")), "a"),
    PoweredRun("append", _make_datasets, lambda work: append_dataset(work / "a", work / "b"), "ab"),
    PoweredRun("merge", _make_datasets, _merge, "abc"),
    PoweredRun("sidecars", _make_datasets, lambda work: write_sidecars(work / "a"), "a"),
    PoweredRun("train", lambda work: None, _train, outcome=_trained),
    *(_of_stage(name, *STAGES[:number]) for number, name in enumerate(STAGES)),
    PoweredRun("split", _make_datasets, _split, ["a", "s/train", "s/valid"]),
    PoweredRun("redo", _damage, _redo, ["dataset"]),
    PoweredRun("pipeline", lambda work: None, _run_all, ["dataset"]),
    PoweredRun("restart", lambda work: _run_all(work, seed=1), lambda work: _run_all(work, restart=True), ["dataset"]),
]
