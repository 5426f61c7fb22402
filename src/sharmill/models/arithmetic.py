"""Arithmetic of the models of a rank: the same in every run, as precise as the configuration says, in fitting batches.

Importing this module imports no torch.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar, cast

from sharmill.config import Precision
from sharmill.errors import ConfigError
from sharmill.files.host import usable_cores

# On a CPU the activations of a large batch leave the cache, and are new pages each time: more audio at once is slower.
CPU_BATCH_SECONDS: Final = 10.0

# More wait for Python's lock most of the time.
_MOST_THREADS: Final = 16

# The first generation of GPUs with TensorFloat-32 and bfloat16.
_REDUCED_CAPABILITY: Final = (8, 0)

Encode = TypeVar("Encode", bound=Callable[..., Any])


def make_deterministic(device: str) -> int:
    """Make torch's results independent of the machine's cores, and return how many threads may decode audio meanwhile.

    One thread computes: sums then do not depend on the number of cores, and the other cores have ranks of their own.
    cuBLAS gets a workspace of fixed size, without which recurrent layers may differ from run to run. TorchScript fuses
    no kernels: it does so after some calls, so that the first results of a rank would differ from later ones.
    """
    import torch

    torch.set_num_threads(1)
    # Read when cuBLAS is first used; a value of the user's own is as fixed as ours.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    _allow_tf32(False)
    torch._C._jit_set_texpr_fuser_enabled(False)
    return min(usable_cores(), _MOST_THREADS) if device == "cuda" else 1


def require_precision(device: str, precision: Precision) -> None:
    """Raise ConfigError where a device cannot compute with a precision: it would silently compute with another.

    bfloat16 is real on every CPU, if slow on one without instructions for it.
    """
    if device == "cpu":
        if precision == "tf32":
            raise ConfigError(
                "precision tf32 is a mode of NVIDIA GPUs, and this rank computes on a CPU: use fp32 or bf16",
                code="bad_config_value",
            )
        return
    import torch

    capability = torch.cuda.get_device_capability(device)
    if capability < _REDUCED_CAPABILITY:
        raise ConfigError(
            f"precision {precision} needs a GPU of compute capability 8.0 or higher, and "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}: use fp32",
            code="bad_config_value",
        )


def with_precision(encode: Encode, device: str, precision: Precision) -> Encode:
    """Return a model's function that computes with a precision other than fp32.

    Weights and results stay float32: torch's autocast says which operations compute in bfloat16.

    Raises:
        ConfigError: the device does not have the precision.
    """
    require_precision(device, precision)

    @functools.wraps(encode)
    def in_precision(*args: Any, **options: Any) -> Any:
        with _computing_in(precision, device):
            return encode(*args, **options)

    return cast("Encode", in_precision)


@contextmanager
def _computing_in(precision: Precision, device: str) -> Iterator[None]:
    import torch

    if precision == "bf16":
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            yield
        return
    _allow_tf32(True)
    try:
        yield
    finally:
        _allow_tf32(False)


def _allow_tf32(allowed: bool) -> None:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def fit_batch_seconds(batch_seconds: float, device: str, on_cpu: float = CPU_BATCH_SECONDS) -> float:
    """Return the padded seconds that a batch on this kind of device may have: on a CPU ``on_cpu`` at most.

    It depends on the configuration and the kind of device alone, as the output does that comes from these batches.

    >>> fit_batch_seconds(600.0, "cuda"), fit_batch_seconds(600.0, "cpu"), fit_batch_seconds(5.0, "cpu")
    (600.0, 10.0, 5.0)
    """
    return min(batch_seconds, on_cpu) if device == "cpu" else batch_seconds
