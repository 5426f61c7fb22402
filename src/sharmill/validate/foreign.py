"""The checks of a shard that another tool wrote: what lhotse's manifests themselves promise, in any field layout."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, Final

import numpy as np

from sharmill.shar.arrays import array_from_bytes
from sharmill.shar.index import CodecRecord
from sharmill.shar.items import Item
from sharmill.shar.layout import CONTEXT_AUDIO, CUTS, RECORDING, TARGET_AUDIO
from sharmill.shar.reading.safety import RECORDING_KEYS, find_forbidden
from sharmill.validate.checked_dataset import CheckedDataset, Shard
from sharmill.validate.contract import problem_in, range_problem
from sharmill.validate.findings import Finding
from sharmill.validate.levels import probe_item

# As far as lhotse itself lets durations and samples be apart (LHOTSE_AUDIO_DURATION_MISMATCH_TOLERANCE).
_DURATION_TOLERANCE: Final = 0.025
# Fields whose items last as long as their cut. Contexts live on another time line.
_ALIGNED_AUDIO: Final = (RECORDING, TARGET_AUDIO)
# All that lhotse's Recording, Array, TemporalArray and Features have.
_METADATA_KEYS: Final = frozenset({
    *RECORDING_KEYS,
    "storage_type", "storage_path", "storage_key", "shape", "array", "temporal_dim", "frame_shift", "start",
    "type", "num_frames", "num_features", "recording_id", "channels",
})  # fmt: skip


def check_foreign(
    subject: CheckedDataset,
    shard: Shard,
    cuts: list[dict[str, Any]],
    contents: dict[str, list[Item]],
    stats: dict[str, float],
) -> Iterator[Finding]:
    """Yield what is wrong with a shard; the items of which nothing is known are counted in ``stats``."""
    for cut in cuts:
        if problem := problem_in(_cut_problem, cut):
            yield shard.finding("bad_cut", CUTS, problem, member=str(cut.get("id")))
        elif found := next(filter(None, map(_foreign_language, cut.get("supervisions") or ())), None):
            yield shard.finding(
                "foreign_tag", CUTS, f"NeMo's Magpie-TTS does not read Language:{found}", member=cut["id"]
            )
    for name, items in contents.items():
        codec, all_seconds = subject.codec_of(name), _seconds(name, cuts, contents)
        for item, seconds in zip_longest(items, all_seconds[: len(items)]):
            metadata = item.metadata or {}
            if problem := problem_in(_metadata_problem, metadata):
                yield shard.finding("bad_audio" if "sources" in metadata else "bad_codes", name, problem,
                                    member=item.cut_id)  # fmt: skip
            if "sampling_rate" in metadata and "num_samples" in metadata:
                code = "bad_audio"
                problem = problem_in(_audio_problem, item, metadata, seconds if name in _ALIGNED_AUDIO else None)
            elif item.extension == "npy" and ("shape" in metadata or "array" in metadata):
                code, problem = "bad_codes", problem_in(_array_problem, item, metadata, seconds, codec)
            else:
                if metadata and "sampling_rate" not in metadata:
                    stats[f"unchecked items of {name} (.{item.extension})"] += 1
                continue
            if problem:
                yield shard.finding(code, name, problem, member=item.cut_id)


def _seconds(name: str, cuts: list[dict[str, Any]], contents: dict[str, list[Item]]) -> list[Any]:
    """Return how long the items of a field should last, as far as cuts and audio tell."""
    if name in _ALIGNED_AUDIO:
        return [cut.get("duration") for cut in cuts]
    for source in (CONTEXT_AUDIO,) if "context" in name.rpartition("/")[2] else _ALIGNED_AUDIO:
        if source in contents:
            return [(item.metadata or {}).get("duration") for item in contents[source]]
    return []


def _cut_problem(cut: dict[str, Any]) -> str | None:
    if not isinstance(cut["id"], str):
        return f"the id is {cut['id']!r}, which is not text"
    if not cut["duration"] > 0 or cut["start"] < 0:
        return f"the cut starts at {cut['start']} s and lasts {cut['duration']} s"
    for supervision in cut.get("supervisions") or ():
        if supervision["start"] >= cut["duration"] or supervision["duration"] <= 0:
            return f"the supervision {supervision['id']!r} lies outside the cut"
    found = find_forbidden(cut)
    return f"it has {found}, which is not loaded" if found else None


def _foreign_language(supervision: dict[str, Any]) -> str | None:
    """Return the language of a speaker tag that NeMo does not take for one."""
    found = re.search(r"\bLanguage:(\S+)", str(supervision.get("speaker") or ""))
    return found[1] if found and not re.fullmatch(r"\w+", found[1]) else None


def _metadata_problem(metadata: dict[str, Any]) -> str | None:
    """Return what readers would stumble over in the metadata of an item, or must not load."""
    if unknown := metadata.keys() - _METADATA_KEYS:
        return f"the metadata has the key {min(unknown)!r}, which lhotse does not know"
    found = find_forbidden(metadata)
    return f"the metadata has {found}, which is not loaded" if found else None


def _audio_problem(item: Item, metadata: dict[str, Any], seconds: float | None) -> str | None:
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


def _array_problem(
    item: Item, metadata: dict[str, Any], seconds: float | None, codec: CodecRecord | None
) -> str | None:
    """Return what is wrong with an array, as far as its manifest, the codec and the audio's duration tell.

    A TemporalArray must have as many frames as its audio lasts, give or take one: tools round differently.
    """
    assert item.data is not None
    array = array_from_bytes(item.data, item.cut_id)
    described = metadata.get("array", metadata)
    if list(array.shape) != list(described["shape"]):
        return f"the shape is {array.shape}, described as {described['shape']}"
    if np.issubdtype(array.dtype, np.floating):
        return None if np.isfinite(array).all() else "the array has NaN or infinite values"
    if codec is not None and (problem := range_problem(array, codec)):
        return problem
    if "array" in metadata and seconds is not None:
        frames = array.shape[metadata["temporal_dim"]]
        if not seconds / metadata["frame_shift"] - 1 <= frames <= math.ceil(seconds / metadata["frame_shift"]) + 1:
            return f"{frames} frames of {metadata['frame_shift']} s for {seconds} s of audio"
    return None
