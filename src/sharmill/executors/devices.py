"""Which device a rank gets."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from sharmill.errors import ConfigError

_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Device:
    """A rank's device: ``kind`` is ``cpu`` or ``cuda``, ``visible`` the only GPU that the rank may see."""

    kind: str = "cpu"
    visible: str | None = None

    def restrict_environment(self) -> None:
        """Hide the other GPUs from this process; to be called before anything uses CUDA."""
        if self.visible is not None:
            os.environ[_VISIBLE] = self.visible

    @contextmanager
    def only_visible(self) -> Iterator[None]:
        """Hide the other GPUs for as long as the context lasts: the next stage of this process may use them all."""
        before = os.environ.get(_VISIBLE)
        self.restrict_environment()
        try:
            yield
        finally:
            if before is not None:
                os.environ[_VISIBLE] = before
            elif self.visible is not None:
                os.environ.pop(_VISIBLE, None)


@cache
def visible_gpus() -> tuple[str, ...]:
    """Return the identifiers of the GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` would name them.

    Asked once: after a rank has run inline, torch counts only the GPU that was its.
    """
    import torch

    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get(_VISIBLE, "").split(",") if name.strip()]
    return tuple(named[:count] if named else [str(number) for number in range(count)])


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
