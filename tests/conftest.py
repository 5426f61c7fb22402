"""The environment of all tests, and the data that several folders of them read."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from support.project import (
    TESTS,
    Prepared,
    Project,
    config_for,
    outcome,
    run_prepare,
    run_sharmill,
    second_dataset,
    voice,
    write_config as write_small_config,
    write_lines,
    write_tone,
)
from tenacity import wait_none

from sharmill.cli.main import main

# Shells start background processes with this signal ignored, which all test processes would inherit; tests of
# interrupts would then fail.
signal.signal(signal.SIGINT, signal.default_int_handler)
# On a busy machine any example may take a while.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
# Ranks, jobs and actors import toy stages from ``support``.
os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])

pytest_plugins = ["support.ray_cluster"]


@pytest.fixture(scope="session")
def prepare_records(audio_root):
    """Returns a function: folder, records, options of ``prepare`` -> Prepared, over the shared audio root."""

    def prepare(folder: Path, records: list[Any], *, root: Path = audio_root, **options: Any) -> Prepared:
        path = write_lines(folder / "m.json", records)
        return run_prepare(config_for(folder, [(path, root)], prepare=options))

    return prepare


@pytest.fixture
def no_waits(monkeypatch):
    """Requests for URLs are tried again at once."""
    monkeypatch.setattr("sharmill.files.remote._wait", wait_none())


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
    """Returns a function: size -> a folder on a separate file system; skips if mounting is not permitted."""
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
def corpus(tmp_path_factory):
    """Four synthetic voices with ten utterances each, bad records included."""
    pytest.importorskip("espeakng_loader")
    from sharmill.demo.corpus import make_corpus

    return make_corpus(tmp_path_factory.mktemp("corpus") / "corpus", num_voices=4, utterances_per_voice=10)


@pytest.fixture(scope="session")
def write_config(corpus):
    """Returns a function: folder, changes -> the path of a configuration over ``corpus`` with small units."""

    def write(folder: Path, **changes: Any) -> Path:
        return write_small_config(folder, corpus.manifest, corpus.audio_root, **changes)

    return write


@pytest.fixture
def make_config(write_config):
    """The function of ``write_config``."""
    return write_config


@pytest.fixture(scope="session")
def local_outcomes(write_config, tmp_path_factory):
    """Results of the local executor for two datasets, in the order of a call."""
    folder = tmp_path_factory.mktemp("local")
    configs = [write_config(folder / "a"), write_config(folder / "b", **second_dataset())]
    run_sharmill("run", *configs)
    outcomes = [outcome(config.parent) for config in configs]
    assert all(len(files) > 8 for files, _ in outcomes)
    return outcomes


@pytest.fixture
def make_two_configs(make_config):
    """Returns a function: folder, changes -> the configurations of the datasets of ``local_outcomes``."""

    def make(folder: Path, **changes: Any) -> list[Path]:
        return [make_config(folder / "a", **changes), make_config(folder / "b", **second_dataset() | changes)]

    return make


@pytest.fixture
def project(tmp_path):
    """An empty project: a small corpus to be, with the stages that are run over it."""
    return Project(tmp_path)


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """A dataset of 7 cuts in 3 shards with the codes of a toy codec; not to be changed by tests.

    Cut n has the context n + 1; some contexts are longer than their targets and some are shorter.
    """
    project = _seven(tmp_path_factory.mktemp("built"))
    project.encode(project.write(write={"shard_size": 3, "order": "manifest"}, match={"min_duration": 0.0}))
    return project


@pytest.fixture(scope="session")
def many(tmp_path_factory):
    """Returns a project with a dataset of 60 cuts of 0.1 to 0.9 s in 6 shards, without codes; not to be changed."""
    project = Project(tmp_path_factory.mktemp("many"))
    draws = np.random.default_rng(5)
    for number in range(60):
        samples = int(draws.integers(1600, 14400))
        text = "x" * int(samples * draws.uniform(0.0005, 0.002))
        project.add(f"{number:02}.wav", voice(samples / 16000, seed=number), text=text, speaker=f"s{number % 2}")
    project.write(write={"shard_size": 10, "order": "manifest"}, match={"min_duration": 0.0})
    return project


@pytest.fixture(scope="session")
def without_contexts(tmp_path_factory):
    """A dataset without contexts of 7 cuts in 3 shards, with the codes of a toy codec; not to be changed by tests."""
    project = _seven(tmp_path_factory.mktemp("without_contexts"))
    project.records = [record | {"speaker": None} for record in project.records]
    project.encode(project.write(match=None, write={"num_shards": 3, "order": "manifest"}))
    return project


def _seven(folder: Path) -> Project:
    project = Project(folder)
    for number, seconds in enumerate([1.0, 2.005, 0.5, 3.1, 0.7, 1.3, 0.25]):
        project.add(f"spk/utt{number}.flac", voice(seconds, pitch=150 + 20 * number, seed=number), number=number)
    return project


@pytest.fixture
def call(capsys, monkeypatch):
    """Calls a command in this process; returns its exit status and its output on both streams."""
    monkeypatch.setattr("signal.signal", lambda *arguments: None)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    return run
