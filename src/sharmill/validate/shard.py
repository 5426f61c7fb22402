"""The check of one shard: its files, the relations between cuts, audio and codes, its sound, and its recomputed codes.

Everything that sharmill wrote is recomputed and compared with the stored data: a cut is a function of its record and
the length of its audio, and the metadata of audio and codes are functions of the data. In addition, every context must
satisfy the limits. For a shard of another tool, only the guarantees of lhotse's manifests are checked, in any field
layout. Fields added by other stages must match their description in ``dataset.json``.

Each check of contents is a function that takes a cut or an item, and raises DamagedShard with a sentence about the
first problem.
"""

import errno
import hashlib
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import PurePosixPath
from typing import Any, Final

import msgspec
import numpy as np
import xxhash

from sharmill.audio.files import decode_bytes, probe_bytes
from sharmill.audio.flac import flac_header
from sharmill.audio.resample import resample
from sharmill.audio.segments import find_peak
from sharmill.audio.sound import Sound, measure_sound
from sharmill.engine.plan import find_differences, show
from sharmill.engine.stage import Advance, Processor
from sharmill.engine.unit import Output, Unit
from sharmill.errors import DamagedShard, RejectRecord
from sharmill.files.atomic import write_new
from sharmill.files.checksums import checksum_stream
from sharmill.files.location import RemoteLocation, open_location, tell_version, with_content
from sharmill.files.staging import Staging
from sharmill.manifest import ALIGNMENT, CLIPPED_KEYS, CONTEXT_KEYS, fit_alignments
from sharmill.models import Codec
from sharmill.models.batches import pad
from sharmill.shar.arrays import array_from_bytes, codes_dtype, num_frames
from sharmill.shar.fields import (
    CONTEXT_AUDIO,
    CUTS,
    DATASET_FILE,
    RECORDING,
    SHARDS_FILE,
    TARGET_AUDIO,
    Field,
    codec_of_field,
)
from sharmill.shar.histograms import cut_values
from sharmill.shar.index import CodecRecord, DatasetRecord
from sharmill.shar.items import Item, open_items
from sharmill.shar.json_lines import read_cuts
from sharmill.shar.manifests import array_json, context_id, cut_json, recording_json, temporal_array_json, utterance_of
from sharmill.shar.reading.safety import RECORDING_KEYS, find_forbidden
from sharmill.validate.accounts import RecordRow, row_of_cut
from sharmill.validate.checked_dataset import SECONDS_TOLERANCE, CheckedDataset, Shard
from sharmill.validate.findings import Finding

# Limits on an item's silence and clipping, and on its level in dBFS, beyond which the item is worth listening to.
MAX_SILENCE_SHARE: Final = 0.8
MAX_CLIPPING_SHARE: Final = 1e-3
_LEAST_LOUDNESS: Final = -60.0
# The share of a segment's codes that may differ. Other items in the batch, or other hardware, change the last bits of a
# codec's results, and thereby a few codes; codes of other audio or of another model differ almost everywhere. Reduced
# precision has larger errors, and in a residual codec each wrong code also makes the following ones wrong.
MAX_DIFFERENT_CODES: Final = 0.05
_MAX_DIFFERENT_REDUCED: Final = 0.5

# Errors raised by reading a malformed manifest.
_MALFORMED: Final = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
# Similarities are stored with six decimals.
_SIMILARITY_TOLERANCE: Final = 1e-6
# Fields whose items are as long as their cut. Contexts have a time line of their own.
_ALIGNED_AUDIO: Final = (RECORDING, TARGET_AUDIO)
# lhotse's own tolerance in seconds between duration and samples (LHOTSE_AUDIO_DURATION_MISMATCH_TOLERANCE).
_DURATION_TOLERANCE: Final = 0.025
# All keys that lhotse's Recording, Array, TemporalArray and Features have.
_METADATA_KEYS: Final = frozenset({
    *RECORDING_KEYS,
    "storage_type", "storage_path", "storage_key", "shape", "array", "temporal_dim", "frame_shift", "start",
    "type", "num_frames", "num_features", "recording_id", "channels",
})  # fmt: skip

