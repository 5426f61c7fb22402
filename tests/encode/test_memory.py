"""Codecs that find no memory: what torch raises is put in, and the run ends with one line that says what to set."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from support.errors import raises
from support.shar import ToyCodec, codec_stages, loading, run, voice

from sharmill.encode.config import EncodeConfig
from sharmill.errors import FatalError, UnitFailed


class SmallDevice(ToyCodec):
    """A codec on a device with memory for so many samples at once."""

    def __init__(self, samples: int, error: Exception) -> None:
        super().__init__()
        self.samples, self.error = samples, error

    def encode(self, audio: torch.Tensor, num_samples: torch.Tensor) -> Any:
        if audio.numel() > self.samples:
            raise self.error
        return super().encode(audio, num_samples)


@pytest.fixture
def config(project):
    """Six cuts of one second in three shards."""
    for number in range(6):
        project.add(f"{number}.flac", voice(1.0, pitch=150 + 30 * number, seed=number), number=number)
    return project.write([1, 0, 0, 0, 0, 0], write={"shard_size": 2, "order": "manifest"})


def encode(config, codec, **options):
    """The result of the stage that takes segments through the codec."""
    config = config.with_section(dataclasses.replace(config.section(EncodeConfig), unit_seconds=2.0, **options))
    with loading(codec):
        survey, stage, _ = codec_stages(config, "toy")
        assert run(survey).ok
        return run(stage)


@pytest.mark.parametrize("error", [
    torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("GET was unable to find an engine to execute this computation"),
    RuntimeError("cuFFT error: CUFFT_INTERNAL_ERROR"),
])  # fmt: skip
def test_where_nothing_fits_the_stage_stops_and_says_what_to_set(config, error):
    with raises(FatalError, "out_of_memory", "lower encode.batch_seconds below", "a batch of"):
        encode(config, SmallDevice(16000, error))


@pytest.fixture
def config_with_a_long_one(project):
    """As ``config``, but the last cut has four seconds."""
    for number, seconds in enumerate([1.0] * 5 + [4.0]):
        project.add(f"{number}.flac", voice(seconds, pitch=150 + 30 * number, seed=number), number=number)
    return project.write([1, 0, 0, 0, 0, 0], write={"shard_size": 2, "order": "manifest"})


LACK = torch.cuda.OutOfMemoryError("CUDA out of memory.")


def test_a_segment_too_long_for_the_device_costs_its_unit_alone_and_a_larger_device_does_the_rest(
    config_with_a_long_one,
):
    result = encode(config_with_a_long_one, SmallDevice(40000, LACK), batch_seconds=2.0)
    (failure,) = result.failures.values()
    for part in ("its 4 s do not fit", "at byte", "all other units go on", "with more memory"):
        assert part in failure.message
    larger = SmallDevice(80000, LACK)
    assert encode(config_with_a_long_one, larger, batch_seconds=2.0).ok
    assert [max(batch) for batch in larger.batches] == [64000]


def test_segments_that_cannot_fit_are_named_before_their_unit_is_decoded(config_with_a_long_one, monkeypatch):
    monkeypatch.setattr("sharmill.encode.codec_batches.require_room", lambda *arguments: 3.5)
    codec = ToyCodec()
    result = encode(config_with_a_long_one, codec, batch_seconds=2.0)
    (failure,) = result.failures.values()
    assert "1 of 1 segments are longer than the 4 s that fit" in failure.message
    assert "the longest, of 4 s, is in" in failure.message
    assert sum(len(batch) for batch in codec.batches) == 5


def test_other_errors_are_not_taken_for_a_lack_of_memory(config):
    device = SmallDevice(0, RuntimeError("CUDA error: an illegal memory access was encountered"))
    result = encode(config, device)
    assert {"illegal memory access" in failure.message for failure in result.failures.values()} == {True}


class NanCodec(ToyCodec):
    """A codec whose base class finds codes out of range for a segment of four seconds."""

    def encode(self, audio: torch.Tensor, num_samples: torch.Tensor) -> Any:
        if 64000 in num_samples.tolist():
            raise UnitFailed("codec toy gave the indices -9 to 4, outside its 64", code="bad_codes")
        return super().encode(audio, num_samples)


def test_a_segment_whose_codes_are_not_finite_costs_its_unit_alone_and_is_named(config_with_a_long_one):
    result = encode(config_with_a_long_one, NanCodec(), batch_seconds=8.0)
    (failure,) = result.failures.values()
    assert "outside its 64 (segments " in failure.message
    assert "recording.000002.tar at byte" in failure.message
    assert encode(config_with_a_long_one, ToyCodec(), batch_seconds=8.0).ok
