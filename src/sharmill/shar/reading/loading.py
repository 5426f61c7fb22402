"""Readers in torchdata's StatefulDataLoader, and merging of its states for a different number of ranks or workers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any, Final, TypeVar

import torch
from lhotse import CutSet
from lhotse.cut import Cut

from sharmill.errors import ConfigError, FatalError
from sharmill.shar.reading.iteration import SharReader
from sharmill.shar.reading.state import merge_states

Batch = TypeVar("Batch")
# Remedies for shared-memory errors, keyed by parts of torch's message: the reason, or the system's error number.
_REMEDIES: Final = {
    ("allocate shared memory", "(28)"):
        "/dev/shm has no room for a batch: give the container more shared memory (docker run --shm-size=8g), make "
        "batches smaller, or set num_workers to 0",
    ("(24)",):
        "the tensors of batches need more open files than the limit: raise it (ulimit -n), put more into one "
        "tensor, or set num_workers to 0",
}  # fmt: skip


class ResumableDataset(torch.utils.data.IterableDataset):
    """Cuts, or examples that a pipeline makes from them, with an exact state for a StatefulDataLoader.

    Args:
        cuts: the unmodified CutSet that ``open_shar`` returned; filter and map its cuts in the pipeline.
        pipeline: a function that is called in the worker with the CutSet, and returns an iterable of cuts, or of
            collections of cuts such as a sampler's batches. A cut counts as consumed when the pipeline yields it, so
            cuts that the pipeline holds back are not lost.
        finish: a function applied to each result of the pipeline after its cuts were counted, for example to convert
            cuts to tensors. The loader yields what it returns.

    Every worker reads its own part. ``StatefulDataLoader.state_dict()`` can be loaded into a loader with the same
    numbers of workers and ranks; for other numbers, see ``merge_loader_states``.

    Example:
        >>> cuts = open_shar("data/librispeech", shuffle=True, infinite=True, rank=rank, world_size=8)  # doctest: +SKIP
        >>> loader = StatefulDataLoader(  # doctest: +SKIP
        ...     ResumableDataset(cuts, lambda cuts: DynamicCutSampler(cuts, max_duration=60), finish=to_tensors),
        ...     batch_size=None,
        ...     num_workers=2,
        ... )
    """

    def __init__(
        self,
        cuts: CutSet,
        pipeline: Callable[[CutSet], Iterable[Any]] | None = None,
        *,
        finish: Callable[[Any], Any] | None = None,
    ) -> None:
        if not isinstance(cuts.data, SharReader):
            raise ConfigError(
                "pass the unmodified CutSet of open_shar to ResumableDataset; filter and map its cuts in pipeline=",
                code="inexact_state",
            )
        self._cuts, self._reader = cuts, cuts.data
        self._reader.count_only_marked()
        self._pipeline = pipeline
        self._finish = finish

    def __iter__(self) -> Iterator[Any]:
        # Begin the pass now, not at the first request: a loader may save the states of workers that were not yet asked
        # for data.
        self._reader.begin_pass(next_epoch=True)
        return self._examples()

    def _examples(self) -> Iterator[Any]:
        for made in self._cuts if self._pipeline is None else self._pipeline(self._cuts):
            consumed = list(_cuts_in(made))
            if not consumed:
                raise ConfigError(
                    f"the pipeline yielded a {type(made).__name__} without cuts, so consumed cuts cannot be counted; "
                    "make tensors in finish=",
                    code="inexact_state",
                )
            self._reader.mark_consumed(consumed)
            yield share_tensors(made if self._finish is None else self._finish(made))
        self._reader.end_pass()

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at ``epoch``; without this call, each iteration of a loader is the next epoch."""
        self._reader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this worker's reader."""
        return self._reader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of this part, or merged states; call this before iterating."""
        self._reader.load_state_dict(state)


def share_tensors(batch: Batch) -> Batch:
    """Return a batch; in a worker of a loader, move its tensors to shared memory first.

    Otherwise one of torch's threads would move them later. That thread only prints its errors, so the loader would wait
    forever.

    Raises:
        FatalError: /dev/shm is too small, or too many files are open.
    """
    if torch.utils.data.get_worker_info() is not None:
        _TensorSharing().dump(batch)
    return batch


class _TensorSharing(ForkingPickler):
    """Finds the tensors in a batch of any structure, as torch's own pickler does, and moves them to shared memory."""

    def __init__(self) -> None:
        # The output is discarded. With a buffer callback, arrays are pickled out of band, so they are not copied.
        super().__init__(SimpleNamespace(write=len), 5, True, lambda _: None)

    def reducer_override(self, found: Any) -> Any:
        if not isinstance(found, torch.Tensor):
            return NotImplemented
        if found.layout is torch.strided and found.device.type == "cpu":
            try:
                found.share_memory_()
            except RuntimeError as error:
                for reasons, remedy in _REMEDIES.items():
                    if any(reason in str(error) for reason in reasons):
                        raise FatalError(remedy, code="disk") from error
                raise
        return int, ()


