"""The untrained codec."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest
import torch
from support.models import make_audio

from sharmill.models import load_codec

# Everything the checksum covers is exact arithmetic, so that it is the same on every machine.
CHECKSUM = "9d0787b43ea4d135"

_OTHER_PROCESS = """
import json, torch
from sharmill.models import load_codec
torch.manual_seed(99)
codec = load_codec("untrained")
audio = 0.1 * torch.sin(torch.arange(30000) * 0.05)[None]
print(json.dumps([codec.checksum, codec.encode(audio, torch.tensor([30000]))[0].tolist()]))
"""


@pytest.fixture(scope="module")
def untrained():
    return load_codec("untrained")


def test_it_says_that_it_is_untrained(caplog):
    with caplog.at_level(logging.WARNING, logger="sharmill"):
        codec = load_codec("untrained")
    assert not codec.trained
    assert [record.levelname for record in caplog.records if "untrained" in record.message] == ["WARNING"]


def test_its_shape(untrained):
    assert (untrained.sampling_rate, untrained.samples_per_frame) == (22050, 1024)
    assert (untrained.num_codebooks, untrained.codebook_size) == (8, 2016)
    assert not untrained.equal_lengths_only


@pytest.mark.slow
def test_it_is_the_same_in_another_process(untrained):
    result = subprocess.run([sys.executable, "-c", _OTHER_PROCESS], capture_output=True, text=True, check=True)
    checksum, codes = json.loads(result.stdout.splitlines()[-1])
    audio = 0.1 * torch.sin(torch.arange(30000) * 0.05)[None]
    assert checksum == untrained.checksum == CHECKSUM
    assert codes == untrained.encode(audio, torch.tensor([30000]))[0].tolist()


def test_its_construction_leaves_the_random_state_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    load_codec("untrained")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("num_samples", [1, 1023, 1024, 1025, 20479, 20480, 20481])
def test_frames_are_the_ceiling(untrained, num_samples):
    assert untrained.encode(*make_audio([num_samples])).shape == (1, 8, -(-num_samples // 1024))


def test_codes_follow_the_audio_and_not_the_batch(untrained):
    audio, num_samples = make_audio([66150, 500, 30000, 400000])
    together = untrained.encode(audio, num_samples)
    for item, length in enumerate(num_samples):
        alone = untrained.encode(audio[item : item + 1, :length], num_samples[item : item + 1])[0]
        assert (alone == together[item, :, : alone.shape[1]]).float().mean() >= 0.998
    assert min(row.unique().numel() for row in together[3]) > 30
