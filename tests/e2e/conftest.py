"""Whole pipelines as users start them: the command line in a process of its own, on a small synthetic corpus."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sharmill.demo.corpus import make_corpus

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Four voices, bad records included."""
    return make_corpus(tmp_path_factory.mktemp("corpus") / "corpus", num_voices=4, utterances_per_voice=10)


@pytest.fixture(scope="session")
def encodec(tmp_path_factory):
    """A tiny EnCodec with seeded weights: its classes load faster than NeMo's."""
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


@pytest.fixture
def make_config(corpus, encodec):
    """Returns a function that writes a configuration below a folder, with small units, and returns its path."""

    def make(folder: Path, **changes) -> Path:
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

    return make


def command(*arguments) -> list[str]:
    return [sys.executable, "-m", "sharmill", *map(str, arguments)]


@pytest.fixture
def sharmill():
    """Returns a function that runs the command line to its end: a CompletedProcess with text output."""

    def run(*arguments, **options) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(*arguments), capture_output=True, text=True, timeout=500, check=False, cwd=REPOSITORY, **options
        )

    return run


@pytest.fixture
def start_sharmill():
    """Returns a function that starts the command line in a process group of its own."""
    started: list[subprocess.Popen] = []

    def start(*arguments) -> subprocess.Popen:
        process = subprocess.Popen(
            command(*arguments),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=REPOSITORY,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, 9)
        process.wait()


def digest(directory: Path) -> dict[str, str]:
    """The checksum of every file of a directory, by its relative name."""
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def dataset_digest():
    return digest


def shar_fields(directory: Path, codec: str | None = None) -> dict[str, list[str]]:
    """The files of a dataset as ``lhotse.CutSet.from_shar`` takes them."""
    folders = {"cuts": "cuts", "target_audio": "target_audio", "context_audio": "context_audio"}
    if codec is not None:
        folders |= {name: f"codes_{codec}/{name}" for name in ("target_codes", "context_codes")}
    return {name: [str(path) for path in sorted((directory / folder).iterdir())] for name, folder in folders.items()}


@pytest.fixture
def lhotse_cuts():
    """Returns a function: dataset directory, codec -> the cuts as plain lhotse reads them."""
    from lhotse import CutSet

    def read(directory: Path, codec: str | None = None) -> CutSet:
        return CutSet.from_shar(fields=shar_fields(directory, codec))

    return read
