"""The voice activity detector: the probabilities of its package's own model, for any length."""

import numpy as np
import pytest
import torch
from support.project import raises, voice

from sharmill.errors import ConfigError
from sharmill.models.silero import FRAME_SAMPLES, SileroVad, VadState


def test_the_probabilities_are_those_of_the_package():
    threads = torch.get_num_threads()
    silero_vad = pytest.importorskip("silero_vad")
    torch.set_num_threads(threads)  # the package's import sets one thread
    samples = np.concatenate([voice(2.0, seed=0), np.zeros(8000, np.float32), voice(0.51, seed=1)]).astype(np.float32)
    padded = np.pad(samples, (0, -len(samples) % FRAME_SAMPLES))
    theirs = silero_vad.load_silero_vad().audio_forward(torch.from_numpy(padded)[None], 16000)[0].numpy()
    ours = SileroVad().speech_probabilities(samples)
    assert ours.shape == theirs.shape
    assert np.ptp(theirs) > 0.1
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert [len(SileroVad().speech_probabilities(samples[:size])) for size in (0, 1, 512, 513)] == [0, 1, 1, 2]


def test_parts_of_audio_give_the_probabilities_of_the_whole():
    samples = np.concatenate([voice(2.0, seed=0), np.zeros(8000, np.float32), voice(1.0, seed=1)])
    vad, state = SileroVad(), VadState()
    parts = [vad.speech_probabilities(part, state) for part in np.split(samples, [512, 512, 20480])]
    np.testing.assert_allclose(np.concatenate(parts), vad.speech_probabilities(samples), atol=1e-5)


def test_a_missing_package_is_one_line_with_its_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises(ConfigError, "missing_package", "sharmill[vad]"):
        SileroVad()
