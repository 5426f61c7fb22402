"""NeMo's DataModule with an exact place in the training data, in Lightning's checkpoints.

Importing this module gives the class to NeMo's own scripts, under NeMo's name for it.
"""

import copy
import logging
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException
from nemo.collections import speechlm2
from nemo.collections.common.data.fallback import FallbackDataset
from omegaconf import open_dict

from sharmill.training.nemo.loader import get_dataloader, merge_data_states

log = logging.getLogger(__name__)


class _Batches:
    """The batches of a loader without end, over all of Lightning's epochs.

    Lightning may fetch a batch ahead. If it iterates from the beginning then, that batch comes again.

    Attributes:
        states: of the loader, before and after the batch that the trainer took last.
        counts: of the trainer's batches that were started and processed, when it took that one.
    """

    def __init__(self, loader: Any) -> None:
        self._loader, self._batches = loader, iter(loader)
        self._fetched: deque[tuple[Any, dict[str, Any]]] = deque()
        self.states: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        self.counts = (0, 0)

    def __iter__(self) -> Iterator[Any]:
        yield from [batch for batch, _ in self._fetched]
        for batch in self._batches:
            self._fetched.append((batch, self._loader.state_dict()))
            yield batch

    def take(self, counts: tuple[int, int]) -> None:
        """Note that the trainer took the oldest of the batches that it fetched."""
        self.states, self.counts = (self.states[1], self._fetched.popleft()[1]), counts

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: Lightning would save the state of rank 0 alone, with the batches that it fetched ahead."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do nothing. Lightning demands this method for checkpoints of NeMo's DataModule, whose loader has it."""


class DataModule(speechlm2.DataModule):
    """NeMo's DataModule. With ``resumable: true`` in ``train_ds``, checkpoints have the place in the training data.

    A training then continues with the examples that are left of the epoch, also on another number of ranks or workers,
    from whichever checkpoint Lightning or NeMo saved. Without the key the class is NeMo's.

    Raises:
        ConfigError: when training begins: there is no exact place in such data, or it is that of other data.
    """

    def __init__(self, cfg: Any, tokenizer: Any, dataset: Any) -> None:
        super().__init__(copy.deepcopy(cfg), tokenizer, dataset)
        self._resumable = False
        self._batches: _Batches | None = None
        self._restored: dict[str, Any] = {}
        with open_dict(self.cfg):
            if "train_ds" in self.cfg:
                self._resumable = self.cfg.train_ds.pop("resumable", False)

    def setup(self, stage: str) -> None:
        """Forget the place of an earlier ``fit``, if this one begins with a checkpoint."""
        super().setup(stage)
        if stage == "fit" and self.trainer.ckpt_path is not None:
            self.load_state_dict({})

    def train_dataloader(self) -> Any:
        """Return the batches of this rank, from the place that a checkpoint has."""
        if not self._resumable:
            return super().train_dataloader()
        state = self.state_dict()
        if not state and self.trainer.global_step > 0:
            log.warning(
                "the checkpoint has no place in the training data, which begin from scratch: it was saved without "
                "resumable: true, or after an error on one of several ranks"
            )
        self._batches = _Batches(
            get_dataloader(
                self.cfg.train_ds,
                self._get_dp_rank(),
                self._get_world_size(),
                self.tokenizer,
                dataset=FallbackDataset(self.dataset),
                device_mesh=self._get_device_mesh(),
                resumable=True,
                state=state or None,
            )
        )
        return self._batches

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Count a training batch, which the trainer is about to train on, and return it as it is."""
        if self._batches is not None and self.trainer.training:
            self._batches.take(self._counts())
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the training data, of all ranks together; all of them must call it."""
        if self._batches is None:
            return self._restored
        # A batch may fail before it is started, and one that the model skips is only processed.
        is_trained = all(now > before for now, before in zip(self._counts(), self._batches.counts, strict=True))
        states = [(self._get_dp_rank(), self._batches.states[is_trained])]
        if dist.is_initialized() and dist.get_world_size() > 1:
            # SIGTERM ends all ranks after the same step; after an error, the others may wait for this one.
            if self.trainer.interrupted and not isinstance(sys.exception(), SIGTERMException):
                log.warning("the checkpoint is saved without the place in the training data, since a rank failed")
                return {}
            states *= dist.get_world_size()
            dist.all_gather_object(states, states[0])
        # Tensor-parallel ranks have the same state, or none if they get the batches of another rank.
        by_rank = {rank: state for rank, state in states if state}
        return merge_data_states(list(by_rank.values())) if by_rank else self._restored

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the place in the training data that a checkpoint has, unless training is not resumable."""
        self._batches, self._restored = None, dict(state_dict) if self._resumable else {}

    def _counts(self) -> tuple[int, int]:
        total = self.trainer.fit_loop.epoch_loop.batch_progress.total
        return total.started, total.processed


speechlm2.DataModule = speechlm2.data.DataModule = DataModule