# Number of samples, sampling rate and measures of an item, or the reason why it cannot be decoded.
_Measured = tuple[int, int, Sound] | RejectRecord


class ValidateProcessor(Processor):
    """Checks the shards that one rank processes.

    Args:
        deep: also decode every audio item.
        share: the share of the segments (targets and contexts) to encode again.
        codecs: the codecs that encode these segments, by name.
        with_records: also write the record that each cut was made from, for the accounts.
    """

    def __init__(
        self, subject: CheckedDataset, *, deep: bool, share: float, codecs: Mapping[str, Codec], with_records: bool
    ) -> None:
        self._subject = subject
        self._deep = deep
        self._share = share
        self._codecs = codecs
        self._with_records = with_records

    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        subject, shard = self._subject, self._subject.shards[unit.params["line"]]
        found, stats = list[Finding](), defaultdict[str, float](float)
        contents = self._read_files(shard, found, stats)
        for name in filter(codec_of_field, contents):
            if lacking := sum(item.data is None for item in contents[name]):
                stats[f"cuts without {name}"] += lacking
        found += _check_items(shard, contents)
        cuts = contents.pop(CUTS, [])
        stats["cuts"] += len(cuts)
        found += _find_clipped(shard, cuts, stats)
        if subject.dataset is not None and subject.is_own:
            found += check_contract(subject.dataset, shard, cuts, contents)
        else:
            found += check_foreign(subject, shard, cuts, contents, stats)
        # All audio is processed once for decoding (if requested), and once for each codec.
        passes = self._deep + len(self._codecs)

        def finish(item: Item) -> None:
            advance(_seconds(item) / passes)

        if self._deep:
            _measure_all(shard, contents, found, stats, finish)
        found += self._encode_again(shard, contents, stats, finish)
        findings, records = f"parts/{unit.index:06d}.findings.jsonl", f"parts/{unit.index:06d}.cuts.jsonl"
        # If there are no accounts, only the ids are needed, to find duplicates.
        rows = [row_of_cut(cut) if self._with_records else RecordRow(id=str(cut.get("id"))) for cut in cuts]
        for file, lines in ((findings, found), (records, rows)):
            write_new(staging.path(file), msgspec.json.Encoder().encode_lines(lines))
        return Output(
            files=[findings, records],
            num_out=unit.size,
            stats={"seconds": (shard.record.target_seconds if shard.record else 0.0), "checked": stats},
        )

    def _read_files(self, shard: Shard, found: list[Finding], stats: dict[str, float]) -> dict[str, list[Any]]:
        """Return the contents of all fields with readable files; add findings to ``found`` and counts to ``stats``."""
        subject, contents = self._subject, dict[str, list[Any]]()

        def add(code: str, name: str, sentence: str, file: str | None = None) -> None:
            found.append(shard.finding(code, name, sentence, file=file))

        for name in subject.fields:
            if name not in shard.files:
                add("missing_field", name, f"the shard has no {name}")
        for name, file in shard.files.items():
            recorded, path = shard.record.fields[name] if shard.record else None, subject.directory / file
            if recorded is not None and name not in subject.fields:
                add("wrong_totals", name, f"{DATASET_FILE} does not list the field")
            field = subject.dataset.fields_by_name.get(name) if subject.dataset and subject.is_own else None
            if recorded is not None and field is not None and file != field.path(shard.index):
                add("wrong_name", name, f"{SHARDS_FILE} lists {file} instead of {field.path(shard.index)}")
            path = with_content(path, "", math.inf if recorded is None else recorded.max_bytes)
            of_copy = ""
            if isinstance(path, RemoteLocation):
                of_copy = f" (in {path.cache.path_of(path.url)}: remove this copy)"
            try:
                # Fetch the file again if its cached copy is of another version.
                tell_version(path)
                with open_location(path, buffering=0) as stream:
                    size = os.fstat(stream.fileno()).st_size
                    stats["files"] += 1
                    stats["bytes"] += size
                    # Do not compute the checksum of a file of the wrong size: it may be sparse, with a size of a
                    # terabyte.
                    if recorded is not None and size != recorded.size:
                        add("wrong_size", name, f"{size} bytes instead of {recorded.size}{of_copy}", file)
                    elif recorded is not None and checksum_stream(stream) != recorded.xxh3:
                        add("wrong_checksum", name, f"the bytes have changed since they were written{of_copy}", file)
                if name == CUTS:
                    contents[name] = list(read_cuts(path))
                else:
                    # The data of items are views of the file, which stays mapped.
                    table = open_items(path)
                    contents[name] = [table.item(number, copy=False) for number in range(len(table))]
            except DamagedShard as error:
                add("damaged", name, str(error), file)
            except (FileNotFoundError, NotADirectoryError, ValueError):
                add("missing_file", name, "the file is missing", file)
            except OSError as error:
                # These errors come from a damaged disk, missing permissions, or an interrupted server.
                if error.errno not in (errno.EIO, errno.EACCES, errno.EPERM, errno.EREMOTEIO):
                    raise
                add("damaged", name, f"it cannot be read: {error.strerror}", file)
        return contents

    def _encode_again(
        self, shard: Shard, contents: dict[str, list[Item]], stats: dict[str, float], finish: Callable[[Item], None]
    ) -> Iterator[Finding]:
        """Yield findings for items whose codes do not match their audio; call ``finish`` with each audio item."""
        for record in self._subject.codecs if self._codecs else ():
            assert self._subject.dataset is not None  # the codecs come from it
            # A dataset without contexts has no context codes either.
            for codes, source in zip(record.fields, self._subject.dataset.audio_fields, strict=False):
                for item, audio in zip(contents.get(codes.name, []), contents.get(source, []), strict=False):
                    # Choose by a hash of the bytes, so that a segment is either always in the sample or never, wherever
                    # it occurs.
                    is_chosen = xxhash.xxh3_64_intdigest(audio.data or b"", 42) < self._share * (1 << 64)
                    if is_chosen and (problem := _compare(self._codecs[record.name], record, item, audio, stats)):
                        yield shard.finding("different_codes", codes.name, problem, member=item.cut_id)
                    finish(audio)


