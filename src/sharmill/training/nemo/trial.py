"""Trials of a training loader: what a rank gets, without loading audio, in this process or in fresh ones."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from lhotse.cut import Cut
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sharmill.engine.child import safe_path
from sharmill.errors import ConfigError
from sharmill.models.nemo_checkpoint import quiet_nemo
from sharmill.training.nemo.canonical import check_count
from sharmill.training.nemo.loader import get_dataloader
from sharmill.training.nemo.loader_settings import (
    DIVIDED,
    Settings,
    prepare_settings,
    resolve_settings,
    sections_of,
    sources_of,
)
from sharmill.training.nemo.partition import READER
from sharmill.training.nemo.resumable import cuts_of, merge_data_states, parts_of
from sharmill.training.tokenizers import PromptTokenizer, load_tokenizer
from sharmill.training.yaml_files import read_yaml

# The place of an example: its reader, epoch, group, draw, block and item.
Place = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Seen:
    """An example of a trial.

    Args:
        place: None for data that are not divided.
        seconds: of each of its pieces of audio.
        tokens: of its text, or of all of it in a conversation; 0 where nothing was tokenized.
        size: its length and its tokens as buckets of two dimensions compare them.
        length: its length as other buckets compare it.
    """

    place: Place | None
    seconds: tuple[float, ...] = ()
    tokens: int = 0
    size: tuple[float, int] = (0.0, 0)
    length: float = 0.0


@dataclass(frozen=True, slots=True)
class TrialPart:
    """The batches of examples that one rank got, and the state of its loader after them."""

    batches: list[list[Seen]] = field(default_factory=list)
    state: Mapping[str, Any] | None = None


def read_train_settings(path: str | Path, section: str = "train_ds") -> Settings:
    """Return a loader's settings in a YAML file: those below ``section`` where NeMo's recipes have it, or all of it.

    Raises:
        ConfigError: it is no such file.
    """
    loaded = read_yaml(path)
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path} is a list, not the settings of a loader", code="bad_config_file")
    for key in (f"model.{section}.dataset", f"model.{section}", section, f"data.{section}"):
        if (found := _at(loaded, key)) is not None:
            if not isinstance(found, DictConfig):
                raise ConfigError(f"{path}: {key} has no settings of a loader", code="bad_config_file")
            loaded = found
            break
    settings = resolve_settings(loaded, str(path))  # type: ignore[arg-type]
    if not any(one.keys() & {"input_cfg", "manifest_filepath", "shar_path", "cuts_path"}
               for one in sections_of(settings)):  # fmt: skip
        raise ConfigError(
            f"{path} has no settings of a loader: neither input_cfg nor {section} with one", code="bad_config_file"
        )
    return settings


def _at(loaded: DictConfig, key: str) -> Any:
    """Return what is at a dotted key, or None; an interpolation on the way that leads nowhere is nothing."""
    try:
        return OmegaConf.select(loaded, key)
    except OmegaConfBaseException:
        return None


def try_rank(
    settings: Settings,
    rank: int,
    world_size: int,
    num_batches: int,
    tokenizer: str | None,
    *,
    resumable: bool = False,
    state: Mapping[str, Any] | None = None,
) -> TrialPart:
    """Return the batches that a rank gets first, or after a state."""
    lengths = SeenExamples(settings)
    loader = get_dataloader(
        settings, rank, world_size, None if tokenizer is None else PromptTokenizer(load_tokenizer(tokenizer)),
        dataset=lengths, resumable=resumable, state=state,
    )  # fmt: skip
    batches = list(islice(loader, num_batches))
    return TrialPart(batches, loader.state_dict() if resumable else None)


@contextmanager
def fresh_python() -> Iterator[Executor]:
    """A new Python process for ``try_ranks``: NeMo, which takes seconds, is imported in it once for all ranks."""
    context = multiprocessing.get_context("spawn")
    with safe_path(), ProcessPoolExecutor(1, mp_context=context) as fresh:
        yield fresh


def check_ranks(fresh: Executor, settings: Settings, world_sizes: Sequence[int]) -> None:
    """Raise ConfigError where the settings do not go with one of these numbers of ranks."""
    fresh.submit(_check_ranks, settings, world_sizes).result()


def _check_ranks(settings: Settings, world_sizes: Sequence[int]) -> None:
    with quiet_nemo():
        for world_size in world_sizes:
            if settings.get("canonical") is None:
                prepare_settings(settings, 0, world_size)
            else:
                check_count(settings["canonical"], world_size, settings.get("num_workers", 0))


def try_ranks(
    fresh: Executor,
    settings: Settings,
    world_size: int,
    num_batches: int,
    tokenizer: str | None,
    state: Mapping[str, Any] | None,
) -> tuple[list[TrialPart], dict[str, Any]]:
    """Run each rank in a process of its own, and return what they got with the merged state."""
    parts = fresh.submit(_fork_ranks, settings, world_size, num_batches, tokenizer, state).result()
    return parts, merge_data_states([part.state for part in parts if part.state is not None])


def _fork_ranks(
    settings: Settings, world_size: int, num_batches: int, tokenizer: str | None, state: Mapping[str, Any] | None
) -> list[TrialPart]:
    """Run the ranks one after the other, each in a copy of this process, which has imported NeMo and nothing else."""
    context = multiprocessing.get_context("fork")
    parts = []
    with quiet_nemo():
        import nemo.collections.common.data.lhotse.dataloader  # noqa: F401

        for rank in range(world_size):
            with ProcessPoolExecutor(1, mp_context=context) as copy:
                parts.append(
                    copy.submit(
                        try_rank, settings, rank, world_size, num_batches, tokenizer, resumable=True, state=state
                    ).result()
                )
    return parts


def places(parts: Sequence[TrialPart]) -> list[Place]:
    """Return the places of all examples that parts got."""
    return [seen.place for part in parts for batch in part.batches for seen in batch if seen.place is not None]


class SeenExamples(torch.utils.data.Dataset):
    """Batches of ``Seen``: no audio is loaded.

    Examples of entries that are not divided have no place, and are measured as the first sampler does.
    """

    def __init__(self, settings: Settings) -> None:
        prepared = prepare_settings({key: value for key, value in settings.items() if key != "canonical"}, 0, 1)
        self._first, *_ = sections_of(prepared)
        # Readers have the numbers of the divided entries, across all samplers.
        self._sections = [
            section for section in sections_of(prepared) for source in sources_of(section)
            if source.get("type") in ("sharmill", DIVIDED)
        ]  # fmt: skip

    def __getitem__(self, examples: Any) -> list[Seen]:
        return [self._look_at(example) for example in examples]

    def _look_at(self, example: Any) -> Seen:
        place = place_of(example)
        section = self._first if place is None else self._sections[place[0]]
        seconds = tuple(cut.duration for cut in cuts_of(example))
        in_tokens = section.get("use_multimodal_sampling", False)
        if not isinstance(example, Cut):
            if not in_tokens and getattr(example, "context_ids", None) is None:
                return Seen(place, seconds)
            total = section.get("measure_total_length", True)
            size = (example.input_length, example.output_length)
            return Seen(place, seconds, example.total_length, size, example.total_length if total else size[0])
        ids = getattr(example, "input_ids", None)
        tokens = (
            len(ids)
            if ids is not None
            else sum(len(one.tokens) for one in example.supervisions if one.has_custom("tokens"))
        )
        length = example.duration
        if in_tokens:
            length = math.ceil(length / section["token_equivalent_duration"])
        summed = in_tokens and section.get("measure_total_length", True)
        return Seen(place, seconds, tokens, (length, tokens), length + tokens if summed else length)


def place_of(example: Any) -> Place | None:
    """Return the place of an example, or of the first cut that it was made from."""
    for part in parts_of(example):
        custom = getattr(part, "custom", None) or {}
        if READER in custom:
            return (custom[READER], *custom["shar_position"])
    return None
