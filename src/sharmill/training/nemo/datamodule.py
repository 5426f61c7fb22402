"""A version of NeMo's DataModule that saves the exact position in the training data in Lightning's checkpoints.

Importing this module replaces NeMo's class, so that NeMo's own scripts use the class defined here.
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
    """Iterable over the batches of an infinite loader, across all of Lightning's epochs.

    Lightning may fetch a batch ahead. If it starts a new iteration, a fetched batch that was not used is delivered
    again.

    Attributes:
        states: states of the loader before and after the batch that the trainer took last.
        counts: numbers of batches that the trainer had started and processed when it took that batch.
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
        """Record that the trainer took the oldest fetched batch."""
        self.states, self.counts = (self.states[1], self._fetched.popleft()[1]), counts

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state, because Lightning would save only rank 0's state, including batches fetched ahead."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do nothing; Lightning requires this method for checkpoints of NeMo's DataModule."""


class DataModule(speechlm2.DataModule):
    """NeMo's DataModule, which saves the position in the training data if ``train_ds`` has ``resumable: true``.

    If training is resumed from any checkpoint of Lightning or NeMo, it then continues with the remaining examples of
    the epoch, even on a different number of ranks or workers. Without ``resumable``, the class behaves like NeMo's.

    Raises:
        ConfigError: the position in the data cannot be saved exactly, or the saved position belongs to other data;
            raised when training begins.
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
        """Discard the position of an earlier ``fit`` if this one starts from a checkpoint."""
        super().setup(stage)
        if stage == "fit" and self.trainer.ckpt_path is not None:
            self.load_state_dict({})

    def train_dataloader(self) -> Any:
        """Return the batches of this rank, starting at the position in the checkpoint, if any."""
        if not self._resumable:
            return super().train_dataloader()
        state = self.state_dict()
        if not state and self.trainer.global_step > 0:
            log.warning(
                "the checkpoint stores no position in the training data, because it was saved without resumable=true "
                "or after an error on one of several ranks; reading starts from the beginning of the data"
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
        """Record that the trainer takes a training batch, and return the batch unchanged."""
        if self._batches is not None and self.trainer.training:
            self._batches.take(self._counts())
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position of all ranks in the training data; every rank must call this method."""
        if self._batches is None:
            return self._restored
        # A batch has been used for training only if it was both started and processed. If it failed before it was
        # started, neither count has increased; if the model skipped it, only the number of processed batches has.
        is_trained = all(now > before for now, before in zip(self._counts(), self._batches.counts, strict=True))
        states = [(self._get_dp_rank(), self._batches.states[is_trained])]
        if dist.is_initialized() and dist.get_world_size() > 1:
            # SIGTERM ends all ranks after the same step. After an error, however, gathering the states might deadlock.
            if self.trainer.interrupted and not isinstance(sys.exception(), SIGTERMException):
                log.warning("the checkpoint is saved without a position in the training data, because a rank failed")
                return {}
            states *= dist.get_world_size()
            dist.all_gather_object(states, states[0])
        # Tensor-parallel ranks have equal states, or empty ones if they receive the batches of another rank.
        by_rank = {rank: state for rank, state in states if state}
        return merge_data_states(list(by_rank.values())) if by_rank else self._restored

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the position in the training data from a checkpoint; ignored unless training is resumable."""
        self._batches, self._restored = None, dict(state_dict) if self._resumable else {}

    def _counts(self) -> tuple[int, int]:
        total = self.trainer.fit_loop.epoch_loop.batch_progress.total
        return total.started, total.processed


speechlm2.DataModule = speechlm2.data.DataModule = DataModule
