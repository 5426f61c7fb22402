"""The ranks of the training example, the lock on its folder, and its checkpoints.

All ranks write a checkpoint, any number of ranks can read it, and it is published atomically.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer
from train_config import TrainConfig

from sharmill.errors import ConfigError, FatalError, SharmillError
from sharmill.files.atomic import make_folder, publish_directory, remove_at_once, remove_temp_files, temp_path
from sharmill.files.checksums import checksum
from sharmill.files.locks import FolderLock

# How long to wait for the lock, since the previous job may still be exiting.
_LOCK_WAIT_SECONDS = 5.0


@dataclass(frozen=True)
class World:
    """The ranks of this training, numbered by torchrun, on a mesh with the axes ``dp``, ``cp`` and ``tp``.

    Ranks along ``tp`` share the layers and read the same data. ``cp`` is 1, since there is no context parallelism.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def data_size(self) -> int:
        """The number of ranks that read different data."""
        return self.mesh["dp"].size()

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order, on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of the values over the data-parallel ranks."""
        dist.all_reduce(values, group=self.mesh["dp"].get_group())
        return values

    def any(self, *values: bool) -> list[bool]:
        """Return for each value whether it is true on any rank, so that all ranks make the same decision."""
        flags = torch.tensor([int(value) for value in values], device=self.device)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return [bool(flag) for flag in flags.tolist()]


@contextmanager
def join_world(config: TrainConfig) -> Iterator[World]:
    """Join the other ranks started by torchrun; without torchrun there is one rank.

    Raises:
        ConfigError: the ranks cannot be divided by ``tensor_parallel``, or the node has fewer GPUs than ranks.
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
        # Every rank of the node detects missing GPUs here, before it waits for other ranks.
        ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
        if gpus < ranks:
            raise ConfigError(
                f"device: {ranks} ranks on this node need a GPU each, but torch finds only {gpus}; use device=cpu",
                code="bad_config_value",
            )
        torch.cuda.set_device(device)
    backend = "nccl" if use_cuda else "gloo"
    if size > 1:
        dist.init_process_group(backend)
    else:
        # A single rank needs no network, so it listens only on the loopback address.
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        shape = (size // config.tensor_parallel, 1, config.tensor_parallel)
        yield World(rank, size, device, init_device_mesh(device.type, shape, mesh_dim_names=("dp", "cp", "tp")))
    finally:
        dist.destroy_process_group()


@contextmanager
def lock_out_dir(out_dir: Path, world: World) -> Iterator[None]:
    """Lock a folder against other trainings, which would overwrite the checkpoints.

    Raises:
        ConfigError: another training holds the lock, or the path is not a folder.
        FatalError: the lock cannot be written.
    """
    refused: SharmillError | None = None
    with ExitStack() as stack:
        if world.rank == 0:
            try:
                out_dir.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FolderLock(out_dir, wait_seconds=_LOCK_WAIT_SECONDS))
            except ConfigError as error:
                refused = ConfigError(f"{error}, or use another out_dir", code=error.code)
            except FatalError as error:
                refused = error
            except OSError as error:
                refused = ConfigError(f"out_dir: cannot use {out_dir}: {error.strerror}", code="disk")
        if errors := [error for error in world.gather(refused) if error is not None]:
            raise errors[0]
        yield


_CHECKPOINT = re.compile(r"step-(\d{9})")
_RECORD = "record.json"
_KEYS = {"step": int, "seed": int, "sizes": dict, "data_kind": str, "data": (dict, type(None)), "files": dict}
# Optimizer values are stored by parameter name, because the groups depend on the layout.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