def _check_items(shard: Shard, contents: dict[str, list[Any]]) -> Iterator[Finding]:
    """Yield findings if the number, order or seconds of a field's items differ from the cuts or from the index."""
    record, cuts = shard.record, contents.get(CUTS)
    ids = [str(cut.get("id")) for cut in cuts or ()]
    expected, source = (record.count, "in the index") if record else (None if cuts is None else len(cuts), "cuts")
    seconds = record.seconds if record else {}
    for name, items in contents.items():
        if expected is not None and len(items) != expected:
            yield shard.finding("wrong_count", name, f"{len(items)} items, but {expected} {source}")
        if name == CUTS:
            continue
        for position, (cut_id, item) in enumerate(zip(ids, items, strict=False)):
            if item.cut_id != cut_id:
                yield shard.finding(
                    "wrong_id", name, f"item {position} belongs to {item.cut_id!r}, but the cut there is {cut_id!r}"
                )
                break
        if name in seconds:
            found = sum(map(_seconds, items))
            if abs(found - seconds[name]) > SECONDS_TOLERANCE:
                yield shard.finding("wrong_totals", name, f"{found:.3f} s of audio, but {seconds[name]} s in the index")


def _find_clipped(shard: Shard, cuts: list[dict[str, Any]], stats: dict[str, float]) -> Iterator[Finding]:
    """Count the items that were clipped when they were written, as recorded in their cuts.

    Yield a finding for each item with a large share of clipped samples.
    """
    for cut in cuts:
        values = cut_values(cut)
        for field, name in CLIPPED_KEYS.items():
            if share := values.get(name):
                stats["items clipped in writing"] += 1
                if share > MAX_CLIPPING_SHARE:
                    yield shard.finding(
                        "clipped_audio", field, f"{share:.2%} of its samples were clipped in writing",
                        member=str(cut.get("id")),
                    )  # fmt: skip


