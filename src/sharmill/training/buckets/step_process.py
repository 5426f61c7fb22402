"""Training steps of chosen sizes in a process with a limit of memory, which may die of it.

The step is ``module:callable``, called as ``step(batch_size, length, num_tokens, device)``; a class is instantiated
once per process without arguments, and the object called. The contract is in ``sharmill.training.buckets.batch_size``.
Below it: the memory that is available, and a limit on it.
"""

from __future__ import annotations

import gc
import mmap
import os
import re
import resource
import signal
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from sharmill.errors import ConfigError, FatalError, SharmillError, mentions_memory
from sharmill.files.host import group_limits
from sharmill.models.memory import is_out_of_memory
from sharmill.training.child_process import ChildEnded, ChildProcess
from sharmill.training.tokenizers import load_callable

# Optimizers make their state in the first step; only the second one has activations and state at once.
_STEPS_PER_PROBE = 2
_LAST_LINES = 15


@dataclass(frozen=True)
class Bucket:
    """A bucket by the longest that its batches may have: seconds (or frames), and text tokens in two dimensions."""

    length: float
    num_tokens: int | None = None

    def __str__(self) -> str:
        return f"{self.length:g}" if self.num_tokens is None else f"{self.length:g} with {self.num_tokens} tokens"


@dataclass(frozen=True)
class Budget:
    """An amount of memory: ``size`` bytes of the ``total`` of ``device``."""

    device: str
    size: int
    total: int

    def __str__(self) -> str:
        return f"{format_memory(self.size)} of {self.device}"


