"""The checks of codes: type, shape, range and manifest, by the codec and the audio that they are the codes of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sharmill.audio.resample import resampled_length
from sharmill.encode.stage import codes_dtype
from sharmill.errors import DamagedShard
from sharmill.shar.index import CodecRecord
from sharmill.shar.items import Item
from sharmill.shar.npy import array_from_bytes
from sharmill.validate.cuts import MALFORMED


def codes_problems(
    items: Sequence[Item], sources: Sequence[Item], codec: CodecRecord, *, temporal: bool
) -> Iterator[tuple[str, str]]:
    """The cut id and what is wrong, for the codes of one field and shard.

    The range is looked at for all arrays together, and for each only where that is needed.
    """
    dtype = codes_dtype(codec.codebook_size)
    sound: list[tuple[Item, np.ndarray]] = []
    for item, source in zip(items, sources, strict=False):
        codes, problem = _look(item, source, codec, dtype, temporal=temporal)
        if problem is not None or codes is None:
            yield item.cut_id, problem or "there are no codes"
        else:
            sound.append((item, codes))
    if sound and _are_in_range(np.concatenate([codes.ravel() for _, codes in sound]), codec):
        return
    for item, codes in sound:
        if not _are_in_range(codes, codec):
            size = codec.codebook_size
            yield item.cut_id, f"codes run from {codes.min()} to {codes.max()} in a codebook of {size}"


def _are_in_range(codes: np.ndarray, codec: CodecRecord) -> bool:
    return not codes.size or bool(codes.min() >= 0 and codes.max() < codec.codebook_size)


def _look(
    item: Item, source: Item, codec: CodecRecord, dtype: np.dtype, *, temporal: bool
) -> tuple[np.ndarray | None, str | None]:
    """The codes of an item, and what is wrong with all but their range."""
    metadata = item.metadata
    if item.data is None or metadata is None or source.metadata is None:
        return None, "there are no codes"
    try:
        codes = array_from_bytes(item.data, item.cut_id)
        shape = (codec.num_codebooks, num_frames(source.metadata, codec))
        described = metadata["array"] if temporal else metadata
        if codes.shape != shape or tuple(described["shape"]) != shape:
            return None, f"the shape is {codes.shape}, described as {described['shape']}, and should be {shape}"
        if codes.dtype != dtype:
            return None, f"the type is {codes.dtype}, and should be {dtype}"
        if described["storage_type"] != "shar" or item.extension != "npy":
            return None, f"it is stored as .{item.extension}, {described['storage_type']!r}"
        return codes, _time_problem(metadata, codec) if temporal else None
    except DamagedShard as error:
        return None, str(error)
    except MALFORMED as error:
        return None, f"a key is absent or of the wrong type: {error!r}"


def _time_problem(metadata: dict[str, Any], codec: CodecRecord) -> str | None:
    if metadata["frame_shift"] != codec.samples_per_frame / codec.sampling_rate:
        return f"frame_shift is {metadata['frame_shift']}"
    if metadata["temporal_dim"] != -1 or metadata["start"] != 0:
        return f"temporal_dim is {metadata['temporal_dim']}, start is {metadata['start']}"
    return None


def num_frames(metadata: dict[str, Any], codec: CodecRecord) -> int:
    """ceil(samples at the codec's rate / samples per frame) of the audio that a Recording describes."""
    samples, rate = metadata["num_samples"], metadata["sampling_rate"]
    if rate != codec.sampling_rate:
        samples = resampled_length(samples, rate, codec.sampling_rate)
    return -(-samples // codec.samples_per_frame)


def foreign_codes_problem(item: Item, seconds: float | None, codec: CodecRecord | None) -> str | None:
    """What is wrong with an array of another tool, as far as its manifest, the codec and the audio's duration tell.

    A TemporalArray must have as many frames as its audio lasts, give or take one: tools round differently.
    """
    metadata = item.metadata
    assert item.data is not None
    assert metadata is not None
    try:
        array = array_from_bytes(item.data, item.cut_id)
        described = metadata.get("array", metadata)
        if list(array.shape) != list(described["shape"]):
            return f"the shape is {array.shape}, described as {described['shape']}"
        if np.issubdtype(array.dtype, np.floating):
            return None if np.isfinite(array).all() else "the array has NaN or infinite values"
        if codec is not None and array.size and (array.min() < 0 or array.max() >= codec.codebook_size):
            return f"codes run from {array.min()} to {array.max()} in a codebook of {codec.codebook_size}"
        if "array" in metadata and seconds is not None:
            frames = array.shape[metadata["temporal_dim"]]
            if not seconds / metadata["frame_shift"] - 1 <= frames <= math.ceil(seconds / metadata["frame_shift"]) + 1:
                return f"{frames} frames of {metadata['frame_shift']} s for {seconds} s of audio"
        return None
    except DamagedShard as error:
        return str(error)
    except MALFORMED as error:
        return f"a key is absent or of the wrong type: {error!r}"
