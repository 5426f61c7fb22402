"""Small datasets of a few voices, with and without codes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.shar import Project, ToyCodec, voice


def make_dataset(folder: Path, prefix: str, voices: int = 2, *, codecs: str = "", per_voice: int = 2) -> Project:
    """A dataset in shards of three cuts; the context of each utterance is the next one of its voice."""
    project = Project(folder)
    contexts = []
    for number in range(voices * per_voice):
        speaker = f"{prefix}{number // per_voice}"
        project.add(f"{speaker}/{number}.flac", voice(0.4 + 0.05 * number, seed=number), speaker=speaker)
        contexts.append(number - number % per_voice + (number + 1) % per_voice)
    config = project.write(
        contexts, write={"shard_size": 3, "order": "manifest"}, match={"min_duration": 0.0}, name=prefix
    )
    for codec in codecs:
        project.encode(config, codec, ToyCodec())
    return project


@pytest.fixture(scope="session")
def coded(tmp_path_factory):
    """Two datasets with the codec a, of 2 and of 3 voices."""
    folder = tmp_path_factory.mktemp("coded")
    return [make_dataset(folder / name, name, voices, codecs="a").dataset for name, voices in (("x", 2), ("y", 3))]


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """Three datasets without codes."""
    folder = tmp_path_factory.mktemp("plain")
    return [make_dataset(folder / name, name).dataset for name in "pqr"]
