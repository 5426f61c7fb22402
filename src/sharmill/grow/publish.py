"""Copies of finished datasets in object stores: all files first, the index last."""

import re
from collections.abc import Callable
from operator import methodcaller
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec
import xxhash

from sharmill.errors import ConfigError, FatalError, RejectRecord
from sharmill.files.remote import FETCHES_AT_ONCE, request
from sharmill.files.storage import NOT_JSON, checksum
from sharmill.grow.join import SourceDataset
from sharmill.prefetch import prefetch
from sharmill.shar.layout import CUTS, DATASET_FILE, SHARDS_FILE, FieldFile, ShardRecord, write_dataset, write_shards

# Of one request, when an object is read back.
_BLOCK_BYTES: Final = 16 << 20


def publish_dataset(
    dataset: str | Path, url: str, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, int]:
    """Copy a finished dataset to an object store; a copy that was interrupted goes on.

    Each object is read back and compared with the checksum in the dataset's index, unless the index in the store lists
    it: that is written last, when all was compared.

    Args:
        dataset: the dataset directory; another tool may have written its files.
        url: of the dataset in the store, where there is nothing, or an earlier state of the same dataset.
        progress: called after each file with the number of files that are done, and of all.

    Returns:
        The numbers of files that were ``copied``, and that were ``there``.

    Raises:
        ConfigError: there is no such dataset, the store cannot be used, or has something else at this URL.
        DamagedShard: a file of the dataset is not what its index lists, and was not copied.
        FatalError: the store does not answer, refuses, or gives other bytes than it was given.

    Example:
        >>> publish_dataset("data/speech", "s3://bucket/speech")  # doctest: +SKIP
        {'copied': 24, 'there': 0}
    """
    if not re.fullmatch(r"(s3|gs|ais)://[^/?#]+(/[^?#]*)?", url):
        raise ConfigError(
            f"{url} is no place in an object store: name s3://, gs:// or ais://BUCKET/FOLDER", code="bad_usage"
        )
    source = SourceDataset.read(Path(dataset), any_tool=True)
    try:
        return _publish(source, url.rstrip("/"), progress)
    except (RejectRecord, OSError) as error:
        problem = error.detail if isinstance(error, RejectRecord) else error
        raise FatalError(
            f"{url} is not complete: {problem}; see that the bucket is there and may be written, and run the same "
            "command again",
            code="disk",
        ) from error


def _publish(source: SourceDataset, url: str, progress: Callable[[int, int], None]) -> dict[str, int]:
    listed = _read_listed(url)
    if not listed <= {file for shard in source.shards for file in shard.fields.values()}:
        raise _foreign(url)

    def place(item: tuple[ShardRecord, str]) -> bool:
        """Copy a file unless it is there; return True if it was copied."""
        shard, field = item
        file = shard.fields[field]
        target = f"{url}/{file.file}"
        size = _find(target)
        if size is None:
            _upload(source.path(shard, field), target, file.xxh3)
        elif size != file.size or (file not in listed and _read_checksum(target, size) != file.xxh3):
            raise _foreign(target)
        return size is None

    # The cuts last.
    fields = sorted(source.record.fields, key=lambda field: field == CUTS)
    items = [(shard, field) for field in fields for shard in source.shards if field in shard.fields]
    copied = 0
    for done, is_new in enumerate(prefetch(place, items, threads=FETCHES_AT_ONCE, ahead=FETCHES_AT_ONCE), 1):
        copied += is_new
        progress(done, len(items))
    # The index as it was read: a run may have changed it meanwhile.
    with TemporaryDirectory() as folder:
        write_shards(Path(folder), source.shards)
        write_dataset(Path(folder), source.record)
        for path in (Path(folder, SHARDS_FILE), Path(folder, DATASET_FILE)):
            if not _has(f"{url}/{path.name}", path.stat().st_size, checksum(path)):
                _upload(path, f"{url}/{path.name}", checksum(path))
    return {"copied": copied, "there": len(items) - copied}


def _read_listed(url: str) -> set[FieldFile]:
    """Return the files that the index in a store lists; raise ConfigError where that is no index of sharmill's."""
    index = f"{url}/{SHARDS_FILE}"
    size = _find(index)
    if size is None:
        if _find(f"{url}/{DATASET_FILE}") is not None:
            raise _foreign(f"{url}/{DATASET_FILE}")
        return set()
    try:
        shards = msgspec.json.Decoder(ShardRecord).decode_lines(
            request(index, lambda client: client.read(index, 0, size))
        )
    except NOT_JSON:
        raise _foreign(index) from None
    return {file for shard in shards for file in shard.fields.values()}


def _foreign(url: str) -> ConfigError:
    return ConfigError(
        f"{url} is there already, and is not of this state of the dataset or an earlier one: choose another URL, or "
        "remove what is there",
        code="foreign_output",
    )


def _find(url: str) -> int | None:
    """Return the size of an object, or None: there is none."""
    try:
        return request(url, lambda client: client.version(url)).size
    except RejectRecord as reject:
        if reject.reason != "missing_audio":
            raise
        return None


def _has(url: str, size: int, xxh3: str) -> bool:
    """Return True if there is an object of this size and checksum."""
    return _find(url) == size and _read_checksum(url, size) == xxh3


def _read_checksum(url: str, size: int) -> str:
    hashed = xxhash.xxh3_64()
    for start in range(0, size, _BLOCK_BYTES):
        hashed.update(request(url, methodcaller("read", url, start, min(start + _BLOCK_BYTES, size))))
    return hashed.hexdigest()


def _upload(path: Path, url: str, xxh3: str) -> None:
    request(url, lambda client: client.upload(path, url))
    if not _has(url, path.stat().st_size, xxh3):
        raise FatalError(
            f"{url} is not what was sent to the store: remove it, and run the same command again", code="disk"
        )