class StepProcess:
    """Training steps in a process of their own, which is replaced when it dies.

    Args:
        step: ``module:callable``.
        budget: the memory that the process may have.
        timeout: seconds for one size, or for loading the step.
        options: arguments of the class that the step is.

    Attributes:
        last_lack: the message of the last error of memory.
    """

    def __init__(
        self, step: str, budget: Budget, timeout: float | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        self._step = step
        self._options = dict(options or {})
        self._budget = budget
        self._timeout = timeout
        self._child: ChildProcess | None = None
        self._output: Path | None = None
        self.last_lack = ""

    def __enter__(self) -> StepProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def fits(self, batch_size: int, bucket: Bucket) -> bool:
        """Return True if two steps of this size in a row have enough memory.

        Raises:
            ConfigError: there is no such step.
            FatalError: the step failed for another reason; its traceback, or last output, is in the message.
        """
        child = self._child or self._start()
        child.send((batch_size, bucket.length, bucket.num_tokens))
        return self._expect(self._answer(child), "fits", f"a batch of {batch_size} of {bucket}")

    def _start(self) -> ChildProcess:
        descriptor, name = tempfile.mkstemp(prefix="sharmill-step-", suffix=".log")
        os.close(descriptor)
        self._output = Path(name)
        # Not a daemon: a step may have worker processes of its own.
        self._child = ChildProcess(
            _run_steps, self._step, self._options, self._budget, name, name="sharmill-step", daemon=False
        )
        self._expect(self._answer(self._child), "ready", "loading it")
        return self._child

    def _answer(self, child: ChildProcess) -> tuple[str, str]:
        """Return the answer of the process, or ``died`` and why; without a reason, it was for lack of memory."""
        try:
            answer: tuple[str, str] = child.receive(self._timeout)
        except TimeoutError:
            return "error", f"it took more than {self._timeout:g} seconds; allow it more with --timeout"
        except ChildEnded as error:
            return "died", self._cause_of_death(child.exitcode or 0, str(error))
        return answer

    def _cause_of_death(self, code: int, how: str) -> str:
        assert self._output is not None
        output = self._output.read_text(errors="replace")
        # SIGKILL is how the kernel gets memory back; other deaths must have said so.
        if code == -signal.SIGKILL or (code < 0 and mentions_memory(output)):
            return ""
        return "\n".join([f"its process {how}", *output.splitlines()[-_LAST_LINES:]])

    def _expect(self, answer: tuple[str, str], good: str, doing: str) -> bool:
        """Return True for the good answer, False where memory was lacking; raise for all others."""
        kind, detail = answer
        if kind == good:
            return True
        if kind == "died":
            self._end()
        elif kind == "out_of_memory" and good == "fits":
            self.last_lack = detail
            if self._budget.device == "cpu":
                # Libraries leave holes and half-made things behind, with which less and less fits.
                self._end()
            return False
        if kind == "died" and good == "fits" and not detail:
            return False
        if kind == "wrong_use":
            raise ConfigError(detail, code="bad_callable")
        why = "there is not enough memory" if kind == "out_of_memory" or not detail else detail
        raise FatalError(f"the step {self._step} failed ({doing}, {self._budget}): {why}", code="step_failed")

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.join()
            self._child.connection.close()
            self._child = None
        if self._output is not None:
            self._output.unlink(missing_ok=True)
            self._output = None


def _run_steps(connection: Connection, name: str, options: dict[str, Any], budget: Budget, output: str) -> None:
    """Load the step under the limit, then answer until the other end is closed; all output goes to a file."""
    descriptor = os.open(output, os.O_WRONLY | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    try:
        if budget.device == "cpu":
            _limit_memory(budget.size)
        else:
            import torch

            torch.cuda.set_device(budget.device)
            torch.cuda.set_per_process_memory_fraction(min(1.0, budget.size / budget.total), budget.device)
        step = load_callable(name, "step")
        step = step(**options) if isinstance(step, type) else step
    except ConfigError as error:
        connection.send(_describe(error) if is_out_of_memory(error) else ("wrong_use", str(error)))
        return
    except Exception as error:  # noqa: BLE001  whatever it is, the parent tells it
        connection.send(_describe(error))
        return
    connection.send(("ready", ""))
    while True:
        try:
            question = connection.recv()
        except EOFError:
            return
        connection.send(_probe(step, budget.device, *question))
        # What it left goes: the next one has other sizes, and should not find gaps of the old.
        gc.collect()
        if budget.device != "cpu":
            torch.cuda.empty_cache()


def _probe(
    step: Callable[..., Any], device: str, batch_size: int, length: float, num_tokens: int | None
) -> tuple[str, str]:
    try:
        for _ in range(_STEPS_PER_PROBE):
            step(batch_size, length, num_tokens, device)
        if device != "cpu":
            import torch

            # Kernels run later than they are called, and so do their errors.
            torch.cuda.synchronize(device)
    except Exception as error:  # noqa: BLE001  whatever it is, the parent tells it
        return _describe(error)
    return "fits", ""


def _describe(error: Exception) -> tuple[str, str]:
    if is_out_of_memory(error):
        return "out_of_memory", str(error)
    # What a user must change is said in one line; for the rest the traceback is needed.
    return "error", str(error) if isinstance(error, SharmillError) else "".join(traceback.format_exception(error))


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30,
          "TIB": 2**40}  # fmt: skip


def parse_memory(text: str) -> int:
    """Return the bytes of ``8GiB``, ``500 MB`` or ``1000000``.

    Raises:
        ConfigError: it is none of these, or nothing.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in _UNITS:
        raise ConfigError(f"{text!r} is no size of memory; write it like 8GiB or 500MB", code="bad_config_value")
    size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size <= 0:
        raise ConfigError(f"{text!r} is no memory at all", code="bad_config_value")
    return size


def format_memory(size: float) -> str:
    """Format bytes in GiB."""
    return f"{size / 2**30:.2f} GiB"


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process may still take: of the machine, and of the control groups that it is in."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", (proc / "meminfo").read_text(), re.MULTILINE)
    assert match is not None, "Linux tells what is available since 3.14"
    files1, files2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")
    limits = group_limits("memory", files1, files2, proc, cgroups)
    return min([int(match[1]) * 1024, *(max(0, limit - used) for limit, used in limits)])


def _limit_memory(size: int) -> None:
    """Limit the data of this process to ``size`` bytes from now on; what it has already counts.

    By RLIMIT_DATA, which counts private writable memory. RLIMIT_AS would count the libraries of torch as well, and
    address space that is reserved and never used.

    Raises:
        FatalError: the kernel does not enforce it.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    # An abort for lack of memory must not write that memory to the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return
    raise FatalError(
        "this kernel does not enforce RLIMIT_DATA, so that memory on the CPU cannot be limited",
        code="unsupported_system",
    )