def _measure_all(
    shard: Shard, contents: dict[str, list[Item]], found: list[Finding], stats: dict[str, float],
    finish: Callable[[Item], None],
) -> None:  # fmt: skip
    """Decode every audio item (equal bytes only once) and add findings to ``found``; call ``finish`` with each item."""
    reported = {(finding.code, finding.field, finding.member) for finding in found}
    known: dict[str, _Measured] = {}
    for name, items in contents.items():
        for item in items:
            is_audio = item.data is not None and item.metadata is not None and "sampling_rate" in item.metadata
            if not is_audio or ("bad_audio", name, item.cut_id) in reported:
                continue
            key = xxhash.xxh3_128_hexdigest(item.data or b"")
            if key not in known:
                known[key] = _measure(item.data or b"", stats)
            stats["items decoded"] += 1
            finish(item)
            problem = _sound_problem(item, known[key])
            if problem and (problem[0], name, item.cut_id) not in reported:
                found.append(shard.finding(problem[0], name, problem[1], member=item.cut_id))


def _measure(data: bytes, stats: dict[str, float]) -> _Measured:
    """Decode audio and measure its sound; return the reject if the audio cannot be decoded."""
    try:
        samples, rate = decode_bytes(data)
        find_peak(samples)
    except RejectRecord as reject:
        return reject
    if _contradicts_md5(data, samples):
        return RejectRecord("unreadable_audio", "the MD5 sum in the FLAC header does not match its samples")
    sound, seconds = measure_sound(samples, rate), len(samples) / rate
    stats["seconds decoded"] += seconds
    stats["seconds of silence"] += seconds * sound.silence
    stats["seconds clipped"] += seconds * sound.clipped
    return len(samples), rate, sound


def _contradicts_md5(data: bytes | memoryview, samples: np.ndarray) -> bool:
    """Return True if the data is mono 16-bit FLAC with an MD5 sum that does not match its samples."""
    bits = (int.from_bytes(data[18:26], "big") >> 36 & 31) + 1
    if flac_header(data) is None or bits != 16 or not any(data[26:42]):
        return False
    integers = (samples * (1 << 15)).astype("<i2")
    return hashlib.md5(integers.data, usedforsecurity=False).digest() != bytes(data[26:42])


def _sound_problem(item: Item, measured: _Measured) -> tuple[str, str] | None:
    """Return the code and sentence of the first problem that decoding an item has shown; None if there is none."""
    if isinstance(measured, RejectRecord):
        return "bad_audio", str(measured)
    *found, sound = measured
    promised = [(item.metadata or {}).get(key) for key in ("num_samples", "sampling_rate")]
    problems = (
        (found != promised, "bad_audio", f"samples and rate are {found}, but {promised} in the metadata"),
        (sound.silence > MAX_SILENCE_SHARE, "silent_audio", f"{sound.silence:.0%} of it is silence"),
        (sound.loudness < _LEAST_LOUDNESS, "silent_audio", f"its level is {sound.loudness:.0f} dB of full scale"),
        (sound.clipped > MAX_CLIPPING_SHARE, "clipped_audio",
         f"{sound.clipped:.2%} of its samples are at full scale"),
    )  # fmt: skip
    return next(((code, sentence) for is_wrong, code, sentence in problems if is_wrong), None)


def _compare(codec: Codec, record: CodecRecord, item: Item, audio: Item, stats: dict[str, float]) -> str | None:
    """Encode audio again; return how the stored codes differ, or None if they match or other checks report them."""
    if item.data is None or audio.data is None:
        return None
    try:
        stored = array_from_bytes(item.data, item.cut_id)
        samples, rate = decode_bytes(audio.data)
    except (DamagedShard, RejectRecord):
        return None
    made = codec.encode(*pad([resample(samples, rate, codec.sampling_rate)]))[0].numpy()
    stats["segments encoded again"] += 1
    if made.shape != stored.shape:
        return f"the codec gives codes of shape {made.shape}, but the stored ones have {stored.shape}"
    different = int(np.count_nonzero(made != stored))
    stats["codes compared"] += made.size
    stats["codes that differ"] += different
    most = MAX_DIFFERENT_CODES if record.precision == "fp32" else _MAX_DIFFERENT_REDUCED
    return f"{different / made.size:.1%} of the codes differ" if different > most * made.size else None


