"""A real SLURM. The tests skip where there is none; ``tmp_path`` is on the only machine, so all nodes share it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from toy_chain import SleepyStage, ToyChain
from toy_stage import output_bytes, run, wait_until

from sharmill.chain import ChainState, wait_for_end
from sharmill.config import to_config
from sharmill.engine.ledger import read_ledger
from sharmill.engine.plan import load
from sharmill.engine.run import read_totals
from sharmill.executors.profile import ClusterProfile, RankProfile
from sharmill.executors.slurm_queue import cancel, queued_jobs

REPOSITORY = Path(__file__).parents[2]
KILL_NODE = REPOSITORY.parent / "shared" / "slurm" / "kill_node.sh"
# What the toy stages are imported from in the jobs.
SETUP = [f"export PYTHONPATH={REPOSITORY}/tests/slurm:{REPOSITORY}/tests/engine", "export OMP_NUM_THREADS=1"]


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


def slurm(*command: Any) -> str:
    """What a SLURM command prints."""
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout


def make_profile(**changes: Any) -> ClusterProfile:
    """Four ranks that need little; ``partition`` and the other values of ranks go to them."""
    cluster = {key: changes.pop(key) for key in list(changes) if key in ClusterProfile.__dataclass_fields__}
    ranks = RankProfile(**({"partition": "cpu", "max_ranks": 4, "memory_gb": 0.25, "timeout_min": 60} | changes))
    return ClusterProfile(**({"cpu": ranks, "gpu": replace(ranks), "signal_s": 30, "setup": SETUP} | cluster))


@pytest.fixture
def jobs_folder(tmp_path):
    """Where the jobs of a test lie; none is left behind."""
    folder = tmp_path / "run" / "jobs"
    yield folder
    _cancel_all(folder)


def _cancel_all(folder: Path) -> None:
    cancel([job.id for job in queued_jobs(folder)])
    wait_until(lambda: not queued_jobs(folder), 60)


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


def finish(chain: ToyChain) -> ChainState:
    """Waits for the end of a chain that has been started."""
    return wait_for_end(chain)


def assert_same_as_local(chain: ToyChain, folder: Path) -> None:
    """The output has the bytes of an undisturbed local run, every unit is in the ledger, and the accounts add up."""
    stage = chain.stage
    assert stage is not None
    reference = SleepyStage(folder / "reference", units=stage.units)
    run(reference)
    assert output_bytes(stage) == output_bytes(reference)
    units = load(stage)
    assert sorted(read_ledger(stage.dir.ledger, units)) == list(range(stage.units))
    assert read_totals(stage) == read_totals(reference)


def running_ranks(chain: ToyChain) -> list[str]:
    """The tasks of the ranks' array that run."""
    return [job.id for job in queued_jobs(chain.run_dir.jobs) if job.state == "RUNNING" and "_" in job.id]


def wait_for_units(chain: ToyChain, count: int, seconds: float = 90.0) -> None:
    """Returns when at least ``count`` units are in the ledger."""
    assert chain.stage is not None
    stage = chain.stage
    wait_until(lambda: stage.dir.units.exists() and len(read_ledger(stage.dir.ledger, load(stage))) >= count, seconds)


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


@pytest.fixture
def make_config(corpus, encodec):
    """Returns a function that writes a configuration below a folder, with small units, and returns its path."""

    folders = []

    def make(folder: Path, **changes: Any) -> Path:
        values = {
            "name": folder.name,
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
        folders.append(folder / "run" / "jobs")
        return path

    yield make
    for folder in folders:
        _cancel_all(folder)


@pytest.fixture
def sharmill():
    """Returns a function that runs the command line to its end: a CompletedProcess with text output."""

    def call(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sharmill", *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=500, check=False, cwd=REPOSITORY, **options
        )

    return call
