"""The checks of a shard that another tool wrote: what lhotse's manifests themselves promise, in any field layout."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, Final

from sharmill.shar.arrays import array_from_bytes
from sharmill.shar.index import CodecRecord
from sharmill.shar.items import Item
from sharmill.shar.layout import CONTEXT_AUDIO, CUTS, RECORDING, TARGET_AUDIO
from sharmill.shar.reading.safety import find_forbidden
from sharmill.validate.checked_dataset import CheckedDataset, Shard
from sharmill.validate.findings import Finding
from sharmill.validate.items import (
    array_problem,
    audio_problem,
    check_field,
    codes_problem,
    metadata_problem,
    problem_in,
)

# Fields whose items last as long as their cut. Contexts live on another time line.
_ALIGNED_AUDIO: Final = (RECORDING, TARGET_AUDIO)


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
    added = {field.name: field for field in subject.dataset.added_fields} if subject.dataset else {}
    for name, items in contents.items():
        if name in added:
            yield from check_field(shard, added[name], items)
            continue
        codec, all_seconds = subject.codec_of(name), _seconds(name, cuts, contents)
        for item, seconds in zip_longest(items, all_seconds[: len(items)]):
            metadata = item.metadata or {}
            if item.data is None:
                if found := find_forbidden(metadata):
                    sentence = f"the value has {found}, which is not loaded"
                    yield shard.finding("bad_value", name, sentence, member=item.cut_id)
                continue
            if problem := problem_in(metadata_problem, metadata):
                yield shard.finding("bad_audio" if "sources" in metadata else "bad_codes", name, problem,
                                    member=item.cut_id)  # fmt: skip
            if "sampling_rate" in metadata and "num_samples" in metadata:
                code = "bad_audio"
                problem = problem_in(audio_problem, item, metadata, seconds if name in _ALIGNED_AUDIO else None)
            elif item.extension == "npy" and ("shape" in metadata or "array" in metadata):
                code, problem = "bad_codes", problem_in(_codes_problem, item, metadata, seconds, codec)
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


def _codes_problem(
    item: Item, metadata: dict[str, Any], seconds: float | None, codec: CodecRecord | None
) -> str | None:
    """Return what is wrong with an array, as far as its manifest, the codec and the audio's duration tell."""
    assert item.data is not None
    array = array_from_bytes(item.data, item.cut_id)
    problem = array_problem(array, metadata, seconds)
    return codes_problem(array, codec) if not problem and codec and array.dtype.kind in "iu" else problem