def _seconds(item: Item) -> float:
    """Return the seconds in the metadata, or 0 if the metadata is malformed (reported as a separate finding)."""
    try:
        return float((item.metadata or {})["duration"])
    except _MALFORMED:
        return 0.0


def check_contract(
    dataset: DatasetRecord, shard: Shard, cuts: list[dict[str, Any]], contents: dict[str, list[Item]]
) -> Iterator[Finding]:
    """Yield the violations of the contract in a shard of a dataset written by sharmill.

    Args:
        cuts: the cuts of the shard.
        contents: the items of the shard, by field, without fields whose files could not be read.
    """
    targets, contexts = contents.get(TARGET_AUDIO, []), contents.get(CONTEXT_AUDIO, [])
    may_have_contexts = dataset.has_contexts or CONTEXT_AUDIO in shard.files
    yield from _find(shard, "bad_cut", CUTS, partial(_check_cut, may_have_contexts), cuts, targets)
    yield from _find(shard, "bad_cut", CUTS, partial(_check_context, dataset.limits), cuts, contexts)
    yield from _find(shard, "copied_context", CONTEXT_AUDIO, _check_copy, contexts, targets)
    for name, items in ((TARGET_AUDIO, targets), (CONTEXT_AUDIO, contexts)):
        yield from _find(shard, "bad_audio", name, partial(_check_audio, dataset), items)
    for codec in dataset.codecs:
        # A codec whose name is not a valid folder name has no fields.
        for codes, audio, temporal in zip(codec.fields, (targets, contexts), (True, False), strict=False):
            known = dataset.fields_by_name.get(codes.name)
            check = partial(_check_codes, codec, temporal, known is not None and known.optional)
            yield from _find(shard, "bad_codes", codes.name, check, contents.get(codes.name, []), audio)
    for field in dataset.added_fields:
        yield from _find_in_field(shard, field, contents.get(field.name, []))


def check_foreign(
    subject: CheckedDataset,
    shard: Shard,
    cuts: list[dict[str, Any]],
    contents: dict[str, list[Item]],
    stats: dict[str, float],
) -> Iterator[Finding]:
    """Yield the problems of another tool's shard; items of unknown formats are counted in ``stats``."""
    for cut in cuts:
        found = [*_find(shard, "bad_cut", CUTS, _check_foreign_cut, [cut])]
        yield from found or _find(shard, "foreign_tag", CUTS, _check_language, [cut])
    added = {field.name: field for field in subject.dataset.added_fields} if subject.dataset else {}
    for name, items in contents.items():
        if name in added:
            yield from _find_in_field(shard, added[name], items)
            continue
        codec = next((codec for codec in subject.codecs if codec.name == codec_of_field(name)), None)
        for item, seconds in zip_longest(items, _expected_seconds(name, cuts, contents)[: len(items)]):
            metadata = item.metadata or {}
            if item.data is None:
                yield from _find(
                    shard, "bad_value", name, lambda value: _check_allowed("the value", value.metadata), [item]
                )
                continue
            yield from _find(
                shard, "bad_audio" if "sources" in metadata else "bad_codes", name, _check_metadata, [item]
            )
            if "sampling_rate" in metadata and "num_samples" in metadata:
                aligned = seconds if name in _ALIGNED_AUDIO else None
                yield from _find(shard, "bad_audio", name, partial(_check_stored_audio, seconds=aligned), [item])
            elif item.extension == "npy" and ("shape" in metadata or "array" in metadata):
                yield from _find(shard, "bad_codes", name, partial(_check_array, seconds=seconds, codec=codec), [item])
            elif metadata and "sampling_rate" not in metadata:
                stats[f"unchecked items of {name} (.{item.extension})"] += 1


def _find(
    shard: Shard, code: str, field: str, check: Callable[..., object], rows: Sequence[Any], *others: Sequence[Any]
) -> Iterator[Finding]:
    """Yield a finding for each cut or item in ``rows`` that fails a check.

    The check is called with the row, and with its counterparts in ``others``.
    """
    for row, *of_row in zip(rows, *others, strict=False):
        try:
            check(row, *of_row)
            continue
        except (DamagedShard, RejectRecord) as error:
            sentence = str(error)
        except _MALFORMED as error:
            sentence = f"a key is missing or has the wrong type: {error!r}"
        yield shard.finding(code, field, sentence, member=row.cut_id if isinstance(row, Item) else str(row.get("id")))


