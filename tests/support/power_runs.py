"""The runs whose power is cut: the pipeline, what comes before, what changes datasets. Models are stand-ins."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch
import torch.distributed.checkpoint

from sharmill.collect.run import ManifestOptions, make_manifest
from sharmill.config import Config, ValidateConfig, to_yaml
from sharmill.engine.listener import Listener
from sharmill.engine.run import Executor
from sharmill.errors import ConfigError
from sharmill.executors.local.executor import LocalExecutor
from sharmill.export.run import export_dataset
from sharmill.grow.append import append_dataset
from sharmill.grow.merge import merge_datasets
from sharmill.grow.split import split_dataset
from sharmill.pilot.calibrate import run_pilot
from sharmill.pipeline import DatasetRun, run_dataset, validate_dataset
from sharmill.shar.layout import TARGET_AUDIO, TARGET_CODES, codes_field, shard_file
from sharmill.shar.rebuild import rebuild_index
from sharmill.shar.sidecars import write_sidecars
from sharmill.validate.findings import encode_report, read_report
from sharmill.validate.redo import take_back_commits
from support.growing import make_dataset
from support.paths import REPOSITORY
from support.power import PoweredRun
from support.power_ranks import ForkedTasks, run_chain
from support.power_ray import forked_actors
from support.shar import PitchEncoder, Project, ToyCodec, put, voice
from support.small_run import STAGES, lasting_files


@contextmanager
def stand_ins() -> Iterator[None]:
    """Makes an encoder that hears pitch and a codec that hears loudness what is loaded; YAML is made once."""
    with (
        mock.patch("sharmill.match.stage.load_speaker_encoder", new=_load_encoder),
        mock.patch("sharmill.encode.stage.load_codec", new=_load_codec),
        mock.patch("sharmill.engine.identity.version", new=_version),
        mock.patch("sharmill.pipeline.to_yaml", new=_to_yaml),
    ):
        yield


def _load_encoder(*arguments: Any) -> PitchEncoder:
    return PitchEncoder()


def _load_codec(*arguments: Any) -> ToyCodec:
    return ToyCodec()


_version = cache(version)
_yamls: dict[int, bytes] = {}


def _to_yaml(config: Config) -> bytes:
    """The text of a configuration, made once: each of them lives as long as the process."""
    if id(config) not in _yamls:
        _yamls[id(config)] = to_yaml(config)
    return _yamls[id(config)]


_TOY = {"name": "toy", "model": "builtin"}
_CODECS = {"encode": {"codecs": [_TOY, {"name": "other", "model": "builtin"}]}}
# Stages without models, so that ranks that are started anew need no stand-ins.
_PLAIN: dict[str, Any] = {"match": None, "encode": {"codecs": []}}
# Shards of other content, and more of them, and a manifest of another name, which must be gone for good.
_OTHER_OUTPUT = {
    "write": {"shard_size": 2, "seed": 1}, "match": {"min_duration": 0.0, "min_similarity": 0.5, "unit_seconds": 0.6},
}  # fmt: skip


def _config(work: Path, changes: dict[str, Any] | None = None) -> Config:
    """The configuration of six utterances of two voices, and of one that is not there, in two shards."""
    return _make_config(work, json.dumps(changes or {}))


@cache
def _make_config(work: Path, changes: str) -> Config:
    project = Project(work.parent)
    is_new = not project.root.exists()
    for number in range(6):
        samples = voice(0.3, pitch=200 + 2 * number, seed=number) if is_new else None
        project.add(f"{number}.wav", samples, duration=0.3, speaker=f"s{number % 2}")
    project.add("absent.wav", duration=0.3)
    project.run_dir, project.dataset = work / "run", work / "dataset"
    values: dict[str, Any] = {
        "prepare": {"min_duration": 0.0, "unit_records": 4}, "match": {"min_duration": 0.0, "unit_seconds": 0.6},
        "write": {"shard_size": 3}, "encode": {"codecs": [_TOY]}, "executor": {"workers": 1, "device": "cpu"},
    }  # fmt: skip
    return project.configure(**values | json.loads(changes))


def _run_all(
    work: Path, changes: dict[str, Any] | None = None, *, restart: bool = False, executor: Executor | None = None
) -> None:
    with stand_ins():
        result = run_dataset(_config(work, changes), Listener(), restart=restart, executor=executor)
    assert result.ok
    assert result.report is not None
    assert result.report.findings == []


def _run_on_ray(work: Path) -> None:
    with forked_actors() as executor:
        _run_all(work, executor=executor)


def _damage(work: Path, field: str) -> None:
    """Leaves a finished dataset with a damaged shard of a field, and the report about it."""
    _run_all(work)
    shard = work / "dataset" / shard_file(field, 1)
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
    with stand_ins():
        for name in stages:
            assert run_dataset(_config(work), Listener(), stages=[name]).ok


def _submit(work: Path, *, is_forking: bool = False) -> None:
    with stand_ins(), mock.patch.object(DatasetRun, "show"):
        run_chain(DatasetRun(_config(work)), is_forking=is_forking)


def _put_speech(work: Path) -> None:
    """Leaves three recordings of two speakers, two of them with texts, and a file that is none."""
    for name in ("anna/one", "anna/two", "ben/three"):
        put(work / f"speech/{name}.wav", voice(0.3, seed=len(name)))
        (work / f"speech/{name}.txt").write_text(f"the text of {name}\n")
    (work / "speech/ben/three.txt").unlink()
    (work / "speech/ben/four.wav").write_bytes(b"no audio")


def _collect(work: Path) -> None:
    with _unless_done():
        options = ManifestOptions(keys={"speaker": "{path[0]}", "language": "en"}, vocabulary=str(work / "words.txt"))
        make_manifest([str(work / "speech")], str(work / "speech.json"), options, Listener(), workers=1)


def _calibrate(work: Path) -> None:
    """A pilot."""
    with stand_ins():
        run_pilot(_config(work), size=4, measure=False)


def _done_by_jobs(work: Path) -> dict[str, bytes]:
    """The files of a run, without its random id."""
    return {name: data for name, data in lasting_files(work).items() if name != "run/id"}


def _calibration(work: Path) -> dict[str, bytes]:
    """The outcome of the pilot without the rates, which are measured."""
    calibration = msgspec.json.decode((work / "run/calibration.json").read_bytes())
    del calibration["rates"]
    return {"run/calibration.json": msgspec.json.encode(calibration)}


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


def _train_example(work: Path, steps: int) -> None:
    """The training of examples/train.py, two steps at a time, until its checkpoint is that of so many steps."""
    while (done := _example_steps(work)) < steps:
        with redirect_stdout(StringIO()):
            runpy.run_path(str(REPOSITORY / "examples/train.py"))["main"](str(work / "a"), work / "model.pt", 2)
        assert _example_steps(work) == done + 2


def _begin_example(work: Path) -> None:
    """Leaves a dataset, and a checkpoint of two steps."""
    _make_datasets(work)
    _train_example(work, 2)


def _example_steps(work: Path) -> int:
    if not (work / "model.pt").exists():
        return 0
    state = torch.load(work / "model.pt", weights_only=True)
    return int(state["optimizer"]["state"][0]["step"])


def _trained_example(work: Path) -> dict[str, bytes]:
    """The checkpoint, whose file has names of its own run in it."""
    state = torch.load(work / "model.pt", weights_only=True)
    return {"model.pt": f"{state['model']} {state['optimizer']}".encode()}


# Those of the fewest steps first: what they leave of their time is the others'.
RUNS = [
    PoweredRun("index", _lose_index, lambda work: list(rebuild_index(work / "a")), "a"),
    PoweredRun("append", _make_datasets, lambda work: append_dataset(work / "a", work / "b"), "ab"),
    PoweredRun("merge", _make_datasets, _merge, "abc"),
    PoweredRun("sidecars", _make_datasets, lambda work: write_sidecars(work / "a"), "a"),
    PoweredRun("export", _make_datasets, lambda work: export_dataset(work / "a", "nemo_codes", work / "x"), "a"),
    PoweredRun("calibrate", lambda work: None, _calibrate, outcome=_calibration),
    PoweredRun("train", lambda work: None, _train, outcome=_trained),
    PoweredRun("train example", _begin_example, lambda work: _train_example(work, 4), "a", outcome=_trained_example),
    PoweredRun("manifest", _put_speech, _collect),
    *(_of_stage(name, *STAGES[:number]) for number, name in enumerate(STAGES)),
    PoweredRun("split", _make_datasets, _split, ["a", "s/train", "s/valid"]),
    PoweredRun("redo", lambda work: _damage(work, TARGET_AUDIO), _redo, ["dataset"]),
    PoweredRun("redo codes", lambda work: _damage(work, codes_field("toy", TARGET_CODES)), _redo, ["dataset"]),
    PoweredRun("findings", lambda work: _damage(work, TARGET_AUDIO), lambda work: _run_stages(work, "validate")),
    PoweredRun("add codec", _run_all, lambda work: _run_all(work, _CODECS), ["dataset"], "toy"),
    PoweredRun("workers", lambda work: None, lambda work: _run_all(work, _PLAIN), ["dataset"],
               recorded=lambda work: _run_all(work, _PLAIN, executor=LocalExecutor(2, "cpu"))),
    PoweredRun("ray", lambda work: None, _run_all, ["dataset"], recorded=_run_on_ray),
    PoweredRun("array tasks", lambda work: None, _run_all, ["dataset"],
               recorded=lambda work: _run_all(work, executor=ForkedTasks())),
    PoweredRun("chain of jobs", lambda work: None, _submit, ["dataset"], outcome=_done_by_jobs,
               recorded=lambda work: _submit(work, is_forking=True)),
    PoweredRun("pipeline", lambda work: None, _run_all, ["dataset"]),
    PoweredRun("restart", lambda work: _run_all(work, _OTHER_OUTPUT), lambda work: _run_all(work, restart=True),
               ["dataset"]),
]  # fmt: skip
