"""Memory of models: how much they take per second, measured, and the batch size that follows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.errors import raises

from sharmill.errors import ConfigError
from sharmill.models import load_codec
from sharmill.models.measure import Measurement, measure_model, require_room
from sharmill.models.memory import estimate_bytes_per_second, measure_peak


def test_the_peak_is_that_of_tensors_alive_at_once():
    def work() -> None:
        for _ in range(3):
            kept = torch.zeros(1 << 20)
            del kept
        both = torch.zeros(1 << 20), torch.zeros(1 << 19)
        del both

    # As a layer does, whose input is freed when its output is there.
    def layer() -> None:
        kept = torch.zeros(1 << 20)
        kept = torch.relu(kept)
        kept = torch.relu(kept)

    assert 8 << 20 <= measure_peak(layer, "cpu") <= 1.01 * (8 << 20)
    peak = 4 * ((1 << 20) + (1 << 19))
    assert peak <= measure_peak(work, "cpu") <= 1.01 * peak


def test_bytes_per_second_are_the_slope_of_the_peaks():
    def run(seconds: float) -> None:
        torch.zeros(5000 + round(seconds * 1000), dtype=torch.uint8)

    assert estimate_bytes_per_second(run, "cpu") == pytest.approx(1000, rel=0.02)


def test_a_codec_is_measured_and_a_size_chosen(checkpoints):
    codec = load_codec(f"transformers:{checkpoints['encodec']}")
    found = measure_model(codec, "cpu", 1 << 33)
    assert list(found.speeds) == [5.0, 10.0]
    assert found.best_size in found.speeds
    # At least the audio itself, and the first layer's four channels.
    assert 16000 * 4 * 4 < found.bytes_per_second < 16000 * 4 * 1000


def test_sizes_that_do_not_fit_are_not_tried(checkpoints):
    codec = load_codec(f"transformers:{checkpoints['encodec']}")
    found = measure_model(codec, "cpu", 1 << 10)
    assert found.speeds == {}
    assert found.best_size is None


@pytest.mark.parametrize(
    ("speeds", "best"),
    [({15.0: 100.0, 30.0: 150.0, 60.0: 152.0}, 30.0), ({15.0: 100.0, 30.0: 90.0}, 15.0), ({15.0: 100.0}, 15.0)],
)
def test_the_best_size_is_the_least_that_no_larger_one_beats_by_much(speeds, best):
    assert Measurement(bytes_per_second=1, speeds=speeds, memory=1).best_size == best


def test_a_batch_that_takes_more_than_the_gpu_has_is_refused_before_any_work(monkeypatch):
    """On a stand-in for a GPU with 8 GiB, where the model takes 20 MiB per second."""
    seconds = [0.0]

    class Model:
        sampling_rate = 16000

        def encode(self, audio, num_samples):
            seconds[0] = float(num_samples.sum()) / 16000

    cuda = torch.cuda
    monkeypatch.setattr(cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(cuda, "memory_allocated", lambda device: 1000)
    monkeypatch.setattr(cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(cuda, "max_memory_allocated", lambda device: 5000 + int(seconds[0] * 20 * 2**20))
    monkeypatch.setattr(cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=8 << 30))
    require_room(Model(), "cuda", 400.0, "encode.batch_seconds")
    with raises(ConfigError, "out_of_memory", "encode.batch_seconds is 600", "11.7 GiB", "has 8.0", "to 287 or less"):
        require_room(Model(), "cuda", 600.0, "encode.batch_seconds")
