"""The checks of a shard that another tool wrote: what lhotse's manifests themselves promise, in any field layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from sharmill.errors import DamagedShard, RejectRecord
from sharmill.shar.index import CodecRecord
from sharmill.shar.items import Item
from sharmill.shar.layout import CONTEXT_AUDIO, CUTS, RECORDING, TARGET_AUDIO
from sharmill.shar.npy import array_from_bytes
from sharmill.validate.checked_dataset import CheckedDataset, Shard
from sharmill.validate.contract import MALFORMED, malformed
from sharmill.validate.findings import Finding
from sharmill.validate.levels import probe_item

# As far as lhotse itself lets durations and samples be apart (LHOTSE_AUDIO_DURATION_MISMATCH_TOLERANCE).
_DURATION_TOLERANCE: Final = 0.025
# Fields whose items last as long as their cut. Contexts live on another time line.
_ALIGNED_AUDIO: Final = (RECORDING, TARGET_AUDIO)


def check_foreign(
    subject: CheckedDataset,
    shard: Shard,
    cuts: list[dict[str, Any]],
    contents: dict[str, list[Item]],
    findings: list[Finding],
    count: Callable[[str], None],
) -> None:
    """Add what is wrong to ``findings``, and count, under ``unchecked``, the items of which nothing is known."""

    def add(code: str, name: str, member: str, sentence: str | None) -> None:
        if sentence is not None:
            findings.append(Finding(code=code, sentence=sentence, shard=shard.index, field=name, member=member))

    for cut in cuts:
        add("bad_cut", CUTS, str(cut.get("id")), _cut_problem(cut))
    for name, items in contents.items():
        durations = [cut.get("duration") for cut in cuts] if name in _ALIGNED_AUDIO else [None] * len(items)
        for item, duration in zip(items, durations, strict=False):
            if item.metadata is not None and "sampling_rate" in item.metadata and "num_samples" in item.metadata:
                add("bad_audio", name, item.cut_id, _audio_problem(item, duration))
    for name, items in contents.items():
        codec, sources = subject.codec_of(name), _sources(name, contents, len(items))
        for item, seconds in zip(items, sources, strict=False):
            if item.metadata is None or "sampling_rate" in item.metadata:
                continue  # a placeholder, or audio
            if item.extension == "npy" and ("shape" in item.metadata or "array" in item.metadata):
                add("bad_codes", name, item.cut_id, _array_problem(item, seconds, codec))
            else:
                count(f"unchecked items of {name} (.{item.extension})")


def _sources(name: str, contents: dict[str, list[Item]], number: int) -> list[float | None]:
    """Return the seconds of the audio that the items of a field of arrays are aligned with, as far as that is known."""
    wanted = (CONTEXT_AUDIO,) if "context" in name.rpartition("/")[2] else _ALIGNED_AUDIO
    for source in wanted:
        if source in contents:
            return [(item.metadata or {}).get("duration") for item in contents[source]]
    return [None] * number


def _cut_problem(cut: dict[str, Any]) -> str | None:
    try:
        if not isinstance(cut["id"], str):
            return f"the id is {cut['id']!r}, which is not text"
        if not cut["duration"] > 0 or cut["start"] < 0:
            return f"the cut starts at {cut['start']} s and lasts {cut['duration']} s"
        for supervision in cut.get("supervisions") or ():
            if supervision["start"] >= cut["duration"] or supervision["duration"] <= 0:
                return f"the supervision {supervision['id']!r} lies outside the cut"
        for source in (cut.get("recording") or {}).get("sources") or ():
            if source["type"] == "command":
                return "the recording would be loaded by a command"
        return None
    except MALFORMED as error:
        return malformed(error)


def _audio_problem(item: Item, duration: float | None) -> str | None:
    metadata = item.metadata
    assert metadata is not None
    assert item.data is not None
    try:
        info = probe_item(item.data)
        channels = len(metadata.get("channel_ids") or metadata["sources"][0]["channels"])
        found, promised = (info.num_samples, info.sampling_rate), (metadata["num_samples"], metadata["sampling_rate"])
        if abs(found[0] - promised[0]) > _DURATION_TOLERANCE * found[1] or found[1] != promised[1]:
            return f"samples and rate are {found}, the metadata says {promised}"
        if abs(metadata["duration"] - found[0] / found[1]) > _DURATION_TOLERANCE:
            return f"it lasts {found[0] / found[1]} s, the metadata says {metadata['duration']}"
        if info.channels != channels:
            return f"it has {info.channels} channels, the metadata says {channels}"
        if duration is not None and abs(duration - metadata["duration"]) > _DURATION_TOLERANCE:
            return f"the cut lasts {duration} s, its audio {metadata['duration']} s"
        return None
    except RejectRecord as error:
        return str(error)
    except MALFORMED as error:
        return malformed(error)


def _array_problem(item: Item, seconds: float | None, codec: CodecRecord | None) -> str | None:
    """Return what is wrong with an array, as far as its manifest, the codec and the audio's duration tell.

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
        return malformed(error)
