"""A real SLURM. The tests skip where there is none; ``tmp_path`` is on the only machine, so all nodes share it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from toy_cluster import REPOSITORY, SleepyStage, ToyChain, cancel_all, make_profile

from sharmill.config import to_config
from sharmill.executors.profile import ClusterProfile


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_not()
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("slurm") and reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_not() -> str:
    if shutil.which("sbatch") is None:
        return "there is no SLURM here: sbatch is not installed"
    pinged = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, check=False, timeout=60)
    if pinged.returncode != 0 or "is UP" not in pinged.stdout:
        return f"SLURM's controller does not answer: {' '.join((pinged.stdout + pinged.stderr).split())}"
    shown = subprocess.run(["sinfo", "--noheader", "--format=%P"], capture_output=True, text=True, check=False)
    if not {"cpu*", "scavenge", "gpu"} <= set(shown.stdout.split()):
        return "this is not the test cluster: it lacks the partitions cpu, scavenge and gpu"
    return ""


@pytest.fixture
def jobs_folder(tmp_path):
    """Where the jobs of a test lie; none is left behind."""
    folder = tmp_path / "run" / "jobs"
    yield folder
    cancel_all(folder)


@pytest.fixture
def make_chain(tmp_path, jobs_folder) -> Callable[..., ToyChain]:
    """Returns a function: options of the stage, ``profile`` -> a chain over a toy stage in the test's folder."""

    def make(*, profile: ClusterProfile | None = None, **options: Any) -> ToyChain:
        config = to_config(
            {
                "name": "toy",
                "run_dir": str(tmp_path / "run"),
                "dataset_dir": str(tmp_path / "out"),
                "sources": [{"manifest": "m.json", "audio_root": "."}],
            },
            "test",
        )
        return ToyChain(config, ("toy",), profile or make_profile(), stage=SleepyStage(tmp_path, **options))

    return make


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Four voices, bad records included."""
    from sharmill.demo.corpus import make_corpus

    return make_corpus(tmp_path_factory.mktemp("corpus") / "corpus", num_voices=4, utterances_per_voice=6)


@pytest.fixture(scope="session")
def encodec(tmp_path_factory):
    """A tiny EnCodec with seeded weights."""
    import torch
    from transformers import EncodecConfig, EncodecModel

    folder = tmp_path_factory.mktemp("models") / "encodec"
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = EncodecConfig(
            num_filters=4, hidden_size=16, codebook_size=64, codebook_dim=16, upsampling_ratios=[8, 5, 4, 2],
            target_bandwidths=[1.5], num_lstm_layers=1,
        )  # fmt: skip
        EncodecModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def write_config(corpus, encodec) -> Callable[..., Path]:
    """Returns a function that writes a configuration below a folder, with small units, and returns its path."""

    def write(folder: Path, **changes: Any) -> Path:
        values = {
            "name": "small",
            "run_dir": str(folder / "run"),
            "dataset_dir": str(folder / "dataset"),
            "sources": [{"manifest": str(corpus.manifest), "audio_root": str(corpus.audio_root)}],
            "prepare": {"unit_records": 10},
            "match": {"unit_seconds": 30.0},
            "write": {"shard_size": 8},
            "encode": {"codecs": [{"name": "tiny", "model": f"transformers:{encodec}"}]},
            "executor": {"workers": 1},
        }
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(values | changes))
        return path

    return write


@pytest.fixture
def make_config(write_config):
    """The function ``write_config``; the jobs of its datasets are ended with the test."""
    folders = []

    def make(folder: Path, **changes: Any) -> Path:
        folders.append(folder / "run" / "jobs")
        return write_config(folder, **changes)

    yield make
    for folder in folders:
        cancel_all(folder)


@pytest.fixture(scope="session")
def sharmill():
    """Returns a function that runs the command line to its end: a CompletedProcess with text output."""

    def call(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sharmill", *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=500, check=False, cwd=REPOSITORY, **options
        )

    return call
