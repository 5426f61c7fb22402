"""Rows for a GPU: speed and memory of models, the model's share of a stage's time, selection, precision.

Each yields lines of figures as it finds them, so that what a deadline cuts off is the rest.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import soundfile as sf
import torch
from support.manifests import speaker_tag
from support.shar import Project, codec_stages, voice

from bench_gpu.models import CODEC, ENCODER
from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import Finished
from sharmill.engine.rejects import RejectLimit
from sharmill.engine.run import run_stage
from sharmill.engine.stage import Stage
from sharmill.engine.worker import Worker
from sharmill.errors import ConfigError
from sharmill.executors.local.executor import LocalExecutor
from sharmill.executors.unit_queue import UnitQueue
from sharmill.match.select import select_context
from sharmill.match.stage import MatchStage
from sharmill.models import load_codec, load_speaker_encoder
from sharmill.models.measure import measure_model
from sharmill.models.memory import measure_peak
from sharmill.models.protocols import pad, padded_batches
from sharmill.processes import usable_cores

RATE = 22050
# Of a large dataset.
UNIT_SECONDS = 1200.0
# Of the time of a stage that its model should take: the target.
LEAST_SHARE = 0.9
# What a part of a row may take.
LEAST_SECONDS = 8.0
Line = dict[str, Any]
# Audio (rows, samples) and the rows' lengths.
Batched = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Bench:
    """What the rows work with.

    Attributes:
        device: ``cuda`` or ``cpu``.
        folder: for their files.
        models: names for a configuration, by what the rows call them.
        left: returns the seconds until the deadline.
    """

    device: str
    folder: Path
    models: dict[str, str]
    left: Callable[[], float]

    @property
    def memory(self) -> int:
        """The bytes of memory of the device."""
        return 4 << 30 if self.device == "cpu" else torch.cuda.get_device_properties(self.device).total_memory

    def load(self, name: str, precision: str = "fp32", device: str | None = None) -> Any:
        """Load a model on a device, by default the one that is measured."""
        load: Any = load_speaker_encoder if name == ENCODER else load_codec
        return load(self.models[name], device or self.device, (), precision)


def speed(bench: Bench, name: str) -> Iterator[Line]:
    """Yield hours of audio per hour of a model alone in each precision, in batches of several sizes, and its memory."""
    for precision in ("fp32", "tf32", "bf16"):
        if bench.left() < LEAST_SECONDS:
            yield {"precision": precision, "left out": "no time is left"}
            continue
        try:
            model = bench.load(name, precision)
        except ConfigError as error:
            yield {"precision": precision, "left out": str(error)}
            continue
        found = measure_model(model, bench.device, bench.memory)
        if found.best_size is None:
            yield {"precision": precision, "left out": "no batch fits"}
            continue
        yield {
            "precision": precision, "hours per hour": round(found.speeds[found.best_size]),
            "batch seconds": found.best_size, "MiB per second": round(found.bytes_per_second / 2**20, 1),
            "by batch seconds": {size: round(rate) for size, rate in found.speeds.items()},
        }  # fmt: skip


def selection(bench: Bench, num_rows: int) -> Iterator[Line]:
    """Yield the choices on the device beside those on the CPU, its time beside a plain product, and its memory."""
    rng = np.random.default_rng(7)
    voices = rng.normal(size=(40, 192))[rng.integers(40, size=num_rows)]
    rows = torch.from_numpy(voices + 0.7 * rng.normal(size=(num_rows, 192)))
    durations = rng.uniform(1.0, 9.0, num_rows)
    limits: dict[str, Any] = {"min_similarity": 0.6, "min_duration": 3.0}
    there = rows.to(bench.device)
    few = min(num_rows, 5000)
    chosen = [np.asarray(select_context(part[:few], durations[:few], **limits)[0]) for part in (rows, there)]
    yield {"utterances": few, "choices that differ from the CPU": int((chosen[0] != chosen[1]).sum())}
    candidates = there[torch.from_numpy(durations >= limits["min_duration"]).to(bench.device)].T.contiguous()

    def product() -> None:
        block = max(64, 2**27 // candidates.shape[1])
        for start in range(0, num_rows, block):
            there[start : start + block] @ candidates

    select = partial(select_context, there, durations, **limits)
    peak = measure_peak(select, bench.device)
    seconds = {name: _seconds(bench, work) for name, work in (("select", select), ("matmul", product))}
    yield {
        "utterances": num_rows, "seconds": round(seconds["select"], 4),
        "of plain matmul": round(seconds["matmul"] / seconds["select"], 3), "MiB above": round(peak / 2**20),
    }  # fmt: skip


def _seconds(bench: Bench, work: Callable[[], object]) -> float:
    """Return the least seconds of three runs, after one that warms up."""
    found = []
    for _ in range(4):
        started = time.perf_counter()
        work()
        if bench.device != "cpu":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return min(found[1:])


class _InThisProcess(LocalExecutor):
    """One rank on a device in this process, whose time is kept from when its model is loaded."""

    seconds = 0.0

    def run(self, stage: Stage, units: Any, rejects: RejectLimit, listener: Listener) -> Finished:
        if not stage.uses_gpu:
            return super().run(stage, units, rejects, listener)
        queue = UnitQueue(units, rejects, listener)
        with Worker(stage, 0, self.device, in_driver=True) as worker:
            started = time.perf_counter()
            while unit := queue.take():
                outcome: Any = worker.run(unit, queue.following())
                if hasattr(outcome, "message"):
                    raise RuntimeError(outcome.message)
                queue.done(unit, outcome)
            object.__setattr__(self, "seconds", time.perf_counter() - started)
        return Finished(queue.failures)


def make_corpus(folder: Path, count: int) -> Project:
    """Write seeded FLAC recordings of 2 to 10 s, none of which equals another; one speaker to 100."""
    project = Project(folder)
    project.root.mkdir(parents=True)
    rng = np.random.default_rng(1)
    noise = np.convolve(rng.normal(size=60 * RATE), np.hanning(24) / 12, "same")
    speech = (0.1 * noise * np.abs(np.sin(np.arange(len(noise)) * 2 * np.pi * 3 / RATE))).astype(np.float32)
    lengths, starts = (rng.uniform(2, 10, count) * RATE).astype(int), rng.integers(0, 50 * RATE, count)

    def write(number: int) -> dict[str, Any]:
        samples, name = speech[starts[number] : starts[number] + lengths[number]], f"{number:05d}.flac"
        sf.write(project.root / name, samples, RATE, subtype="PCM_16")
        speaker = speaker_tag(f"speaker{number // 100}")
        return {"audio_filepath": name, "duration": len(samples) / RATE, "speaker": speaker, "text": f"text {number}"}

    with ThreadPoolExecutor() as pool:
        project.records = list(pool.map(write, range(count)))
    return project


def shares(bench: Bench, count: int, batch_seconds: float) -> Iterator[Line]:
    """Yield the model's share of the time of match and of encode, decoding and all else included, one rank."""
    project = make_corpus(bench.folder / "corpus", count)
    hours = sum(record["duration"] for record in project.records) / 3600
    names = [record["audio_filepath"] for record in project.records]
    match = {"encoder": bench.models[ENCODER], "min_similarity": -1.0, "min_duration": 0.0}
    config = project.configure(
        match=match | {"batch_seconds": batch_seconds, "unit_seconds": UNIT_SECONDS},
        write={"shard_size": count // 8},
    )
    project.prepare(config)
    for precision in ("fp32", "bf16"):
        if bench.left() < LEAST_SECONDS:
            yield {"stage": "match", "precision": precision, "left out": "no time is left"}
            continue
        changed = dataclasses.replace(config, match=dataclasses.replace(config.match, precision=precision))
        encoder = bench.load(ENCODER, precision)
        with mock.patch("sharmill.match.stage.load_speaker_encoder", return_value=encoder):
            yield {"stage": "match", "precision": precision, "hours": round(hours, 3)} | _share(
                bench, MatchStage(changed), encoder.embed, _load(project, names, 16000), 16000, hours, batch_seconds
            )
    project.write([(n + count // 2) % count for n in range(count)], match=match, write={"shard_size": count // 8})
    for precision in ("fp32", "bf16"):
        if bench.left() < LEAST_SECONDS:
            yield {"stage": "encode", "precision": precision, "left out": "no time is left"}
            continue
        codec = bench.load(CODEC, precision)
        changed = project.configure(
            match=match, write={"shard_size": count // 8},
            encode={"codecs": [{"name": f"c_{precision}", "model": bench.models[CODEC]}], "precision": precision,
                    "batch_seconds": batch_seconds, "unit_seconds": UNIT_SECONDS},
        )  # fmt: skip
        survey, encode, _ = codec_stages(changed, f"c_{precision}", bench.models[CODEC])
        assert run_stage(survey, LocalExecutor(1), Listener(), max_reject_fraction=1.0).ok
        with mock.patch("sharmill.encode.stage.load_codec", return_value=codec):
            yield {"stage": "encode", "precision": precision, "hours": round(hours, 3)} | _share(
                bench, encode, codec.encode, _load(project, names, RATE), RATE, hours, batch_seconds
            )
    shutil.rmtree(project.folder)


def _load(project: Project, names: list[str], rate: int) -> list[np.ndarray]:
    import soxr

    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda name: soxr.resample(sf.read(project.root / name, dtype="float32")[0], RATE, rate),
                             names))  # fmt: skip


def _share(
    bench: Bench, stage: Stage, run: Callable[..., Any], audio: list[np.ndarray], rate: int, hours: float,
    batch_seconds: float,
) -> Line:  # fmt: skip
    """Return the seconds of a stage from its first unit to its last, and those of its model on the same audio."""
    seconds = batch_seconds if bench.device != "cpu" else min(10.0, batch_seconds)
    batches = padded_batches([len(samples) for samples in audio], seconds * rate)
    padded = [pad([audio[index] for index in batch], pinned=bench.device != "cpu") for batch in batches]
    # The first pass makes what each shape needs once.
    for _ in range(2):
        started = time.perf_counter()
        for batch in padded:
            run(*batch)
        if bench.device != "cpu":
            torch.cuda.synchronize()
        alone = time.perf_counter() - started
    executor = _InThisProcess(1, bench.device)
    assert run_stage(stage, executor, Listener(), max_reject_fraction=1.0, restart=True).ok
    share = alone / executor.seconds
    return {
        "seconds": round(executor.seconds, 3), "model alone": round(alone, 3), "share": round(share, 3),
        f"share >= {LEAST_SHARE}": share >= LEAST_SHARE, "hours per hour": round(hours / executor.seconds * 3600),
    }  # fmt: skip


def beside_cpu(bench: Bench, name: str) -> Iterator[Line]:
    """Compare what six voices give on the GPU and on the CPU, which has all its cores for it."""
    torch.set_num_threads(usable_cores())
    found = []
    for device in ("cpu", bench.device):
        model = bench.load(name, device=device)
        run = model.embed if name == ENCODER else model.encode
        voices = [voice(2.0, model.sampling_rate, 100.0 + 40 * seed, seed) for seed in range(6)]
        found.append([run(*pad([samples])).cpu() for samples in voices])
    torch.set_num_threads(1)
    pairs = list(zip(*found, strict=True))
    if name == ENCODER:
        yield {"way": "GPU beside CPU, fp32", "lowest cosine": min(float((a * b).sum()) for a, b in pairs)}
        return
    compared, differ = sum(a.numel() for a, _ in pairs), sum(int((a != b).sum()) for a, b in pairs)
    yield {"way": "GPU beside CPU, fp32", "codes": compared, "differ": differ, "share": round(differ / compared, 5)}


def left_out() -> Iterator[Line]:
    """Name what cannot be measured here, and why."""
    yield {"left out": "NeMo's own TitaNet-large and AudioCodecModel, with their weights: they need nemo_toolkit"}


def all_rows(bench: Bench) -> list[tuple[str, float, Callable[[], Iterator[Line]]]]:
    """Return the rows, with the seconds that each needs at least, in the order of what matters most."""
    on_cpu = bench.device == "cpu"
    count, batch_seconds, many = (16, 10.0, 2000) if on_cpu else (2000, 600.0, 100_000)
    models = list(bench.models)
    return [
        *((f"speed of the {name}", 8.0, partial(speed, bench, name)) for name in models),
        ("model's share of stages", 10.0 if on_cpu else 90.0, partial(shares, bench, count, batch_seconds)),
        ("selection of contexts", 5.0 if on_cpu else 15.0, partial(selection, bench, many)),
        *((f"{name} beside the CPU", 8.0, partial(beside_cpu, bench, name)) for name in models if not on_cpu),
        ("not measured", -math.inf, left_out),
    ]
