"""The checks of a shard of sharmill's own: what it writes is made again, and compared with what is stored.

A cut is a function of the record that it carries and of the length of its audio, and the metadata of audio and codes
are functions of the data that they describe. Beside these stand the limits that every context keeps, and
what the dataset says of the fields that other stages have added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any, Final

import numpy as np

from sharmill.engine.identity import find_differences, show
from sharmill.manifest import CONTEXT_KEYS
from sharmill.shar.arrays import array_from_bytes, codes_dtype, num_frames
from sharmill.shar.index import CodecRecord, DatasetRecord
from sharmill.shar.items import Item
from sharmill.shar.layout import CONTEXT_AUDIO, CUTS, TARGET_AUDIO, context_id
from sharmill.shar.lhotse_json import array_json, cut_json, recording_json, temporal_array_json, utterance_of
from sharmill.shar.reading.safety import find_forbidden
from sharmill.validate.checked_dataset import Shard
from sharmill.validate.findings import Finding
from sharmill.validate.items import check_field, codes_problem, problem_in
from sharmill.validate.levels import probe_item

# Similarities are stored with six decimals.
_SIMILARITY_TOLERANCE: Final = 1e-6
# Times are compared as the stage match compares them, which chose the context.
_MICROSECONDS: Final = 1_000_000


def check_contract(
    dataset: DatasetRecord, shard: Shard, cuts: list[dict[str, Any]], contents: dict[str, list[Item]]
) -> Iterator[Finding]:
    """Yield what is wrong with a shard of a dataset of sharmill's own.

    Args:
        cuts: its cuts.
        contents: its items by field, as far as the files could be read.
    """
    targets, contexts = contents.get(TARGET_AUDIO, []), contents.get(CONTEXT_AUDIO, [])
    for check, items in ((_cut_problem, targets), (_context_problem, contexts)):
        for cut, item in zip(cuts, items, strict=False):
            if problem := problem_in(check, cut, item.metadata or {}, dataset):
                yield shard.finding("bad_cut", CUTS, problem, member=str(cut.get("id")))
    if not dataset.has_contexts and CONTEXT_AUDIO not in shard.files:
        for cut in cuts:
            if problem := problem_in(_problem_without_context, cut):
                yield shard.finding("bad_cut", CUTS, problem, member=str(cut.get("id")))
    for target, context in zip(targets, contexts, strict=False):
        if target.cut_id == context.cut_id and target.data is not None and target.data == context.data:
            sentence = "the context audio is the target audio, byte for byte"
            yield shard.finding("copied_context", CONTEXT_AUDIO, sentence, member=context.cut_id)
    for name, items in ((TARGET_AUDIO, targets), (CONTEXT_AUDIO, contexts)):
        for item in items:
            if problem := problem_in(_audio_problem, item, dataset):
                yield shard.finding("bad_audio", name, problem, member=item.cut_id)
    for codec in dataset.codecs:
        for codes, sources, temporal in zip(codec.fields, (targets, contexts), (True, False), strict=True):
            for cut_id, problem in _codes_problems(contents.get(codes.name, []), sources, codec, temporal):
                yield shard.finding("bad_codes", codes.name, problem, member=cut_id)
    for field in dataset.added_fields:
        yield from check_field(shard, field, contents.get(field.name, []))


def _cut_problem(cut: dict[str, Any], target: dict[str, Any], dataset: DatasetRecord) -> str | None:
    """Return what is wrong with a cut beside the metadata of its target audio, in a sentence."""
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
    # All else is as it is made.
    forbidden = find_forbidden(cut["supervisions"][0]["custom"])
    return f"its record has {forbidden}, which is not loaded" if forbidden else None


def _problem_without_context(cut: dict[str, Any]) -> str | None:
    """Return what is wrong with a cut of a dataset without contexts."""
    keys = sorted(cut["supervisions"][0]["custom"].keys() & set(CONTEXT_KEYS))
    return f"its record has {keys[0]}, in a dataset without contexts" if keys else None


def _context_problem(cut: dict[str, Any], context: dict[str, Any], dataset: DatasetRecord) -> str | None:
    """Return what is wrong with a cut beside the metadata of its context audio and the limits of the dataset."""
    custom, limits = cut["supervisions"][0]["custom"], dataset.limits
    recording, offset = custom["context_recording_id"], custom["context_audio_offset"]
    duration, similarity = custom["context_audio_duration"], custom["context_speaker_similarity"]
    wanted = context_id(recording, offset, duration)
    if context["id"] != wanted:
        return f"the context audio has the id {context['id']!r} instead of {wanted!r}"
    if recording == cut["recording"]["id"] and _overlap(custom["offset"], custom["duration"], offset, duration):
        return "the context is the target itself, or overlaps it"
    if not limits:
        return None  # a finding about the dataset, not about each cut
    if similarity < limits["min_similarity"] - _SIMILARITY_TOLERANCE:
        return f"the similarity of the context is {similarity}, less than {limits['min_similarity']}"
    if similarity > 1 + _SIMILARITY_TOLERANCE:
        return f"the similarity of the context is {similarity}, more than a cosine can be"
    if not limits["min_duration"] <= duration <= (limits["max_duration"] or math.inf):
        return f"the context lasts {duration} s, which is outside the limits"
    return None


def _overlap(offset: float, duration: float, other_offset: float, other_duration: float) -> bool:
    """Return whether two segments of a recording share any time."""
    times = (offset, offset + duration, other_offset, other_offset + other_duration)
    begin, end, other_begin, other_end = (round(time * _MICROSECONDS) for time in times)
    return (begin, end) == (other_begin, other_end) or (begin < other_end and other_begin < end)


def _audio_problem(item: Item, dataset: DatasetRecord) -> str | None:
    """Return what is wrong with an audio item by its header, in a sentence."""
    if item.data is None or item.metadata is None:
        return "there is no audio"
    info = probe_item(item.data)
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
    intact: list[tuple[str, np.ndarray]] = []
    for item, source in zip(items, sources, strict=False):
        if problem := problem_in(_array_problem, item, source, codec, temporal, intact):
            yield item.cut_id, problem
    if intact and codes_problem(np.concatenate([codes.ravel() for _, codes in intact]), codec):
        for cut_id, codes in intact:
            if problem := codes_problem(codes, codec):
                yield cut_id, problem


def _array_problem(
    item: Item, source: Item, codec: CodecRecord, temporal: bool, intact: list[tuple[str, np.ndarray]]
) -> str | None:
    """Return what is wrong with the codes of the audio ``source`` beside their range, or add them to ``intact``."""
    if item.data is None or item.metadata is None or source.metadata is None:
        return "there are no codes"
    codes = array_from_bytes(item.data, item.cut_id)
    shape = (codec.num_codebooks, num_frames(source.metadata, codec))
    dtype = codes_dtype(codec.codebook_size)
    if codes.shape != shape:
        return f"the shape is {codes.shape}, and should be {shape}"
    if codes.dtype != dtype or item.extension != "npy":
        return f"the type is {codes.dtype} in a .{item.extension}, and should be {dtype} in a .npy"
    made = temporal_array_json(shape, codec.samples_per_frame / codec.sampling_rate) if temporal else array_json(shape)
    if made != item.metadata:
        return _first_difference("the metadata", made, item.metadata)
    intact.append((item.cut_id, codes))
    return None


def _first_difference(what: str, made: dict[str, Any], stored: dict[str, Any]) -> str:
    """Return a sentence about the first place at which something stored is not as it is made."""
    for path, should, found in find_differences(made, stored):
        return f"{path} of {what} is {show(found)}, and should be {show(should)}"
    return f"{what} is not as it should be"
