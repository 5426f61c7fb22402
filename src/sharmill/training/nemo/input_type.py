"""Our datasets as a type of NeMo's ``input_cfg``: importing this module registers ``type: sharmill``.

What makes batches of the cuts is NeMo's. Scripts that call NeMo's loader themselves need nothing but the import.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

from lhotse import CutSet
from nemo.collections.common.data.lhotse.cutset import data_type_parser
from omegaconf import DictConfig, OmegaConf

from sharmill.errors import ConfigError
from sharmill.registry import nearest
from sharmill.shar import open_shar
from sharmill.shar.reading.iteration import SharReader
from sharmill.speaker_tag import nemo_language
from sharmill.training.nemo.entry_keys import OF_ENTRY, OF_OTHERS
from sharmill.training.nemo.examples import open_examples
from sharmill.training.nemo.loader_settings import DIVIDED
from sharmill.training.nemo.partition import Partition, PartitionedCuts

_OPTIONS: Final = (
    "dataset",
    "fields",
    "codec",
    "decode_threads",
    "sidecars",
    "on_damage",
    "max_damaged",
    "speaker_tags",
    "seed",
    "rank",
    "world_size",
    "whole_part",
)

_made: ContextVar[list[PartitionedCuts] | None] = ContextVar("_made", default=None)


@data_type_parser("sharmill")
def read_sharmill(entry: DictConfig) -> tuple[CutSet, bool]:
    """Return the cuts of one entry, without end unless ``force_finite`` or ``metadata_only`` is set.

    Returns:
        The CutSet, and True: like tarred data and text it is read where the batches are made.

    Raises:
        ConfigError: an unknown option, or no such dataset, field or codec.
    """
    options: dict[str, Any] = OmegaConf.to_container(entry, resolve=True)  # type: ignore[assignment]
    _check(options)
    open_reader = partial(
        _open_dataset,
        options["dataset"],
        fields=[] if options.get("metadata_only", False) else options.get("fields"),
        codec=options.get("codec"),
        decode_threads=options.get("decode_threads", 0),
        sidecars=options.get("sidecars"),
        **{key: options[key] for key in ("on_damage", "max_damaged") if key in options},
    )
    source = _collect(PartitionedCuts(open_reader, Partition.of_entry(options)))
    return CutSet(source).map(partial(_as_nemo_expects, speaker_tags=options.get("speaker_tags", "kept"))), True


@data_type_parser(DIVIDED)
def read_divided(entry: DictConfig) -> tuple[CutSet, bool]:
    """Return the examples of an entry of a type of NeMo's, divided among all readers as our own cuts are."""
    options: dict[str, Any] = OmegaConf.to_container(entry, resolve=True)  # type: ignore[assignment]
    source = _collect(PartitionedCuts(partial(open_examples, options), Partition.of_entry(options)))
    return CutSet(source).map(_as_nemo_expects, apply_fn=None), True


def _open_dataset(dataset: str, **options: Any) -> SharReader:
    return open_shar(dataset, **options).data


def entry_sizes(entries: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the number of examples of each entry as ``prepare_settings`` leaves it; filters may leave fewer."""
    return [
        len(open_examples(entry) if entry["type"] == DIVIDED else _open_dataset(entry["dataset"], fields=[]))
        for entry in entries
    ]


def _collect(source: PartitionedCuts) -> PartitionedCuts:
    if (made := _made.get()) is not None:
        source.number = len(made)
        made.append(source)
    return source


@contextmanager
def collected() -> Iterator[list[PartitionedCuts]]:
    """Collect the sources of the divided entries that NeMo reads meanwhile, in their order."""
    made: list[PartitionedCuts] = []
    token = _made.set(made)
    try:
        yield made
    finally:
        _made.reset(token)


def _check(options: dict[str, Any]) -> None:
    if options.pop("slice_length", None) is not None:
        raise ConfigError(
            "slice_length is not for datasets of sharmill: their order is shuffled as a whole", code="bad_config_value"
        )
    for key in options:
        if key not in (*_OPTIONS, *OF_ENTRY, *OF_OTHERS):
            raise ConfigError(
                f"input_cfg: type sharmill has no option {key!r}{nearest(key, [*_OPTIONS, *OF_ENTRY])}",
                code="unknown_key",
            )
    if "dataset" not in options:
        raise ConfigError("input_cfg: type sharmill needs dataset: the dataset directory", code="missing_key")
    if options.get("speaker_tags", "kept") not in ("kept", "nemo"):
        raise ConfigError(
            f"input_cfg: speaker_tags is kept or nemo, not {options['speaker_tags']!r}", code="bad_config_value"
        )


def _as_nemo_expects(cut: Any, speaker_tags: str = "kept") -> Any:
    """Put what NeMo's filters and datasets look for where they look for it, and return the cut; or any other example.

    ``validation_status`` is sought in the cut, and is a manifest key, which we keep in the supervision. A ``cer`` or
    ``context_speaker_similarity`` of null would be compared with a number. ``speaker_tags="nemo"`` writes the
    language of a speaker tag as MagpieTTSLhotseDataset wants it: ``en_US`` for ``en-US``.
    """
    for supervision in getattr(cut, "supervisions", ()):
        custom = supervision.custom or {}
        for key in ("cer", "context_speaker_similarity"):
            if key in custom and custom[key] is None:
                del custom[key]
        if "validation_status" in custom and not cut.has_custom("validation_status"):
            cut.validation_status = custom["validation_status"]
        if speaker_tags == "nemo" and supervision.speaker is not None:
            before, found, rest = supervision.speaker.partition("Language:")
            language, space, after = rest.partition(" ")
            supervision.speaker = before + found + nemo_language(language) + space + after
    return cut