def merge_loader_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks' StatefulDataLoaders into one reader state, for any number of ranks and workers.

    Args:
        states: ``StatefulDataLoader.state_dict()`` of every rank; the dataset must be a ``ResumableDataset``.

    Returns:
        The state for ``ResumableDataset.load_state_dict`` on every new rank, before its new loader is created. (The
        state of a loader itself fits only loaders with the same number of workers.)

    Raises:
        ConfigError: a rank is missing, or these are not states of such loaders.
    """
    return merge_states([found for state in states for found in dataset_states(state)])


def load_states(readers: Sequence[SharReader], state: Mapping[str, Any]) -> None:
    """Load each reader's state from a combined state, in the order of ``readers``; call this before iterating.

    Raises:
        ConfigError: the state belongs to other readers.
    """
    states = state.get("readers", ())
    if len(states) != len(readers):
        raise ConfigError(
            f"the state was saved with {len(states)} datasets or sources, but there are now {len(readers)}",
            code="wrong_state",
        )
    for reader, known in zip(readers, states, strict=True):
        reader.load_state_dict(known)


def dataset_states(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the dataset's states from the state of a StatefulDataLoader, one per worker.

    torchdata has no public function for this, so the private keys of its ``state_dict()`` are read.

    Raises:
        ConfigError: this is not the state of such a loader, its dataset has no state, or workers have yielded more than
            the state records.
    """
    has_workers, is_finished = "_snapshot" in state, state.get("_iterator_finished")
    workers = state["_snapshot"]["_worker_snapshots"].values() if has_workers else [state]
    found: list[Any] = [worker.get("dataset_state") for worker in workers]
    if not found or any(not isinstance(one, Mapping) for one in found):
        raise ConfigError(
            "this is not the state of a StatefulDataLoader whose dataset has its own state", code="wrong_state"
        )
    if has_workers and not is_finished and (steps := state.get("_steps_since_snapshot")):
        raise ConfigError(
            f"the state does not record what the workers yielded since the last snapshot (steps since: {steps}): set "
            "snapshot_every_n_steps=1 in the StatefulDataLoader, or save at multiples of it (this state can only be "
            "loaded into a loader with the same number of workers)",
            code="inexact_state",
        )
    # The snapshot was taken after the last step, before workers noticed that they had no more data.
    return [_ended(one) for one in found] if has_workers and is_finished else found


def _ended(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of a worker at the end of its pass; an infinite reader's state has no end and is unchanged."""
    if "readers" in state:
        return {**state, "readers": [_ended(one) for one in state["readers"]]}
    if state.get("infinite") or "epochs" not in state:
        return state
    later = {number: known for number, known in state["epochs"].items() if int(number) > state["epoch"]}
    return {**state, "epoch": state["epoch"] + 1, "epochs": later}


def _cuts_in(made: Any) -> Iterator[Cut]:
    if isinstance(made, Cut):
        yield made
    elif isinstance(made, (CutSet, Sequence)) and not isinstance(made, (str, bytes)):
        for one in made:
            yield from _cuts_in(one)
    elif isinstance(made, Mapping):
        for one in made.values():
            yield from _cuts_in(one)
