"""Search for the largest batch per bucket that fits in a share of memory, by bisection based on out-of-memory errors.

The user provides the training step as ``module:callable``::

    def step(batch_size: int, length: float, num_tokens: int | None, device: str) -> None

The step runs one whole training step (forward, backward, optimizer) on a synthetic batch of ``batch_size`` items, each
as long as the bucket allows: ``length`` seconds (frames for token bins) and, for two-dimensional bins, ``num_tokens``
text tokens. The step must keep the model and the optimizer between calls, in a module variable or, if the callable is a
class, in its instance, which is created once per process. It must not hide errors. It is called twice per batch size,
since most optimizers allocate their state in the first step.

The search regards memory as exhausted if the step raises ``MemoryError`` or ``torch.cuda.OutOfMemoryError``, if an
error contains a message of one of torch's allocators, or if the process dies by SIGKILL or after printing such a
message. Any other error ends the search with the traceback of the step.

On a GPU, torch's ``set_per_process_memory_fraction`` sets the limit. On the CPU, RLIMIT_DATA limits the step's process.
This limit counts allocations of the process and its libraries, but not shared memory or child processes.
"""

import ast
import gc
import json
import math
import mmap
import os
import re
import resource
import signal
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from sharmill.errors import ConfigError, FatalError, SharmillError, counted, mentions_memory, refuse
from sharmill.files.host import group_limits
from sharmill.models.memory import is_out_of_memory
from sharmill.registry import require_package
from sharmill.training.nemo.settings import check_bins, read_yaml, resolve
from sharmill.training.parallel import ChildEnded, ChildProcess
from sharmill.training.tokenizers import load_callable

# Optimizers allocate their state in the first step, so activations and this state are in memory together only from the
# second step on.
_STEPS_PER_PROBE = 2
_LAST_LINES = 15
_TOKENS_PER_SECOND: Final = 12.0
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30,
          "TIB": 2**40}  # fmt: skip
# Keys of a bins file that limit the examples, or define how their lengths are measured.
_BINS_KEYS = (
    "use_multimodal_sampling", "token_equivalent_duration", "measure_total_length", "prompt_format", "max_tps",
    "max_tpt",
)  # fmt: skip


@dataclass(frozen=True)
class Bucket:
    """Upper bounds on the examples of a bucket.

    Attributes:
        length: maximum seconds, or frames for token bins.
        num_tokens: maximum number of text tokens; None in one dimension.
        max_ratio: maximum number of tokens per second or frame.
    """

    length: float
    num_tokens: int | None = None
    max_ratio: float = math.inf

    @property
    def bound(self) -> float | list[float]:
        """The bound in the form that NeMo's loader expects: a number, or a pair in two dimensions."""
        return self.length if self.num_tokens is None else [self.length, self.num_tokens]

    def __str__(self) -> str:
        return f"{self.length:g}" if self.num_tokens is None else f"{self.length:g} with {self.num_tokens} tokens"


@dataclass(frozen=True)
class Budget:
    """A memory budget: ``size`` bytes out of the ``total`` bytes of ``device``."""

    device: str
    size: int
    total: int

    def __str__(self) -> str:
        return f"{format_memory(self.size)} of {self.device}"


def tune_to_yaml(
    bins_text: str,
    *,
    device: str,
    memory: str | None,
    memory_share: float,
    max_batch_size: int,
    tolerance: float,
    timeout: float,
    tell: Callable[[str], None],
    step: str | None,
    module_name: str | None,
    pretrained_name: str | None,
    **more_step_options: Any,
) -> str:
    """Find the largest batches for ``sharmill tune-batch``, and return them with their bins as YAML for NeMo's loader.

    Args:
        bins_text: see ``read_bins``.
        device, memory_share: see ``make_budget``.
        memory: amount of memory such as ``8GiB``; see ``parse_memory``.
        max_batch_size, tolerance, timeout, tell: see ``tune_batch_sizes``.
        step, module_name, pretrained_name, more_step_options: see ``choose_step``.

    Raises:
        ConfigError: an option or the bins are invalid.
        FatalError: see ``tune_batch_sizes``.
    """
    buckets, settings = read_bins(bins_text)
    chosen, step_options, profile = choose_step(
        buckets, settings, step=step, module_name=module_name, pretrained_name=pretrained_name, **more_step_options
    )
    budget = make_budget(device, memory_share, parse_memory(memory) if memory else None)
    tell(f"searching within {budget}")
    sizes = tune_batch_sizes(
        chosen, buckets, budget, max_batch_size=max_batch_size, tolerance=tolerance, timeout=timeout,
        step_options=step_options, tell=tell,
    )  # fmt: skip
    return batch_sizes_to_yaml(step or module_name or str(pretrained_name), buckets, sizes, budget, profile)


