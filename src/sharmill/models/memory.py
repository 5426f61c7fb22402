"""Memory of models: measurement, the choice of batches that fit and are fast, and errors if memory is exceeded.

Importing this module does not import torch.
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

# If this many batches fail for lack of memory before any unit is complete, the rank blames the configuration.
_UNITS_ALIKE: Final = 2
# Advice if no batch size helps.
ELSEWHERE: Final = "the same command does the rest on a device of the same kind with more memory"
_ROW_SECONDS: Final = 5.0
_CPU_SIZES: Final = (5.0, fit_batch_seconds(math.inf, "cpu"))
# Seconds of audio in the two batches from which the memory per second is computed; their lengths are canonical.
_TWO_SIZES: Final = (2.0, 10.0)
_GPU_SIZES: Final = (15.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)
# Share of the memory that may be used; the rest is reserved for other processes, fragmentation and the system.
_USABLE_SHARE: Final = 0.7
# A larger batch must be this much faster to be worth its memory.
_WORTH: Final = 1.03
_REPEATS: Final = 2
# Durations of read speech in seconds: a gamma distribution with a mean of 6.5 s, clipped to limits.
_SPEECH_SHAPE, _SPEECH_SCALE, _SPEECH_LIMITS = 2.5, 2.6, (0.6, 20.0)

# Number of rows in a batch, and number of samples in each row.
Shape = tuple[int, int]


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if an exception or one of its causes reports a lack of memory."""
    if error is None:
        return False
    # If torch is not imported yet, the error cannot be torch's.
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.cuda.OutOfMemoryError)):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    # A library that cannot be loaded for lack of memory raises ImportError.
    if isinstance(error, (RuntimeError, ImportError)) and mentions_memory(str(error)):
        return True
    return is_out_of_memory(error.__cause__)


@dataclass
class MemoryGuard:
    """Turns a lack of memory in a rank's batches into an error of the unit, or of the stage if no batch seems to fit.

    The shapes of batches depend on the plan and the configuration, not on the free memory. Batches that do not fit are
    therefore not split here.

    Args:
        model: the name of the model in messages.
        key: the configuration key to lower, such as ``encode.batch_seconds``.
    """

    model: str
    key: str
    _failed_alike: int = 0
    _proven: bool = False
    _left_over: bool = False

    @contextmanager
    def batch(self, seconds: float, num_rows: int, *, is_long: bool = False, is_least: bool = False) -> Iterator[None]:
        """Convert a lack of memory in the body, which runs a batch, to one of the errors below.

        Args:
            seconds: the padded seconds of the batch.
            num_rows: the number of rows.
            is_long: the batch is a single segment longer than the batch limit, to be rejected if it does not fit.
            is_least: the batch is a single piece of a segment, which no configuration can make smaller.

        Raises:
            RejectRecord: ``too_long_for_device``, if memory is insufficient and ``is_long`` is True.
            UnitFailed: ``out_of_memory``, if memory is insufficient.
            FatalError: ``out_of_memory``, if this is not the first such failure and no unit is complete yet.
        """
        if self._left_over:
            # Free the memory of the previous batch, which failed, so that this batch has just as much memory.
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
            # Otherwise the traceback would keep the tensors of the batch alive as long as the error exists.
            traceback.clear_frames(error.__traceback__)
            self._left_over = True
            other = other_reason(error)
            if is_long:
                raise RejectRecord(
                    "too_long_for_device",
                    f"its {seconds:.0f} s do not fit in the memory of the device at once{other}",
                ) from error
            self._failed_alike += 1
            kind = UnitFailed if self._proven or self._failed_alike < _UNITS_ALIKE else FatalError
            if num_rows == 1:
                what = "a piece of a longer segment" if is_least else "a segment"
                why = (
                    f"{what} of {seconds:.0f} s does not fit in the memory of the device, whatever {self.key} is: "
                    f"{ELSEWHERE}; or exclude such long segments with prepare.max_duration and --restart"
                )
            else:
                why = (
                    f"a batch of {num_rows} rows and {seconds:.0f} s does not fit in the memory of the device: "
                    f"lower {self.key} below {seconds:.0f}, with --restart {self.key.partition('.')[0]}"
                )
            raise kind(f"{self.model}: {why}{other} ({one_line(error)})", code="out_of_memory") from error

    def unit_done(self) -> None:
        """Record that all batches of a unit fit in memory, so that later failures are specific to their units."""
        self._proven = True


