"""Match feeds its encoder across units: the next unit is decoded while one is at work, and nothing else changes."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch
from support.shar import run, voice

from sharmill.audio.segments import SegmentReader
from sharmill.match.embed import Embedder
from sharmill.match.stage import MatchStage, matched_manifest

# Of the two utterances of each speaker, in the order of the units, which are those of most seconds first.
SECONDS = [4.0, 3.8, 3.6, 3.4]


@pytest.fixture
def config(project):
    """Four speakers with two utterances, a unit each."""
    for number, seconds in enumerate(SECONDS):
        for take in range(2):
            samples = voice(seconds, pitch=200 + 9 * number, seed=take)
            project.add(f"{number}-{take}.wav", samples, speaker=f"s{number}")
    config = project.configure(match={"unit_seconds": 0.1}, speaker_key="speaker")
    project.prepare(config)
    return config


class LengthEncoder:
    """The voice says how long the audio is. ``wait`` is called with the samples of the longest item of a batch."""

    sampling_rate = 16000
    embedding_size = 2
    checksum = "length"

    def __init__(self, wait=lambda length: None):
        self.wait = wait
        self.lengths = []

    def embed(self, audio, num_samples):
        self.lengths.append(int(num_samples.max()))
        self.wait(self.lengths[-1])
        return torch.nn.functional.normalize(torch.stack([torch.ones(len(audio)), num_samples / 16000], dim=1), dim=1)


def match(config, encoder, *, restart=False):
    with mock.patch("sharmill.match.stage.load_speaker_encoder", return_value=encoder):
        return run(MatchStage(config), restart=restart)


def test_the_next_unit_is_decoded_before_one_ends_and_the_choices_are_the_same(config, monkeypatch):
    decoded = {round(seconds * 16000): threading.Event() for seconds in SECONDS}
    prepare = Embedder.prepare

    def prepare_and_tell(self, audio):
        decoded[len(audio.samples)].set()
        return prepare(self, audio)

    monkeypatch.setattr(Embedder, "prepare", prepare_and_tell)

    def wait(length):
        shorter = [other for other in decoded if other < length]
        assert not shorter or decoded[max(shorter)].wait(60), "the next unit is not decoded before this one ends"

    encoder = LengthEncoder(wait)
    assert match(config, encoder).ok
    assert encoder.lengths == [64000, 60800, 57600, 54400]
    ahead = matched_manifest(config).read_bytes()
    monkeypatch.setattr("sharmill.match.stage.MatchProcessor.expect", lambda self, unit: None)
    assert match(config, LengthEncoder(), restart=True).ok
    assert matched_manifest(config).read_bytes() == ahead


def test_a_unit_whose_audio_cannot_be_made_ready_costs_no_other(config, monkeypatch):
    gather = SegmentReader.gather

    def fail_at_one(self, segments):
        if any(segment.duration == 3.8 for segment in segments):
            raise OSError(5, "Input/output error")
        return gather(self, segments)

    monkeypatch.setattr(SegmentReader, "gather", fail_at_one)
    encoder = LengthEncoder()
    result = match(config, encoder)
    assert [failure.message for failure in result.failures.values()] == ["OSError: [Errno 5] Input/output error"]
    assert sorted(encoder.lengths) == [54400, 57600, 64000]
