"""Memory of models: how much they take per second, measured, and the batch size that follows."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.errors import raises
from support.shar import ToyCodec

from sharmill.errors import ConfigError
from sharmill.models import load_codec
from sharmill.models.measure import Measurement, measure_canonical, measure_model, require_room
from sharmill.models.memory import estimate_bytes_per_second, measure_peak

MIB = 1 << 20


PEAK = """
import numpy as np
import torch
from sharmill.models.memory import measure_peak

MIB = 1 << 20
before = np.ones(300 * MIB, np.uint8)
del before

def work():
    for _ in range(3):
        kept = torch.ones(64 * MIB, dtype=torch.uint8)
        del kept
    # As the scratch memory of a convolution, which torch does not know of.
    both = torch.ones(64 * MIB, dtype=torch.uint8), np.ones(32 * MIB, np.uint8)
    del both

print(measure_peak(work, "cpu") / MIB)
"""


def test_the_peak_is_that_of_what_is_held_at_once_tensors_or_not():
    # In a process of its own, in which nothing else takes or frees memory.
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert 94 <= float(done.stdout) <= 110


def test_bytes_per_second_are_those_of_a_batch():
    def run(seconds: float) -> None:
        np.ones(round(seconds * 8 * MIB), np.uint8)

    assert estimate_bytes_per_second(run, "cpu") == pytest.approx(8 * MIB, rel=0.1)


def test_a_system_that_does_not_tell_the_peak_is_named(monkeypatch):
    def refuse(path, text):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.write_text", refuse)
    with raises(ConfigError, "unsupported_system", "clear_refs: Permission denied"):
        measure_peak(lambda: None, "cpu")


def test_a_codec_is_measured_and_a_size_chosen(checkpoints):
    codec = load_codec(f"transformers:{checkpoints['encodec']}")
    found = measure_model(codec, "cpu", 1 << 33)
    assert list(found.speeds) == [5.0, 10.0]
    assert found.best_size in found.speeds
    # At least the audio itself, and the first layer's four channels.
    assert 16000 * 4 * 4 < found.bytes_per_second < 16000 * 4 * 1000


def test_on_a_cpu_canonical_lengths_are_measured_one_by_one():
    codec = ToyCodec(24000, 1920)
    found = measure_canonical(codec, "cpu", 1 << 33, 7200.0)
    # 25 and 125 frames, of which the one is canonical and the other becomes 128.
    assert list(found.speeds) == [2.0, 10.24]
    assert {tuple(batch) for batch in codec.batches} == {(48000,), (245760,)}
    assert found.one_row
    assert found.best_size is None


@pytest.fixture
def gpu(monkeypatch):
    """A stand-in for a GPU with 8 GiB, on which a batch takes 20 MiB a second; returns a function to run one there."""
    seconds = [0.0]
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(cuda, "memory_allocated", lambda device: 1000)
    monkeypatch.setattr(cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(cuda, "max_memory_allocated", lambda device: 5000 + int(seconds[0] * 20 * 2**20))
    monkeypatch.setattr(cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=8 << 30))

    def run(num_samples, sampling_rate):
        seconds[0] = float(num_samples.sum()) / sampling_rate

    return run


class Timed(ToyCodec):
    """A codec on the stand-in that takes a second for ten of audio, by a clock of its own."""

    def __init__(self, gpu, monkeypatch, **options):
        super().__init__(24000, 1920, **options)
        self._run, self.clock = gpu, 0.0
        monkeypatch.setattr("sharmill.models.measure.time", SimpleNamespace(perf_counter=lambda: self.clock))

    def encode(self, audio, num_samples):
        self.batches.append(num_samples.tolist())
        self._run(num_samples, self.sampling_rate)
        self.clock += audio.numel() / self.sampling_rate / 10


def test_on_a_gpu_canonical_lengths_are_measured_in_batches_of_the_sizes_that_encoding_has(gpu, monkeypatch):
    codec = Timed(gpu, monkeypatch)
    found = measure_canonical(codec, "cuda", 8 << 30, 1e6)
    # 20 MiB a second, rounded up to a canonical length, in 0.7 of 8 GiB.
    assert list(found.speeds) == [15.0, 30.0, 60.0, 120.0, 240.0]
    expected = {1: (25, 128)} | {
        rows: (frames,) for size in found.speeds for frames in (25, 128) if (rows := int(size * 12.5 // frames)) > 1
    }
    assert {(len(batch), batch[0] // 1920) for batch in codec.batches} == {
        (rows, frames) for rows, lengths in expected.items() for frames in lengths
    }
    assert not found.one_row


def test_silence_that_fills_up_the_batches_of_a_unit_does_not_count_as_audio(gpu, monkeypatch):
    large, small = (measure_canonical(Timed(gpu, monkeypatch), "cuda", 8 << 30, seconds) for seconds in (1e6, 600.0))
    assert all(9.5 < speed <= 10 for speed in large.speeds.values())
    speeds = list(small.speeds.values())
    assert speeds == sorted(speeds, reverse=True)
    # About a hundred segments of some fifty lengths: most of these batches have one or two of twenty rows or more.
    assert small.speeds[240.0] < 1
    assert small.best_size == 15.0


def test_a_codec_that_takes_segments_one_by_one_is_measured_so_on_a_gpu(gpu, monkeypatch):
    codec = Timed(gpu, monkeypatch, equal_lengths_only=True)
    found = measure_canonical(codec, "cuda", 8 << 30, 7200.0)
    assert {tuple(batch) for batch in codec.batches} == {(25 * 1920,), (125 * 1920,)}
    assert found.one_row
    assert list(found.speeds.values()) == pytest.approx([10, 10])


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


def test_a_batch_that_takes_more_than_the_gpu_has_is_refused_before_any_work(gpu):
    class Model:
        sampling_rate = 16000

        def encode(self, audio, num_samples):
            gpu(num_samples, 16000)

    require_room(Model(), "cuda", 400.0, "encode.batch_seconds")
    with raises(ConfigError, "out_of_memory", "encode.batch_seconds is 600", "11.7 GiB", "has 8.0", "to 287 or less"):
        require_room(Model(), "cuda", 600.0, "encode.batch_seconds")
