"""Descriptions of a dataset, of a shard and of a cut as rows of text, for tables; whoever shows them escapes them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from sharmill.errors import DamagedShard, RejectRecord
from sharmill.inspect.stored import StoredCut, as_mapping, first_supervision, read_stored_audio
from sharmill.shar.arrays import array_from_bytes
from sharmill.shar.index import DatasetRecord
from sharmill.shar.items import Item

_WAVEFORM_CHARACTERS: Final = " ▁▂▃▄▅▆▇█"
_WAVEFORM_WIDTH: Final = 60
# What is quieter than this, relative to full scale, is drawn as silence.
_QUIETEST_DB: Final = -54.0
_SHOWN_CODES: Final = 8


def waveform(samples: np.ndarray, width: int = _WAVEFORM_WIDTH) -> str:
    """Return a line of blocks as high as the peaks of audio (samples,), in decibels.

    >>> waveform(np.array([0.0, 0.01, 1.0]), width=3)
    ' ▃█'
    """
    if len(samples) == 0:
        return ""
    peaks = [np.abs(part).max() for part in np.array_split(samples, min(width, len(samples)))]
    levels = 1 - 20 * np.log10(np.maximum(peaks, 1e-9)) / _QUIETEST_DB
    steps = np.ceil(np.clip(levels, 0.0, 1.0) * (len(_WAVEFORM_CHARACTERS) - 1)).astype(int)
    return "".join(_WAVEFORM_CHARACTERS[step] for step in steps)


def dataset_rows(directory: Path, record: DatasetRecord) -> Iterator[tuple[str, str]]:
    """Yield names and values of what the index says of a dataset."""
    yield "dataset", f"{record.name}, in {directory}"
    yield "size", f"{record.num_cuts:,} cuts in {record.num_shards:,} shards"
    yield "target audio", f"{record.target_seconds / 3600:,.3f} h"
    if record.has_contexts:
        yield "context audio", f"{record.context_seconds / 3600:,.3f} h"
    rate = "the rates of its sources" if record.sampling_rate is None else f"{record.sampling_rate} Hz"
    yield "audio", f"{record.audio_format}, {rate}"
    yield "fields", ", ".join(record.fields)
    for field in record.added_fields:
        yield f"field {field.name}", field.describe()
    for codec in record.codecs:
        trained = "" if codec.trained else "; untrained: its codes mean nothing"
        yield (
            f"codec {codec.name}",
            f"{codec.model}: {codec.num_codebooks} codebooks of {codec.codebook_size}, "
            f"{codec.sampling_rate / codec.samples_per_frame:g} frames per second of {codec.sampling_rate} Hz, "
            f"checksum {codec.checksum}{trained}",
        )
    for name, limit in record.limits.items():
        yield f"limit {name}", str(limit)


def shard_rows(cuts: Iterator[dict[str, Any]]) -> Iterator[tuple[str, str, str, str, str, str]]:
    """Yield id, duration, duration of the context, similarity, speaker and text of the cuts of a shard."""
    for cut in cuts:
        supervision = first_supervision(cut)
        custom = as_mapping(supervision.get("custom"))
        yield (
            str(cut.get("id")), _number(cut.get("duration")), _number(custom.get("context_audio_duration")),
            _number(custom.get("context_speaker_similarity")), str(supervision.get("speaker") or ""),
            str(supervision.get("text") or ""),
        )  # fmt: skip


def cut_rows(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted keys and values of a cut, all of it, in the order in which it is stored.

    Args:
        value: the cut, or one of its parts, whose key is ``key``.
    """
    if isinstance(value, (dict, list)) and value:
        for name, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from cut_rows(child, f"{key}.{name}" if key else str(name))
    else:
        yield key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def field_rows(stored: StoredCut) -> Iterator[tuple[str, str, str]]:
    """Yield field, shape and a picture of each item of a cut: the waveform of audio, the first codes of codes.

    An item that cannot be decoded is described by what is wrong with it: the others can still be looked at.
    """
    for field, item in stored.items.items():
        if item.data is None:
            values = list((item.metadata or {"": ""}).values())
            shown = json.dumps(values[0] if len(values) == 1 else item.metadata, ensure_ascii=False)
            yield field, "nothing" if item.metadata is None else "a value", shown
            continue
        try:
            yield (field, *_describe_item(item))
        except (DamagedShard, RejectRecord) as error:
            yield field, f"{item.extension}, {len(item.data):,} bytes", f"cannot be decoded: {error}"


def describe_as_values(stored: StoredCut, files: Sequence[Path]) -> dict[str, Any]:
    """Return what is known of a cut as values that JSON has; ``files`` are those that it was exported to."""
    fields = {field: {"shape": shape, "looks_like": picture} for field, shape, picture in field_rows(stored)}
    return {
        "shard": stored.shard,
        "number": stored.number,
        "cut": stored.cut,
        "fields": fields,
        "files": [str(file) for file in files],
    }


def _describe_item(item: Item) -> tuple[str, str]:
    assert item.data is not None
    if item.extension == "npy":
        array = array_from_bytes(item.data, item.cut_id)
        is_codes = array.ndim == 2 and array.dtype.kind in "iu"
        first = ", ".join(map(str, (array[0] if is_codes and array.size else array).flat[:_SHOWN_CODES]))
        shape = f"{array.shape} {array.dtype}{', codebooks and frames' if is_codes else ''}"
        return shape, f"{'the first codebook' if is_codes else 'it'} begins {first}"
    samples, rate = read_stored_audio(item)
    shape = f"({len(samples)},) at {rate} Hz, {len(samples) / rate:.3f} s of {item.extension}"
    return shape, waveform(samples)


def _number(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, (int, float)) else ""
