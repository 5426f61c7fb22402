"""Manufactured test data: audio files, manifest records, and whole runs of ``prepare``.

Builders are fixtures, since tests are imported without packages.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile as sf
from support.paths import TESTS

from sharmill.config import Config, to_config
from sharmill.engine.run import StageResult, run_stage
from sharmill.executors.local.executor import LocalExecutor
from sharmill.manifest import Utterance
from sharmill.prepare.stage import PrepareStage, prepared_manifest

# A shell starts what goes on in the background with this signal ignored, and every process of the tests would inherit
# that: those of interrupts then fail.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Ranks, jobs and actors import toy stages from ``support``.
os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])

TAG = "| Language:en Dataset:Tests Speaker:{} |"


class SilentListener:
    """Hears what happens and keeps nothing of it."""

    def stage_started(self, stage, units, done):
        pass

    def unit_done(self, unit, commit):
        pass

    def unit_failed(self, unit, error, attempts):
        pass

    def stage_ended(self, stage, result):
        pass


def make_record(**changes: Any) -> dict[str, Any]:
    """A good record of ``a.wav`` of the audio root; a change to ``...`` removes the key."""
    record = {"audio_filepath": "a.wav", "duration": 2.0, "speaker": TAG.format("anna"), "text": "Good day."} | changes
    return {key: value for key, value in record.items() if value is not ...}


def write_tone(path: Path, seconds: float = 2.0, *, rate: int = 16000, channels: int = 1) -> Path:
    """A quiet tone; the format is that of the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tone = 0.1 * np.sin(2 * np.pi * 220 * np.arange(round(seconds * rate)) / rate)
    sf.write(path, np.repeat(tone[:, None], channels, axis=1), rate)
    return path


def write_manifest(path: Path, records: list[Any]) -> Path:
    """Records as JSON lines; ``bytes`` are lines as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [record if isinstance(record, bytes) else json.dumps(record).encode() for record in records]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


@dataclass(frozen=True)
class Prepared:
    """What a run of ``prepare`` left."""

    config: Config
    stage: PrepareStage
    result: StageResult

    @property
    def kept(self) -> list[Utterance]:
        return [Utterance.from_json(line) for line in prepared_manifest(self.config).read_bytes().splitlines()]

    @property
    def rejects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stage.dir.rejects.read_bytes().splitlines()]

    @property
    def stats(self) -> dict[str, Any]:
        return json.loads(self.stage.run_dir.stats.read_bytes())


def config_for(folder: Path, sources: list[tuple[Path | str, Path | str]], **changes: Any) -> Config:
    """A configuration with its directories below ``folder``, of (manifest, audio root) pairs."""
    values = {
        "name": "small",
        "run_dir": str(folder / "run"),
        "dataset_dir": str(folder / "dataset"),
        "sources": [{"manifest": str(manifest), "audio_root": str(root)} for manifest, root in sources],
    }
    return to_config(values | changes, "test")


def run_prepare_stage(config: Config) -> Prepared:
    """Runs the stage to its end, in this process."""
    stage = PrepareStage(config)
    return Prepared(config, stage, run_stage(stage, LocalExecutor(1), SilentListener(), max_reject_fraction=1.0))


@pytest.fixture(scope="session")
def record():
    """The function ``make_record``."""
    return make_record


@pytest.fixture(scope="session")
def tag():
    """Returns a function: speaker -> speaker tag."""
    return TAG.format


@pytest.fixture(scope="session")
def tone():
    """The function ``write_tone``."""
    return write_tone


@pytest.fixture(scope="session")
def manifest():
    """The function ``write_manifest``."""
    return write_manifest


@pytest.fixture(scope="session")
def configure():
    """The function ``config_for``."""
    return config_for


@pytest.fixture(scope="session")
def run_prepare():
    """The function ``run_prepare_stage``."""
    return run_prepare_stage


@pytest.fixture(scope="session")
def prepare_records(audio_root):
    """Returns a function: folder, records, options of ``prepare`` -> Prepared, over the shared audio root."""

    def prepare(folder: Path, records: list[Any], *, root: Path = audio_root, **options: Any) -> Prepared:
        path = write_manifest(folder / "m.json", records)
        return run_prepare_stage(config_for(folder, [(path, root)], prepare=options))

    return prepare


@pytest.fixture(scope="session")
def audio_root(tmp_path_factory):
    """Good files of 2 s (a.wav, b.wav, deep/c.flac) and one of every bad kind; not to be changed by tests."""
    folder = tmp_path_factory.mktemp("audio")
    root = folder / "root"
    for name in ("a.wav", "b.wav", "deep/c.flac", "../outside.wav"):
        write_tone(root / name)
    write_tone(root / "stereo.wav", channels=2)
    write_tone(root / "no_samples.wav", 0.0)
    (root / "no_bytes.wav").touch()
    (root / "text.wav").write_text("this is no audio\n" * 100)
    (root / "folder.wav").mkdir()
    os.mkfifo(root / "fifo.wav")
    (root / "link_out.wav").symlink_to(folder / "outside.wav")
    (root / "link_in.wav").symlink_to(root / "a.wav")
    (root / "link_loop.wav").symlink_to(root / "link_loop.wav")
    (root / "folder_out").symlink_to(folder)
    return root


@pytest.fixture
def small_disk(tmp_path):
    """Returns a function: size -> a folder that is a file system of its own; skips where that is not permitted."""
    mounted = []

    def mount(size: str) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
        attempt = subprocess.run(command, capture_output=True, text=True, check=False)
        if attempt.returncode != 0:
            pytest.skip(f"mounting a tmpfs is not permitted here: {attempt.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture(scope="session")
def sharmill():
    """The function ``run_sharmill``: arguments of the command line -> a CompletedProcess with text output."""
    from support.pipelines import run_sharmill

    return run_sharmill


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Four synthetic voices with ten utterances each, bad records included."""
    pytest.importorskip("espeakng_loader")
    from sharmill.demo.corpus import make_corpus

    return make_corpus(tmp_path_factory.mktemp("corpus") / "corpus", num_voices=4, utterances_per_voice=10)