def _require(condition: object, sentence: str) -> None:
    """Raise DamagedShard unless a condition holds."""
    if not condition:
        raise DamagedShard(sentence)


def _require_equal(subject: str, stored: dict[str, Any], made: dict[str, Any]) -> None:
    """Raise DamagedShard with the first difference between a stored mapping and the recomputed one."""
    if stored != made:
        for path, should, found in find_differences(made, stored):
            raise DamagedShard(f"{path} of {subject} is {show(found)} but should be {show(should)}")
        raise DamagedShard(f"{subject} is not as it should be")


def _check_allowed(subject: str, value: Any) -> None:
    """Raise DamagedShard if a value contains anything that must never be loaded."""
    found = find_forbidden(value)
    _require(not found, f"{subject} has {found}, which is not loaded")


def _check_cut(may_have_contexts: bool, cut: dict[str, Any], audio: Item) -> None:
    """Compare a cut with its record and with the metadata of its target audio."""
    utterance, target = utterance_of(cut), audio.metadata or {}
    path = utterance.segment.audio_filepath
    is_below = not path.startswith("/") and (".." not in path or ".." not in PurePosixPath(path).parts)
    _require(is_below, f"its record names {path!r}, which is not below an audio root")
    _require(isinstance(utterance.text, str), f"the text of its record is {utterance.text!r}")
    alignments = fit_alignments(utterance.custom.get(ALIGNMENT, {}), 0.0, 0.0, cut["duration"])
    _require(alignments is not None, "its alignment extends beyond the cut, or is not in lhotse's form")
    _require_equal(
        "the cut", cut,
        cut_json(utterance, sampling_rate=target["sampling_rate"], num_samples=target["num_samples"]),
    )  # fmt: skip
    _require(target["id"] == cut["id"], f"the target audio has the id {target['id']!r}")
    custom = cut["supervisions"][0]["custom"]
    # All other parts equal the recomputed cut, so only the record can contain something that must not be loaded.
    _check_allowed("its record", custom)
    keys = sorted(custom.keys() & set(CONTEXT_KEYS))
    _require(may_have_contexts or not keys, f"its record has {', '.join(keys)}, but the dataset has no contexts")


def _check_context(limits: dict[str, Any], cut: dict[str, Any], audio: Item) -> None:
    """Compare a cut with the metadata of its context audio and the limits of the dataset."""
    custom, found = cut["supervisions"][0]["custom"], (audio.metadata or {})["id"]
    recording, offset = custom["context_recording_id"], custom["context_audio_offset"]
    duration, similarity = custom["context_audio_duration"], custom["context_speaker_similarity"]
    wanted = context_id(recording, offset, duration)
    _require(found == wanted, f"the context audio has the id {found!r} instead of {wanted!r}")
    if recording == cut["recording"]["id"]:
        times = (custom["offset"], custom["offset"] + custom["duration"], offset, offset + duration)
        # Compare microseconds, as the stage match does when it chooses the context.
        begin, end, other_begin, other_end = (round(time * 1_000_000) for time in times)
        is_same, is_apart = (begin, end) == (other_begin, other_end), end <= other_begin or other_end <= begin
        _require(is_apart and not is_same, "the context is the target itself, or overlaps it")
    # Missing limits are reported once for the dataset, so do not report each cut.
    if limits:
        least, longest = limits["min_similarity"], limits["max_duration"] or math.inf
        told = f"the similarity of the context is {similarity}"
        _require(similarity >= least - _SIMILARITY_TOLERANCE, f"{told}, below the limit of {least}")
        _require(similarity <= 1 + _SIMILARITY_TOLERANCE, f"{told}, but a cosine is at most 1")
        _require(limits["min_duration"] <= duration <= longest,
                 f"the context lasts {duration} s, which is outside the limits")  # fmt: skip


