"""Batches of the training example, and their position in the data."""

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from lhotse.dataset import DynamicCutSampler
from torch.distributed.device_mesh import DeviceMesh
from torchdata.stateful_dataloader import StatefulDataLoader
from train_config import TrainConfig

from sharmill.errors import ConfigError
from sharmill.shar import open_shar
from sharmill.shar.fields import CONTEXT_CODES, TARGET_CODES
from sharmill.shar.index import read_dataset
from sharmill.shar.reading.loading import ResumableDataset, merge_loader_states
from sharmill.training.codes import CodecForm
from sharmill.training.speech_text import SpeechTextDataset
from sharmill.training.tokenizers import PromptTokenizer, load_tokenizer

_TEXT_BOS, _TEXT_EOS = 256, 257
_TEXT_SIZE = 258
# lhotse's samplers must not divide the data, because the reader has already divided it.
_UNDIVIDED = {"rank": 0, "world_size": 1}
# SpeechTextDataset adds BOS and EOS to the codes.
_NUM_SPECIAL_IDS = 2


def make_data(config: TrainConfig, mesh: DeviceMesh, *, seed: int) -> "ExactData | MixedData":
    """Return the source of batches for a configuration; all ranks along ``tp`` get equal batches."""
    return (ExactData if config.loader is None else MixedData)(config, mesh, seed=seed)


def data_kind(config: TrainConfig) -> str:
    """Return the kind of data; a position in the data is valid only for data of the same kind."""
    return "without loader" if config.loader is None else f"loader and resumable: {str(config.resumable).lower()}"


def validation_batches(config: TrainConfig, mesh: DeviceMesh) -> Iterator[dict[str, Any]]:
    """Yield this rank's part of ``validation`` once, always in the same batches.

    Ranks may have different numbers of batches.
    """
    assert config.validation is not None
    rank, world_size = mesh["dp"].get_local_rank(), mesh["dp"].size()
    if not config.validation.endswith((".yaml", ".yml")):
        cuts = open_shar(config.validation, _fields(config), codec=config.codec, rank=rank, world_size=world_size)
        tensors = _tensors(config, seed=0)
        for batch in DynamicCutSampler(cuts, max_duration=config.batch_seconds, **_UNDIVIDED):
            yield tensors[batch]
        return
    from sharmill.training import get_dataloader
    from sharmill.training.nemo.settings import entries_of, read_train_settings, sections_of, tag_names

    settings = read_train_settings(config.validation, "validation_ds")
    # If the seed is of any other kind, NeMo draws a different number in each process, even in processes that need the
    # same batches.
    seed = found if isinstance(found := settings.get("seed"), int) else 0
    # Read the data as a stream, because a map dataset would repeat examples so that all ranks have equal numbers of
    # them.
    settings |= {"force_finite": True, "shuffle": False, "num_workers": 0, "seed": seed, "shard_seed": seed}
    settings.pop("canonical", None)
    for section in sections_of(settings):
        section |= {"force_map_dataset": False, "force_iterable_dataset": True}
    for part in [*sections_of(settings), *entries_of(settings)]:
        part |= {name: seed for name in ("seed", "shard_seed") if name in part}
    tensors = _tensors(config, seed, tags=tag_names(settings))
    yield from get_dataloader(settings, rank, world_size, _tokenizer(), dataset=tensors)


def _tokenizer() -> PromptTokenizer:
    return PromptTokenizer(load_tokenizer("bytes"), bos=_TEXT_BOS, eos=_TEXT_EOS)


def _fields(config: TrainConfig) -> list[str]:
    return [TARGET_CODES, CONTEXT_CODES] if read_dataset(Path(config.dataset)).has_contexts else [TARGET_CODES]


def _tensors(config: TrainConfig, seed: int, tags: Sequence[str] = ()) -> SpeechTextDataset:
    return SpeechTextDataset(
        CodecForm.of_dataset(config.dataset, config.codec),
        _tokenizer(),
        context=None,
        tags=tags,
        text_bos_id=_TEXT_BOS,
        text_eos_id=_TEXT_EOS,
        seed=seed,
    )