@pytest.fixture(scope="session")
def encodec(tmp_path_factory):
    """The folder of a tiny EnCodec."""
    from support.pipelines import save_encodec

    return save_encodec(tmp_path_factory.mktemp("models") / "encodec")


@pytest.fixture(scope="session")
def write_config(corpus, encodec):
    """Returns a function: folder, changes -> the path of a configuration over ``corpus`` with small units."""
    from support.pipelines import write_config

    def write(folder: Path, **changes: Any) -> Path:
        return write_config(folder, corpus.manifest, corpus.audio_root, encodec, **changes)

    return write


@pytest.fixture
def make_config(write_config):
    """The function of ``write_config``."""
    return write_config


@pytest.fixture(scope="session")
def local_outcomes(write_config, sharmill, tmp_path_factory):
    """What the local executor makes of two datasets, by their place in a call."""
    from support.pipelines import outcome, second_dataset

    folder = tmp_path_factory.mktemp("local")
    configs = [write_config(folder / "a"), write_config(folder / "b", **second_dataset())]
    done = sharmill("run", *configs)
    assert done.returncode == 0, done.stderr
    outcomes = [outcome(config.parent) for config in configs]
    assert all(len(files) > 8 for files, _ in outcomes)
    return outcomes


@pytest.fixture
def make_two_configs(make_config):
    """Returns a function: folder, changes -> the configurations of the datasets of ``local_outcomes``."""
    from support.pipelines import second_dataset

    def make(folder: Path, **changes: Any) -> list[Path]:
        return [make_config(folder / "a", **changes), make_config(folder / "b", **second_dataset() | changes)]

    return make


@pytest.fixture(scope="session")
def dataset_digest():
    """The function ``digest``: folder -> the checksum of every file by its name."""
    from support.pipelines import digest

    return digest


@pytest.fixture
def project(tmp_path):
    """An empty project: a small corpus to be, with the stages that are run over it."""
    from support.shar import Project

    return Project(tmp_path)


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """A dataset of 7 cuts in 3 shards with the codes of a toy codec; not to be changed by tests.

    Cut n has the context n + 1; some contexts are longer than their targets and some are shorter.
    """
    from support.shar import Project, voice

    project = Project(tmp_path_factory.mktemp("built"))
    for number, seconds in enumerate([1.0, 2.005, 0.5, 3.1, 0.7, 1.3, 0.25]):
        project.add(f"spk/utt{number}.flac", voice(seconds, pitch=150 + 20 * number, seed=number), number=number)
    config = project.write(write={"shard_size": 3, "order": "manifest"}, match={"min_duration": 0.0})
    project.encode(config)
    return project
