"""Codecs that run out of memory, and segments that are too long for a device: cut into pieces if codes stay equal."""

import dataclasses
import weakref
from typing import Any

import pytest
import torch
from support.project import ToyCodec, codec_stages, lines, loading, raises, run, voice

from sharmill.encode.config import EncodeConfig
from sharmill.errors import FatalError
from sharmill.models import load_codec
from sharmill.shar import open_shar

LACK = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class SmallDevice(ToyCodec):
    """A codec on a device with memory for a limited number of samples."""

    def __init__(self, samples: int, error: Exception = LACK) -> None:
        super().__init__()
        self.samples, self.error = samples, error

    def encode(self, audio: torch.Tensor, num_samples: torch.Tensor) -> Any:
        if audio.numel() > self.samples:
            raise self.error
        return super().encode(audio, num_samples)


@pytest.fixture(params=[0, 1], ids=["alone", "fed"])
def make_config(project, request):
    """Returns a function: seconds of cuts -> the configuration of a dataset of them, two in a shard.

    Feeders give the codec a thread of its own.
    """

    def make(*seconds):
        for number, duration in enumerate(seconds):
            project.add(f"{number}.flac", voice(duration, pitch=150 + 30 * number, seed=number), number=number)
        contexts = [1, *[0] * (len(seconds) - 1)]
        executor = {"workers": 1, "feeders": request.param}
        return project.write(contexts, write={"shard_size": 2, "order": "manifest"}, executor=executor)

    return make


def encode(config, codec, **options):
    """The result of the stage that takes segments through the codec; where it is done their codes are in the dataset.

    ``options`` are keys of the section encode.
    """
    config = config.with_section(dataclasses.replace(config.section(EncodeConfig), **options))
    with loading(codec):
        survey, stage, assemble = codec_stages(config)
        assert run(survey).ok
        result = run(stage)
        if result.ok:
            assert run(assemble).ok
    return result


@pytest.mark.parametrize("error", [
    LACK,
    RuntimeError("GET was unable to find an engine to execute this computation"),
    RuntimeError("cuFFT error: CUFFT_INTERNAL_ERROR"),
])  # fmt: skip
def test_where_nothing_fits_the_stage_stops_and_says_what_to_set(make_config, error):
    with raises(FatalError, "out_of_memory", "lower encode.batch_seconds below", "a batch of"):
        encode(make_config(*[1.0] * 6), SmallDevice(16000, error), unit_seconds=2.0)


ENGINE = RuntimeError("GET was unable to find an engine to execute this computation")


@pytest.mark.parametrize(
    ("error", "durations", "unit_seconds"),
    [(ENGINE, [1.0] * 6, 2.0), (ENGINE, [0.4] * 5 + [4.0], 4.0), (LACK, [1.0] * 6, 2.0)],
)
def test_what_may_be_a_fault_of_libraries_is_told_as_that_too(make_config, error, durations, unit_seconds):
    try:
        result = encode(make_config(*durations), SmallDevice(16000, error), unit_seconds=unit_seconds)
        told = str(result.failures)
    except FatalError as fatal:
        told = str(fatal)
    assert "fit in the memory of the device" in told
    assert ("the same message appears if torch, its libraries" in told) == (error is ENGINE)


def test_a_single_segment_gets_no_advice_on_smaller_batches(make_config):
    (failure,) = encode(
        make_config(*[0.4] * 5, 4.0), SmallDevice(40000), unit_seconds=4.0, batch_seconds=10.0
    ).failures.values()
    assert "a segment of 4 s " in failure.message
    assert (
        "of the same kind with more memory; or exclude such long segments with prepare.max_duration" in failure.message
    )
    assert "lower encode" not in failure.message


def test_a_segment_too_long_for_the_device_costs_its_unit_alone(make_config):
    config = make_config(*[1.0] * 5, 4.0)
    (failure,) = encode(config, SmallDevice(40000), unit_seconds=2.0, batch_seconds=2.0).failures.values()
    for part in ("its 4 s do not fit", "at byte", "all other units continue", "with more memory"):
        assert part in failure.message
    larger = SmallDevice(80000)
    assert encode(config, larger, unit_seconds=2.0, batch_seconds=2.0).ok
    assert [max(batch) for batch in larger.batches] == [64000]


class FullOnce(ToyCodec):
    """A codec on a device that is full in the first batch, and in later ones while memory of the first is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: weakref.ref | None = None

    def encode(self, audio: torch.Tensor, num_samples: torch.Tensor) -> Any:
        allocated = audio * 2
        if self.kept is None:
            self.kept = weakref.ref(allocated)
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        if self.kept() is not None:
            raise LACK
        return super().encode(audio, num_samples)


def test_memory_of_a_failed_batch_is_free_for_the_next(make_config):
    result = encode(make_config(*[1.0] * 6, 0.5), FullOnce(), unit_seconds=4.0, batch_seconds=2.0)
    assert result.ok


@pytest.fixture
def codec(monkeypatch):
    """The builtin codec, on a device that has no memory for more than 21 s at once."""
    codec = load_codec("builtin")
    codec.whole, codec.lengths = codec.encode, []

    def encode(audio, num_samples):
        codec.lengths.append([round(n / 16000, 1) for n in num_samples.tolist()])
        if audio.numel() > 21 * 16000:
            raise LACK
        return codec.whole(audio, num_samples)

    monkeypatch.setattr(codec, "encode", encode)
    return codec


def test_a_segment_cut_for_the_device_has_the_codes_of_the_whole(project, make_config, codec):
    config = make_config(1.0, 70.0)
    assert encode(config, codec).ok
    assert codec.lengths == [[20.0], [20.0], [20.0], [20.0], [1.0]]
    (commit,) = [one for path in codec_stages(config)[1].dir.path.glob("**/ledger/*.jsonl") for one in lines(path)]
    assert (commit["stats"]["encoded_seconds"], commit["stats"]["padded_seconds"]) == (71.0, 71.0)
    (long,) = [cut for cut in open_shar(project.dataset) if cut.duration > 60]
    audio = torch.from_numpy(long.load_custom("target_audio"))
    assert (long.target_codes.load() == codec.whole(audio, torch.tensor([audio.shape[1]]))[0].numpy()).all()


def test_a_segment_too_long_for_the_codec_is_named_with_a_remedy(make_config, codec, monkeypatch):
    monkeypatch.setattr(codec, "find_reach", lambda: None)
    (failure,) = encode(make_config(1.0, 70.0), codec).failures.values()
    for part in ("its 70 s do not fit", "all other units continue", "a device of the same kind with more memory"):
        assert part in failure.message
