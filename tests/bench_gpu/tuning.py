"""Rows for ``sharmill tune-batch`` on a GPU: NeMo's SALM with its own step, and a codec with a user step."""

import gc
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from subprocess import run
from typing import Any

import torch
import yaml
from support.models import model_settings, save_models

from bench_gpu.codec_step import CODEC_FILE, CodecStep
from bench_gpu.rows import CODEC, Bench, Line, Row

# Memory limit that allows batches of usual size, and is filled quickly.
GPU_MEMORY = "40GiB"
CPU_MEMORY = "4GiB"
# A language model of 0.3 billion parameters, and the encoder of FastConformer-large.
LLM = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_key_value_heads": 4,
}  # fmt: skip
ENCODER = {"n_layers": 17, "d_model": 512, "n_heads": 8, "ff_expansion_factor": 4, "conv_kernel_size": 9}
# Least and largest time of one search.
SECONDS, MOST_SECONDS = 60.0, 80.0
TESTS = Path(__file__).parents[1]


def tune_salm(bench: Bench) -> Iterator[Line]:
    """Yield the largest batches of a SALM in bf16, for speech of up to 5, 10 and 20 seconds."""
    on_cpu, folder = bench.device == "cpu", bench.folder / "salm"
    folder.mkdir()
    llm, encoder = ({}, {}) if on_cpu else (LLM, ENCODER)
    settings = model_settings(save_models(folder, llm=llm, encoder=encoder), **encoder)
    # Use one layer between the encoder and the language model.
    settings["perception"]["modality_adapter"]["n_layers"] = 1
    (folder / "salm.yaml").write_text(yaml.safe_dump({"model": settings}))
    step = ["--module-name", "nemo.collections.speechlm2.models.SALM", "--config-path", str(folder / "salm.yaml")]
    yield _tune(bench, [*step, "--bins", "[1.0, 2.0]" if on_cpu else "[5.0, 10.0, 20.0]"])


def tune_codec(bench: Bench) -> Iterator[Line]:
    """Yield the largest batches of a codec in torch's default precision, for segments of up to 1, 2 and 4 seconds."""
    bins = "[0.2, 0.4]" if bench.device == "cpu" else "[1.0, 2.0, 4.0]"
    step = f"{CodecStep.__module__}:{CodecStep.__name__}"
    yield _tune(bench, ["--step", step, "--bins", bins])


def _tune(bench: Bench, options: list[str]) -> Line:
    """Run the command, and return the batches that it found and the number of sizes that it tried."""
    on_cpu = bench.device == "cpu"
    if not on_cpu:  # free the memory of other rows
        gc.collect()
        torch.cuda.empty_cache()
    limits = ["--max-batch-size", "2"] if on_cpu else ["--tolerance", "0.1"]
    memory, seconds = (CPU_MEMORY, 10 * MOST_SECONDS) if on_cpu else (GPU_MEMORY, MOST_SECONDS)
    where = ["--device", "cpu" if on_cpu else "cuda:0", "--memory", memory, "--timeout", f"{seconds:g}", *limits]
    environment = os.environ | {"PYTHONPATH": str(TESTS), CODEC_FILE: bench.models[CODEC].removeprefix("nemo:")}
    command = [sys.executable, "-m", "sharmill", "tune-batch", *options, *where]
    started = time.perf_counter()
    done = run(command, capture_output=True, text=True, check=False, timeout=seconds, env=environment)
    if done.returncode:
        raise RuntimeError(f"tune-batch ended with {done.returncode}: {done.stderr[-4000:]}")
    found: dict[str, Any] = yaml.safe_load(done.stdout)
    tried = [line.strip() for line in done.stderr.splitlines() if line.startswith("  ")]
    return {
        "memory": memory, "bins": found["bucket_duration_bins"], "batch sizes": found["bucket_batch_size"],
        "sizes tried": len(tried), "too large": sum("does not" in line for line in tried),
        "seconds": round(time.perf_counter() - started, 1),
    }  # fmt: skip


def tuning_rows(bench: Bench) -> list[Row]:
    """Return the rows with the least seconds that each needs."""
    return [
        ("tune-batch of a codec", SECONDS, partial(tune_codec, bench)),
        ("tune-batch of a SALM", SECONDS, partial(tune_salm, bench)),
    ]
