"""Which device a rank gets."""

from __future__ import annotations

import os
from dataclasses import dataclass

from sharmill.errors import ConfigError


@dataclass(frozen=True)
class Device:
    """A rank's device: ``kind`` is ``cpu`` or ``cuda``, ``visible`` the only GPU that the rank may see."""

    kind: str = "cpu"
    visible: str | None = None

    def restrict_environment(self) -> None:
        """Hides the other GPUs from this process; to be called before anything imports torch."""
        if self.visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.visible


def visible_gpus() -> list[str]:
    """The identifiers of the GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` would name them."""
    import torch

    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(number) for number in range(count)]


def plan_devices(workers: int | str, *, uses_gpu: bool, gpus: list[str], cores: int) -> list[Device]:
    """The device of every rank.

    ``workers`` is a number or ``auto``: one per GPU for a stage that uses them where there are any, else one per core.
    With more ranks than GPUs, ranks share them in turn.
    """
    if uses_gpu and gpus:
        count = len(gpus) if workers == "auto" else int(workers)
        return [Device("cuda", gpus[rank % len(gpus)]) for rank in range(count)]
    count = cores if workers == "auto" else int(workers)
    if count < 1:
        raise ConfigError(f"executor.workers is {workers}; use 'auto' or a number from 1")
    return [Device() for _ in range(count)]
