"""The devices of ranks: what this process may use, and how ranks share it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sharmill.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
# Set by SLURM where a job has some, whatever else it sets.
_GIVEN = "SLURM_GPUS_ON_NODE"
# What the drivers of NVIDIA (on Linux, in containers, below Windows) and AMD have, where there is one.
_DRIVERS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


@dataclass(frozen=True)
class Device:
    """A rank's device: ``kind`` is ``cpu`` or ``cuda``, ``visible`` the only GPU that the rank may see, if any.

    One on the CPU sees none: NeMo would use the memory of one, from every core.
    """

    kind: str = "cpu"
    visible: str = ""

    @classmethod
    def given(cls, kind: str) -> Device:
        """Return the device of a job that was given one: the first GPU that is visible, if it is to be one."""
        return cls(kind, os.environ.get(VISIBLE, "").split(",")[0] if kind == "cuda" else "")

    def slot(self, number: int) -> str:
        """Return the slot of a rank with this device on this host."""
        return f"{socket.gethostname()}/{f'GPU {self.visible} of rank' if self.visible else 'rank'} {number}"


@cache
def visible_gpus() -> tuple[str, ...]:
    """Return the identifiers of the GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` would name them.

    Asked once: what a rank inline hides from torch is not to be counted. Where there is no driver of GPUs, torch is not
    imported to say so.
    """
    if "torch" not in sys.modules and not any(Path(path).exists() for path in _DRIVERS):
        return ()
    import torch

    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    if count and named[0:1] and all(name.startswith("MIG-") for name in named):
        # A process sees the first instance alone, whatever the list, and a rank has one.
        return tuple(named)
    return tuple(named[:count] if named else [str(number) for number in range(count)])


def usable_gpus(device: str) -> tuple[str, ...]:
    """Return the GPUs for ranks of this process where ``executor.device`` is ``device``.

    Raises:
        ConfigError: GPUs are asked for, or were given to this job, and torch finds none.
    """
    if device == "cpu":
        return ()
    gpus = visible_gpus()
    if not gpus and (device == "cuda" or _gpus_are_given()):
        from sharmill.models.device import explain_missing

        wanted = "executor.device is cuda" if device == "cuda" else "this job was given GPUs"
        raise ConfigError(
            f"{wanted}, and none can be used; executor.device=cpu runs without. {explain_missing()}",
            code="device_failed",
        )
    return gpus


def _gpus_are_given() -> bool:
    """Return True if the scheduler, or whoever started this process, has set GPUs aside for it."""
    if (named := os.environ.get(VISIBLE)) is not None:
        return named.split(",")[0].strip() not in ("", "-1", "NoDevFiles")
    return os.environ.get(_GIVEN, "0") not in ("", "0")


def plan_devices(workers: int | str, *, uses_gpu: bool, gpus: Sequence[str], cores: int) -> list[Device]:
    """Return the device of every rank.

    ``workers`` is a number or ``auto``: one per GPU for a stage that uses them where there are any, else one per core.
    With more ranks than GPUs, ranks share them in turn.

    Raises:
        ConfigError: ``workers`` is neither.
    """
    if workers != "auto" and (not str(workers).isdecimal() or int(workers) < 1):
        raise ConfigError(f"executor.workers is {workers}; use 'auto' or a number from 1", code="bad_config_value")
    places = [Device("cuda", gpu) for gpu in gpus] if uses_gpu and gpus else [Device()] * cores
    count = len(places) if workers == "auto" else int(workers)
    return [places[rank % len(places)] for rank in range(count)]
