"""The checkpoints of a training: whole or not there, written by all ranks, and read by any number of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer
from train_world import World

from sharmill.errors import ConfigError, FatalError, SharmillError
from sharmill.files.storage import checksum, make_folder, path_aside, publish_directory, remove_asides, remove_at_once

_CHECKPOINT = re.compile(r"step-(\d{9})")
_RECORD = "record.json"
_KEYS = {"step": int, "seed": int, "sizes": dict, "data_kind": str, "data": (dict, type(None)), "files": dict}
# Values of the optimizer under the names of their parameters: another layout has them in other groups.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


class Checkpoints:
    """The newest checkpoints in ``out_dir``.

    Each is a folder ``step-<n>``: every rank's part of model and optimizer, as ``torch.distributed.checkpoint`` writes
    them, and ``record.json`` with all else, the place in the data among it.
    """

    def __init__(self, out_dir: Path, keep: int, world: World) -> None:
        self._folder = out_dir / "checkpoints"
        self._keep = keep
        self._world = world
        if world.rank == 0:
            make_folder(self._folder)
            remove_asides(self._folder)
        newest = self._paths()[-1:] if world.rank == 0 else []
        # One rank looks: on a shared disk the others may see another state of the folder.
        found: list[Path] = world.gather(newest)[0]
        self._newest = found[0] if found else None

    def read_record(self) -> dict[str, Any] | None:
        """Return the record of the newest checkpoint; None where there is none.

        Raises:
            ConfigError: it is damaged.
        """
        if self._newest is None:
            return None
        try:
            record: dict[str, Any] = json.loads((self._newest / _RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self._damaged(error) from error
        for key, kinds in _KEYS.items():
            if not isinstance(record, dict) or not isinstance(record.get(key, ...), kinds):
                raise self._damaged(f"{_RECORD} has no {key} as this sharmill writes it")
        return record

    def load(self, model: nn.Module, optimizer: Optimizer, files: dict[str, Any]) -> None:
        """Load the newest checkpoint, whatever number of ranks and layout wrote it; ``files`` are those of its record.

        Raises:
            ConfigError: it is damaged.
        """
        self._check(files)
        model_state, optimizer_state = get_state_dict(model, optimizer, options=_OPTIONS)
        state = {"model": model_state, "optimizer": optimizer_state}
        try:
            dcp.load(state, checkpoint_id=self._newest)
        except CheckpointException as errors:
            raise self._damaged(_first_of(errors)) from errors
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=_OPTIONS,
        )

    def save(self, model: nn.Module, optimizer: Optimizer, record: dict[str, Any]) -> None:
        """Save a checkpoint of ``record["step"]`` on all ranks, and remove old ones.

        Raises:
            FatalError: a rank cannot write its part.
        """
        final = self._folder / f"step-{record['step']:09d}"
        aside = self._world.gather(path_aside(final))[0]
        model_state, optimizer_state = get_state_dict(model, optimizer, options=_OPTIONS)
        writer = dcp.FileSystemWriter(aside, sync_files=True)
        try:
            dcp.save({"model": model_state, "optimizer": optimizer_state}, storage_writer=writer)
        except CheckpointException as errors:
            raise FatalError(f"cannot write {final}: {_first_of(errors)}", code="disk") from errors
        # Those that each rank wrote, and rank 0 the list of what is in them.
        own = [*aside.glob(f"__{self._world.rank}_*"), *([aside / ".metadata"] if self._world.rank == 0 else [])]
        files = self._world.gather({path.name: _facts_of(path) for path in own})
        if self._world.rank == 0:
            record = record | {"files": {name: facts for part in files for name, facts in part.items()}}
            (aside / _RECORD).write_text(json.dumps(record), encoding="utf-8")
            publish_directory(aside, final)
            for path in self._paths()[: -self._keep]:
                remove_at_once(path)

    def _check(self, files: dict[str, Any]) -> None:
        """Raise ConfigError on every rank for a file that is not as it was written; each reads a part of them."""
        assert self._newest is not None
        damaged = ""
        for name, facts in sorted(files.items())[self._world.rank :: self._world.size]:
            try:
                if _facts_of(self._newest / name) != facts:
                    damaged = f"{name} is not as it was written"
            except (OSError, SharmillError) as error:
                damaged = f"{name}: {error}"
        for said in self._world.gather(damaged):
            if said:
                raise self._damaged(said)

    def _damaged(self, error: BaseException | str) -> ConfigError:
        return ConfigError(
            f"{self._newest} is damaged: {str(error).strip() or type(error).__name__}; remove it to go on from the "
            "checkpoint before it",
            code="wrong_state",
        )

    def _paths(self) -> list[Path]:
        return sorted(path for path in self._folder.iterdir() if _CHECKPOINT.fullmatch(path.name))


def _facts_of(path: Path) -> list[Any]:
    """Return what a file is known by later: its size and checksum."""
    return [path.stat().st_size, checksum(path)]


def _first_of(errors: CheckpointException) -> BaseException:
    """Return the first error of any rank; each comes with its traceback."""
    return next(iter(errors.failures.values()))[0]
