"""The largest batch of each bucket that fits in a share of the memory, by bisection on real out-of-memory errors.

The step is the user's, named ``module:callable``::

    def step(batch_size: int, length: float, num_tokens: int | None, device: str) -> None

It runs one whole training step (forward, backward, optimizer) on a made-up batch of ``batch_size`` items, each as long
as the bucket allows: ``length`` seconds (frames, for token bins), and ``num_tokens`` text tokens in two dimensions. It
keeps model and optimizer between calls (in a module variable, or in ``__init__`` of a class, which is instantiated once
per process), and must not hide errors. It is called twice per size, since most optimizers make their state in the first
step.

Out of memory are: ``MemoryError``, ``torch.cuda.OutOfMemoryError``, the messages of torch's allocators, and the end of
the process by SIGKILL or after such a message. Everything else ends the search with the step's own traceback.

On a GPU the limit is torch's ``set_per_process_memory_fraction``. On the CPU the step's process is limited by
RLIMIT_DATA, which counts what it and its libraries allocate, but neither shared memory nor its child processes.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sharmill.errors import ConfigError, FatalError
from sharmill.training.buckets.step_process import Bucket, Budget, StepProcess, available_memory, format_memory
from sharmill.training.yaml_files import read_yaml, resolve

# Of a file of bins: limits under which the batches were tried, and how lengths are counted.
_OF_BINS = (
    "use_multimodal_sampling", "token_equivalent_duration", "measure_total_length", "prompt_format", "max_tps",
    "max_tpt",
)  # fmt: skip


class NothingFits(FatalError):
    """A bucket has no batch size at all."""


def tune_batch_sizes(
    step: str,
    buckets: Sequence[Bucket],
    budget: Budget,
    *,
    max_batch_size: int = 4096,
    tolerance: float = 0.0,
    timeout: float | None = None,
    step_options: Mapping[str, Any] | None = None,
    tell: Callable[[Bucket, int], None] = lambda bucket, size: None,
    tell_try: Callable[[Bucket, int, bool], None] = lambda bucket, size, fits: None,
) -> list[int]:
    """Find the largest batch of each bucket; see the module for what a step is.

    Args:
        step: ``module:callable``.
        max_batch_size: where to stop asking for more.
        tolerance: stop when the gap between what fits and what does not is at most this share of the latter.
        timeout: seconds that one size may take.
        step_options: arguments of the class that the step is.
        tell: called with each result as soon as it is known, the longest bucket first.
        tell_try: called with each size that was tried, and whether it fits.

    Raises:
        FatalError: the step failed or took too long, or not even one item of a bucket fits.
    """
    with StepProcess(step, budget, timeout, step_options) as process:

        def fits(size: int, bucket: Bucket) -> bool:
            found = process.fits(size, bucket)
            tell_try(bucket, size, found)
            return found

        try:
            return search(fits, buckets, max_batch_size=max_batch_size, tolerance=tolerance, tell=tell)
        except NothingFits as error:
            details = process.last_lack.splitlines()
            raise NothingFits(str(error), code="out_of_memory", details=details) from error


def search(
    fits: Callable[[int, Bucket], bool],
    buckets: Sequence[Bucket],
    *,
    max_batch_size: int,
    tolerance: float = 0.0,
    tell: Callable[[Bucket, int], None] = lambda bucket, size: None,
) -> list[int]:
    """Find the largest batch of each bucket for which ``fits`` is true.

    What fits in a bucket is taken to fit in every bucket that is neither longer nor has more tokens: so results never
    grow with the bucket, and the search begins where the longer bucket's ended.
    """
    found: dict[Bucket, int] = {}
    for bucket in sorted(set(buckets), key=lambda one: (one.length, one.num_tokens or 0), reverse=True):
        known = 0
        for other, size in found.items():
            if other.length >= bucket.length and (other.num_tokens or 0) >= (bucket.num_tokens or 0):
                known = max(known, size)
        found[bucket] = _largest(fits, bucket, known, max_batch_size, tolerance)
        if not found[bucket]:
            raise NothingFits(
                f"not even one item of {bucket} fits; leave out what is so long, make the model smaller, or allow more "
                "memory",
                code="out_of_memory",
            )
        tell(bucket, found[bucket])
    return [found[bucket] for bucket in buckets]


def _largest(fits: Callable[[int, Bucket], bool], bucket: Bucket, known: int, limit: int, tolerance: float) -> int:
    """Double from what is known to fit until it does not, then halve the gap. Return 0 if not even 1 fits."""
    good, bad = known, limit + 1
    while good < limit and bad > limit:
        size = min(limit, max(1, 2 * good))
        good, bad = (size, bad) if fits(size, bucket) else (good, size)
    while bad <= limit and bad - good > max(1, int(tolerance * bad)):
        size = (good + bad) // 2
        good, bad = (size, bad) if fits(size, bucket) else (good, size)
    return good


def make_budget(device: str, share: float, memory: int | None) -> Budget:
    """Return ``share`` of ``memory`` bytes; by default of a GPU's, or of those available to this process on the CPU.

    Args:
        device: ``cpu``, ``cuda``, ``cuda:1``, or ``auto`` for the first GPU if there is one.

    Raises:
        ConfigError: there is no such device, the share is not above 0 and at most 1, or the device has less memory.
    """
    if not 0 < share <= 1:
        raise ConfigError(f"--memory-share is {share:g}; it must be above 0 and at most 1", code="bad_config_value")
    import torch

    if device == "auto":
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        total = available_memory()
        if memory is not None and memory > total:
            # The kernel would end other processes for it.
            raise ConfigError(
                f"--memory is {format_memory(memory)}, and {format_memory(total)} are available here",
                code="bad_config_value",
            )
        return Budget("cpu", int(share * (memory or total)), total)
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"--device is {device!r}; use cpu, cuda or cuda:0", code="bad_config_value") from error
    number = chosen.index or 0
    if chosen.type != "cuda" or not torch.cuda.is_available() or number >= torch.cuda.device_count():
        raise ConfigError(
            f"there is no device {device!r} here; there are {torch.cuda.device_count()} GPUs", code="bad_config_value"
        )
    total = torch.cuda.get_device_properties(number).total_memory
    if memory is not None and memory > total:
        raise ConfigError(
            f"--memory is {format_memory(memory)}, and cuda:{number} has {format_memory(total)}",
            code="bad_config_value",
        )
    return Budget(f"cuda:{number}", int(share * (memory or total)), total)


def read_buckets(text: str) -> list[Bucket]:
    """Read the buckets of a list, ``[3.9, 7.5]`` or ``[[3.9, 60], [3.9, 94]]``, or of a file of ``sharmill bins``.

    Raises:
        ConfigError: there is no such file, or these are no bins: ascending, positive, all numbers or all pairs.
    """
    bins = _read_bins(text)
    if not isinstance(bins, list) or not bins:
        raise ConfigError(f"{text}: bucket_duration_bins is a list of bins, not {bins!r}", code="bad_config_value")
    pairs = [tuple(bound) if isinstance(bound, (list, tuple)) else (bound,) for bound in bins]
    if not all(_is_bin(pair) and len(pair) == len(pairs[0]) for pair in pairs):
        raise ConfigError(
            f"{text}: bins are numbers above 0, or pairs of them: [3.9, 7.5], [[3.9, 60], [3.9, 94]]",
            code="bad_config_value",
        )
    if pairs != sorted(pairs, key=lambda pair: pair[0]):
        raise ConfigError(f"{text}: bins are in ascending order", code="bad_config_value")
    return [Bucket(*pair) for pair in pairs]


def read_bin_settings(text: str) -> dict[str, Any]:
    """Return what a file of ``sharmill bins`` says beside its bins that batches depend on; nothing of a list."""
    values = {} if text.lstrip().startswith("[") else _read_file(text)
    return {key: values[key] for key in _OF_BINS if key in values}


def _read_bins(text: str) -> Any:
    if text.lstrip().startswith("["):
        try:
            return ast.literal_eval(text.strip())
        except (ValueError, SyntaxError) as error:
            raise ConfigError(f"{text} is not a list of bins: {error}", code="bad_config_value") from error
    values = _read_file(text)
    if "bucket_duration_bins" not in values:
        raise ConfigError(
            f"{text} has no key bucket_duration_bins; make it with: sharmill bins DATASET --closed", code="missing_key"
        )
    bins = values["bucket_duration_bins"]
    if isinstance(bins, list) and values.get("num_buckets") == len(bins) + 1:
        # With batch sizes, a loader drops what is longer than the last bin.
        raise ConfigError(
            f"{text}: the longest cuts are above the last bin; make it with: sharmill bins DATASET --closed",
            code="bad_config_value",
        )
    return bins


def _read_file(text: str) -> dict[str, Any]:
    values = resolve(read_yaml(text), text)
    return values if isinstance(values, dict) else {}


def _is_bin(pair: tuple[Any, ...]) -> bool:
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in pair)
    return numbers and pair[0] > 0 and (len(pair) == 1 or (len(pair) == 2 and isinstance(pair[1], int)))


def batch_sizes_to_yaml(
    step: str, buckets: Sequence[Bucket], sizes: Sequence[int], budget: Budget, more: Mapping[str, Any] | None = None
) -> str:
    """Format the keys for NeMo's loader, with ``more`` of them, below a comment with step and budget."""
    bins = [bucket.length if bucket.num_tokens is None else [bucket.length, bucket.num_tokens] for bucket in buckets]
    return (
        f"# the largest batches of {step} in {budget}\n"
        f"use_bucketing: true\nbucket_duration_bins: {bins}\nbucket_batch_size: {list(sizes)}\n"
    ) + "".join(f"{key}: {json.dumps(value)}\n" for key, value in (more or {}).items())