def _check_copy(context: Item, target: Item) -> None:
    is_copy = target.cut_id == context.cut_id and target.data is not None and target.data == context.data
    _require(not is_copy, "the context audio is the target audio, byte for byte")


def _check_audio(dataset: DatasetRecord, item: Item) -> None:
    """Check the header of an audio item, and compare its metadata with metadata computed from the header."""
    if item.data is None or item.metadata is None:
        raise DamagedShard("there is no audio")
    info, wanted = probe_bytes(item.data), dataset.audio_format
    _require(info.channels == 1, f"it has {info.channels} channels")
    _require(wanted == "original" or item.extension == info.format == wanted,
             f"it is {info.format} with the name .{item.extension}, in a dataset of {wanted}")  # fmt: skip
    _require(dataset.sampling_rate in (None, info.sampling_rate),
             f"its rate is {info.sampling_rate} Hz in a dataset of {dataset.sampling_rate} Hz")  # fmt: skip
    # Keep the stored id, which is compared with the cut elsewhere.
    _require_equal(
        "the metadata", item.metadata,
        recording_json(item.metadata.get("id", ""), info.sampling_rate, info.num_samples),
    )  # fmt: skip


def _check_codes(codec: CodecRecord, temporal: bool, optional: bool, item: Item, audio: Item) -> None:
    """Check codes against the codec and the length of their audio, and their metadata against recomputed metadata."""
    if item.data is None and optional:
        return
    if item.data is None or item.metadata is None or audio.metadata is None:
        raise DamagedShard("there are no codes")
    codes = array_from_bytes(item.data, item.cut_id)
    frames = num_frames(audio.metadata, codec.sampling_rate, codec.samples_per_frame)
    shape, dtype = (codec.num_codebooks, frames), codes_dtype(codec.codebook_size)
    _require(codes.shape == shape, f"the shape is {codes.shape} but should be {shape}")
    _require(codes.dtype == dtype and item.extension == "npy",
             f"the type is {codes.dtype} in a .{item.extension} but should be {dtype} in a .npy")  # fmt: skip
    made = temporal_array_json(shape, codec.samples_per_frame / codec.sampling_rate) if temporal else array_json(shape)
    _require_equal("the metadata", item.metadata, made)
    _check_range("codes", codes, 0, codec.codebook_size - 1)


def _expected_seconds(name: str, cuts: list[dict[str, Any]], contents: dict[str, list[Item]]) -> list[Any]:
    """Return the expected seconds of each item of a field, according to cuts and audio; an empty list if unknown."""
    if name in _ALIGNED_AUDIO:
        return [cut.get("duration") for cut in cuts]
    for source in (CONTEXT_AUDIO,) if "context" in name.rpartition("/")[2] else _ALIGNED_AUDIO:
        if source in contents:
            return [(item.metadata or {}).get("duration") for item in contents[source]]
    return []


def _check_foreign_cut(cut: dict[str, Any]) -> None:
    _require(isinstance(cut["id"], str), f"the id is {cut['id']!r}, which is not text")
    _require(cut["duration"] > 0 and cut["start"] >= 0,
             f"the cut starts at {cut['start']} s and lasts {cut['duration']} s")  # fmt: skip
    for supervision in cut.get("supervisions") or ():
        _require(supervision["start"] < cut["duration"] and supervision["duration"] > 0,
                 f"the supervision {supervision['id']!r} lies outside the cut")  # fmt: skip
    _check_allowed("it", cut)


def _check_language(cut: dict[str, Any]) -> None:
    """Check that NeMo recognizes the languages in speaker tags."""
    for supervision in cut.get("supervisions") or ():
        if found := re.search(r"\bLanguage:(\S+)", str(supervision.get("speaker") or "")):
            _require(re.fullmatch(r"\w+", found[1]), f"NeMo's Magpie-TTS does not read {found[0]}")


def _find_in_field(shard: Shard, field: Field, items: Sequence[Item]) -> Iterator[Finding]:
    """Yield findings about the items of a field that is not in the published layout, which a stage has added."""
    code = "bad_audio" if field.kind == "audio" else "bad_value"
    return _find(shard, code, field.name, partial(_check_field, field), items)


