"""Datasets that training tests read and do not change."""

from __future__ import annotations

import numpy as np
import pytest
from support.corpora import make_corpora
from support.shar import Project, voice


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
def corpora(tmp_path_factory):
    """Two datasets with codes, text and conversations: see ``Corpora``."""
    return make_corpora(tmp_path_factory.mktemp("corpora"))
