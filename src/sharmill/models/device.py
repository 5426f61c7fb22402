"""Devices that models run on: whether torch can use them, and of which kind they are."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Final

from sharmill.errors import DeviceError, first_line

log = logging.getLogger(__name__)

_DRIVER_FILE: Final = Path("/proc/driver/nvidia/version")
# By the CUDA that torch was built with: the least driver and the least compute capability.
_NEEDS: Final = {"13": "a driver of 580 or later and compute capability 7.5 or higher"}


def check_device(device: str) -> str:
    """Run a kernel on a device, and return the kind of the device.

    Returns:
        ``cpu``, or the GPU's name and compute capability: ``NVIDIA H200, capability 9.0``.

    Raises:
        DeviceError: torch cannot use it; the message has torch's reason, the driver and what this torch needs.
    """
    if device == "cpu":
        return "cpu"
    import torch

    try:
        torch.arange(64.0, device=device).square().sum().item()
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(f"torch cannot use the GPU: {first_line(error).rstrip('. ')}. {describe_torch()}") from error
    kind = f"{name}, capability {capability[0]}.{capability[1]}"
    log.info("%s works: %s, driver %s, torch %s", device, kind, driver_version(), torch.__version__)
    return kind


def explain_missing() -> str:
    """Return why torch finds no GPU, in its own words, and what this torch needs."""
    try:
        check_device("cuda")
    except DeviceError as error:
        return str(error)
    return "torch counts none, but can use one"


def describe_torch() -> str:
    """Return sentences about the build of torch, what it needs of a GPU, and what this machine has."""
    import torch

    cuda = torch.version.cuda
    if cuda is None:
        built = f"torch {torch.__version__} is built for CPUs alone"
    else:
        needs = _NEEDS.get(cuda.partition(".")[0])
        built = f"torch {torch.__version__} is built for CUDA {cuda}" + (f", which needs {needs}" if needs else "")
    return f"{built}; this machine's driver is {driver_version()}{_describe_capabilities()}. See docs/gpus.md"


def driver_version() -> str:
    """Return the version of NVIDIA's kernel driver, or that there is none."""
    try:
        text = _DRIVER_FILE.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "not there"
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", text)
    return found[1] if found else "of an unknown version"


def _describe_capabilities() -> str:
    import torch

    try:
        found = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError):
        return ""
    return "".join(f", its GPU {index} has capability {major}.{minor}" for index, (major, minor) in enumerate(found))
