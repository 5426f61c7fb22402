"""Reads a dataset directory as a lazy lhotse CutSet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharmill.errors import ConfigError, DamagedShard
from sharmill.shar.fields import Item, read_cuts, read_field
from sharmill.shar.index import DatasetRecord, ShardRecord, read_dataset, read_shards
from sharmill.shar.layout import BASE_FIELDS, CONTEXT_CODES, CUTS, TARGET_AUDIO, TARGET_CODES, codes_field, shard_file

if TYPE_CHECKING:
    from lhotse import CutSet, MonoCut

_CODES = (TARGET_CODES, CONTEXT_CODES)
_MEMORY_ARRAYS = {"npy": "memory_npy"}


def open_shar(dataset: str | Path, fields: Sequence[str] | None = None, *, codec: str | None = None) -> CutSet:
    """The cuts of a finished dataset, in their order, read one shard at a time.

    Args:
        dataset: the dataset directory.
        fields: which of ``target_audio``, ``context_audio``, ``target_codes`` and ``context_codes`` to attach to the
            cuts (default: all that there are). The files of the others are not opened.
        codec: whose codes, where there are several.

    Returns:
        A lazy CutSet. With ``target_audio``, that audio is attached as ``recording`` too, so that ``load_audio()``
        works; without, ``recording`` only tells where the audio came from. ``load_target_codes()`` of a truncated cut
        has its frames only; ``load_context_audio()`` and ``load_context_codes()`` always have the whole context.

    Raises:
        ConfigError: there is no finished dataset, or not this field or codec in it.
        DamagedShard: while iterating, where a file is not as it should be.

    Example:
        >>> for cut in open_shar("data/librispeech", ["target_codes", "context_codes"]):  # doctest: +SKIP
        ...     cut.load_target_codes(), cut.load_context_codes()
    """
    from lhotse import CutSet

    directory = Path(dataset)
    return CutSet(_LazyShar(directory, _choose_fields(directory, read_dataset(directory), fields, codec)))


class _LazyShar:
    """Iterates over the cuts of all shards; as often as asked."""

    def __init__(self, directory: Path, fields: dict[str, str]) -> None:
        self._directory = directory
        self._fields = fields

    def __iter__(self) -> Iterator[MonoCut]:
        expected = read_dataset(self._directory).num_shards
        found = 0
        for shard in read_shards(self._directory):
            if shard.index != found:
                raise DamagedShard(f"{self._directory}: the index lists shard {shard.index} where {found} belongs")
            yield from self._read_shard(shard)
            found += 1
        if found != expected:
            raise DamagedShard(f"{self._directory}: the index lists {found} shards instead of {expected}")

    def __len__(self) -> int:
        return read_dataset(self._directory).num_cuts

    def _read_shard(self, shard: ShardRecord) -> Iterator[MonoCut]:
        streams = {name: read_field(self._path(shard, field)) for name, field in self._fields.items()}
        count = 0
        for values in read_cuts(self._path(shard, CUTS)):
            cut = _make_cut(values, shard)
            for name, stream in streams.items():
                item = next(stream, None)
                if item is None or item.cut_id != cut.id:
                    found = "nothing" if item is None else repr(item.cut_id)
                    raise _damage(shard, f"{name} has {found} for {cut.id!r}")
                if item.metadata is not None:
                    _attach_checked(cut, name, item, shard)
            yield cut
            count += 1
        if count != shard.count:
            raise _damage(shard, f"there are {count} cuts instead of {shard.count}")
        for name, stream in streams.items():
            # Only the end of the archive tells that it is whole.
            if (item := next(stream, None)) is not None:
                raise _damage(shard, f"{name} has {item.cut_id!r} after the last cut")

    def _path(self, shard: ShardRecord, field: str) -> Path:
        if field not in shard.fields:
            raise _damage(shard, f"there is no {field}")
        file = shard.fields[field].file
        if file != shard_file(field, shard.index):
            raise _damage(shard, f"the index has {file} where {shard_file(field, shard.index)} belongs")
        return self._directory / file


def _damage(shard: ShardRecord, what: str) -> DamagedShard:
    return DamagedShard(f"shard {shard.index}: {what}")


def _make_cut(values: dict[str, Any], shard: ShardRecord) -> MonoCut:
    from lhotse import MonoCut

    if values.pop("type", "MonoCut") != "MonoCut":
        raise _damage(shard, f"{values.get('id')!r} is not a MonoCut")
    try:
        kinds = {source["type"] for recording in _recordings(values) for source in recording.get("sources", ())}
        if not kinds <= {"file", "shar"}:
            # lhotse would run a command, or fetch a URL.
            raise _damage(shard, f"a recording of {values.get('id')!r} has a source of type {sorted(kinds)}")
        return MonoCut.from_dict(values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damage(shard, f"{values.get('id')!r} is not a cut: {error!r}") from error


def _recordings(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All that lhotse makes a Recording from: that of the cut, and what looks like one in a ``custom`` mapping."""
    yield values.get("recording") or {}
    for owner in (values, *(values.get("supervisions") or ())):
        yield from (value for value in (owner.get("custom") or {}).values() if isinstance(value, dict))


def _choose_fields(
    directory: Path, dataset: DatasetRecord, fields: Sequence[str] | None, codec: str | None
) -> dict[str, str]:
    """The fields to attach, by the attribute of the cut that each fills."""
    available = {field: field for field in BASE_FIELDS if field != CUTS}
    names = [record.name for record in dataset.codecs]
    if codec is not None and codec not in names:
        raise ConfigError(f"{directory} has no codec {codec!r}; it has {', '.join(names) or 'none'}")
    wants_codes = fields is None or any(field in _CODES for field in fields)
    if wants_codes and codec is None and len(names) > 1:
        raise ConfigError(f"{directory} has the codecs {', '.join(names)}: name one with codec=")
    if names:
        available |= {field: codes_field(codec or names[0], field) for field in _CODES}
    unknown = [field for field in fields or () if field not in available and field != CUTS]
    if unknown:
        raise ConfigError(f"{directory} has no field {unknown[0]!r}; it has {', '.join(available)}")
    return {name: field for name, field in available.items() if fields is None or name in fields}


def _attach_checked(cut: MonoCut, name: str, item: Item, shard: ShardRecord) -> None:
    try:
        _attach(cut, name, item)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        # lhotse's messages may hold all the bytes of the item.
        raise _damage(shard, f"{name} of {cut.id!r} cannot be read: {type(error).__name__} {error!s:.100}") from error


def _attach(cut: MonoCut, name: str, item: Item) -> None:
    from lhotse import Recording
    from lhotse.array import TemporalArray, deserialize_array
    from lhotse.utils import fastcopy

    from sharmill.shar.arrays import TimeLastArray

    metadata: dict[str, Any] = dict(item.metadata or {})
    if item.extension not in _MEMORY_ARRAYS:
        metadata["sources"] = [{"type": "memory", "channels": [0], "source": item.data}]
        recording = Recording.from_dict(metadata)
        setattr(cut, name, recording)
        if name == TARGET_AUDIO:
            cut.recording = fastcopy(recording, id=cut.recording.id)
        return
    stored = {"storage_type": _MEMORY_ARRAYS[item.extension], "storage_path": "", "storage_key": item.data}
    if "array" in metadata:
        metadata["array"] = metadata["array"] | stored
    else:
        metadata |= stored
    array = deserialize_array(metadata)
    if isinstance(array, TemporalArray) and array.temporal_dim in (-1, len(array.shape) - 1):
        array = TimeLastArray(**vars(array))
    setattr(cut, name, array)