class StepProcess(AbstractContextManager["StepProcess"]):
    """A separate process for training steps, which is replaced if it dies.

    Args:
        step: ``module:callable``.
        budget: memory limit of the process.
        timeout: maximum seconds for one batch size, or for loading the step.
        options: keyword arguments of the step if it is a class.

    Attributes:
        last_memory_error: message of the last out-of-memory error.
    """

    def __init__(
        self, step: str, budget: Budget, timeout: float | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        self._step = step
        self._options = dict(options or {})
        self._budget = budget
        self._timeout = timeout
        self._child: ChildProcess | None = None
        self._output = tempfile.NamedTemporaryFile(prefix="sharmill-step-", suffix=".log")  # noqa: SIM115  see __exit__
        self.last_memory_error = ""

    def __exit__(self, *error: object) -> None:
        self._end()
        self._output.close()

    def fits(self, batch_size: int, bucket: Bucket) -> bool:
        """Return True if two consecutive steps with this batch size fit in memory.

        Raises:
            ConfigError: the step does not exist.
            FatalError: the step failed for another reason; the details contain its traceback or its last output.
        """
        if self._child is None:
            # Daemons cannot have children, but a step may start worker processes.
            arguments = (self._step, self._options, self._budget, self._output.name)
            self._child = ChildProcess(_run_steps, *arguments, name="sharmill-step", daemon=False)
            if self._answer(self._child, "loading it") is not None:
                raise self._failure("loading it", "there is not enough memory")
        self._child.send((batch_size, bucket.length, bucket.num_tokens))
        lack = self._answer(self._child, f"a batch of {batch_size} of {bucket}")
        if lack is None:
            return True
        self.last_memory_error = lack or self.last_memory_error
        if self._budget.device == "cpu":
            # End the process: after a failed allocation, fragmentation and memory leaks in libraries would leave less
            # memory for later sizes.
            self._end()
        return False

    def _answer(self, child: ChildProcess, doing: str) -> str | None:
        """Return None if the child succeeded, or an error message if memory was exhausted.

        The message is empty if the process died. Any other failure raises an error.
        """
        try:
            kind, detail = child.receive(self._timeout)
        except TimeoutError:
            kind, detail = "error", f"it took more than {self._timeout:g} seconds; raise --timeout"
        except ChildEnded as error:
            output, code = Path(self._output.name).read_text(errors="replace"), child.exitcode or 0
            self._end()
            # The kernel's out-of-memory killer uses SIGKILL. Any other death counts only if the output mentions memory.
            if code == -signal.SIGKILL or (code < 0 and mentions_memory(output)):
                return ""
            kind, detail = "error", "\n".join([f"its process {error}", *output.splitlines()[-_LAST_LINES:]])
        if kind == "wrong_use":
            raise ConfigError(detail, code="bad_callable")
        if kind == "error":
            raise self._failure(doing, detail)
        return detail if kind == "out_of_memory" else None

    def _failure(self, doing: str, why: str) -> FatalError:
        first, *rest = why.splitlines() or [""]
        return FatalError(
            f"the step {self._step} failed ({doing}, {self._budget}): {first}", code="step_failed", details=rest
        )

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.join()
            self._child.connection.close()
            self._child = None


def _run_steps(connection: Connection, name: str, options: dict[str, Any], budget: Budget, output: str) -> None:
    """Load the step under the memory limit, then try each batch size that is received, until the pipe is closed.

    All output goes to a file.
    """
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
    except Exception as error:  # noqa: BLE001  the parent reports any error
        kind, detail = _describe(error)
        connection.send(("wrong_use" if kind == "error" and isinstance(error, ConfigError) else kind, detail))
        return
    connection.send(("fits", ""))
    while True:
        try:
            batch_size, length, num_tokens = connection.recv()
        except EOFError:
            return
        answer = ("fits", "")
        try:
            for _ in range(_STEPS_PER_PROBE):
                step(batch_size, length, num_tokens, budget.device)
            if budget.device != "cpu":
                # CUDA kernels run asynchronously, so their errors appear only here.
                torch.cuda.synchronize(budget.device)
        except Exception as error:  # noqa: BLE001  the parent reports any error
            answer = _describe(error)
        connection.send(answer)
        # The next batch has a different size, and must not be affected by memory fragmentation that this batch caused.
        gc.collect()
        if budget.device != "cpu":
            torch.cuda.empty_cache()


def _describe(error: Exception) -> tuple[str, str]:
    if is_out_of_memory(error):
        return "out_of_memory", str(error)
    # Our own errors are self-explanatory; any other error needs its traceback.
    return "error", str(error) if isinstance(error, SharmillError) else "".join(traceback.format_exception(error))


def parse_memory(text: str) -> int:
    """Parse an amount of memory such as ``8GiB``, ``500 MB`` or ``1000000``, and return it in bytes.

    Raises:
        ConfigError: the text is not an amount of memory, or the amount is below 1 MiB.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    number, unit = found.groups() if found else ("", "none")
    refuse((unit.upper() not in _UNITS, f"{text!r} is not an amount of memory; write it like 8GiB or 500MB"))
    size = int(float(number) * _UNITS[unit.upper()])
    refuse(
        (size <= 0, f"the amount of memory is {text!r}: it must be above 0"),
        (size < 1 << 20, f"{text!r} is only {counted(size, 'byte')}; use a larger unit, as in {number}GiB"),
    )
    return size


def format_memory(size: float) -> str:
    """Format bytes in GiB."""
    return f"{size / 2**30:.2f} GiB"


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many bytes this process may still allocate under the limits of the machine and of its own cgroups."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", (proc / "meminfo").read_text(), re.MULTILINE)
    assert match is not None, "Linux reports MemAvailable since 3.14"
    files1, files2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")
    limits = group_limits("memory", files1, files2, proc, cgroups)
    return min([int(match[1]) * 1024, *(max(0, limit - used) for limit, used in limits)])


def _limit_memory(size: int) -> None:
    """Limit the data memory of this process to ``size`` bytes, including memory that it has already allocated.

    The limit is RLIMIT_DATA, which counts private writable memory. RLIMIT_AS would also count torch's libraries and
    address space that is reserved but never used.

    Raises:
        FatalError: the kernel does not enforce the limit.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    # A process that aborts for lack of memory must not write a core dump.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return
    raise FatalError(
        "this kernel does not enforce RLIMIT_DATA, so the CPU's memory cannot be limited: use a GPU or another machine",
        code="unsupported_system",
    )


def tune_batch_sizes(
    step: str,
    buckets: Sequence[Bucket],
    budget: Budget,
    *,
    max_batch_size: int = 4096,
    tolerance: float = 0.0,
    timeout: float | None = None,
    step_options: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> list[int]:
    """Find the largest batch size of each bucket by running a training step, as described in the module's docstring.

    Args:
        step: ``module:callable``.
        max_batch_size: upper limit of the search.
        tolerance: stop when the gap between a size that fits and one that does not is at most this fraction of the
            latter.
        timeout: maximum seconds for one batch size.
        step_options: keyword arguments of the step if it is a class.
        tell: called with a line for each batch size tried and for each bucket's result, from the longest bucket down.

    Returns:
        The batch sizes, in the order of ``buckets``.

    Raises:
        FatalError: the step failed or took too long, or not even one item of a bucket fits.
    """
    with StepProcess(step, budget, timeout, step_options) as process:

        def fits(size: int, bucket: Bucket) -> bool:
            found = process.fits(size, bucket)
            tell(f"  {size} {'fits' if found else 'does not fit'}")
            return found

        return search(
            fits, buckets, max_batch_size=max_batch_size, tolerance=tolerance, tell=tell,
            error_details=lambda: process.last_memory_error.splitlines(),
        )  # fmt: skip


def search(
    fits: Callable[[int, Bucket], bool],
    buckets: Sequence[Bucket],
    *,
    max_batch_size: int,
    tolerance: float = 0.0,
    tell: Callable[[str], None] = lambda line: None,
    error_details: Callable[[], Sequence[str]] = tuple,
) -> list[int]:
    """Find the largest batch size of each bucket for which ``fits`` is true.

    A size that fits a bucket is assumed to fit every bucket that is not longer and has no more tokens. The search for a
    bucket therefore starts at the result of the longer buckets.

    Args:
        error_details: returns further lines for the error.

    Raises:
        FatalError: not even one item of a bucket fits.
    """
    found: dict[Bucket, int] = {}
    for bucket in sorted(set(buckets), key=lambda one: (one.length, one.num_tokens or 0), reverse=True):
        larger = [other for other in found if (other.num_tokens or 0) >= (bucket.num_tokens or 0)]
        known = max((found[other] for other in larger if other.length >= bucket.length), default=0)
        found[bucket] = _largest(fits, bucket, known, max_batch_size, tolerance)
        if not found[bucket]:
            raise FatalError(
                f"not even one item of bucket {bucket} fits into memory; exclude long items, use a smaller model, or "
                "allow more memory",
                code="out_of_memory",
                details=error_details(),
            )
        tell(f"{bucket}: {found[bucket]}{' or more' if found[bucket] == max_batch_size else ''}")
    return [found[bucket] for bucket in buckets]


def _largest(fits: Callable[[int, Bucket], bool], bucket: Bucket, known: int, limit: int, tolerance: float) -> int:
    """Find the largest size by doubling from ``known``, which fits, and then bisecting; return 0 if not even 1 fits."""
    good, bad = known, limit + 1
    while good < limit and bad > limit:
        size = min(limit, max(1, 2 * good))
        good, bad = (size, bad) if fits(size, bucket) else (good, size)
    while bad <= limit and bad - good > max(1, int(tolerance * bad)):
        size = (good + bad) // 2
        good, bad = (size, bad) if fits(size, bucket) else (good, size)
    return good


def make_budget(device: str, share: float, memory: int | None) -> Budget:
    """Return a memory budget, which is a share of the memory of a device.

    Args:
        device: ``cpu``, ``cuda``, ``cuda:1``, or ``auto`` for the first GPU if there is one.
        share: fraction of the memory.
        memory: bytes; by default all memory of the GPU, or the memory available to this process on the CPU.

    Raises:
        ConfigError: the device does not exist or has less memory than ``memory``.
    """
    import torch

    if device == "auto":
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        total = available_memory()
    else:
        try:
            chosen = torch.device(device)
        except RuntimeError as error:
            raise ConfigError(f"--device is {device!r}; use cpu, cuda or cuda:0", code="bad_config_value") from error
        number, count = chosen.index or 0, torch.cuda.device_count()
        refuse(
            (chosen.type != "cuda" or not torch.cuda.is_available() or number >= count,
             f"the device {device!r} does not exist; this machine has {count} GPUs"),
        )  # fmt: skip
        device = f"cuda:{number}"
        total = torch.cuda.get_device_properties(number).total_memory
    size = memory or total
    # On the CPU, exceeding the available memory might make the kernel kill other processes.
    refuse(
        (size > total, f"--memory is {format_memory(size)}, but {device} only has {format_memory(total)} available"),
    )
    return Budget(device, int(share * size), total)


def read_bins(text: str) -> tuple[list[Bucket], dict[str, Any]]:
    """Read buckets from a list, ``[3.9, 7.5]`` or ``[[3.9, 60], [3.9, 94]]``, or from a file written by ``sharmill
    bins``.

    Returns:
        The buckets, and the other settings of the file that affect batches.

    Raises:
        ConfigError: the file does not exist, or the bins are not ascending positive numbers or pairs.
    """
    if text.lstrip().startswith("["):
        try:
            values: Any = {"bucket_duration_bins": ast.literal_eval(text.strip())}
        except (ValueError, SyntaxError) as error:
            raise ConfigError(f"{text} is not a list of bins: {error}", code="bad_config_value") from error
    else:
        values = resolve(read_yaml(text), text)
    refuse(
        (not isinstance(values, dict) or "bucket_duration_bins" not in values,
         f"{text} has no key bucket_duration_bins; create the file with: sharmill bins DATASET --closed"),
        code="missing_key",
    )  # fmt: skip
    bins = values["bucket_duration_bins"]
    check_bins(bins, f"{text}: bucket_duration_bins")
    pairs = [bound if isinstance(bound, list) else [bound] for bound in bins]
    refuse(
        # A loader with batch sizes per bucket drops examples that are longer than the last bin.
        (values.get("num_buckets") == len(bins) + 1,
         f"{text}: the longest cuts are above the last bin; create the file with: sharmill bins DATASET --closed"),
        (pairs[0][0] <= 0 or not all(isinstance(tokens, int) for _, *rest in pairs for tokens in rest),
         f"{text}: bins must be positive numbers or pairs, such as [3.9, 7.5] or [[3.9, 60], [3.9, 94]]"),
    )  # fmt: skip
    return [Bucket(*pair) for pair in pairs], {key: values[key] for key in _BINS_KEYS if key in values}


def batch_sizes_to_yaml(
    step: str, buckets: Sequence[Bucket], sizes: Sequence[int], budget: Budget, more: Mapping[str, Any] | None = None
) -> str:
    """Format settings for NeMo's loader, followed by ``more``, as YAML; a comment names the step and the budget."""
    return (
        f"# the largest batches of {step} in {budget}\n"
        f"use_bucketing: true\nbucket_duration_bins: {[one.bound for one in buckets]}\n"
        f"bucket_batch_size: {list(sizes)}\n"
    ) + "".join(f"{key}: {json.dumps(value)}\n" for key, value in (more or {}).items())


def choose_step(
    buckets: Sequence[Bucket],
    settings: Mapping[str, Any],
    *,
    step: str | None,
    module_name: str | None,
    config_path: str | None,
    pretrained_name: str | None,
    precision: str,
    tokens_per_second: float | None,
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Choose the user's own step or the step for a NeMo model.

    Args:
        settings: settings returned by ``read_bins``.

    Returns:
        The step as ``module:callable``, the keyword arguments of its class, and loader settings that ensure that no
        batch needs more memory than the batches tried in the search.

    Raises:
        ConfigError: no step or several steps are named, or NeMo is not installed.
    """
    in_tokens, profile = bool(settings.get("use_multimodal_sampling")), dict(settings)
    is_nemo = step is None
    one_named = (config_path is None) != (pretrained_name is None) and (config_path is None or module_name is not None)
    refuse(
        (not is_nemo and (module_name or config_path or pretrained_name),
         "--step cannot be combined with --module-name, --config-path or --pretrained-name: remove one of them"),
        (is_nemo and not one_named,
         "the step is missing: give --step MODULE:CALLABLE, --module-name with --config-path, or --pretrained-name"),
        (is_nemo and in_tokens and "token_equivalent_duration" not in settings,
         "the bins are for text only, but NeMo models are tried with speech: give your own step with --step"),
        code="bad_usage",
    )  # fmt: skip
    if tokens_per_second is None:
        limit = settings.get("max_tps")
        tokens_per_second = float(limit) if isinstance(limit, (int, float)) else _TOKENS_PER_SECOND
    if is_nemo and not in_tokens and buckets[0].num_tokens is None:
        profile["max_tps"] = tokens_per_second
    # A plain list for the user's own step may be in seconds or in frames, so it does not imply a maximum duration.
    if not in_tokens and (is_nemo or settings):
        profile["max_duration"] = math.ceil(1000 * buckets[-1].length) / 1000
    if step is not None:
        return step, {}, profile
    require_package("nemo")
    options = {
        "module_name": module_name, "config_path": config_path, "pretrained_name": pretrained_name,
        "tokens_per_second": tokens_per_second, "precision": precision,
        "seconds_per_frame": settings["token_equivalent_duration"] if in_tokens else None,
        "in_total": bool(settings.get("measure_total_length")),
    }  # fmt: skip
    return "sharmill.training.buckets.nemo_step:NemoStep", options, profile
