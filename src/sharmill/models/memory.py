"""Memory of models: how much a model takes, which batches fit and are fast, and the end of work that does not fit.

Importing this module imports no torch.
"""

import ctypes
import errno
import gc
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from sharmill.errors import ConfigError, FatalError, RejectRecord, UnitFailed, mentions_memory, one_line, other_reason
from sharmill.models import Codec, SpeakerEncoder
from sharmill.models.batches import Batch, plan_batches
from sharmill.models.device import fit_batch_seconds

# Units that fail alike, before one is done, until a rank takes it for the configuration's fault.
_UNITS_ALIKE: Final = 2
# Advice for a user whom no batch size helps.
ELSEWHERE: Final = "the same command does the rest on a device with more memory, of the same kind"
_ROW_SECONDS: Final = 5.0
_CPU_SIZES: Final = (5.0, fit_batch_seconds(math.inf, "cpu"))
# Sizes of the two batches that the memory per second follows from; their lengths are canonical.
_TWO_SIZES: Final = (2.0, 10.0)
_GPU_SIZES: Final = (15.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)
# The rest is for other processes, fragments and the system's own pages.
_USABLE_SHARE: Final = 0.7
# A larger batch must be this much faster to be worth its memory.
_WORTH: Final = 1.03
_REPEATS: Final = 2
# Durations of read speech: a gamma distribution with a mean of 6.5 s.
_SPEECH_SHAPE, _SPEECH_SCALE, _SPEECH_LIMITS = 2.5, 2.6, (0.6, 20.0)

# Rows and samples of a batch.
Shape = tuple[int, int]


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if an exception, or what caused it, is about memory."""
    if error is None:
        return False
    # torch is not imported for this: without it there is no such error.
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.cuda.OutOfMemoryError)):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    # A library that finds no room when it is imported is an ImportError.
    if isinstance(error, (RuntimeError, ImportError)) and mentions_memory(str(error)):
        return True
    return is_out_of_memory(error.__cause__)


@dataclass
class MemoryGuard:
    """Watch over the batches of a model on a rank: what does not fit ends its unit, and the stage if nothing does.

    Batches have the shapes that plan and configuration give them, whatever memory is free: nothing is split here.

    Args:
        model: its name, for messages.
        key: the key of the configuration to lower, such as ``encode.batch_seconds``.
    """

    model: str
    key: str
    _failed_alike: int = 0
    _proven: bool = False
    _left_over: bool = False

    @contextmanager
    def batch(self, seconds: float, num_rows: int, *, is_long: bool = False, is_least: bool = False) -> Iterator[None]:
        """Run a batch of so many padded seconds.

        Args:
            is_long: it is one segment that is longer than any batch may be: to be rejected where it does not fit.
            is_least: it is one piece of a segment: no configuration makes a smaller batch of it.

        Raises:
            RejectRecord: it has not enough memory, and is such a segment.
            UnitFailed: it has not enough memory; ``code`` is ``out_of_memory``.
            FatalError: it is not the first one, and no unit has been done yet.
        """
        if self._left_over:
            # So that this batch finds the memory that the one that failed has found.
            gc.collect()
            torch = sys.modules.get("torch")
            if torch is not None and torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            self._left_over = False
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # The tensors of the batch would live in the frames of its traceback for as long as anybody has the error.
            traceback.clear_frames(error.__traceback__)
            self._left_over = True
            other = other_reason(error)
            if is_long:
                raise RejectRecord(
                    "too_long_for_device", f"its {seconds:.0f} s do not fit in the memory of the device at once{other}"
                ) from error
            self._failed_alike += 1
            kind = UnitFailed if self._proven or self._failed_alike < _UNITS_ALIKE else FatalError
            if num_rows == 1:
                what = "a piece of a longer segment" if is_least else "a segment"
                why = (
                    f"{what}, of {seconds:.0f} s, does not fit in the memory of the device by itself, whatever "
                    f"{self.key} is: {ELSEWHERE}; or keep segments so long out with prepare.max_duration and --restart"
                )
            else:
                why = (
                    f"a batch of {num_rows} rows and {seconds:.0f} s does not fit in the memory of the device: "
                    f"lower {self.key} below {seconds:.0f}, with --restart {self.key.partition('.')[0]}"
                )
            raise kind(f"{self.model}: {why}{other} ({one_line(error)})", code="out_of_memory") from error

    def unit_done(self) -> None:
        """Note that all batches of a unit had enough memory: what fails later is the fault of that unit alone."""
        self._proven = True


def measure_peak(work: Callable[[], object], device: str) -> int:
    """Return the most bytes that this process held beyond what it held before, while ``work`` ran.

    On a GPU it is what torch had allocated. On a CPU it is resident memory: tensors, what the libraries below torch
    take beside them, and what the system's allocator keeps of both.

    Raises:
        ConfigError: the system does not tell the peak of a process.
    """
    if device == "cpu":
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # pages that are free already would be used first, and not be counted
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        except OSError as error:
            raise ConfigError(
                f"the memory of models cannot be measured on this machine: /proc/self/clear_refs: {error.strerror}",
                code="unsupported_system",
            ) from error
        before = _resident("VmRSS")
        work()
        return max(0, _resident("VmHWM") - before)
    import torch

    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _resident(key: str) -> int:
    """Return the bytes that the status of this process has behind a key."""
    return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0]) << 10


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The speed and the memory of a model on a device.

    Args:
        bytes_per_second: memory per second of audio in a batch, padding included.
        speeds: by the seconds of a batch, seconds of audio per second; sizes that do not fit are left out.
        most_seconds: the seconds of audio that fit at once: in a batch, or in one segment.
        one_row: True if a batch is one segment whatever size is asked for. Speeds are then by the seconds of a segment.
    """

    bytes_per_second: float
    speeds: dict[float, float]
    most_seconds: float
    one_row: bool = False

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
    sizes = _CPU_SIZES if device == "cpu" else _GPU_SIZES
    shape = _shape_in_rows(model)
    return _measure(model, device, memory, shape, {seconds: [shape(seconds)] for seconds in sizes})


