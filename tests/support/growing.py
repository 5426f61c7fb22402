"""Small datasets of a few voices, with and without codes, to be merged, split and appended to."""

from __future__ import annotations

from pathlib import Path

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
