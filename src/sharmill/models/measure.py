"""Batch sizes measured on the device at hand: speed and memory of a model, and the size to put into a configuration."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from sharmill.errors import ConfigError
from sharmill.models.arithmetic import CPU_BATCH_SECONDS
from sharmill.models.memory import estimate_bytes_per_second, is_out_of_memory
from sharmill.models.shapes import Batch, plan_batches

if TYPE_CHECKING:
    from sharmill.models.protocols import Codec, SpeakerEncoder

_ROW_SECONDS: Final = 5.0
_CPU_SIZES: Final = (5.0, CPU_BATCH_SECONDS)
# Rounded up to canonical lengths: the two that memory is told from.
_CANONICAL_SECONDS: Final = (2.0, 10.0)
_GPU_SIZES: Final = (15.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)
# What another process, fragments and the system's own pages take beside the tensors.
_USABLE_SHARE: Final = 0.7
# A larger batch must be this much faster to be worth its memory.
_WORTH: Final = 1.03
_REPEATS: Final = 2
# Of read speech: a gamma distribution with a mean of 6.5 s.
_SPEECH_SHAPE, _SPEECH_SCALE, _SPEECH_LIMITS = 2.5, 2.6, (0.6, 20.0)

# Rows and samples of a batch.
Shape = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The speed and the memory of a model on a device.

    Args:
        bytes_per_second: memory per second of audio in a batch, padding included.
        speeds: by the seconds of a batch, seconds of audio per second; sizes that do not fit are left out.
        memory: bytes of the device.
        one_row: True if a batch is one segment whatever size is asked for. Speeds are then by the seconds of a segment.
    """

    bytes_per_second: float
    speeds: dict[float, float]
    memory: int
    one_row: bool = False

    @property
    def most_seconds(self) -> float:
        """The seconds of audio that fit at once: in a batch, or in one segment."""
        return _USABLE_SHARE * self.memory / max(1.0, self.bytes_per_second)

    @property
    def best_size(self) -> float | None:
        """The least size that no larger one beats by much; None where none fits, and where all are one row."""
        if self.one_row:
            return None
        best: float | None = None
        for size, speed in sorted(self.speeds.items()):
            if best is None or speed > _WORTH * self.speeds[best]:
                best = size
        return best


def measure_model(model: Codec | SpeakerEncoder, device: str, memory: int) -> Measurement:
    """Run a model on seeded noise in batches of several sizes, as far as they fit.

    Args:
        device: ``cpu`` or ``cuda``, which the model is on.
        memory: bytes of the device that may be used.
    """
    run = _batch_runner(model, device)
    bytes_per_second = estimate_bytes_per_second(make_runner(model, device), device)
    sizes = _fitting(_CPU_SIZES if device == "cpu" else _GPU_SIZES, bytes_per_second, memory)
    shapes = {seconds: [_shape_of_rows(seconds, model.sampling_rate)] for seconds in sizes}
    speeds = dict(_measure_speeds(run, shapes, model.sampling_rate))
    return Measurement(bytes_per_second=bytes_per_second, speeds=speeds, memory=memory)


