"""Batch sizes measured on the device at hand: speed and memory of a model, and the size to put into a configuration."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sharmill.errors import ConfigError
from sharmill.models.arithmetic import CPU_BATCH_SECONDS
from sharmill.models.memory import estimate_bytes_per_second, is_out_of_memory

if TYPE_CHECKING:
    from sharmill.models.protocols import Codec, SpeakerEncoder

_ROW_SECONDS: Final = 5.0
_CPU_SIZES: Final = (5.0, CPU_BATCH_SECONDS)
_GPU_SIZES: Final = (15.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)
# What another process, fragments and the system's own pages take beside the tensors.
_USABLE_SHARE: Final = 0.7
# A larger batch must be this much faster to be worth its memory.
_WORTH: Final = 1.03
_REPEATS: Final = 2


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The speed and the memory of a model on a device.

    Args:
        bytes_per_second: memory per second of audio in a batch, padding included.
        speeds: by the seconds of a batch, seconds of audio per second; sizes that do not fit are left out.
        memory: bytes of the device.
    """

    bytes_per_second: float
    speeds: dict[float, float]
    memory: int

    @property
    def most_seconds(self) -> float:
        """The seconds of audio that fit at once: in a batch, or in one segment."""
        return _USABLE_SHARE * self.memory / max(1.0, self.bytes_per_second)

    @property
    def best_size(self) -> float | None:
        """The least size that no larger one beats by much; None where none fits."""
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
    run = make_runner(model, device)
    bytes_per_second = estimate_bytes_per_second(run, device)
    sizes = _CPU_SIZES if device == "cpu" else _GPU_SIZES
    fitting = [size for size in sizes if size * bytes_per_second <= _USABLE_SHARE * memory]
    return Measurement(bytes_per_second=bytes_per_second, speeds=dict(_measure_speeds(run, fitting)), memory=memory)


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
    """Return the work of one batch of noise of so many seconds."""
    import torch

    work: Callable[..., object] = model.encode if hasattr(model, "encode") else model.embed

    def run(seconds: float) -> None:
        rows = max(1, round(seconds / _ROW_SECONDS))
        samples = round(seconds / rows * model.sampling_rate)
        audio = 0.1 * torch.randn(rows, samples, generator=torch.Generator().manual_seed(0))
        work(audio, torch.full((rows,), samples, dtype=torch.int64))
        if device != "cpu":
            torch.cuda.synchronize(device)

    return run


def _measure_speeds(run: Callable[[float], None], sizes: Sequence[float]) -> Iterator[tuple[float, float]]:
    for size in sizes:
        try:
            run(size)
            times = []
            for _ in range(_REPEATS):
                started = time.perf_counter()
                run(size)
                times.append(time.perf_counter() - started)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return
        yield size, size / min(times)
