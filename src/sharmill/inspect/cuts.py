"""Functions that find, list, export and decode the cuts of a dataset and everything stored for them.

Text in rows is not escaped; callers that print rows must escape it.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from sharmill.audio.encoding import encode
from sharmill.audio.files import decode_bytes
from sharmill.audio.resample import resampled_length
from sharmill.errors import ConfigError, DamagedShard, RejectRecord, refuse
from sharmill.files.atomic import write_atomic
from sharmill.files.location import Location, check_copy
from sharmill.models import DecodingCodec, load_recorded_codec
from sharmill.shar.arrays import array_from_bytes
from sharmill.shar.fields import CUTS
from sharmill.shar.histograms import supervision_of
from sharmill.shar.index import CodecRecord, DatasetRecord, ShardRecord, read_dataset, read_shards
from sharmill.shar.items import Item, open_items, read_field
from sharmill.shar.json_lines import decode_cut, read_cuts, read_json_lines

_WAVEFORM_CHARACTERS: Final = " ▁▂▃▄▅▆▇█"
# Audio below this level, relative to full scale, is drawn as silence.
_QUIETEST_DB: Final = -54.0
_SUFFIXES: Final = (".wav", ".flac", ".mp3", ".opus")


@dataclass(frozen=True)
class StoredCut:
    """A cut as it is stored in a dataset, with its items.

    Attributes:
        shard: the index of its shard.
        number: its index in the shard, from 0.
        cut: its line in the file of cuts.
        items: its item in each other field; a placeholder without data if the field has no item for the cut.
    """

    shard: int
    number: int
    cut: dict[str, Any]
    items: dict[str, Item]


def find_shard(directory: Location, index: int) -> ShardRecord:
    """Return the record of a shard in the index.

    Raises:
        ConfigError: the dataset or the shard does not exist.
        DamagedShard: the index is damaged.
    """
    num_shards = read_dataset(directory).num_shards
    for shard in read_shards(directory, num_shards):
        if shard.index == index:
            return shard
    known = f"shards are numbered 0 to {num_shards - 1}" if num_shards else "the dataset is empty"
    raise ConfigError(f"{directory} has no shard {index}: {known}", code="unknown_shard")


def find_cut(directory: Location, cut_id: str) -> StoredCut:
    """Return a cut of a dataset. The shards are searched one after the other, since the index has no ids.

    Raises:
        ConfigError: the dataset or the cut does not exist.
        DamagedShard: a file being read is damaged.
    """
    # Search the bytes first, so that only a few lines are decoded. Search for both spellings of the id, since other
    # tools escape non-ASCII characters.
    needles = {json.dumps(cut_id, ensure_ascii=ascii)[1:-1].encode("utf-8", "surrogatepass") for ascii in (True, False)}
    for shard in read_shards(directory, read_dataset(directory).num_shards):
        path = _file(directory, shard, CUTS)
        for number, line in enumerate(read_json_lines(path)):
            if any(needle in line for needle in needles) and decode_cut(path, line).get("id") == cut_id:
                return open_stored_shard(directory, shard)(number)
    raise ConfigError(
        f"{directory} has no cut {cut_id!r}; list the cuts of a shard with sharmill inspect {directory} --shard 0",
        code="unknown_cut",
    )


def open_stored_shard(directory: Location, shard: ShardRecord) -> Callable[[int], StoredCut]:
    """Open the files of a shard, and return a function that reads the cut at a given index.

    Raises:
        DamagedShard: a file is damaged; the returned function also raises it if the shard has no cut at that index.
    """
    path = _file(directory, shard, CUTS)
    lines = read_json_lines(path)
    tables = {field: open_items(_file(directory, shard, field)) for field in shard.fields if field != CUTS}

    def read(number: int) -> StoredCut:
        if number >= len(lines):
            raise DamagedShard(f"{path} has {len(lines)} cuts, but no number {number}")
        cut, items = decode_cut(path, lines[number]), {}
        cut_id = str(cut.get("id"))
        for field, table in tables.items():
            if number >= len(table):
                raise table.damage(f"there are {len(table)} items, but none for {cut_id!r}, number {number}")
            items[field] = table.item(number)
            if items[field].cut_id != cut_id:
                raise table.damage(f"item {number} belongs to {items[field].cut_id!r}, not to {cut_id!r}")
        return StoredCut(shard.index, number, cut, items)

    return read


def read_shard(directory: Location, shard: ShardRecord) -> Iterator[dict[str, Any]]:
    """Yield the cuts of a shard.

    Raises:
        DamagedShard: the file is damaged.
    """
    return read_cuts(_file(directory, shard, CUTS))


def read_stored_field(directory: Location, shard: ShardRecord, field: str) -> Iterator[Item]:
    """Yield the items of a field in a shard.

    Raises:
        DamagedShard: the file is missing or damaged.
    """
    return read_field(_file(directory, shard, field))


def _file(directory: Location, shard: ShardRecord, field: str) -> Location:
    if field not in shard.fields:
        raise DamagedShard(f"{directory}: the index lists no {field} of shard {shard.index}")
    location = shard.fields[field].below(directory)
    check_copy(location)
    return location


def read_codes(item: Item) -> np.ndarray:
    """Return the codes of an item, (codebooks, frames).

    Raises:
        DamagedShard: the array does not contain codes.
    """
    codes = array_from_bytes(item.data or b"", item.cut_id)
    if codes.ndim != 2 or codes.dtype.kind not in "iu":
        raise DamagedShard(f"{item.cut_id}: an array of shape {codes.shape} and type {codes.dtype} is not codes")
    return codes


def waveform(samples: np.ndarray, width: int = 60) -> str:
    """Return a line of block characters that shows the peaks of audio (samples,) in decibels.

    >>> waveform(np.array([0.0, 0.01, 1.0]), width=3)
    ' ▃█'
    """
    if len(samples) == 0:
        return ""
    peaks = [np.abs(part).max() for part in np.array_split(samples, min(width, len(samples)))]
    levels = 1 - 20 * np.log10(np.maximum(peaks, 1e-9)) / _QUIETEST_DB
    steps = np.ceil(np.clip(levels, 0.0, 1.0) * (len(_WAVEFORM_CHARACTERS) - 1)).astype(int)
    return "".join(_WAVEFORM_CHARACTERS[step] for step in steps)


def dataset_rows(directory: Location, record: DatasetRecord) -> Iterator[tuple[str, str]]:
    """Yield rows (name, value) that describe a dataset, taken from its index."""
    yield "dataset", f"{record.name}, in {directory}"
    yield "size", f"{record.num_cuts:,} cuts in {record.num_shards:,} shards"
    yield "target audio", f"{record.target_seconds / 3600:,.3f} h"
    if record.has_contexts:
        yield "context audio", f"{record.context_seconds / 3600:,.3f} h"
    rate = "the rates of its sources" if record.sampling_rate is None else f"{record.sampling_rate} Hz"
    yield "audio", f"{record.audio_format}, {rate}"
    yield "fields", ", ".join(record.fields)
    for field in record.layout:
        if not field.is_published or field.optional:
            yield f"field {field.name}", field.describe()
    for codec in record.codecs:
        trained = "" if codec.trained else "; untrained: its codes mean nothing"
        yield (
            f"codec {codec.name}",
            f"{codec.model}: {codec.num_codebooks} codebooks of {codec.codebook_size}, "
            f"{codec.sampling_rate / codec.samples_per_frame:g} frames per second of {codec.sampling_rate} Hz, "
            f"checksum {codec.checksum}{trained}",
        )
    for name, limit in record.limits.items():
        yield f"limit {name}", "none" if limit is None else str(limit)


def shard_rows(cuts: Iterator[dict[str, Any]]) -> Iterator[tuple[str, str, str, str, str, str]]:
    """Yield id, duration and context duration (in seconds), similarity, speaker and text of each cut, as text."""
    for cut in cuts:
        supervision, custom = supervision_of(cut)
        yield (
            str(cut.get("id")), _number(cut.get("duration")), _number(custom.get("context_audio_duration")),
            _number(custom.get("context_speaker_similarity")), str(supervision.get("speaker") or ""),
            str(supervision.get("text") or ""),
        )  # fmt: skip


def cut_rows(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield all dotted keys and values of a cut in their stored order.

    Args:
        value: the cut, or the part of it whose dotted key is ``key``.
    """
    if isinstance(value, (dict, list)) and value:
        for name, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from cut_rows(child, f"{key}.{name}" if key else str(name))
    else:
        yield key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def field_rows(stored: StoredCut) -> Iterator[tuple[str, str, str]]:
    """Yield field, shape and a preview of each item of a cut: the waveform, the first codes, or the value.

    An item that cannot be decoded is listed with its error, so that the other items can still be viewed.
    """
    for field, item in stored.items.items():
        if item.data is None:
            values = list((item.metadata or {"": ""}).values())
            shown = json.dumps(values[0] if len(values) == 1 else item.metadata, ensure_ascii=False)
            yield field, "nothing" if item.metadata is None else "a value", shown
            continue
        try:
            yield (field, *_describe_item(item))
        except (DamagedShard, RejectRecord) as error:
            yield field, f"{item.extension}, {len(item.data):,} bytes", f"cannot be decoded: {error}"