def measure_canonical(codec: Codec, device: str, memory: int, unit_seconds: float) -> Measurement:
    """Run a codec on seeded noise of canonical lengths, in batches of canonical sizes: see ``plan_batches``.

    Only audio counts in the speeds, and not the silence that fills up batches in a unit of segments as long as speech.

    Args:
        device: ``cpu`` or ``cuda``, which the codec is on.
        memory: bytes of the device that may be used.
        unit_seconds: audio of a unit.
    """
    run = _batch_runner(codec, device)
    rate, size = codec.sampling_rate, codec.samples_per_frame

    def plan(seconds: Sequence[float], batch_seconds: float) -> list[Batch]:
        frames = [-(-round(item * rate) // size) for item in seconds]
        return plan_batches(frames, batch_seconds, codec, device, canonical=True)

    def shape(seconds: float, batch_seconds: float = 0.0) -> Shape:
        (batch,) = plan([seconds], batch_seconds)
        return batch.num_rows, batch.num_frames * size

    bytes_per_second = estimate_bytes_per_second(lambda seconds: run(*shape(seconds)), device)
    one_row = shape(_CANONICAL_SECONDS[0], _GPU_SIZES[-1])[0] == 1
    if one_row:
        shapes = {samples / rate: [(rows, samples)] for rows, samples in map(shape, _CANONICAL_SECONDS)}
    else:
        shapes = {seconds: [shape(item, seconds) for item in _CANONICAL_SECONDS] for seconds in _GPU_SIZES}
    shapes = {seconds: shapes[seconds] for seconds in _fitting(list(shapes), bytes_per_second, memory)}
    speeds = dict(_measure_speeds(run, shapes, rate))
    if not one_row:
        unit = _make_lengths(unit_seconds)
        speeds = {seconds: speed * _audio_share(plan(unit, seconds)) for seconds, speed in speeds.items()}
    return Measurement(bytes_per_second=bytes_per_second, speeds=speeds, memory=memory, one_row=one_row)


def require_room(model: Codec | SpeakerEncoder, device: str, batch_seconds: float, key: str) -> float:
    """Return the seconds of audio that all memory of a GPU holds at once, which is measured.

    On a CPU, where batches are small and memory is not one number, there is no such limit.

    Args:
        key: the key of the configuration that ``batch_seconds`` is the value of, for the message.

    Raises:
        ConfigError: not even a batch fits.
    """
    if device == "cpu":
        return math.inf
    import torch

    bytes_per_second = estimate_bytes_per_second(make_runner(model, device), device)
    memory = torch.cuda.get_device_properties(device).total_memory
    needed = bytes_per_second * batch_seconds
    if needed > memory:
        raise ConfigError(
            f"{key} is {batch_seconds:g}: a batch takes about {needed / 2**30:.1f} GiB, and the device has "
            f"{memory / 2**30:.1f}; set it to {_USABLE_SHARE * memory / bytes_per_second:.0f} or less",
            code="out_of_memory",
        )
    return memory / max(1.0, bytes_per_second)


def make_runner(model: Codec | SpeakerEncoder, device: str) -> Callable[[float], None]:
    """Return the work of one batch of noise of so many seconds, in rows of about 5 s."""
    run = _batch_runner(model, device)
    return lambda seconds: run(*_shape_of_rows(seconds, model.sampling_rate))


def _shape_of_rows(seconds: float, sampling_rate: int) -> Shape:
    rows = max(1, round(seconds / _ROW_SECONDS))
    return rows, round(seconds / rows * sampling_rate)


def _batch_runner(model: Codec | SpeakerEncoder, device: str) -> Callable[[int, int], None]:
    """Return the work of one batch of noise of so many rows and samples."""
    import torch

    work: Callable[..., object] = model.encode if hasattr(model, "encode") else model.embed

    def run(rows: int, samples: int) -> None:
        audio = 0.1 * torch.randn(rows, samples, generator=torch.Generator().manual_seed(0))
        work(audio, torch.full((rows,), samples, dtype=torch.int64))
        if device != "cpu":
            torch.cuda.synchronize(device)

    return run


def _fitting(sizes: Sequence[float], bytes_per_second: float, memory: int) -> list[float]:
    return [seconds for seconds in sizes if seconds * bytes_per_second <= _USABLE_SHARE * memory]


def _measure_speeds(
    run: Callable[[int, int], None], shapes: Mapping[float, Sequence[Shape]], sampling_rate: int
) -> Iterator[tuple[float, float]]:
    """Yield for each key the seconds of audio per second of its batches, one after the other, as far as they fit."""
    for key, batches in shapes.items():
        try:
            taken = sum(_time_batch(run, batch) for batch in batches)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return
        yield key, sum(rows * samples for rows, samples in batches) / sampling_rate / taken


def _time_batch(run: Callable[[int, int], None], batch: Shape) -> float:
    """Return the least seconds of a batch, after a run that warms up."""
    run(*batch)
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        run(*batch)
        times.append(time.perf_counter() - started)
    return min(times)


def _make_lengths(seconds: float) -> list[float]:
    """Return the seconds of segments as long as speech, so many seconds in all at least."""
    count = math.ceil(seconds / _SPEECH_LIMITS[0])
    lengths = np.clip(np.random.default_rng(0).gamma(_SPEECH_SHAPE, _SPEECH_SCALE, count), *_SPEECH_LIMITS)
    return list(lengths[: 1 + int(np.searchsorted(np.cumsum(lengths), seconds))])


def _audio_share(batches: Sequence[Batch]) -> float:
    """Return the share of the audio of batches that is not rows of silence."""
    items = sum(len(batch.items) * batch.num_frames for batch in batches)
    return items / sum(batch.num_rows * batch.num_frames for batch in batches)
