"""The checks of an item by itself: what its manifest, its field and its codec say of the data in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

from sharmill.errors import DamagedShard, RejectRecord
from sharmill.shar.arrays import array_from_bytes
from sharmill.shar.index import CodecRecord
from sharmill.shar.items import Item
from sharmill.shar.layout import Field
from sharmill.shar.reading.safety import RECORDING_KEYS, find_forbidden
from sharmill.validate.checked_dataset import Shard
from sharmill.validate.findings import Finding
from sharmill.validate.levels import probe_item

# What looking at a manifest raises that is not as it should be.
MALFORMED: Final = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
# As far as lhotse itself lets durations and samples be apart (LHOTSE_AUDIO_DURATION_MISMATCH_TOLERANCE).
_DURATION_TOLERANCE: Final = 0.025
# All that lhotse's Recording, Array, TemporalArray and Features have.
_METADATA_KEYS: Final = frozenset({
    *RECORDING_KEYS,
    "storage_type", "storage_path", "storage_key", "shape", "array", "temporal_dim", "frame_shift", "start",
    "type", "num_frames", "num_features", "recording_id", "channels",
})  # fmt: skip


def problem_in(check: Callable[..., str | None], *arguments: Any) -> str | None:
    """Return the sentence of a check about what is wrong, or one about why something cannot be looked at."""
    try:
        return check(*arguments)
    except (DamagedShard, RejectRecord) as error:
        return str(error)
    except MALFORMED as error:
        return f"a key is absent or of the wrong type: {error!r}"


def check_field(shard: Shard, field: Field, items: list[Item]) -> Iterator[Finding]:
    """Yield what is wrong with the items of a field that a stage has added to the published layout."""
    for item in items:
        if problem := problem_in(_field_problem, item, field):
            code = "bad_audio" if field.kind == "audio" else "bad_value"
            yield shard.finding(code, field.name, problem, member=item.cut_id)


def _field_problem(item: Item, field: Field) -> str | None:
    if item.metadata is None:
        return None if field.optional else "there is no value, and none may be missing"
    if field.kind == "value":
        return _value_problem(item.metadata, field)
    if item.data is None:
        return f"there is a value in a field of the kind {field.kind}"
    if problem := metadata_problem(item.metadata):
        return problem
    if field.kind == "audio":
        return audio_problem(item, item.metadata)
    array = array_from_bytes(item.data, item.cut_id)
    return array_problem(array, item.metadata) or (range_problem(array, *field.limits) if field.limits else None)


def _value_problem(values: dict[str, Any], field: Field) -> str | None:
    if values.keys() != {field.attribute}:
        return f"it has {', '.join(sorted(values))} instead of {field.attribute}"
    value = values[field.attribute]
    if value is None and not field.optional:
        return "there is no value, and none may be missing"
    if field.limits is not None and value is not None:
        low, high = field.limits
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return f"the value is {value!r:.80}, which is not a number"
        return None if low <= value <= high else f"the value {value} is not between {low:g} and {high:g}"
    return _forbidden("the value", value)


def metadata_problem(metadata: dict[str, Any]) -> str | None:
    """Return what readers would stumble over in the metadata of an item, or must not load."""
    if unknown := metadata.keys() - _METADATA_KEYS:
        return f"the metadata has the key {min(unknown)!r}, which lhotse does not know"
    return _forbidden("the metadata", metadata)


def _forbidden(what: str, value: Any) -> str | None:
    found = find_forbidden(value)
    return f"{what} has {found}, which is not loaded" if found else None


def audio_problem(item: Item, metadata: dict[str, Any], seconds: float | None = None) -> str | None:
    """Return what is wrong with an audio item beside its metadata and, if known, the seconds of its cut."""
    assert item.data is not None
    info = probe_item(item.data)
    channels = len(metadata.get("channel_ids") or metadata["sources"][0]["channels"])
    found, promised = (info.num_samples, info.sampling_rate), (metadata["num_samples"], metadata["sampling_rate"])
    if abs(found[0] - promised[0]) > _DURATION_TOLERANCE * found[1] or found[1] != promised[1]:
        return f"samples and rate are {found}, the metadata says {promised}"
    if abs(metadata["duration"] - found[0] / found[1]) > _DURATION_TOLERANCE:
        return f"it lasts {found[0] / found[1]} s, the metadata says {metadata['duration']}"
    if info.channels != channels:
        return f"it has {info.channels} channels, the metadata says {channels}"
    if seconds is not None and abs(seconds - metadata["duration"]) > _DURATION_TOLERANCE:
        return f"the cut lasts {seconds} s, its audio {metadata['duration']} s"
    return None


def array_problem(array: np.ndarray, metadata: dict[str, Any], seconds: float | None = None) -> str | None:
    """Return what is wrong with an array, as far as its manifest and the audio's duration tell.

    A TemporalArray must have as many frames as its audio lasts, give or take one: tools round differently.
    """
    described = metadata.get("array", metadata)
    if list(array.shape) != list(described["shape"]):
        return f"the shape is {array.shape}, described as {described['shape']}"
    if np.issubdtype(array.dtype, np.floating):
        return None if np.isfinite(array).all() else "the array has NaN or infinite values"
    if "array" in metadata and seconds is not None:
        frames = array.shape[metadata["temporal_dim"]]
        if not seconds / metadata["frame_shift"] - 1 <= frames <= math.ceil(seconds / metadata["frame_shift"]) + 1:
            return f"{frames} frames of {metadata['frame_shift']} s for {seconds} s of audio"
    return None


def range_problem(array: np.ndarray, low: float, high: float) -> str | None:
    """Return a sentence about values outside of limits."""
    if not array.size or (array.min() >= low and array.max() <= high):
        return None
    return f"the values run from {array.min()} to {array.max()}, and not from {low:g} to {high:g}"


def codes_problem(codes: np.ndarray, codec: CodecRecord) -> str | None:
    """Return a sentence about codes that are not in the codebook of their codec."""
    if range_problem(codes, 0, codec.codebook_size - 1) is None:
        return None
    return f"codes run from {codes.min()} to {codes.max()} in a codebook of {codec.codebook_size}"
