"""The datasets that tests of damage copy."""

from pathlib import Path

import numpy as np
import pytest
from support.project import Project, ToyCodec, voice


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A folder with three finished datasets that tests must not change.

    ``dataset`` has 7 cuts in 3 shards, at 16 kHz, with the codes of a toy codec. Cut n has the context n + 1. In shard
    1, the first two targets and the first context are equally long, and the last target has a context of the same
    recording. ``project`` is the corpus it was made from. ``again`` has the same cuts at 8 kHz, with codes of twice as
    many frames; ``foreign`` has other cuts.
    """
    folder = tmp_path_factory.mktemp("finished")
    _build(folder, "dataset", 16000, 320, "spk")
    _build(folder, "again", 8000, 80, "spk")
    _build(folder, "foreign", 16000, 320, "else")
    return folder


def _build(folder: Path, name: str, rate: int, samples_per_frame: int, speaker: str) -> None:
    project = Project(folder / ("project" if name == "dataset" else f"{name}.project"))
    project.folder.mkdir()
    project.dataset = folder / name
    for number, seconds in enumerate([1.0, 2.005, 0.5, 1.0, 1.0]):
        loudness = np.float32(0.5 + 0.3 * number)
        samples = loudness * voice(seconds, pitch=150 + 20 * number, seed=number)
        project.add(f"{speaker}/utt{number}.flac", samples, speaker=speaker)
    long = project.add(f"{speaker}/long.flac", voice(4.0, seed=9), speaker=speaker, offset=0.5, duration=0.8)
    project.add(long.relative_to(project.root).as_posix(), speaker=speaker, offset=2.0, duration=1.5)
    project.records[-1]["text"] = "another text of the same recording"
    config = project.write(
        write={"shard_size": 3, "order": "manifest", "sampling_rate": rate},
        match={"min_duration": 0.4, "max_duration": 3.0},
    )
    project.encode(config, codec=ToyCodec(sampling_rate=rate, samples_per_frame=samples_per_frame))