def _describe_item(item: Item) -> tuple[str, str]:
    if item.extension == "npy":
        array = array_from_bytes(item.data or b"", item.cut_id)
        is_codes = array.ndim == 2 and array.dtype.kind in "iu"
        first = ", ".join(map(str, (array[0] if is_codes and array.size else array).flat[:8]))
        shape = f"{array.shape} {array.dtype}{', codebooks and frames' if is_codes else ''}"
        return shape, f"{'the first codebook' if is_codes else 'it'} starts with {first}"
    samples, rate = decode_bytes(item.data or b"")
    shape = f"({len(samples)},) at {rate} Hz, {len(samples) / rate:.3f} s of {item.extension}"
    return shape, waveform(samples)


def _number(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, (int, float)) else ""


def export_cut(stored: StoredCut, folder: Path) -> list[Path]:
    """Write ``cut.json``, the stored audio, the arrays (as ``.npy``) and the values to a folder; return the paths.

    Raises:
        ConfigError: the folder is not empty.
        FatalError: the folder is not writable.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty folder: choose another one", code="foreign_output")
    contents = {"cut.json": msgspec.json.format(msgspec.json.encode(stored.cut), indent=2) + b"\n"}
    for field, item in stored.items.items():
        if item.metadata is not None:
            # Names come from the dataset, and must not lead out of the folder.
            name, extension = (re.sub(r"[^\w-]+", "_", part) for part in (field, item.extension))
            value = msgspec.json.encode(item.metadata) + b"\n"
            contents[f"{name}.{extension}"] = value if item.data is None else item.data
    for name, data in contents.items():
        write_atomic(folder / name, data)
    return [folder / name for name in contents]


def choose_codec(record: DatasetRecord, name: str | None) -> CodecRecord:
    """Return the codec with this name or, if ``name`` is None, the only codec.

    Raises:
        ConfigError: there is no such codec, or ``name`` is None and there are several codecs.
    """
    found = [codec for codec in record.codecs if name in (None, codec.name)]
    if len(found) != 1:
        names = [codec.name for codec in record.codecs]
        wanted = "several codecs" if name is None and names else f"no codec {name!r}" if name else "no codes"
        listed = f": choose one of {', '.join(names)} with --codec" if names else ""
        raise ConfigError(f"the dataset has {wanted}{listed}", code="unknown_codec")
    return found[0]


def load_decoder(codec: CodecRecord, model: str | None = None) -> DecodingCodec:
    """Load the codec that made the codes of a dataset, to decode them to audio.

    Args:
        codec: the record of the codec in the dataset.
        model: the model to load, if the recorded one is not built into sharmill.

    Raises:
        ConfigError: the codec cannot be loaded or cannot decode.
    """
    loaded = load_recorded_codec(codec, model)
    if not isinstance(loaded, DecodingCodec) or loaded.decoded_sampling_rate is None:
        raise ConfigError(f"the codec {codec.name!r} ({codec.model}) cannot turn codes into audio", code="no_decoder")
    return loaded


def decode_stored_codes(
    stored: StoredCut,
    dataset: DatasetRecord,
    codec: CodecRecord,
    decoder: DecodingCodec,
    *,
    context: bool = False,
    most_seconds: float = math.inf,
) -> tuple[np.ndarray, int]:
    """Decode the codes of a cut to audio.

    Args:
        dataset: the record of the cut's dataset.
        codec: the record of the codec in the dataset.
        decoder: the same codec, loaded.
        context: decode the codes of the context instead of the target.
        most_seconds: decode only about this many seconds from the beginning.

    Returns:
        Samples (samples,), as long as the encoded audio or about ``most_seconds``, and their sampling rate.

    Raises:
        ConfigError: the cut has no such codes.
        DamagedShard: the codes are damaged.
    """
    import torch

    field = codec.fields[context].name
    item = stored.items.get(field)
    if item is None or item.data is None:
        raise ConfigError(f"the cut has no {field}", code="unknown_field")
    codes = read_codes(item)
    if most_seconds < math.inf:
        codes = codes[:, : math.ceil(most_seconds * codec.sampling_rate / codec.samples_per_frame)]
    rate = decoder.decoded_sampling_rate
    assert rate is not None  # load_decoder has checked this
    try:
        audio = decoder.decode(torch.from_numpy(codes.astype(np.int64))[None], torch.tensor([codes.shape[1]]))[0]
    except ValueError as error:
        raise DamagedShard(f"{field} of {item.cut_id}: {error}") from error
    source = stored.items.get(dataset.audio_fields[context])
    if source is not None and source.metadata is not None:
        audio = audio[: resampled_length(source.metadata["num_samples"], source.metadata["sampling_rate"], rate)]
    return audio.numpy(), rate


def export_audio(path: Path, samples: np.ndarray, sampling_rate: int) -> None:
    """Write audio in the format named by the suffix of ``path``.

    Raises:
        ConfigError: the suffix is not a known format, or the format does not support this rate.
        FatalError: the file cannot be written.
    """
    refuse(
        (path.suffix.lower() not in _SUFFIXES, f"{path}: the name must end in one of {', '.join(_SUFFIXES)}"),
        (path.is_dir(), f"{path} is a folder: give the name of a file"),
        code="bad_usage",
    )
    write_atomic(path, encode(samples, sampling_rate, path.suffix.lower()[1:]))
