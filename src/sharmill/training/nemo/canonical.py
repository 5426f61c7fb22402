"""The same global batches on any number of ranks: an epoch in fixed parts, each of which makes its own batches.

Of N parts a rank of W has N / W, and gives out one batch of each in turn; so N / W batches of every rank are together
one global step, which is the same for every W. All that is random follows from the number of a part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from sharmill.errors import ConfigError
from sharmill.training.nemo.loader import dataset_for, make_loader
from sharmill.training.nemo.loader_settings import DIVIDED, prepare_settings, resolve_settings, sections_of, sources_of
from sharmill.training.nemo.resumable import ResumableBatches, vary_seeds


def get_canonical_dataloader(
    cfg: Mapping[str, Any],
    rank: int,
    world_size: int,
    tokenizer: Any,
    dataset: torch.utils.data.Dataset[Any] | None,
    state: Mapping[str, Any] | None,
) -> StatefulDataLoader:
    """Return the loader of ``get_dataloader`` for settings with ``canonical: N``.

    Raises:
        ConfigError: N is not a multiple of the ranks times workers, or the data cannot be divided and go on.
    """
    settings = resolve_settings(cfg)
    count, num_workers = settings.pop("canonical"), settings.pop("num_workers", 0)
    check_count(count, world_size, num_workers)
    for section in sections_of(settings):
        # In step, lhotse draws buckets by the number of the worker.
        section["bucketing_strategy"] = "fully_randomized"
    parts, resumes = [], 0
    for part in range(rank * count // world_size, (rank + 1) * count // world_size):
        # Without workers of its own, NeMo draws by the number of the part alone.
        prepared = prepare_settings(settings, part, count)
        for entry in sources_of(prepared):
            if entry.get("type") in ("sharmill", DIVIDED):
                entry["whole_part"] = True
        if state is not None:
            resumes = vary_seeds(prepared, state)
        made = dataset_for(prepared, tokenizer, dataset)
        loader, ours = make_loader(settings, prepared, part, count, made, tokenizer, resumable=True)
        batches = ResumableBatches(loader.dataset, ours, resumes)
        if state is not None:
            batches.load_state_dict(state)
        parts.append(batches)
    return StatefulDataLoader(
        CanonicalBatches(parts),
        batch_size=None,
        num_workers=num_workers,
        pin_memory=bool(settings.get("pin_memory", False)),
        persistent_workers=num_workers > 0,
    )


def check_count(count: Any, world_size: int, num_workers: int) -> None:
    """Raise ConfigError where so many parts cannot be divided among the ranks and their workers."""
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"canonical is a number of parts, not {count!r}", code="bad_config_value")
    readers = world_size * max(1, num_workers)
    if count % readers:
        allowed = [str(number) for number in range(1, count + 1) if count % number == 0]
        raise ConfigError(
            f"canonical: {count} cannot be divided among {readers} readers ({world_size} ranks x "
            f"{max(1, num_workers)} workers): their number must be one of {', '.join(allowed)}",
            code="split_wrong",
        )


class CanonicalBatches(torch.utils.data.IterableDataset):
    """One batch of each part in turn, with the states of the parts that this process has."""

    def __init__(self, parts: Sequence[ResumableBatches]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[Any]:
        running = [iter(part) for part in self._own_parts()]
        while True:
            for batches in running:
                yield next(batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of this worker's parts."""
        return {"parts": [part.state_dict() for part in self._own_parts()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the states of these parts."""
        for part, known in zip(self._own_parts(), state["parts"], strict=True):
            part.load_state_dict(known)

    def _own_parts(self) -> Sequence[ResumableBatches]:
        """Return every n-th part: a loader takes batches of its workers in turn, so the order is that of the parts."""
        info = torch.utils.data.get_worker_info()
        return self._parts if info is None else self._parts[info.id :: info.num_workers]
