"""The device of a model: whether torch can use it, its kind, its batch size, and its arithmetic.

All runs use the same arithmetic, with the precision of the configuration. Importing this module does not import torch.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from sharmill.config import Precision
from sharmill.errors import ConfigError, DeviceError, one_line

log = logging.getLogger(__name__)

_DRIVER_FILE: Final = Path("/proc/driver/nvidia/version")
# CUDA version of the torch build -> minimum driver and compute capability.
_NEEDS: Final = {"13": "a driver of 580 or later and compute capability 7.5 or higher"}
# On a CPU, larger batches are slower: their activations exceed the cache, and use new pages each time.
_CPU_BATCH_SECONDS: Final = 10.0
# Compute capability of the first GPUs with TensorFloat-32 and bfloat16.
_REDUCED_CAPABILITY: Final = (8, 0)

Encode = TypeVar("Encode", bound=Callable[..., Any])


def check_device(device: str) -> str:
    """Run a kernel on a device, and return the kind of the device.

    Returns:
        ``cpu``, or the GPU's name and compute capability: ``NVIDIA H200, capability 9.0``.

    Raises:
        DeviceError: torch cannot use the device; the message states torch's reason and requirements, and the driver.
    """
    if device == "cpu":
        return "cpu"
    import torch

    try:
        torch.arange(64.0, device=device).square().sum().item()
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(f"torch cannot use the GPU: {one_line(error).rstrip('. ')}. {_describe_torch()}") from error
    kind = f"{name}, capability {capability[0]}.{capability[1]}"
    log.info("%s works: %s, driver %s, torch %s", device, kind, driver_version(), torch.__version__)
    return kind


def explain_missing() -> str:
    """Return torch's reason for finding no GPU, and the requirements of this torch build."""
    try:
        check_device("cuda")
    except DeviceError as error:
        return str(error)
    return "torch counts no GPU, but can use one"


def driver_version() -> str:
    """Return the version of NVIDIA's kernel driver, or a phrase that says that it is missing or unknown."""
    try:
        text = _DRIVER_FILE.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "not there"
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", text)
    return found[1] if found else "of an unknown version"


def _describe_torch() -> str:
    """Return sentences about the torch build, its requirements, and the driver and GPUs of this machine."""
    import torch

    cuda = torch.version.cuda
    if cuda is None:
        built = f"torch {torch.__version__} is built for CPUs only"
    else:
        needs = _NEEDS.get(cuda.partition(".")[0])
        built = f"torch {torch.__version__} is built for CUDA {cuda}" + (f", which needs {needs}" if needs else "")
    found = ""
    # torch may know the number of GPUs but not their properties.
    with suppress(RuntimeError, AssertionError):
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            found += f", its GPU {index} has capability {major}.{minor}"
    return f"{built}; this machine's driver is {driver_version()}{found}. See docs/models.md"


def make_deterministic() -> None:
    """Make the results of torch reproducible.

    Only one thread computes, so that sums do not depend on the number of cores; the other cores have their own ranks.
    cuBLAS gets a workspace of fixed size, without which the results of recurrent layers may differ between runs. The
    kernel fusion of TorchScript is switched off: it starts after some calls, and would then make a rank's later results
    differ from its first ones.
    """
    import torch

    torch.set_num_threads(1)
    # cuBLAS reads this on first use. A value set by the user is as good as this one.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    _allow_tf32(False)
    torch._C._jit_set_texpr_fuser_enabled(False)


def with_precision(encode: Encode, device: str, precision: Precision) -> Encode:
    """Wrap a model's function so that it computes with a precision other than fp32.

    Weights and results stay float32; torch's autocast chooses the operations that compute in bfloat16.

    Raises:
        ConfigError: the device would silently use another precision. Every CPU supports bfloat16, but slowly if it has
            no instructions for it.
    """
    import torch

    if device == "cpu" and precision == "tf32":
        raise ConfigError(
            "precision tf32 needs an NVIDIA GPU, but this rank computes on a CPU: use fp32 or bf16",
            code="bad_config_value",
        )
    if device != "cpu" and (capability := torch.cuda.get_device_capability(device)) < _REDUCED_CAPABILITY:
        raise ConfigError(
            f"precision {precision} needs a GPU of compute capability 8.0 or higher, but "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}: use fp32",
            code="bad_config_value",
        )
    kind = torch.device(device).type
    computing = torch.autocast(kind, dtype=torch.bfloat16) if precision == "bf16" else _computing_in_tf32()
    return cast("Encode", computing(encode))


@contextmanager
def _computing_in_tf32() -> Iterator[None]:
    _allow_tf32(True)
    try:
        yield
    finally:
        _allow_tf32(False)


def _allow_tf32(allowed: bool) -> None:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def fit_batch_seconds(batch_seconds: float, device: str, on_cpu: float = _CPU_BATCH_SECONDS) -> float:
    """Return the maximum padded seconds of a batch: ``batch_seconds``, but on a CPU at most ``on_cpu``.

    The limit affects the output, so it depends only on the configuration and the kind of device.

    >>> fit_batch_seconds(600.0, "cuda"), fit_batch_seconds(600.0, "cpu"), fit_batch_seconds(5.0, "cpu")
    (600.0, 10.0, 5.0)
    """
    return min(batch_seconds, on_cpu) if device == "cpu" else batch_seconds


class DeviceClock:
    """Measures the time that a device spends on a model; on a GPU, whose calls are asynchronous, with CUDA events.

    Args:
        device: ``cpu`` or ``cuda``.
    """

    def __init__(self, device: str) -> None:
        self._on_gpu = device != "cpu"
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time the model while the body runs it on a batch."""
        started = time.monotonic()
        events = self._record()
        yield
        if self._on_gpu:
            self._events.append((events, self._record()))
        else:
            self._seconds += time.monotonic() - started

    def restart(self) -> None:
        """Discard the times of a failed unit."""
        self._seconds, self._events = 0.0, []

    def take(self) -> float:
        """Return the busy seconds since the last call; on a GPU, first wait for the end of the last batch."""
        seconds, events = self._seconds, self._events
        self.restart()
        if events:
            events[-1][1].synchronize()
        return seconds + sum(begin.elapsed_time(end) for begin, end in events) / 1000

    def _record(self) -> Any:
        if not self._on_gpu:
            return None
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