def _check_field(field: Field, item: Item) -> None:
    if item.metadata is None:
        _require(field.optional, "there is no value, although none may be missing")
    elif field.kind == "value":
        _check_value(field, item.metadata)
    else:
        _require(item.data is not None, f"there is a value in a field of the kind {field.kind}")
        _check_metadata(item)
        if field.kind == "audio":
            _check_stored_audio(item)
        else:
            array = _check_array(item)
            if field.limits is not None:
                _check_range("the values", array, *field.limits)


def _check_value(field: Field, values: dict[str, Any]) -> None:
    listed = ", ".join(sorted(values))
    _require(values.keys() == {field.attribute}, f"it has {listed} instead of {field.attribute}")
    value = values[field.attribute]
    _require(value is not None or field.optional, "there is no value, although none may be missing")
    if field.limits is None:
        _check_allowed("the value", value)
    elif value is not None:
        low, high = field.limits
        _require(isinstance(value, (int, float)) and not isinstance(value, bool),
                 f"the value is {value!r:.80}, which is not a number")  # fmt: skip
        _require(low <= value <= high, f"the value {value} is not between {low:g} and {high:g}")


def _check_metadata(item: Item) -> None:
    """Check that metadata has only keys that readers know and contains nothing that must not be loaded."""
    metadata = item.metadata or {}
    unknown = sorted(metadata.keys() - _METADATA_KEYS)
    _require(not unknown, f"the metadata has the key {', '.join(unknown)}, which lhotse does not know")
    _check_allowed("the metadata", metadata)


def _check_stored_audio(item: Item, seconds: float | None = None) -> None:
    """Compare an audio item with its metadata and, if known, with the duration of its cut in seconds."""
    info, metadata = probe_bytes(item.data or b""), item.metadata or {}
    duration, channels = metadata["duration"], len(metadata.get("channel_ids") or metadata["sources"][0]["channels"])
    found, promised = (info.num_samples, info.sampling_rate), (metadata["num_samples"], metadata["sampling_rate"])
    is_as_long = abs(found[0] - promised[0]) <= _DURATION_TOLERANCE * found[1] and found[1] == promised[1]
    _require(is_as_long, f"samples and rate are {found}, but {promised} in the metadata")
    lasts = found[0] / found[1]
    _require(abs(duration - lasts) <= _DURATION_TOLERANCE, f"it lasts {lasts} s, but {duration} s in the metadata")
    _require(info.channels == channels, f"it has {info.channels} channels, but {channels} in the metadata")
    _require(seconds is None or abs(seconds - duration) <= _DURATION_TOLERANCE,
             f"the cut lasts {seconds} s, but its audio {duration} s")  # fmt: skip


def _check_array(item: Item, seconds: float | None = None, codec: CodecRecord | None = None) -> np.ndarray:
    """Return the array of an item, checked against its manifest and, if known, the audio's duration and the codec.

    The number of frames of a TemporalArray may differ by one from the length of its audio, since tools round
    differently.
    """
    array, metadata = array_from_bytes(item.data or b"", item.cut_id), item.metadata or {}
    shape = metadata.get("array", metadata)["shape"]
    _require(list(array.shape) == list(shape), f"the shape is {array.shape}, but {shape} in the metadata")
    if np.issubdtype(array.dtype, np.floating):
        _require(np.isfinite(array).all(), "the array has NaN or infinite values")
    elif "array" in metadata and seconds is not None:
        frames, shift = array.shape[metadata["temporal_dim"]], metadata["frame_shift"]
        _require(seconds / shift - 1 <= frames <= math.ceil(seconds / shift) + 1,
                 f"{frames} frames of {shift} s for {seconds} s of audio")  # fmt: skip
    if codec and array.dtype.kind in "iu":
        _check_range("codes", array, 0, codec.codebook_size - 1)
    return array


def _check_range(what: str, array: np.ndarray, low: float, high: float) -> None:
    """Raise DamagedShard if values are outside their limits."""
    if array.size and not (array.min() >= low and array.max() <= high):
        raise DamagedShard(f"{what} range from {array.min()} to {array.max()} instead of {low:g} to {high:g}")
