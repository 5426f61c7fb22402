"""``shards.jsonl`` and ``dataset.json`` made again from the files of a dataset, sharmill's own or another tool's.

What the files cannot tell is taken from the old ``dataset.json`` where that can be read, or from what the caller knows
of a codec. Nothing is guessed without being said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from sharmill.errors import ConfigError, DamagedShard
from sharmill.files.storage import checksum
from sharmill.shar.cut_lines import read_cuts
from sharmill.shar.index import (
    CodecRecord,
    DatasetRecord,
    FieldFile,
    Positive,
    ShardRecord,
    changing_index,
    read_dataset,
    write_dataset,
    write_shards,
)
from sharmill.shar.items import read_field
from sharmill.shar.layout import (
    CONTEXT_AUDIO,
    CONTEXT_UNALIGNED,
    CUTS,
    DATASET_FILE,
    FORMAT_VERSION,
    RECORDING,
    TARGET_AUDIO,
    codec_of_field,
    sorted_fields,
)
from sharmill.shar.reading.foreign import ForeignShard, find_shards

_UNKNOWN = "unknown"


class CodecFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a codec that a person gives. ``num_codebooks`` is read from the files."""

    name: str
    codebook_size: Positive | None = None
    sampling_rate: Positive | None = None
    samples_per_frame: Positive | None = None
    model: str = _UNKNOWN
    checksum: str = _UNKNOWN
    trained: bool = True


@dataclass
class _CodecSeen:
    """Facts about a codec that occur in the files, over all shards."""

    num_codebooks: set[int] = field(default_factory=set)
    frame_shifts: set[float] = field(default_factory=set)
    rates: set[int] = field(default_factory=set)