def model_sizes(config: TrainConfig) -> dict[str, int]:
    """Return the sizes of text, codes and frames for the model; the number of codes includes BOS and EOS."""
    form = CodecForm.of_dataset(config.dataset, config.codec)
    assert form.num_codebooks is not None
    return {
        "text_size": _TEXT_SIZE,
        "num_codebooks": form.num_codebooks,
        "codes_size": form.codebook_size + _NUM_SPECIAL_IDS,
        "samples_per_frame": form.samples_per_frame,
    }


class ExactData:
    """Batches of limited duration from sharmill's reader; every cut is read once per epoch despite interruptions."""

    merge = staticmethod(merge_loader_states)

    def __init__(self, config: TrainConfig, mesh: DeviceMesh, *, seed: int) -> None:
        cuts = open_shar(
            config.dataset,
            _fields(config),
            codec=config.codec,
            shuffle=True,
            seed=config.order_seed,
            rank=mesh["dp"].get_local_rank(),
            world_size=mesh["dp"].size(),
            infinite=True,
        )
        batches = partial(DynamicCutSampler, max_duration=config.batch_seconds, **_UNDIVIDED)
        self._dataset = ResumableDataset(cuts, batches, finish=_tensors(config, seed).__getitem__)
        self._num_workers = config.num_workers
        self.load_state_dict = self._dataset.load_state_dict

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._loader)

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict()

    @cached_property
    def _loader(self) -> StatefulDataLoader:
        """The loader, whose workers start from the loaded state."""
        return StatefulDataLoader(
            self._dataset, batch_size=None, num_workers=self._num_workers, worker_init_fn=_ignore_sigterm
        )


class MixedData:
    """Batches from NeMo's multimodal loader; every example is read once per epoch unless ``resumable`` is false."""

    def __init__(self, config: TrainConfig, mesh: DeviceMesh, *, seed: int) -> None:
        self._config, self._mesh, self._seed = config, mesh, seed
        self._state: Mapping[str, Any] | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            is_empty = True
            for batch in self._loader:
                is_empty = False
                yield batch
            if is_empty:
                raise ConfigError(
                    f"{self._config.loader} yields no batch for this rank; check its filters and limits",
                    code="too_few_cuts",
                )

    def state_dict(self) -> dict[str, Any] | None:
        return self._loader.state_dict() if self._config.resumable else None

    def merge(self, states: Sequence[Any]) -> dict[str, Any] | None:
        from sharmill.training import merge_data_states

        return merge_data_states(states) if self._config.resumable else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state = state if self._config.resumable else None

    @cached_property
    def _loader(self) -> Any:
        """The loader with the settings in its file, except for the order of the data, which the training sets."""
        from sharmill.training import get_dataloader
        from sharmill.training.nemo.entries import is_divisible
        from sharmill.training.nemo.settings import read_train_settings, sources_of, tag_names

        settings = read_train_settings(str(self._config.loader))
        settings |= {"seed": self._seed, "shard_seed": self._config.shard_seed}
        for entry in sources_of(settings) if self._config.resumable else ():
            if entry.get("type") == "sharmill" or is_divisible(entry):
                entry["shard_seed"] = self._config.order_seed
        loader = get_dataloader(
            settings,
            self._mesh["dp"].get_local_rank(),
            self._mesh["dp"].size(),
            _tokenizer(),
            dataset=_tensors(self._config, self._seed, tags=tag_names(settings)),
            device_mesh=self._mesh,
            resumable=self._config.resumable,
            state=self._state,
        )
        # NeMo's wrapper has no public attribute for its source. The source is None if another rank reads the batches.
        if (source := loader._source) is not None:
            source.worker_init_fn = partial(_ignore_sigterm, then=source.worker_init_fn)
        return loader


def kill_workers() -> None:
    """Kill the workers. At exit, Python would wait for them forever, because they ignore its SIGTERM."""
    # Otherwise torch would raise an error about the killed workers.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for process in multiprocessing.active_children():
        process.kill()


def _ignore_sigterm(worker: int, then: Callable[[int], None] | None = None) -> None:
    """Ignore SIGTERM in a worker, then call ``then`` with the worker's number, if given.

    SLURM sends SIGTERM to every process, but a rank needs its workers until it has saved a checkpoint.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if then is not None:
        then(worker)
