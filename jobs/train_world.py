"""The ranks of the training example, and the folder that one training has to itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from train_config import TrainConfig

from sharmill.engine.locks import FolderLock
from sharmill.errors import ConfigError

# The job before may be on its way out.
_SECONDS_TO_WAIT_FOR_LOCK = 5.0


@dataclass(frozen=True)
class World:
    """The ranks of this training, as torchrun numbers them."""

    rank: int
    size: int
    device: torch.device

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def synchronize(self) -> None:
        """Wait until the device has done all that it was told to."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' values."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def any(self, value: bool) -> bool:
        """Return True on every rank if it is true on any: so all ranks decide alike."""
        if self.size == 1:
            return value
        flag = torch.tensor(int(value), device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)


@contextmanager
def world_of(config: TrainConfig) -> Iterator[World]:
    """Join the other ranks that torchrun started; without it there is one rank."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    use_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    if size > 1:
        dist.init_process_group("nccl" if use_cuda else "gloo")
    try:
        yield World(rank, size, device)
    finally:
        if size > 1:
            dist.destroy_process_group()


@contextmanager
def alone_in(out_dir: Path, world: World) -> Iterator[None]:
    """Keep other trainings out of a folder: two would write over each other's checkpoints.

    Raises:
        ConfigError: there is one.
    """
    refused = ""
    with ExitStack() as stack:
        if world.rank == 0:
            out_dir.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(FolderLock(out_dir, wait_seconds=_SECONDS_TO_WAIT_FOR_LOCK))
            except ConfigError as error:
                refused = str(error)
        if messages := [message for message in world.gather(refused) if message]:
            raise ConfigError(f"{messages[0]}, or use another out_dir", code="locked")
        yield