def measure_peak(work: Callable[[], object], device: str) -> int:
    """Return the peak memory in bytes while ``work`` runs, minus the memory before.

    On a GPU this counts the memory that torch has allocated. On a CPU it counts resident memory: tensors, buffers of
    the libraries under torch, and freed memory that the allocator keeps.

    Raises:
        ConfigError: the system does not report the peak memory of a process.
    """
    if device == "cpu":
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # otherwise, freed pages would be reused without being counted
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
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
    """Return a memory value in bytes from /proc/self/status."""
    return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0]) << 10


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The speed and the memory of a model on a device.

    Args:
        bytes_per_second: bytes of memory for each second of audio in a batch, padding included.
        speeds: seconds of audio processed per second, by the seconds of audio in a batch. Sizes that do not fit in
            memory are left out.
        most_seconds: the seconds of audio that fit in memory at once, in a batch or in a single segment.
        one_row: True if a batch always has one segment. Then the keys of ``speeds`` are the lengths of segments in
            seconds.
    """

    bytes_per_second: float
    speeds: dict[float, float]
    most_seconds: float
    one_row: bool = False

    @property
    def best_size(self) -> float | None:
        """The smallest batch size, in seconds of audio, that no larger size clearly beats.

        It is None if no size fits in memory, or if batches have one row.
        """
        if self.one_row:
            return None
        best: float | None = None
        for size, speed in sorted(self.speeds.items()):
            if best is None or speed > _WORTH * self.speeds[best]:
                best = size
        return best


def measure_model(model: Codec | SpeakerEncoder, device: str, memory: int) -> Measurement:
    """Measure a model on seeded noise in batches of increasing size, until a batch does not fit in memory.

    Args:
        model: the model.
        device: the device of the model, ``cpu`` or ``cuda``.
        memory: the bytes of device memory that may be used.
    """
    sizes = _CPU_SIZES if device == "cpu" else _GPU_SIZES
    shape = _shape_in_rows(model)
    return _measure(model, device, memory, shape, {seconds: [shape(seconds)] for seconds in sizes})


def measure_canonical(codec: Codec, device: str, memory: int, unit_seconds: float) -> Measurement:
    """Measure a codec on seeded noise in canonical batches; see ``plan_batches``.

    The speeds count only audio, not padding. The share of padding is computed for a unit with typical durations of
    speech.

    Args:
        codec: the codec.
        device: the device of the codec, ``cpu`` or ``cuda``.
        memory: the bytes of device memory that may be used.
        unit_seconds: the seconds of audio in a unit.
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
    # Draw typical durations of speech, enough of them for at least one unit.
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
    """Measure a model on batches in order of size, until one does not fit."""
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
    """Return the measured seconds of audio that fit at once in the memory of a GPU; infinite on a CPU.

    On a CPU, batches are small and the available memory varies, so nothing is measured.

    Args:
        model: the model.
        device: the device of the model.
        batch_seconds: the seconds of audio in a batch.
        key: the configuration key of ``batch_seconds``, for the message.

    Raises:
        ConfigError: a batch does not fit.
    """
    if device == "cpu":
        return math.inf
    import torch

    bytes_per_second = estimate_bytes_per_second(model, device)
    memory = torch.cuda.get_device_properties(device).total_memory
    needed = bytes_per_second * batch_seconds
    if needed > memory:
        raise ConfigError(
            f"{key} is {batch_seconds:g}: a batch takes about {needed / 2**30:.1f} GiB, but the device has "
            f"{memory / 2**30:.1f} GiB; set {key} to {_USABLE_SHARE * memory / bytes_per_second:.0f} or less",
            code="out_of_memory",
        )
    return memory / max(1.0, bytes_per_second)


def _shape_in_rows(model: Codec | SpeakerEncoder) -> Callable[[float], Shape]:
    """Return a function that maps the seconds of a batch to its shape, whose rows last about 5 s."""

    def shape(seconds: float) -> Shape:
        rows = max(1, round(seconds / _ROW_SECONDS))
        return rows, round(seconds / rows * model.sampling_rate)

    return shape


def run_noise(model: Codec | SpeakerEncoder, device: str, shape: Shape) -> None:
    """Run a model on a batch of noise of this shape."""
    import torch

    work: Callable[..., object] = model.encode if hasattr(model, "encode") else model.embed
    rows, samples = shape
    audio = 0.1 * torch.randn(rows, samples, generator=torch.Generator().manual_seed(0))
    work(audio, torch.full((rows,), samples, dtype=torch.int64))
    if device != "cpu":
        torch.cuda.synchronize(device)


def _time(model: Codec | SpeakerEncoder, device: str, shape: Shape) -> float:
    """Return the minimum of the seconds that a batch takes in several runs, after a warm-up run."""
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
    """Return the bytes of memory that a model takes for each second of audio in a batch, padding included.

    Args:
        model: the model.
        device: the device of the model.
        shape: a function that maps the seconds of a batch to its shape; by default, the rows of a batch last about
            5 s.
    """
    shape = shape or _shape_in_rows(model)
    short, long = _TWO_SIZES
    run_noise(model, device, shape(short))  # memory that is allocated only once must not count
    most = measure_peak(lambda: run_noise(model, device, shape(long)), device)
    if device == "cpu":
        # Memory is allocated in large chunks, so the difference between two peaks is meaningless. The size of the long
        # batch is typical.
        return most / long
    least = measure_peak(lambda: run_noise(model, device, shape(short)), device)
    return max(0.0, most - least) / (long - short)