class Checkpoints:
    """The newest checkpoints in ``out_dir``.

    Each checkpoint is a folder ``step-<n>`` with the model and optimizer parts of all ranks, written by
    ``torch.distributed.checkpoint``, and with ``record.json``, which includes the position in the data.
    """

    def __init__(self, out_dir: Path, keep: int, world: World) -> None:
        self._folder = out_dir / "checkpoints"
        self._keep = keep
        self._world = world
        if world.rank == 0:
            make_folder(self._folder)
            remove_temp_files(self._folder)
        newest = self._paths()[-1:] if world.rank == 0 else []
        # Only rank 0 looks for checkpoints, because ranks may see different states of the shared folder.
        self._newest: Path | None = next(iter(world.gather(newest)[0]), None)

    def read_record(self) -> dict[str, Any] | None:
        """Return the record of the newest checkpoint, or None if there is no checkpoint.

        Raises:
            ConfigError: the checkpoint is damaged.
        """
        if self._newest is None:
            return None
        try:
            record = json.loads((self._newest / _RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self._damaged(error) from error
        for key, kinds in _KEYS.items():
            if not isinstance(record, dict) or not isinstance(record.get(key, ...), kinds):
                raise self._damaged(f"{_RECORD} has no valid {key}")
        return record

    def load(self, model: nn.Module, optimizer: Optimizer, files: dict[str, Any]) -> None:
        """Load the newest checkpoint, whose record lists ``files``.

        Any number of ranks in any layout may have written it.

        Raises:
            ConfigError: the checkpoint is damaged.
        """
        self._check(files)
        model_state, optimizer_state = get_state_dict(model, optimizer, options=_OPTIONS)
        state = {"model": model_state, "optimizer": optimizer_state}
        try:
            dcp.load(state, checkpoint_id=self._newest)
        except CheckpointException as errors:
            raise self._damaged(_first_error(errors)) from errors
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=_OPTIONS,
        )

    def save(self, model: nn.Module, optimizer: Optimizer, record: dict[str, Any]) -> None:
        """Save a checkpoint for ``record["step"]`` on all ranks, and remove old ones.

        Raises:
            FatalError: a rank cannot write its part.
        """
        final = self._folder / f"step-{record['step']:09d}"
        temp_folder = self._world.gather(temp_path(final))[0]
        model_state, optimizer_state = get_state_dict(model, optimizer, options=_OPTIONS)
        writer = dcp.FileSystemWriter(temp_folder, sync_files=True)
        try:
            dcp.save({"model": model_state, "optimizer": optimizer_state}, storage_writer=writer)
        except CheckpointException as errors:
            raise FatalError(f"cannot write {final}: {_first_error(errors)}", code="disk") from errors
        # Each rank describes its own files; rank 0 also wrote the metadata.
        own = [
            *temp_folder.glob(f"__{self._world.rank}_*"),
            *([temp_folder / ".metadata"] if self._world.rank == 0 else []),
        ]
        files = self._world.gather({path.name: _size_and_checksum(path) for path in own})
        if self._world.rank == 0:
            record["files"] = {name: facts for part in files for name, facts in part.items()}
            (temp_folder / _RECORD).write_text(json.dumps(record), encoding="utf-8")
            publish_directory(temp_folder, final)
            for path in self._paths()[: -self._keep]:
                remove_at_once(path)

    def _check(self, files: dict[str, Any]) -> None:
        """Raise ConfigError on every rank if a file has changed; each rank checks its share of the files."""
        assert self._newest is not None
        damaged = ""
        for name, facts in sorted(files.items())[self._world.rank :: self._world.size]:
            try:
                if _size_and_checksum(self._newest / name) != facts:
                    damaged = f"{name} has changed since it was written"
            except (OSError, SharmillError) as error:
                damaged = f"{name}: {error}"
        for said in self._world.gather(damaged):
            if said:
                raise self._damaged(said)

    def _damaged(self, error: BaseException | str) -> ConfigError:
        return ConfigError(
            f"{self._newest} is damaged: {str(error).strip() or type(error).__name__}; remove it to resume from the "
            "previous checkpoint",
            code="wrong_state",
        )

    def _paths(self) -> list[Path]:
        return sorted(path for path in self._folder.iterdir() if _CHECKPOINT.fullmatch(path.name))


def _size_and_checksum(path: Path) -> list[Any]:
    """Return the size and checksum of a file."""
    return [path.stat().st_size, checksum(path)]


def _first_error(errors: CheckpointException) -> BaseException:
    """Return the first error of any rank; failures are pairs of an error and its traceback."""
    return next(iter(errors.failures.values()))[0]
