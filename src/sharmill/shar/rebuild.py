"""Finding shards by their file names, and rebuilding ``shards.jsonl`` and ``dataset.json`` from them.

The shards are either sharmill's own, whose index was lost, or another tool's. Facts that the files do not contain are
taken from the old ``dataset.json`` if it is readable, or from the caller, who may describe codecs. Inferred facts are
reported.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from sharmill.errors import ConfigError, DamagedShard, refuse
from sharmill.files.checksums import checksum
from sharmill.shar.fields import (
    CONTEXT_AUDIO,
    CONTEXT_UNALIGNED,
    CUTS,
    DATASET_FILE,
    RECORDING,
    TARGET_AUDIO,
    codec_of_field,
    sorted_fields,
)
from sharmill.shar.index import (
    FORMAT_VERSION,
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
from sharmill.shar.json_lines import decode_cut, read_cuts, salvage_lines

_UNKNOWN = "unknown"
# A file name has no number if lhotse was told to write a single shard.
_SHARD_FILE: Final = re.compile(r"([^.]+)(?:\.([0-9]+))?\.(tar|jsonl|jsonl\.gz)")
_COMPRESSED_ARCHIVE: Final = re.compile(r"[^.]+(?:\.[0-9]+)?\.(?:tar\.(?:gz|bz2|xz|zst)|tgz)")
# More folders than a dataset has, however deeply its fields are nested.
_MAX_FOLDERS: Final = 10_000


def find_foreign_shards(directory: Path) -> list[ShardRecord]:
    """Find the shards of another tool in a folder, as ``find_shards`` does.

    Raises:
        ConfigError: sharmill wrote the shards, so without an index some may be missing. ``find_shards`` raises further
            errors.
    """
    shards = find_shards(directory)
    if _are_own(directory, shards):
        raise ConfigError(
            f"{directory} is not a finished dataset: it has no {DATASET_FILE}. Finish the run that writes it; if the "
            "index was lost, rebuild it with sharmill index",
            code="no_dataset",
        )
    return shards


def _are_own(directory: Path, shards: Iterable[ShardRecord]) -> bool:
    """Return True if sharmill wrote the shards, judging by their first cut."""
    for shard in shards:
        path = directory / shard.files[CUTS]
        lines, _ = salvage_lines(path)
        if lines:
            try:
                custom = decode_cut(path, lines[0]).get("custom")
            except DamagedShard:
                return False
            return isinstance(custom, dict) and CONTEXT_UNALIGNED in custom
    return False


def find_shards(directory: Path, *, complete: bool = True) -> list[ShardRecord]:
    """Find the shards of a folder without using its index, in numerical order: 2 comes before 10.

    Two layouts are supported. In lhotse's layout all files are in one folder (``cuts.000000.jsonl.gz``,
    ``recording.000000.tar``), and a field is named after its files. In the layout of sharmill and the published scripts
    each field has a folder (``cuts/cuts.000000.jsonl.gz``, ``codes_x/target_codes/codes.000000.tar``) and is named
    after it. Other files (``.idx`` beside a shard, notes) and hidden files are ignored.

    Args:
        complete: refuse shards that lack fields, and fields with additional shards. The checker passes False, since it
            reports these itself.

    Raises:
        ConfigError: there are no cuts, a shard lacks a field that others have, or two files have the same field and
            number.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a folder", code="bad_layout")
    flat, nested = _cuts_files(directory), _cuts_files(directory / CUTS)
    numbered = {match[2] is not None for match in flat + nested}
    refuse(
        (flat and nested, f"{directory} has files of cuts both directly and in its folder cuts; remove one of them"),
        (len(numbered) > 1, f"{directory} has files of cuts with and without a number; remove one of them"),
        code="bad_layout",
    )
    fields: dict[str, dict[int, str]] = {}
    for name in _list_files(directory, nested=not flat):
        folder, _, file = name.rpartition("/")
        match = _SHARD_FILE.fullmatch(file)
        if match is None and _COMPRESSED_ARCHIVE.fullmatch(file):
            raise ConfigError(
                f"{directory / name}: compressed archives are not supported; decompress it to .tar", code="bad_layout"
            )
        if match is None or (match[2] is not None) not in numbered:
            continue
        field, index = folder or match[1], int(match[2] or 0)
        taken = fields.setdefault(field, {}).setdefault(index, name)
        if taken != name:
            raise ConfigError(
                f"{directory / taken} and {file} are both shard {index} of {field}; remove one", code="bad_layout"
            )
    if CUTS not in fields:
        raise ConfigError(
            f"{directory} has no cuts: neither cuts.000000.jsonl.gz nor a folder cuts with such files",
            code="bad_layout",
        )
    for field, files in fields.items() if complete else ():
        if odd := sorted(files.keys() ^ fields[CUTS].keys()):
            has, lacks = (field, CUTS) if odd[0] in files else (CUTS, field)
            raise ConfigError(f"{directory}: {has} has shard {odd[0]}, but {lacks} does not", code="bad_layout")
    return [
        ShardRecord(
            index=index,
            count=-1,
            target_seconds=0.0,
            context_seconds=0.0,
            fields={
                field: FieldFile(files[index], -1, "") for field, files in sorted(fields.items()) if index in files
            },
        )
        for index in sorted(set().union(*fields.values()))
    ]


