"""The checks of a shard of sharmill's own: what it writes is made again, and compared with what is stored.

A cut is a function of the record that it carries and of the length of its audio, and the metadata of audio and codes
are functions of the data that they describe. Beside these stand the limits that every context keeps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any, Final

import numpy as np

from sharmill.engine.differences import ABSENT, find_differences, show
from sharmill.errors import DamagedShard, RejectRecord
from sharmill.shar.codes import codes_dtype, num_frames
from sharmill.shar.index import CodecRecord, DatasetRecord
from sharmill.shar.items import Item
from sharmill.shar.layout import CONTEXT_AUDIO, CUTS, TARGET_AUDIO, codec_fields, context_id
from sharmill.shar.lhotse_json import array_json, cut_json, recording_json, temporal_array_json, utterance_of
from sharmill.shar.npy import array_from_bytes
from sharmill.validate.findings import Finding
from sharmill.validate.levels import probe_item

# What looking at a manifest raises that is not as it should be.
MALFORMED: Final = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
# Similarities are stored with six decimals.
_SIMILARITY_TOLERANCE: Final = 1e-6
# Times are compared as the stage match compares them, which chose the context.
_MICROSECONDS: Final = 1_000_000


def check_contract(
    dataset: DatasetRecord, shard: int, cuts: list[dict[str, Any]], contents: dict[str, list[Item]]
) -> Iterator[Finding]:
    """Yield what is wrong with a shard of a dataset of sharmill's own.

    Args:
        shard: its index.
        cuts: its cuts.
        contents: its items by field, as far as the files could be read.
    """

    def found(code: str, field: str, member: Any, sentence: str) -> Finding:
        return Finding(code=code, sentence=sentence, shard=shard, field=field, member=str(member))

    targets, contexts = contents.get(TARGET_AUDIO, []), contents.get(CONTEXT_AUDIO, [])
    for cut, target in zip(cuts, targets, strict=False):
        if problem := _cut_problem(cut, target.metadata or {}):
            yield found("bad_cut", CUTS, cut.get("id"), problem)
    for cut, context in zip(cuts, contexts, strict=False):
        if problem := _context_problem(cut, context.metadata or {}, dataset.limits):
            yield found("bad_cut", CUTS, cut.get("id"), problem)
    for target, context in zip(targets, contexts, strict=False):
        if target.cut_id == context.cut_id and target.data is not None and target.data == context.data:
            sentence = "the context audio is the target audio, byte for byte"
            yield found("copied_context", CONTEXT_AUDIO, context.cut_id, sentence)
    for field, items in ((TARGET_AUDIO, targets), (CONTEXT_AUDIO, contexts)):
        for item in items:
            if problem := _audio_problem(item, dataset):
                yield found("bad_audio", field, item.cut_id, problem)
    for codec in dataset.codecs:
        for field, sources, temporal in zip(codec_fields(codec.name), (targets, contexts), (True, False), strict=True):
            for cut_id, problem in _codes_problems(contents.get(field, []), sources, codec, temporal):
                yield found("bad_codes", field, cut_id, problem)


def _cut_problem(cut: dict[str, Any], target: dict[str, Any]) -> str | None:
    """Return what is wrong with a cut beside the metadata of its target audio, in a sentence."""
    try:
        utterance = utterance_of(cut)
        path = utterance.audio_filepath
        if path.startswith("/") or (".." in path and ".." in PurePosixPath(path).parts):
            return f"its record is of {path!r}, which is not below an audio root"
        if not isinstance(utterance.text, str):
            return f"the text of its record is {utterance.text!r}"
        made = cut_json(utterance, sampling_rate=target["sampling_rate"], num_samples=target["num_samples"])
        if made != cut:
            return _first_difference("the cut", made, cut)
        if target["id"] != cut["id"]:
            return f"the target audio has the id {target['id']!r}"
        return None
    except RejectRecord as reject:
        return str(reject)
    except MALFORMED as error:
        return malformed(error)


def _context_problem(cut: dict[str, Any], context: dict[str, Any], limits: dict[str, Any]) -> str | None:
    """Return what is wrong with a cut beside the metadata of its context audio and the limits of the dataset."""
    try:
        custom = cut["supervisions"][0]["custom"]
        recording, offset = custom["context_recording_id"], custom["context_audio_offset"]
        duration, similarity = custom["context_audio_duration"], custom["context_speaker_similarity"]
        wanted = context_id(recording, offset, duration)
        if context["id"] != wanted:
            return f"the context audio has the id {context['id']!r} instead of {wanted!r}"
        if recording == cut["recording"]["id"] and _overlap(custom["offset"], custom["duration"], offset, duration):
            return "the context is the target itself, or overlaps it"
        if similarity < limits["min_similarity"] - _SIMILARITY_TOLERANCE:
            return f"the similarity of the context is {similarity}, less than {limits['min_similarity']}"
        if similarity > 1 + _SIMILARITY_TOLERANCE:
            return f"the similarity of the context is {similarity}, more than a cosine can be"
        if not limits["min_duration"] <= duration <= (limits["max_duration"] or math.inf):
            return f"the context lasts {duration} s, which is outside the limits"
        return None
    except MALFORMED as error:
        return malformed(error)


def _overlap(offset: float, duration: float, other_offset: float, other_duration: float) -> bool:
    """Return whether two segments of a recording share any time."""
    times = (offset, offset + duration, other_offset, other_offset + other_duration)
    begin, end, other_begin, other_end = (round(time * _MICROSECONDS) for time in times)
    return (begin, end) == (other_begin, other_end) or (begin < other_end and other_begin < end)


def _audio_problem(item: Item, dataset: DatasetRecord) -> str | None:
    """Return what is wrong with an audio item by its header, in a sentence."""
    if item.data is None or item.metadata is None:
        return "there is no audio"
    try:
        info = probe_item(item.data)
    except RejectRecord as reject:
        return str(reject)
    if info.channels != 1:
        return f"it has {info.channels} channels"
    if dataset.audio_format != "original" and not item.extension == info.format == dataset.audio_format:
        return f"it is {info.format} under the name .{item.extension}, in a dataset of {dataset.audio_format}"
    if dataset.sampling_rate not in (None, info.sampling_rate):
        return f"its rate is {info.sampling_rate} Hz in a dataset of {dataset.sampling_rate} Hz"
    # The id is compared with the cut, which says whose audio it is.
    made = recording_json(item.metadata.get("id", ""), info.sampling_rate, info.num_samples)
    return None if made == item.metadata else _first_difference("the metadata", made, item.metadata)


def _codes_problems(
    items: Sequence[Item], sources: Sequence[Item], codec: CodecRecord, temporal: bool
) -> Iterator[tuple[str, str]]:
    """Yield the cut id and what is wrong, for the codes of one field and shard.

    The range is looked at for all arrays together, and for each only where that is needed.
    """
    intact: list[tuple[Item, np.ndarray]] = []
    for item, source in zip(items, sources, strict=False):
        try:
            intact.append((item, _read_codes(item, source, codec, temporal)))
        except DamagedShard as error:
            yield item.cut_id, str(error)
        except MALFORMED as error:
            yield item.cut_id, malformed(error)
    if not intact or _are_in_range(np.concatenate([codes.ravel() for _, codes in intact]), codec):
        return
    for item, codes in intact:
        if not _are_in_range(codes, codec):
            yield item.cut_id, f"codes run from {codes.min()} to {codes.max()} in a codebook of {codec.codebook_size}"


def _read_codes(item: Item, source: Item, codec: CodecRecord, temporal: bool) -> np.ndarray:
    """Return the codes (codebooks, frames) of an item.

    Raises:
        DamagedShard: they, or their metadata, are not what the codec makes of the audio ``source``.
    """
    if item.data is None or item.metadata is None or source.metadata is None:
        raise DamagedShard("there are no codes")
    codes = array_from_bytes(item.data, item.cut_id)
    shape = (codec.num_codebooks, num_frames(source.metadata, codec))
    dtype = codes_dtype(codec.codebook_size)
    if codes.shape != shape:
        raise DamagedShard(f"the shape is {codes.shape}, and should be {shape}")
    if codes.dtype != dtype or item.extension != "npy":
        raise DamagedShard(f"the type is {codes.dtype} in a .{item.extension}, and should be {dtype} in a .npy")
    made = temporal_array_json(shape, codec.samples_per_frame / codec.sampling_rate) if temporal else array_json(shape)
    if made != item.metadata:
        raise DamagedShard(_first_difference("the metadata", made, item.metadata))
    return codes


def _are_in_range(codes: np.ndarray, codec: CodecRecord) -> bool:
    return not codes.size or bool(codes.min() >= 0 and codes.max() < codec.codebook_size)


def _first_difference(what: str, made: dict[str, Any], stored: dict[str, Any]) -> str:
    """Return a sentence about the first place at which something stored is not as it is made."""
    for path, should, found in find_differences(made, stored):
        if should is ABSENT:
            return f"{what} has {path} {show(found)}, which it should not"
        if found is ABSENT:
            return f"{what} has no {path}, which should be {show(should)}"
        return f"{path} of {what} is {show(found)}, and should be {show(should)}"
    return f"{what} is not as it should be"


def malformed(error: Exception) -> str:
    """Return the sentence about a manifest that cannot be looked at."""
    return f"a key is absent or of the wrong type: {error!r}"