def measure_canonical(codec: Codec, device: str, memory: int, unit_seconds: float) -> Measurement:
    """Run a codec on seeded noise of canonical lengths, in batches of canonical sizes: see ``plan_batches``.

    Only audio counts in the speeds, and not the silence that fills up batches in a unit of segments as long as speech.

    Args:
        device: ``cpu`` or ``cuda``, which the codec is on.
        memory: bytes of the device that may be used.
        unit_seconds: audio of a unit.
    """
    rate, size = codec.sampling_rate, codec.samples_per_frame

    def plan(seconds: Sequence[float], batch_seconds: float) -> list[Batch]:
        frames = [-(-round(item * rate) // size) for item in seconds]
        return plan_batches(frames, batch_seconds, codec, device, canonical=True)

    def shape(seconds: float, batch_seconds: float = 0.0) -> Shape:
        (batch,) = plan([seconds], batch_seconds)
        return batch.num_rows, batch.num_frames * size

    one_row = shape(_TWO_SIZES[0], _GPU_SIZES[-1])[0] == 1
    if one_row:
        batches = {samples / rate: [(rows, samples)] for rows, samples in map(shape, _TWO_SIZES)}
    else:
        batches = {seconds: [shape(item, seconds) for item in _TWO_SIZES] for seconds in _GPU_SIZES}
    found = _measure(codec, device, memory, shape, batches, one_row=one_row)
    # Segments as long as speech, a unit of them at least.
    count = math.ceil(unit_seconds / _SPEECH_LIMITS[0])
    lengths = np.clip(np.random.default_rng(0).gamma(_SPEECH_SHAPE, _SPEECH_SCALE, count), *_SPEECH_LIMITS)
    unit = list(lengths[: 1 + int(np.searchsorted(np.cumsum(lengths), unit_seconds))])
    for seconds in () if one_row else found.speeds:
        planned = plan(unit, seconds)
        audio = sum(len(batch.items) * batch.num_frames for batch in planned)
        found.speeds[seconds] *= audio / sum(batch.num_rows * batch.num_frames for batch in planned)
    return found


def _measure(
    model: Codec | SpeakerEncoder, device: str, memory: int, shape: Callable[[float], Shape],
    batches: Mapping[float, Sequence[Shape]], *, one_row: bool = False,
) -> Measurement:  # fmt: skip
    """Measure a model on batches by size, one after the other, as far as they fit."""
    bytes_per_second = estimate_bytes_per_second(model, device, shape)
    speeds: dict[float, float] = {}
    for size, shapes in batches.items():
        if size * bytes_per_second > _USABLE_SHARE * memory:
            break
        try:
            taken = sum(_time(model, device, batch) for batch in shapes)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            break
        speeds[size] = sum(rows * samples for rows, samples in shapes) / model.sampling_rate / taken
    most = _USABLE_SHARE * memory / max(1.0, bytes_per_second)
    return Measurement(bytes_per_second=bytes_per_second, speeds=speeds, most_seconds=most, one_row=one_row)


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

    bytes_per_second = estimate_bytes_per_second(model, device)
    memory = torch.cuda.get_device_properties(device).total_memory
    needed = bytes_per_second * batch_seconds
    if needed > memory:
        raise ConfigError(
            f"{key} is {batch_seconds:g}: a batch takes about {needed / 2**30:.1f} GiB, and the device has "
            f"{memory / 2**30:.1f}; set it to {_USABLE_SHARE * memory / bytes_per_second:.0f} or less",
            code="out_of_memory",
        )
    return memory / max(1.0, bytes_per_second)


def _shape_in_rows(model: Codec | SpeakerEncoder) -> Callable[[float], Shape]:
    """Return a function that returns the shape of a batch of so many seconds, in rows of about 5 s."""

    def shape(seconds: float) -> Shape:
        rows = max(1, round(seconds / _ROW_SECONDS))
        return rows, round(seconds / rows * model.sampling_rate)

    return shape


def run_noise(model: Codec | SpeakerEncoder, device: str, shape: Shape) -> None:
    """Run a model on a batch of noise of so many rows and samples."""
    import torch

    work: Callable[..., object] = model.encode if hasattr(model, "encode") else model.embed
    rows, samples = shape
    audio = 0.1 * torch.randn(rows, samples, generator=torch.Generator().manual_seed(0))
    work(audio, torch.full((rows,), samples, dtype=torch.int64))
    if device != "cpu":
        torch.cuda.synchronize(device)


def _time(model: Codec | SpeakerEncoder, device: str, shape: Shape) -> float:
    """Return the least seconds that a batch takes, after a run that warms up."""
    run_noise(model, device, shape)
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        run_noise(model, device, shape)
        times.append(time.perf_counter() - started)
    return min(times)


def estimate_bytes_per_second(
    model: Codec | SpeakerEncoder, device: str, shape: Callable[[float], Shape] | None = None
) -> float:
    """Return the bytes of memory that a model takes per second of audio in a batch, padding included.

    Args:
        shape: returns the shape of a batch of so many seconds; by default it has rows of about 5 s.
    """
    shape = shape or _shape_in_rows(model)
    short, long = _TWO_SIZES
    run_noise(model, device, shape(short))  # memory that is allocated once is no part of it
    most = measure_peak(lambda: run_noise(model, device, shape(long)), device)
    if device == "cpu":
        # Pages come and stay in large pieces, so that a difference of two peaks may be anything. It is a batch's size.
        return most / long
    least = measure_peak(lambda: run_noise(model, device, shape(short)), device)
    return max(0.0, most - least) / (long - short)
