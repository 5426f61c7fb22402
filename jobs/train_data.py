"""The batches of the training example, and their state."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from lhotse import CutSet
from lhotse.dataset import DynamicCutSampler
from torch.distributed.device_mesh import DeviceMesh
from torchdata.stateful_dataloader import StatefulDataLoader
from train_config import TrainConfig

from sharmill.errors import ConfigError
from sharmill.shar import open_shar
from sharmill.shar.index import read_dataset
from sharmill.shar.layout import CONTEXT_CODES, TARGET_CODES
from sharmill.shar.reading.loading import ResumableDataset, merge_loader_states
from sharmill.training.codes import CodecForm
from sharmill.training.speech_text import SpeechTextDataset
from sharmill.training.tokenizers import PromptTokenizer, load_tokenizer

_TEXT_BOS, _TEXT_EOS = 256, 257
_TEXT_SIZE = 258
# BOS and EOS, which SpeechTextDataset adds to the codes.
_NUM_MARKS = 2


class TrainingData(Protocol):
    """Batches without end, for one rank."""

    def __iter__(self) -> Iterator[dict[str, Any]]: ...

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of this rank; None where there is none."""

    def merge(self, states: Sequence[Any]) -> dict[str, Any] | None:
        """Merge the states of all ranks into one for any number of ranks."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a merged state; before iterating."""


def make_data(config: TrainConfig, mesh: DeviceMesh, *, seed: int) -> TrainingData:
    """Return the batches that the configuration asks for: the same ones on all ranks along ``tp``."""
    if config.loader is not None:
        return MixedData(config, mesh, seed=seed)
    tensors = _tensors(config, seed, context=CONTEXT_CODES in _fields(config))
    return ExactData(config, tensors, rank=mesh["dp"].get_local_rank(), world_size=mesh["dp"].size())


def data_kind(config: TrainConfig) -> str:
    """Return what the place in the data is a place in: between kinds no job can go on."""
    if config.loader is None:
        return "without loader"
    return "loader and resumable: true" if config.resumable else "loader and resumable: false"


def validation_batches(config: TrainConfig, *, rank: int, world_size: int) -> Iterator[dict[str, Any]]:
    """Yield this rank's part of ``validation`` once, the same batches each time; ranks may have unequal numbers."""
    assert config.validation is not None
    if config.validation.endswith((".yaml", ".yml")):
        yield from _mixed_validation(config, config.validation, rank, world_size)
        return
    fields = _fields(config)
    cuts = open_shar(config.validation, fields, codec=config.codec, rank=rank, world_size=world_size)
    tensors = _tensors(config, seed=0, context=CONTEXT_CODES in fields)
    for batch in _by_duration(cuts, config.batch_seconds):
        yield tensors[batch]


def _mixed_validation(config: TrainConfig, path: str, rank: int, world_size: int) -> Iterator[dict[str, Any]]:
    """Yield this rank's part of what the settings in a file name, each example once."""
    from sharmill.training import get_dataloader
    from sharmill.training.nemo.loader_settings import sections_of, tag_names
    from sharmill.training.nemo.trial import read_train_settings

    settings = read_train_settings(path, "validation_ds")
    # NeMo would draw the other seeds anew in each process, also in those that are to have the same batches.
    seed = found if isinstance(found := settings.get("seed"), int) else 0
    # Read by this process, and divided among the ranks as a stream is: without the copies that even out batches.
    settings |= {"force_finite": True, "shuffle": False, "num_workers": 0, "seed": seed, "shard_seed": seed}
    settings.pop("canonical", None)
    for section in sections_of(settings):
        section |= {"force_map_dataset": False, "force_iterable_dataset": True}
        _fix_seeds(section, seed)
    tensors = _tensors(config, seed, context=_has_contexts(settings), tags=tag_names(settings))
    yield from get_dataloader(settings, rank, world_size, _tokenizer(), dataset=tensors)


def _fix_seeds(settings: dict[str, Any], seed: int) -> None:
    """Set the seeds that a section has, and those of its entries and groups."""
    settings |= {name: seed for name in ("seed", "shard_seed") if name in settings}
    for entry in settings.get("input_cfg") or ():
        if isinstance(entry, dict):
            _fix_seeds(entry, seed)


def _has_contexts(settings: Mapping[str, Any]) -> bool:
    """Return False if utterances come without context codes.

    Raises:
        ConfigError: some have them and others have none.
    """
    from sharmill.training.nemo.loader_settings import sections_of

    found = {has for section in sections_of(dict(settings)) for has in _contexts_of(section)}
    if len(found) > 1:
        raise ConfigError(
            "input_cfg: some datasets have context codes and others have none: name the same fields in all entries",
            code="unlike_datasets",
        )
    return False not in found


def _contexts_of(settings: Mapping[str, Any]) -> Iterator[bool]:
    for entry in settings.get("input_cfg") or ():
        if isinstance(entry, dict) and entry.get("type") != "lhotse_as_conversation":
            if entry.get("type") == "sharmill" and "dataset" in entry:
                yield _dataset_has_contexts(entry["dataset"]) and CONTEXT_CODES in (
                    entry.get("fields") or [CONTEXT_CODES]
                )
            yield from _contexts_of(entry)


def _dataset_has_contexts(dataset: str) -> bool:
    return read_dataset(Path(dataset)).has_contexts


def _tokenizer() -> PromptTokenizer:
    return PromptTokenizer(load_tokenizer("bytes"), bos=_TEXT_BOS, eos=_TEXT_EOS)


