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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from train_config import TrainConfig

from sharmill.errors import ConfigError, FatalError, SharmillError
from sharmill.files.locks import FolderLock

# The job before may be on its way out.
_SECONDS_TO_WAIT_FOR_LOCK = 5.0


@dataclass(frozen=True)
class World:
    """The ranks of this training, as torchrun numbers them, on a mesh of the axes ``dp``, ``cp`` and ``tp``.

    Ranks along ``tp`` share the layers, and read the same data; there is no context parallelism, so that ``cp`` is 1.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def data_rank(self) -> int:
        """The place of this rank among those that read different data."""
        return self.mesh["dp"].get_local_rank()

    @property
    def data_size(self) -> int:
        """The number of ranks that read different data."""
        return self.mesh["dp"].size()

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order, on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def gather_data(self, value: Any) -> list[Any]:
        """Return one value for each part of the data, in order, on every rank: of the first ranks along ``tp``."""
        return self.gather(value)[:: self.mesh["tp"].size()]

    def synchronize(self) -> None:
        """Wait until the device has done all that it was told to."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of the values over the parts of the data."""
        dist.all_reduce(values, group=self.mesh["dp"].get_group())
        return values

    def any(self, *values: bool) -> list[bool]:
        """Return for each value, on every rank, if it is true on any: so all ranks decide alike."""
        flags = torch.tensor([int(value) for value in values], device=self.device)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return [bool(flag) for flag in flags.tolist()]


@contextmanager
def world_of(config: TrainConfig) -> Iterator[World]:
    """Join the other ranks that torchrun started; without it there is one rank.

    Raises:
        ConfigError: the ranks cannot be divided by ``tensor_parallel``, or there are fewer GPUs on the node than ranks.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if size % config.tensor_parallel:
        raise ConfigError(
            f"tensor_parallel: {size} ranks cannot be divided into groups of {config.tensor_parallel}",
            code="split_wrong",
        )
    use_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if use_cuda else torch.device("cpu")
    if use_cuda:
        # Every rank of the node finds this, and none waits for another.
        ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
        if gpus < ranks:
            raise ConfigError(
                f"device: {ranks} ranks on this node need a GPU each, and torch finds {gpus}; device=cpu needs none",
                code="bad_config_value",
            )
        torch.cuda.set_device(device)
    backend = "nccl" if use_cuda else "gloo"
    if size > 1:
        dist.init_process_group(backend)
    else:
        # It meets nobody, and listens on no network.
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        shape = (size // config.tensor_parallel, 1, config.tensor_parallel)
        yield World(rank, size, device, init_device_mesh(device.type, shape, mesh_dim_names=("dp", "cp", "tp")))
    finally:
        dist.destroy_process_group()


@contextmanager
def alone_in(out_dir: Path, world: World) -> Iterator[None]:
    """Keep other trainings out of a folder: two would write over each other's checkpoints.

    Raises:
        ConfigError: there is one, or it is no folder.
        FatalError: the lock cannot be written.
    """
    refused: SharmillError | None = None
    with ExitStack() as stack:
        if world.rank == 0:
            try:
                out_dir.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FolderLock(out_dir, wait_seconds=_SECONDS_TO_WAIT_FOR_LOCK))
            except ConfigError as error:
                refused = ConfigError(f"{error}, or use another out_dir", code=error.code)
            except FatalError as error:
                refused = error
            except OSError as error:
                refused = ConfigError(f"out_dir: cannot use {out_dir}: {error.strerror}", code="disk")
        if errors := [error for error in world.gather(refused) if error is not None]:
            raise errors[0]
        yield
