"""The training example on text, pairs, conversations and speech in one loader."""

from __future__ import annotations

import signal

import pytest
from omegaconf import OmegaConf
from support.corpora import make_corpora
from support.example import make_example
from support.paths import REPOSITORY
from train import main

CONFIGS = REPOSITORY / "configs/training"


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    return make_corpora(tmp_path_factory.mktemp("corpora"))


@pytest.fixture
def train(corpora, tmp_path, monkeypatch):
    """Returns a function: the example, trained in this process on a configuration whose paths lead to test data."""
    data = tmp_path / "data"
    (data / "text").mkdir(parents=True)
    for name, dataset in {"hifitts2": corpora.large, "libritts": corpora.large, "german": corpora.small}.items():
        (data / name).symlink_to(dataset)
    for name, path in zip(("books", "questions", "answers"), (corpora.text, *corpora.pairs), strict=True):
        (data / f"text/{name}.txt").symlink_to(path)
    (data / "dialogs").symlink_to(corpora.conversations.parent)
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)

    def run(name, loader, **keys):
        example = make_example(tmp_path, name, "data/libritts", **{"loader": loader, "checkpoint_every": 1000} | keys)
        assert main([str(example.config)]) == 0
        return example

    yield run
    signal.signal(signal.SIGTERM, handler)


def small(tmp_path, name):
    """A configuration of the repository with buffers for few data."""
    settings = OmegaConf.load(CONFIGS / f"{name}.yaml")
    sections = (value for value in settings.values() if OmegaConf.is_dict(value) and "input_cfg" in value)
    for section in sections:
        for key in section.keys() & {"bucket_buffer_size", "shuffle_buffer_size"}:
            section[key] = 10
        section.num_workers = 0
    settings.num_workers = 0
    path = tmp_path / f"{name}.yaml"
    OmegaConf.save(settings, path)
    return str(path)


@pytest.mark.slow
def test_speech_and_text(train, tmp_path):
    example = train("mixed", small(tmp_path, "speech_text"), max_steps=60, learning_rate=1e-2)
    steps = example.steps(0)
    for name in ("text_loss", "codes_loss"):
        assert sum(values[name] for values in steps[-5:]) < 0.9 * sum(values[name] for values in steps[:5])