def _fields(config: TrainConfig) -> list[str]:
    return [TARGET_CODES, CONTEXT_CODES] if _dataset_has_contexts(config.dataset) else [TARGET_CODES]


def _tensors(config: TrainConfig, seed: int, *, context: bool, tags: Sequence[str] = ()) -> SpeechTextDataset:
    return SpeechTextDataset(
        CodecForm.of_dataset(config.dataset, config.codec),
        _tokenizer(),
        context=context,
        tags=tags,
        text_bos_id=_TEXT_BOS,
        text_eos_id=_TEXT_EOS,
        seed=seed,
    )


def model_sizes(config: TrainConfig) -> dict[str, int]:
    """Return the sizes of text, codes and frames that the model is made for; ids of codes include their marks."""
    form = CodecForm.of_dataset(config.dataset, config.codec)
    assert form.num_codebooks is not None
    return {
        "text_size": _TEXT_SIZE,
        "num_codebooks": form.num_codebooks,
        "codes_size": form.codebook_size + _NUM_MARKS,
        "samples_per_frame": form.samples_per_frame,
    }


class ExactData:
    """Batches by duration of our reader's cuts: from its state every cut comes once per epoch whatever happens."""

    def __init__(self, config: TrainConfig, tensors: SpeechTextDataset, *, rank: int, world_size: int) -> None:
        cuts = open_shar(
            config.dataset,
            _fields(config),
            codec=config.codec,
            shuffle=True,
            seed=config.order_seed,
            rank=rank,
            world_size=world_size,
            infinite=True,
        )
        batches = partial(_by_duration, max_duration=config.batch_seconds)
        self._dataset = ResumableDataset(cuts, batches, finish=tensors.__getitem__)
        self._num_workers = config.num_workers
        self._loader: StatefulDataLoader | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._begun())

    def state_dict(self) -> dict[str, Any]:
        return self._begun().state_dict()

    def merge(self, states: Sequence[Any]) -> dict[str, Any]:
        return merge_loader_states(states)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert self._loader is None, "a state is loaded before its workers start"
        self._dataset.load_state_dict(state)

    def _begun(self) -> StatefulDataLoader:
        if self._loader is None:
            self._loader = StatefulDataLoader(
                self._dataset, batch_size=None, num_workers=self._num_workers, worker_init_fn=_outlive_sigterm
            )
        return self._loader


class MixedData:
    """NeMo's multimodal loader: every example comes once per epoch, unless ``resumable`` is false."""

    def __init__(self, config: TrainConfig, mesh: DeviceMesh, *, seed: int) -> None:
        self._config, self._mesh, self._seed = config, mesh, seed
        self._state: Mapping[str, Any] | None = None
        self._loader: Any = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            is_empty = True
            for batch in self._begun():
                is_empty = False
                yield batch
            if is_empty:
                raise ConfigError(
                    f"{self._config.loader} gives this rank no batch: look at its filters and limits",
                    code="too_few_cuts",
                )

    def state_dict(self) -> dict[str, Any] | None:
        return self._begun().state_dict() if self._config.resumable else None

    def merge(self, states: Sequence[Any]) -> dict[str, Any] | None:
        from sharmill.training import merge_data_states

        return merge_data_states(states) if self._config.resumable else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert self._loader is None, "a state is loaded before its workers start"
        self._state = state if self._config.resumable else None

    def _begun(self) -> Any:
        if self._loader is None:
            from sharmill.training import get_dataloader
            from sharmill.training.nemo.loader_settings import tag_names

            settings = self._settings()
            self._loader = get_dataloader(
                settings,
                self._mesh["dp"].get_local_rank(),
                self._mesh["dp"].size(),
                _tokenizer(),
                dataset=_tensors(self._config, self._seed, context=_has_contexts(settings), tags=tag_names(settings)),
                device_mesh=self._mesh,
                resumable=self._config.resumable,
                state=self._state,
            )
            # NeMo has no public name for what its wrapper reads: None where the batches are another rank's.
            if (source := self._loader._source) is not None:
                source.worker_init_fn = partial(_outlive_sigterm, then=source.worker_init_fn)
        return self._loader

    def _settings(self) -> dict[str, Any]:
        """Return the loader's settings: the order of the data is the training's, all else is the job's."""
        from sharmill.training.nemo.loader_settings import is_divisible, sources_of
        from sharmill.training.nemo.trial import read_train_settings

        settings = read_train_settings(str(self._config.loader))
        settings |= {"seed": self._seed, "shard_seed": self._config.shard_seed}
        for entry in sources_of(settings) if self._config.resumable else ():
            if entry.get("type") == "sharmill" or is_divisible(entry):
                entry["shard_seed"] = self._config.order_seed
        return settings


def end_readers() -> None:
    """End the processes that read: at its exit Python would ask them to end by SIGTERM, and wait for ever."""
    # torch takes the end of one for an accident.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for process in multiprocessing.active_children():
        process.kill()


def _outlive_sigterm(worker: int, then: Callable[[int], None] | None = None) -> None:
    """Ignore SIGTERM, which SLURM sends to every process: without its workers a rank cannot go on to a checkpoint."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if then is not None:
        then(worker)


def _by_duration(cuts: CutSet, max_duration: float) -> DynamicCutSampler:
    # The reader has given this rank and worker their part already.
    return DynamicCutSampler(cuts, max_duration=max_duration, rank=0, world_size=1)