def _cuts_files(folder: Path) -> list[re.Match[str]]:
    """Return the parsed names of the files of cuts in a folder."""
    matches = [_SHARD_FILE.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return [match for match in matches if match and match[1] == CUTS and match[3] != "tar"]


def _list_files(directory: Path, *, nested: bool) -> Iterator[str]:
    """Yield the names of possible shard files, either in a folder itself or (``nested``) in its subfolders."""
    seen: set[str] = set()
    for root, folders, names in os.walk(directory, followlinks=True):
        real = os.path.realpath(root)
        if real in seen:  # symbolic links form a cycle
            folders[:] = []
            continue
        if len(seen) == _MAX_FOLDERS:
            raise ConfigError(
                f"{directory} has more than {_MAX_FOLDERS:,} folders, which no dataset has; check whether a link in it "
                f"leads elsewhere. The last folder is {root}",
                code="bad_layout",
            )
        seen.add(real)
        folders[:] = sorted(name for name in folders if nested and not name.startswith("."))
        folder = os.path.relpath(root, directory)
        for name in sorted(names):
            if (folder != ".") == nested and not name.startswith("."):
                yield f"{folder}/{name}" if nested else name


class CodecFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a codec that a user provides; ``num_codebooks`` is not among them, as it is read from the files."""

    name: str
    codebook_size: Positive | None = None
    sampling_rate: Positive | None = None
    samples_per_frame: Positive | None = None
    model: str = _UNKNOWN
    checksum: str = _UNKNOWN
    trained: bool = True


@dataclass
class _CodecSeen:
    """Facts about a codec, collected from the files of all shards. ``rates`` are sampling rates of audio in Hz."""

    num_codebooks: set[int] = field(default_factory=set)
    frame_shifts: set[float] = field(default_factory=set)
    rates: set[int] = field(default_factory=set)


def parse_codec_facts(text: str) -> CodecFacts:
    """Parse codec facts in the form ``NAME,KEY=VALUE,...``, such as ``nano,codebook_size=4032,sampling_rate=22050``.

    Raises:
        ConfigError: the text does not have this form.
    """
    name, *pairs = text.split(",")
    values: dict[str, Any] = dict(pair.partition("=")[::2] for pair in pairs)
    unknown = sorted(values.keys() - set(CodecFacts.__struct_fields__) | values.keys() & {"name"})
    if not name or "=" in name or unknown:
        known = ", ".join(key for key in CodecFacts.__struct_fields__ if key != "name")
        raise ConfigError(f"--codec {text}: use the form NAME,KEY=VALUE,...; valid keys: {known}", code="bad_codec")
    try:
        return msgspec.convert({"name": name, **values}, CodecFacts, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--codec {text}: {error}", code="bad_codec") from error


def rebuild_index(directory: Path, facts: Sequence[CodecFacts] = (), *, name: str | None = None) -> Iterator[str]:
    """Rebuild the index, and yield lines that report what was found, what was taken from the old index, and what was
    inferred.

    Every file is read to its end. Nothing is written unless all shards are intact.

    Raises:
        ConfigError: there are no shards, facts about a codec are missing, or a shard lacks fields.
        DamagedShard: a file is damaged; the checker lists all damage.
    """
    found = find_shards(directory)
    inferred: list[str] = []
    if [shard.index for shard in found] != list(range(len(found))):
        if _are_own(directory, found):
            raise ConfigError(
                f"{directory}: sharmill wrote these shards, but some are missing: their numbers must run from 0 "
                "without gaps; run the configuration again",
                code="no_dataset",
            )
        inferred.append(
            "the numbers of the shards have gaps or do not begin with 0: the index numbers them in order from 0"
        )
        found = [msgspec.structs.replace(shard, index=index) for index, shard in enumerate(found)]
    old = None
    if (directory / DATASET_FILE).is_file():
        with suppress(DamagedShard):
            old = read_dataset(directory)
    seen: dict[str, _CodecSeen] = {}
    audio: set[tuple[str, int]] = set()
    records = [_record(directory, shard, seen, audio) for shard in found]
    fields = list(found[0].fields)
    # If contexts were added or removed after the old index was written, its limits and contract do not apply to these
    # files.
    own = old is not None and old.contract == "sharmill" and bool(old.limits) == (CONTEXT_AUDIO in fields)
    if old is not None and old.contract == "sharmill" and not own:
        before, now = ("with", "without") if old.limits else ("without", "with")
        inferred.append(
            f"the old {DATASET_FILE} describes a dataset {before} contexts, but the files have one {now}: cuts and "
            "codes are treated as another tool's, without limits"
        )
    codecs = [_codec(codec, seen[codec], facts, old, inferred) for codec in sorted(seen)]
    if unused := sorted({fact.name for fact in facts} - set(seen)):
        raise ConfigError(
            f"--codec {unused[0]}: no codes have this name; names of the codes: {', '.join(seen) or 'none'}",
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
        layout=[
            known for known in (old.layout if old else []) if known.name in fields and (own or not known.is_published)
        ],
    )
    with changing_index(directory):
        write_shards(directory, records)
        write_dataset(directory, record)
    yield f"{directory}: {record.num_shards} shards, {record.num_cuts} cuts, the fields {', '.join(record.fields)}"
    if old is not None:
        yield f"taken over from the old {DATASET_FILE}: name, limits, audio format and codecs not given"
    else:
        yield (
            f"there was no readable {DATASET_FILE}: cuts and codes are treated as another tool's, without limits. If "
            "the run directory of this dataset exists, sharmill run CONFIG restores everything instead"
        )
    yield from inferred


def _record(
    directory: Path, shard: ShardRecord, seen: dict[str, _CodecSeen], audio: set[tuple[str, int]]
) -> ShardRecord:
    """Return the record of a shard; add codec facts to ``seen``, and audio formats with sampling rates to ``audio``."""
    files = {}
    for name, file in shard.files.items():
        path = directory / file
        files[name] = FieldFile(file, path.stat().st_size, checksum(path))
    ids = [str(cut.get("id")) for cut in read_cuts(directory / files[CUTS].file)]
    seconds = {
        name: _read_field(name, directory / file.file, ids, seen, audio) for name, file in files.items() if name != CUTS
    }
    target = TARGET_AUDIO if TARGET_AUDIO in seconds else RECORDING
    return msgspec.structs.replace(
        shard,
        count=len(ids),
        target_seconds=round(seconds.get(target, 0.0), 3),
        context_seconds=round(seconds.get(CONTEXT_AUDIO, 0.0), 3),
        fields=files,
    )


def _read_field(
    name: str, path: Path, ids: list[str], seen: dict[str, _CodecSeen], audio: set[tuple[str, int]]
) -> float:
    """Return the seconds of audio in a field, whose items must belong to ``ids``; update ``seen`` and ``audio``."""
    seconds = 0.0
    codec = codec_of_field(name)
    for item in read_field(path, ids):
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
            raise DamagedShard(f"{path}: the metadata of {item.cut_id!r} is not a manifest: {error!r}") from error
    return seconds


def _codec(
    name: str, seen: _CodecSeen, facts: Sequence[CodecFacts], old: DatasetRecord | None, inferred: list[str]
) -> CodecRecord:
    """Return the record of a codec: from the old index if no facts were given, otherwise from facts and files."""
    given = next((fact for fact in facts if fact.name == name), None)
    before = next((codec for codec in old.codecs if codec.name == name), None) if old else None
    if given is None and before is not None:
        return before
    how = f"pass the values with --codec {name},KEY=VALUE,..."
    if len(seen.num_codebooks) != 1 or 0 in seen.num_codebooks or len(seen.frame_shifts) > 1:
        found = f"{sorted(seen.num_codebooks)} codebooks and frames of {sorted(seen.frame_shifts)} s"
        raise ConfigError(f"the codes of {name!r} have {found}: they are not from one codec", code="bad_codec")
    given = given or CodecFacts(name=name)
    rate, samples = given.sampling_rate, given.samples_per_frame
    if rate is None and samples is None and len(seen.frame_shifts) == len(seen.rates) == 1:
        (rate,), (shift,) = seen.rates, seen.frame_shifts
        samples = round(rate * shift)
        if samples and samples / rate == shift:
            inferred.append(
                f"inferred: {name!r} works at {rate} Hz, the rate of the audio, with {samples} samples per frame: "
                f"its frame_shift is exactly their quotient. If the codec resamples, {how}"
            )
        else:
            rate = samples = None
    wanted = {"codebook_size": given.codebook_size, "sampling_rate": rate, "samples_per_frame": samples}
    known = {key: value for key, value in wanted.items() if value is not None}
    if unknown := [key for key in wanted if key not in known]:
        raise ConfigError(f"the files do not state {', '.join(unknown)} of {name!r}: {how}", code="bad_codec")
    return CodecRecord(
        name=name, model=given.model, checksum=given.checksum, trained=given.trained,
        num_codebooks=seen.num_codebooks.pop(), codebook_size=known["codebook_size"],
        sampling_rate=known["sampling_rate"], samples_per_frame=known["samples_per_frame"],
    )  # fmt: skip