def parse_codec_facts(text: str) -> CodecFacts:
    """Parse the facts of ``NAME,KEY=VALUE,...``, such as ``nano,codebook_size=4032,sampling_rate=22050``.

    Raises:
        ConfigError: it is not of this form.
    """
    name, *pairs = text.split(",")
    values: dict[str, Any] = dict(pair.partition("=")[::2] for pair in pairs)
    unknown = sorted(values.keys() - set(CodecFacts.__struct_fields__) | values.keys() & {"name"})
    if not name or "=" in name or unknown:
        known = ", ".join(key for key in CodecFacts.__struct_fields__ if key != "name")
        raise ConfigError(f"--codec {text}: write NAME,KEY=VALUE,... with keys among {known}", code="bad_codec")
    try:
        return msgspec.convert({"name": name, **values}, CodecFacts, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--codec {text}: {error}", code="bad_codec") from error


def rebuild_index(directory: Path, facts: Sequence[CodecFacts] = (), *, name: str | None = None) -> Iterator[str]:
    """Make the index again, and yield lines that say what was found, taken over and inferred.

    Every file is read to its end. Nothing is written unless all shards are whole.

    Raises:
        ConfigError: there are no shards, a codec's facts are missing, or a shard lacks fields.
        DamagedShard: a file is not what it should be: the checker tells all of them.
    """
    found = find_shards(directory)
    inferred: list[str] = []
    if [shard.index for shard in found] != list(range(len(found))):
        if any(CONTEXT_UNALIGNED in (cut.get("custom") or {}) for cut in read_cuts(found[0].files[CUTS])):
            raise ConfigError(
                f"{directory}: sharmill wrote these shards, and some are gone: their numbers do not run from 0 without "
                "gaps; run the configuration again",
                code="no_dataset",
            )
        inferred.append("the numbers of the shards have gaps: the index counts them in their order, from 0")
        found = [ForeignShard(index, shard.files) for index, shard in enumerate(found)]
    old = None
    if (directory / DATASET_FILE).is_file():
        with suppress(DamagedShard):
            old = read_dataset(directory)
    seen: dict[str, _CodecSeen] = {}
    audio: set[tuple[str, int]] = set()
    records = [_record(directory, shard, seen, audio) for shard in found]
    fields = list(found[0].files)
    # Where contexts went or came since the old one, its limits and its contract are not those of these files.
    own = old is not None and old.contract == "sharmill" and bool(old.limits) == (CONTEXT_AUDIO in fields)
    if old is not None and old.contract == "sharmill" and not own:
        before, now = ("with", "without") if old.limits else ("without", "with")
        inferred.append(
            f"the old {DATASET_FILE} is of a dataset {before} contexts, and the files are of one {now}: cuts and codes "
            "count as another tool's, without limits"
        )
    codecs = [_codec(codec, seen[codec], facts, old, inferred) for codec in sorted(seen)]
    if unused := sorted({fact.name for fact in facts} - set(seen)):
        raise ConfigError(
            f"--codec {unused[0]}: there are no codes of that name, only {', '.join(seen) or 'none'}",
            code="unknown_codec",
        )
    formats, rates = {extension for extension, _ in audio}, {rate for _, rate in audio}
    record = DatasetRecord(
        format_version=FORMAT_VERSION,
        name=name or (old.name if old else directory.resolve().name),
        fields=sorted_fields(fields),
        num_shards=len(records),
        num_cuts=sum(shard.count for shard in records),
        target_seconds=round(sum(shard.target_seconds for shard in records), 3),
        context_seconds=round(sum(shard.context_seconds for shard in records), 3),
        audio_format=old.audio_format if old else (formats.pop() if len(formats) == 1 else "original"),
        sampling_rate=old.sampling_rate if old else (rates.pop() if len(rates) == 1 else None),
        limits=old.limits if old and CONTEXT_AUDIO in fields else {},
        codecs=codecs,
        match_precision=old.match_precision if old else "fp32",
        match_devices=old.match_devices if old else [],
        contract="sharmill" if own else "foreign",
        layout=[added for added in (old.added_fields if old else []) if added.name in fields],
    )
    with changing_index(directory):
        write_shards(directory, records)
        write_dataset(directory, record)
    yield f"{directory}: {record.num_shards} shards, {record.num_cuts} cuts, the fields {', '.join(record.fields)}"
    if old is not None:
        yield f"taken over from the old {DATASET_FILE}: name, limits, audio format and the codecs not given"
    else:
        yield (
            f"there was no readable {DATASET_FILE}: cuts and codes count as another tool's, without limits. If the run "
            "directory of this dataset is there, sharmill run CONFIG restores all instead"
        )
    yield from inferred


def _record(
    directory: Path, shard: ForeignShard, seen: dict[str, _CodecSeen], audio: set[tuple[str, int]]
) -> ShardRecord:
    """Return the record of a shard; add to ``seen``, and to the formats and rates of ``audio``."""
    ids = [str(cut.get("id")) for cut in read_cuts(shard.files[CUTS])]
    seconds: dict[str, float] = {}
    for name, path in shard.files.items():
        if name != CUTS:
            seconds[name] = _read_field(name, path, ids, seen, audio)
    files = {
        name: FieldFile(path.relative_to(directory).as_posix(), path.stat().st_size, checksum(path))
        for name, path in shard.files.items()
    }
    target = TARGET_AUDIO if TARGET_AUDIO in seconds else RECORDING
    return ShardRecord(
        index=shard.index,
        count=len(ids),
        target_seconds=round(seconds.get(target, 0.0), 3),
        context_seconds=round(seconds.get(CONTEXT_AUDIO, 0.0), 3),
        fields=files,
    )


def _read_field(
    name: str, path: Path, ids: list[str], seen: dict[str, _CodecSeen], audio: set[tuple[str, int]]
) -> float:
    """Return the seconds of audio in a field. Its items must be those of the cuts."""
    seconds, count = 0.0, 0
    codec = codec_of_field(name)
    # To its end, behind the last cut, for only that tells that the archive is whole.
    for item in read_field(path):
        if count < len(ids) and item.cut_id != ids[count]:
            raise DamagedShard(f"{path}: item {count} is {item.cut_id!r}, the cut there is {ids[count]!r}")
        count += 1
        if item.metadata is None or item.data is None:
            continue
        try:
            if "num_samples" in item.metadata:
                seconds += item.metadata["num_samples"] / item.metadata["sampling_rate"]
                audio.add((item.extension, item.metadata["sampling_rate"]))
            elif codec is not None:
                codes = seen.setdefault(codec, _CodecSeen())
                codes.num_codebooks.add(item.metadata.get("array", item.metadata)["shape"][0])
                if "frame_shift" in item.metadata:
                    codes.frame_shifts.add(item.metadata["frame_shift"])
                codes.rates |= {rate for _, rate in audio}
        except (LookupError, TypeError, ArithmeticError) as error:
            raise DamagedShard(f"{path}: the metadata of {item.cut_id!r} are no manifest: {error!r}") from error
    if count != len(ids):
        raise DamagedShard(f"{path}: {count} items for {len(ids)} cuts")
    return seconds


def _codec(
    name: str, seen: _CodecSeen, facts: Sequence[CodecFacts], old: DatasetRecord | None, inferred: list[str]
) -> CodecRecord:
    """Return the record of a codec: as given, else as it was, else as its files tell."""
    given = next((fact for fact in facts if fact.name == name), None)
    before = next((codec for codec in old.codecs if codec.name == name), None) if old else None
    if given is None and before is not None:
        return before
    how = f"give it with --codec {name},KEY=VALUE,..."
    if len(seen.num_codebooks) != 1 or 0 in seen.num_codebooks or len(seen.frame_shifts) > 1:
        found = f"{sorted(seen.num_codebooks)} codebooks and frames of {sorted(seen.frame_shifts)} s"
        raise ConfigError(f"the codes of {name!r} have {found}: they are not of one codec", code="bad_codec")
    given = given or CodecFacts(name=name)
    rate, samples = given.sampling_rate, given.samples_per_frame
    if rate is None and samples is None and len(seen.frame_shifts) == len(seen.rates) == 1:
        (rate,), (shift,) = seen.rates, seen.frame_shifts
        samples = round(rate * shift)
        if samples and samples / rate == shift:
            inferred.append(
                f"inferred: {name!r} works at {rate} Hz, the rate of the audio, with {samples} samples a frame: "
                f"its frame_shift is exactly their quotient. If it resamples, {how}"
            )
        else:
            rate = samples = None
    facts_needed = {"codebook_size": given.codebook_size, "sampling_rate": rate, "samples_per_frame": samples}
    if unknown := [key for key, value in facts_needed.items() if value is None]:
        raise ConfigError(f"the files do not tell {', '.join(unknown)} of {name!r}: {how}", code="bad_codec")
    assert given.codebook_size is not None
    assert rate is not None
    assert samples is not None
    return CodecRecord(
        name=name, model=given.model, checksum=given.checksum, trained=given.trained, sampling_rate=rate,
        samples_per_frame=samples, num_codebooks=seen.num_codebooks.pop(), codebook_size=given.codebook_size,
    )  # fmt: skip
