"""A dataset to look at, and the command line in this process."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from support.shar import Project, ToyCodec, voice

HOSTILE = "\x1b[31mred\x07 <script>alert(1)</script> [bold]x[/bold] \u202eabc\nnew line"


class DecodingToy(ToyCodec):
    """A toy codec whose audio is a level for each frame: the first codebook in steps of 1/50."""

    decoded_sampling_rate = 16000

    def decode(self, codes, num_frames):
        return codes[:, 0].repeat_interleave(self.samples_per_frame, dim=1).to(torch.float32) / 50


@pytest.fixture(scope="session")
def looked_at(tmp_path_factory):
    """A dataset of five cuts in two shards, with codes of ``toy``; not to be changed by tests."""
    project = Project(tmp_path_factory.mktemp("looked_at"))
    for number in range(5):
        samples = voice(1.0 + 0.125 * number, pitch=150 + 20 * number, seed=number)
        project.add(f"utt{number}.flac", samples, text=HOSTILE if number == 3 else f"sentence {number}")
    config = project.write(write={"shard_size": 3, "order": "manifest"}, match={"min_duration": 0.0})
    project.encode(config)
    return project.dataset


@pytest.fixture
def toy():
    """The codec that made the codes is what is loaded, whatever its name."""
    with mock.patch("sharmill.models.recorded.load_codec", return_value=DecodingToy()) as load:
        yield load
