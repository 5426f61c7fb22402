"""The number of the epoch that a loader's worker processes begin next.

Every worker process has its own copy of the reader. Unless workers are persistent, they exit after their epoch, and
their copies are lost. So the number of the next epoch is kept in memory that they share with the loader's process.
"""

import multiprocessing
import os
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawArray
from typing import Any, Final

from torch.utils.data import get_worker_info

# More workers than a loader has on any machine.
_MAX_WORKERS: Final = 1024


class NextEpoch:
    """The next epoch of a reader, shared by the process that created it and the workers of its loaders.

    Every worker writes only its own entry, so no lock is needed. The workers of one iteration agree on its epoch
    regardless of which one begins first: the entries of workers that have begun are one epoch ahead of the others.
    """

    def __init__(self, epoch: int = 0) -> None:
        self._owner = os.getpid()
        self._of_workers = RawArray("q", [epoch] * _MAX_WORKERS)

    def __reduce__(self) -> tuple[Any, ...]:
        """Share the memory if a process is being started; otherwise pickle a copy of the latest epoch."""
        if get_spawning_popen():
            return object.__new__, (NextEpoch,), self.__dict__
        return NextEpoch, (max(self._of_workers),)

    def set(self, epoch: int) -> None:
        """Set the next epoch of this worker, or of all workers if called outside of a worker."""
        info, shared = get_worker_info(), self._of_workers
        if not self._is_shared():
            return
        if info is not None:
            shared[info.id] = epoch
        if info is None or info.id == 0:
            # Also set the entries of workers that a later loader may have.
            first = info.num_workers if info else 0
            shared[first:] = [epoch] * (_MAX_WORKERS - first)

    def find(self, known: int) -> int:
        """Return the epoch that this process must begin; ``known`` if this process does not share the memory."""
        if not self._is_shared():
            return known
        info = get_worker_info()
        ahead = max(self._of_workers)
        return ahead if info is None else max(self._of_workers[info.id], ahead - 1)

    def _is_shared(self) -> bool:
        """Return True in the process that created this object and in the workers of its loaders.

        Return False in all other processes, such as ranks forked by a launcher.
        """
        parent = multiprocessing.parent_process() if get_worker_info() else None
        return self._owner == (parent.pid if parent else os.getpid())
