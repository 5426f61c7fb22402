"""The checks of one shard: its files, and whether cuts, audio and codes belong together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from sharmill import audio
from sharmill.encode.stage import codes_dtype
from sharmill.errors import DamagedShard, RejectRecord
from sharmill.manifest import parse_speaker_tag
from sharmill.shar.fields import Item, array_from_bytes, read_cuts, read_field
from sharmill.shar.index import CodecRecord, DatasetRecord, ShardRecord
from sharmill.shar.layout import (
    CONTEXT_AUDIO,
    CONTEXT_CODES,
    CUTS,
    DATASET_FILE,
    TARGET_AUDIO,
    TARGET_CODES,
    codes_field,
    context_id,
    shard_file,
)
from sharmill.store import checksum
from sharmill.validate.agreement import record_problem, recording_problem, same_audio_problem
from sharmill.validate.findings import Finding

# What looking at a manifest raises that is not as it should be.
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
# The index has seconds with three decimals.
_SECONDS_TOLERANCE = 2e-3


@dataclass(frozen=True)
class ShardCheck:
    """Checks shards of one dataset. ``deep`` decodes every audio item as well."""

    directory: Path
    dataset: DatasetRecord
    deep: bool = False

    def __call__(self, shard: ShardRecord) -> tuple[list[Finding], list[str]]:
        """The findings, and the ids of the cuts for the check over the whole dataset."""
        findings = list(self._check_files(shard))
        contents: dict[str, list[Any]] = {}
        for field, file in shard.fields.items():
            path = self.directory / file.file
            if not path.is_file():
                continue  # reported by _check_files
            try:
                contents[field] = list(read_cuts(path) if field == CUTS else read_field(path))
            except DamagedShard as error:
                findings.append(_finding("damaged", shard, file.file, str(error)))
        for field, items in contents.items():
            if len(items) != shard.count:
                sentence = f"{len(items)} items, but {shard.count} in the index"
                findings.append(_finding("wrong_count", shard, field, sentence))
        cuts = contents.pop(CUTS, [])
        ids = [str(cut.get("id")) for cut in cuts]
        for field, items in contents.items():
            findings += _check_pairing(shard, field, ids, items)
        findings += _check_seconds(shard, contents)
        findings += self._check_cuts(shard, cuts, contents)
        for codec in self.dataset.codecs:
            findings += _check_codec(shard, codec, contents)
        return findings, ids

    def _check_files(self, shard: ShardRecord) -> Iterator[Finding]:
        for field in self.dataset.fields:
            if field not in shard.fields:
                yield _finding("missing_field", shard, field, f"the shard has no {field}")
        for field, file in shard.fields.items():
            path = self.directory / file.file
            if field not in self.dataset.fields:
                yield _finding("wrong_totals", shard, field, f"{DATASET_FILE} does not name the field")
            if file.file != shard_file(field, shard.index):
                sentence = f"shards.jsonl has {file.file} where {shard_file(field, shard.index)} belongs"
                yield _finding("wrong_name", shard, field, sentence)
            if not path.is_file():
                yield _finding("missing_file", shard, file.file, "the file is not there")
            elif path.stat().st_size != file.size:
                sentence = f"{path.stat().st_size} bytes instead of {file.size}"
                yield _finding("wrong_size", shard, file.file, sentence)
            elif checksum(path) != file.xxh3:
                yield _finding("wrong_checksum", shard, file.file, "the bytes have changed since they were written")

    def _check_cuts(
        self, shard: ShardRecord, cuts: list[dict[str, Any]], contents: dict[str, list[Item]]
    ) -> Iterator[Finding]:
        for cut, target in zip(cuts, contents.get(TARGET_AUDIO, []), strict=False):
            problem = cut_problem(cut, target.metadata or {})
            if problem:
                yield _finding("bad_cut", shard, str(cut.get("id")), problem)
        for cut, context in zip(cuts, contents.get(CONTEXT_AUDIO, []), strict=False):
            problem = context_problem(cut, context.metadata or {}, self.dataset.limits)
            if problem:
                yield _finding("bad_cut", shard, str(cut.get("id")), problem)
        for target, context in zip(contents.get(TARGET_AUDIO, []), contents.get(CONTEXT_AUDIO, []), strict=False):
            problem = same_audio_problem(target, context)
            if problem:
                yield _finding("bad_audio", shard, f"{CONTEXT_AUDIO}: {context.cut_id}", problem)
        for field in (TARGET_AUDIO, CONTEXT_AUDIO):
            for item in contents.get(field, []):
                problem = audio_problem(item, deep=self.deep)
                if problem:
                    yield _finding("bad_audio", shard, f"{field}: {item.cut_id}", problem)


def cut_problem(cut: dict[str, Any], target: dict[str, Any]) -> str | None:
    """What is wrong with a cut beside the metadata of its target audio, in a sentence, or None."""
    try:
        (supervision,) = cut["supervisions"]
        recording = cut["recording"]
        seconds = target["num_samples"] / target["sampling_rate"]
        if cut["start"] != 0 or supervision["start"] != 0:
            return "cut or supervision does not start at 0"
        if cut["duration"] != seconds:
            return f"the cut lasts {cut['duration']} s, its audio {seconds} s"
        if supervision["duration"] != cut["duration"]:
            return "cut and supervision last differently long"
        if target["id"] != cut["id"]:
            return f"the target audio has the id {target['id']!r}"
        if any(recording[key] != target[key] for key in ("num_samples", "sampling_rate")):
            return "recording and target audio differ in samples or rate"
        if supervision["recording_id"] != recording["id"]:
            return f"the supervision is of {supervision['recording_id']!r}, the recording is {recording['id']!r}"
        if cut["custom"]["context_audio_unaligned"] is not True:
            return "context_audio_unaligned is not set, so that lhotse would cut the context"
        parse_speaker_tag(supervision["speaker"])
        return _provenance_problem(cut)
    except RejectRecord as error:
        return str(error)
    except _MALFORMED as error:
        return f"a key is absent or of the wrong type: {error!r}"


def _provenance_problem(cut: dict[str, Any]) -> str | None:
    """What is wrong with the parts of a cut that say what it is and where it came from."""
    (supervision,), recording = cut["supervisions"], cut["recording"]
    (source,) = recording["sources"]
    path = PurePosixPath(source["source"])
    if cut["type"] != "MonoCut":
        return f"it is a {cut['type']}"
    if cut["channel"] != 0 or supervision["channel"] != 0:
        return "cut or supervision is not of channel 0"
    if not isinstance(supervision["text"], str) or not isinstance(supervision["language"], str):
        return "the text or the language of the supervision is not text"
    # lhotse would run a command; a path may only say where the audio came from.
    if source["type"] != "file" or path.is_absolute() or ".." in path.parts:
        return f"the recording has the source {source['type']} {source['source']!r}"
    if not cut["id"].startswith(f"cut-{recording['id']}-"):
        return f"the recording is {recording['id']!r}"
    return record_problem(cut)


def context_problem(cut: dict[str, Any], context: dict[str, Any], limits: dict[str, Any]) -> str | None:
    """What is wrong with a cut beside the metadata of its context audio, in a sentence, or None."""
    try:
        custom = cut["supervisions"][0]["custom"]
        duration, similarity = custom["context_audio_duration"], custom["context_speaker_similarity"]
        segment = (custom["context_recording_id"], custom["context_audio_offset"], duration)
        if context["id"] != context_id(*segment):
            return f"the context audio has the id {context['id']!r} instead of {context_id(*segment)!r}"
        if segment == (cut["recording"]["id"], custom["offset"], custom["duration"]):
            return "the context is the target itself"
        # Stored with six decimals.
        if not limits["min_similarity"] - 1e-6 <= similarity <= 1 + 1e-6:
            return f"the similarity of the context is {similarity}"
        if duration < limits["min_duration"] or duration > (limits["max_duration"] or math.inf):
            return f"the context lasts {duration} s"
        return None
    except _MALFORMED as error:
        return f"a key is absent or of the wrong type: {error!r}"


def audio_problem(item: Item, *, deep: bool) -> str | None:
    """What is wrong with an audio item, in a sentence, or None."""
    metadata = item.metadata
    if item.data is None or metadata is None:
        return "there is no audio"
    try:
        if deep:
            samples, rate = audio.decode(item.data)
            found = (len(samples), rate)
        else:
            info = audio.probe_bytes(item.data)
            found = (info.num_samples, info.sampling_rate)
    except RejectRecord as error:
        return str(error)
    promised = (metadata.get("num_samples"), metadata.get("sampling_rate"))
    if found != promised:
        return f"samples and rate are {found}, the metadata says {promised}"
    if metadata.get("duration") != found[0] / found[1]:
        return f"it lasts {found[0] / found[1]} s, the metadata says {metadata.get('duration')}"
    return recording_problem(metadata)


def _check_seconds(shard: ShardRecord, contents: dict[str, list[Item]]) -> Iterator[Finding]:
    for field, recorded in ((TARGET_AUDIO, shard.target_seconds), (CONTEXT_AUDIO, shard.context_seconds)):
        if field in contents:
            found = sum(_seconds(item) for item in contents[field])
            if abs(found - recorded) > _SECONDS_TOLERANCE:
                yield _finding("wrong_totals", shard, field, f"{found:.3f} s of audio, but {recorded} s in the index")


def _seconds(item: Item) -> float:
    """By the metadata; 0 where that is malformed, which is another finding."""
    try:
        return float((item.metadata or {})["duration"])
    except _MALFORMED:
        return 0.0


def _check_pairing(shard: ShardRecord, field: str, ids: list[str], items: list[Item]) -> Iterator[Finding]:
    for position, (cut_id, item) in enumerate(zip(ids, items, strict=False)):
        if item.cut_id != cut_id:
            sentence = f"item {position} is {item.cut_id!r}, the cut there is {cut_id!r}"
            yield _finding("wrong_id", shard, field, sentence)
            return


def _check_codec(shard: ShardRecord, codec: CodecRecord, contents: dict[str, list[Item]]) -> Iterator[Finding]:
    for codes, audio_field in ((TARGET_CODES, TARGET_AUDIO), (CONTEXT_CODES, CONTEXT_AUDIO)):
        field = codes_field(codec.name, codes)
        for item, source in zip(contents.get(field, []), contents.get(audio_field, []), strict=False):
            problem = codes_problem(item, source, codec, temporal=codes == TARGET_CODES)
            if problem:
                yield _finding("bad_codes", shard, f"{field}: {item.cut_id}", problem)


def codes_problem(item: Item, source: Item, codec: CodecRecord, *, temporal: bool) -> str | None:
    """What is wrong with the codes of an audio item, in a sentence, or None."""
    if item.data is None or item.metadata is None or source.metadata is None:
        return "there are no codes"
    try:
        codes = array_from_bytes(item.data, item.cut_id)
        samples = audio.resampled_length(
            source.metadata["num_samples"], source.metadata["sampling_rate"], codec.sampling_rate
        )
        shape = (codec.num_codebooks, -(-samples // codec.samples_per_frame))
        described = item.metadata["array"] if temporal else item.metadata
        if codes.shape != shape or tuple(described["shape"]) != shape:
            return f"the shape is {codes.shape}, described as {described['shape']}, and should be {shape}"
        if codes.dtype != codes_dtype(codec.codebook_size):
            return f"the type is {codes.dtype}, and should be {codes_dtype(codec.codebook_size)}"
        if codes.size and not (np.min(codes) >= 0 and np.max(codes) < codec.codebook_size):
            return f"codes run from {np.min(codes)} to {np.max(codes)} in a codebook of {codec.codebook_size}"
        if not temporal:
            return None
        if item.metadata["frame_shift"] != codec.samples_per_frame / codec.sampling_rate:
            return f"frame_shift is {item.metadata['frame_shift']}"
        if item.metadata["temporal_dim"] != -1 or item.metadata["start"] != 0:
            return f"temporal_dim is {item.metadata['temporal_dim']}, start is {item.metadata['start']}"
        return None
    except DamagedShard as error:
        return str(error)
    except _MALFORMED as error:
        return f"a key is absent or of the wrong type: {error!r}"


def _finding(code: str, shard: ShardRecord, where: str, sentence: str) -> Finding:
    return Finding(code=code, shard=shard.index, where=where, sentence=sentence)
