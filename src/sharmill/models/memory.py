"""Memory of models: the errors that are about it, how much a model takes, and the end of work that does not fit.

Importing this module imports no torch.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sharmill.errors import ConfigError, FatalError, RejectRecord, UnitFailed, first_line, mentions_memory

# Units that fail alike, before one is done, until a rank takes it for the configuration's fault.
_UNITS_ALIKE: Final = 2
# What a user can do where no batch size helps.
ELSEWHERE: Final = "the same command does the rest on a device with more memory, of the same kind"


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


class MemoryGuard:
    """Watch over the batches of a model on a rank: what does not fit ends its unit, and the stage if nothing does.

    Batches have the shapes that plan and configuration give them, whatever memory is free: nothing is split here.

    Args:
        model: its name, for messages.
        key: the key of the configuration to lower, such as ``encode.batch_seconds``.
    """

    def __init__(self, model: str, key: str) -> None:
        self._model = model
        self._key = key
        self._failed_alike = 0
        self._proven = False
        self._left_over = False

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
            # Not where it failed: there, its traceback still holds the tensors.
            _release_cached()
            self._left_over = False
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._left_over = True
            if is_long:
                detail = f"its {seconds:.0f} s do not fit in the memory of the device at once"
                raise RejectRecord("too_long_for_device", detail) from error
            self._failed_alike += 1
            kind = UnitFailed if self._proven or self._failed_alike < _UNITS_ALIKE else FatalError
            if is_least:
                why = (
                    f"a piece of {seconds:.0f} s of a longer segment does not fit in the memory of the device, "
                    f"whatever {self._key} is: {ELSEWHERE}"
                )
            else:
                why = (
                    f"a batch of {num_rows} rows and {seconds:.0f} s does not fit in the memory of the device: "
                    f"lower {self._key} below {seconds:.0f}, with --restart {self._key.partition('.')[0]}"
                )
            raise kind(f"{self._model}: {why} ({first_line(error)})", code="out_of_memory") from error

    def unit_done(self) -> None:
        """Note that all batches of a unit had enough memory: what fails later is the fault of that unit alone."""
        self._proven = True


def _release_cached() -> None:
    """Give back what the failed batch has left, so that the next one finds the memory that this one found."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def measure_peak(work: Callable[[], object], device: str) -> int:
    """Return the most bytes that this process held beyond what it held before, while ``work`` ran.

    On a GPU it is what torch had allocated. On a CPU it is resident memory: tensors, what the libraries below torch
    take beside them, and what the system's allocator keeps of both.

    Raises:
        ConfigError: the system does not tell the peak of a process.
    """
    if device == "cpu":
        return _measure_resident_peak(work)
    import torch

    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _measure_resident_peak(work: Callable[[], object]) -> int:
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


def _resident(key: str) -> int:
    """Return the bytes that the status of this process has behind a key."""
    return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0]) << 10


def estimate_bytes_per_second(run: Callable[[float], object], device: str) -> float:
    """Return the bytes of memory that a model takes per second of audio in a batch, padding included.

    Args:
        run: runs the model on so many seconds of audio.
    """
    short, long = 2.0, 10.0
    run(short)  # what is made once is no part of it
    most = measure_peak(lambda: run(long), device)
    if device == "cpu":
        # Pages come and stay in large pieces, so that a difference of two peaks may be anything. It is a batch's size.
        return most / long
    return max(0.0, most - measure_peak(lambda: run(short), device)) / (long - short)
