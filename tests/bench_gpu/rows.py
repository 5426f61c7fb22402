"""Rows for a GPU: speed and memory of models, the model's share of a stage's time, selection, precision.

Each row yields lines of figures as soon as they are measured, so a deadline loses only the rest.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal
from unittest import mock

import numpy as np
import soundfile as sf
import soxr
import torch
from bench.encode import save_codec
from bench.speech import in_batches, write_corpus
from support.models import save_mimi, save_titanet
from support.project import Project, codec_stages, stage_of, voice
from transformers import MimiConfig

from sharmill.engine.executor import Listener, StageResult, Unlocked
from sharmill.engine.launch import begin_launch
from sharmill.engine.parent import Rank
from sharmill.engine.plan import read_ledger
from sharmill.engine.run import run_stage
from sharmill.engine.stage import Processor, StageRun
from sharmill.engine.watch import Watcher
from sharmill.engine.work import work
from sharmill.errors import ConfigError
from sharmill.executors.local import LocalExecutor
from sharmill.files.host import usable_cores
from sharmill.match.select import select_context
from sharmill.models import load_codec, load_speaker_encoder
from sharmill.models.batches import pad
from sharmill.models.device import with_precision
from sharmill.models.memory import measure_model, measure_peak

RATE = 22050
# Length of a unit of a large dataset.
UNIT_SECONDS = 1200.0
# Largest batch of encode, because fp32 convolutions take more than half a GiB per second on some GPUs.
ENCODE_BATCH_SECONDS = 120.0
# Numbers of feeders of a rank.
FEEDERS: Final[tuple[int | Literal["auto"], ...]] = (1, 4, 8, "auto")
# Target for the model's share of a stage's time.
LEAST_SHARE = 0.9
ENCODER = "speaker encoder in TitaNet-large's sizes"
CODEC = "codec of NeMo's kind and size"
Line = dict[str, Any]
# Name of a row, the seconds that it needs at least, and the function that yields its lines.
Row = tuple[str, float, Callable[[], Iterator[Line]]]


def save_models(folder: Path, *, is_small: bool) -> dict[str, str]:
    """Write models with random weights, of real or small size, and return their names by their labels in the rows.

    Mimi of real size has the default configuration, which equals kyutai/mimi.
    """
    filters, last_filters, channels = (64, 128, 2) if is_small else (1024, 3072, 48)
    encoder = save_titanet(folder / "titanet.nemo", filters=filters, last_filters=last_filters)
    codec = save_codec(folder / "codec.nemo", base_channels=channels)
    mimi = save_mimi(folder / "mimi", **({} if is_small else MimiConfig().to_dict()))
    return {ENCODER: f"nemo:{encoder}", CODEC: f"nemo:{codec}", "Mimi": f"transformers:{mimi}"}


@dataclass(frozen=True)
class Bench:
    """Device, folder and models of the rows.

    Attributes:
        device: ``cuda`` or ``cpu``.
        folder: folder for files of the rows.
        models: names for a configuration, by their labels in the rows.
    """

    device: str
    folder: Path
    models: dict[str, str]

    @property
    def memory(self) -> int:
        """Memory of the device in bytes."""
        return 4 << 30 if self.device == "cpu" else torch.cuda.get_device_properties(self.device).total_memory

    def load(self, name: str, precision: str = "fp32", device: str | None = None) -> Any:
        """Load a model on a device, by default the measured device."""
        load: Any = load_speaker_encoder if name == ENCODER else load_codec
        return load(self.models[name], device or self.device, precision=precision)


def speed(bench: Bench, name: str) -> Iterator[Line]:
    """Yield speed (hours of audio per hour) and memory of a model alone, by precision and batch size."""
    for precision in ("fp32", "tf32", "bf16"):
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
    """Yield differences of choices between device and CPU, the time compared with a plain product, and the memory."""
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


def _seconds(bench: Bench, work: Callable[[], object], *, repeats: int = 3) -> float:
    """Return the least seconds of some runs after a warm-up."""
    found = []
    for _ in range(1 + repeats):
        started = time.perf_counter()
        work()
        if bench.device != "cpu":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return min(found[1:])


class _InThisProcess(LocalExecutor):
    """Executor with one rank in this process, timed from the moment its model is loaded."""

    seconds = 0.0

    def run(self, stage: StageRun, units: Any, listener: Listener, unlocked: Unlocked = nullcontext) -> StageResult:
        begin_launch(stage, units, 1)
        load, started = stage.declaration.open, 0.0

        def load_first(stage: StageRun, device: str) -> Processor:
            nonlocal started
            processor = load(stage, device)
            started = time.perf_counter()
            return processor

        with mock.patch.object(stage.declaration, "open", load_first):
            work(stage, Rank(0, "here/rank 0", self.device, is_replaced=False), Watcher(stage))
        object.__setattr__(self, "seconds", time.perf_counter() - started)
        return StageResult()


def shares(bench: Bench, count: int, batch_seconds: float) -> Iterator[Line]:
    """Yield the model's share of the time of match and encode, by the number of feeders of the single rank."""
    project = Project(bench.folder / "corpus")
    project.records = write_corpus(project.folder, count, rate=RATE, speakers=max(1, count // 100))
    match = {"encoder": bench.models[ENCODER], "min_similarity": -1.0, "min_duration": 0.0}
    size = {"batch_seconds": batch_seconds, "unit_seconds": UNIT_SECONDS}
    project.prepare(project.configure(match=match))
    for precision in ("fp32", "bf16"):
        config = project.configure(match=match | size | {"precision": precision})
        encoder = bench.load(ENCODER, precision)
        with mock.patch("sharmill.match.stage.load_speaker_encoder", return_value=encoder):
            for line in _shares(bench, stage_of(config, "match"), encoder.embed, project, 16000, batch_seconds):
                yield {"stage": "match", "precision": precision} | line
    # An fp32 codec is slow, so it gets fewer recordings.
    count = max(16, count // 3)
    project = Project(bench.folder / "fewer")
    project.records = write_corpus(project.folder, count, rate=RATE)
    write = {"shard_size": count // 8}
    project.write([(n + count // 2) % count for n in range(count)], match=match, write=write)
    batch_seconds = min(batch_seconds, ENCODE_BATCH_SECONDS)
    for precision in ("fp32", "bf16"):
        codec = bench.load(CODEC, precision)
        name, encode = f"c_{precision}", size | {"batch_seconds": batch_seconds, "precision": precision}
        config = project.configure(
            match=match, write=write, encode=encode | {"codecs": [{"name": name, "model": bench.models[CODEC]}]}
        )
        segments, stage, _ = codec_stages(config, name, bench.models[CODEC])
        assert run_stage(segments, LocalExecutor(1), Listener()).ok
        with mock.patch("sharmill.encode.stage.load_codec", return_value=codec):
            for line in _shares(bench, stage, codec.encode, project, RATE, batch_seconds):
                yield {"stage": "encode", "precision": precision} | line


def _shares(
    bench: Bench, stage: StageRun, run: Callable[..., Any], project: Project, rate: int, batch_seconds: float
) -> Iterator[Line]:
    """Yield the seconds of a stage from its first to its last unit, and of its model alone on the same audio."""

    def load(record: dict[str, Any]) -> np.ndarray:
        return soxr.resample(sf.read(project.root / record["audio_filepath"], dtype="float32")[0], RATE, rate)

    with ThreadPoolExecutor() as pool:
        audio = list(pool.map(load, project.records))
    on_cpu = bench.device == "cpu"
    seconds = min(10.0, batch_seconds) if on_cpu else batch_seconds
    # The first pass does the work that each shape needs only once.
    alone = _seconds(bench, in_batches(run, audio, round(seconds * rate), pinned=not on_cpu), repeats=1)
    heard = sum(record["duration"] for record in project.records)
    for number in FEEDERS:
        executor = _InThisProcess(1, bench.device)
        found = replace(stage, options=replace(stage.options, max_reject_fraction=1.0, feeders=number))
        used = time.process_time()
        assert run_stage(found, executor, Listener(), restart=True).ok
        used = time.process_time() - used
        by_feeders = sum(
            commit.stats["feeder_seconds"] for commit in read_ledger(stage.dir, stage.dir.read_units()).values()
        )
        share = alone / executor.seconds
        yield {
            "feeders": number, "hours": round(heard / 3600, 3), "seconds": round(executor.seconds, 3),
            "model alone": round(alone, 3), "share": round(share, 3), f"share >= {LEAST_SHARE}": share >= LEAST_SHARE,
            "hours per hour": round(heard / executor.seconds),
            "ms of the rank per second": round(1000 * used / heard, 4),
            "ms of feeders per second": round(1000 * by_feeders / heard, 4),
        }  # fmt: skip


def beside_cpu(bench: Bench, name: str) -> Iterator[Line]:
    """Compare the results for six voices on the GPU and on all cores of the CPU."""
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


def beside_nemo(bench: Bench, count: int, batch_seconds: float) -> Iterator[Line]:
    """Yield the speed of NeMo's AudioCodecModel.encode, one by one and in batches, and of sharmill in these batches.

    Both use the same precision, and each line also counts the codes that differ.
    """
    from nemo.collections.tts.models import AudioCodecModel

    theirs = AudioCodecModel.restore_from(bench.models[CODEC].removeprefix("nemo:"), map_location=bench.device).eval()
    rng = np.random.default_rng(3)
    audio = [voice(seconds, RATE, seed=n) for n, seconds in enumerate(rng.uniform(2.0, 10.0, count))]
    audio = [samples.astype(np.float32) for samples in audio]
    heard, on_cpu = sum(map(len, audio)) / RATE, bench.device == "cpu"

    def encode(samples: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
        codes, _ = theirs.encode(audio=samples.to(bench.device), audio_len=num_samples.to(bench.device))
        return codes

    for precision in ("fp32", "tf32", "bf16"):
        try:
            nemo = encode if precision == "fp32" else with_precision(encode, bench.device, precision)
            ours = bench.load(CODEC, precision).encode
        except ConfigError as error:
            yield {"precision": precision, "left out": str(error)}
            continue
        ways = {
            "NeMo one by one": in_batches(nemo, audio, 1, pinned=not on_cpu),
            "NeMo in batches": in_batches(nemo, audio, round(batch_seconds * RATE), pinned=not on_cpu),
            "ours": in_batches(ours, audio, round(batch_seconds * RATE), pinned=not on_cpu),
        }
        seconds = {name: _seconds(bench, work, repeats=1 if on_cpu else 2) for name, work in ways.items()}
        with torch.no_grad():
            pairs = [(nemo(*pad([samples])).cpu(), ours(*pad([samples])).cpu()) for samples in audio[:8]]
        yield {
            "precision": precision, "hours": round(heard / 3600, 3), "batch seconds": batch_seconds,
            "hours per hour": {name: round(heard / found, 1) for name, found in seconds.items()},
            "ours beside one by one": round(seconds["NeMo one by one"] / seconds["ours"], 2),
            "ours beside batches": round(seconds["NeMo in batches"] / seconds["ours"], 2),
            "codes": sum(a.numel() for a, _ in pairs), "differ": sum(int((a != b).sum()) for a, b in pairs),
        }  # fmt: skip


def model_rows(bench: Bench) -> list[Row]:
    """Return the rows of models and stages, the most important first."""
    on_cpu = bench.device == "cpu"
    count, batch_seconds, many = (16, 10.0, 2000) if on_cpu else (2000, 600.0, 100_000)
    models = list(bench.models)
    few, seconds = (4, 20.0) if on_cpu else (64, 60.0)
    return [
        *((f"speed of the {name}", 8.0, partial(speed, bench, name)) for name in models),
        ("share of stages", 10.0 if on_cpu else 90.0, partial(shares, bench, count, batch_seconds)),
        ("selection of contexts", 5.0 if on_cpu else 15.0, partial(selection, bench, many)),
        *((f"{name} beside the CPU", 8.0, partial(beside_cpu, bench, name)) for name in models if not on_cpu),
        ("encode beside NeMo's codec", 10.0 if on_cpu else 45.0, partial(beside_nemo, bench, few, seconds)),
    ]
