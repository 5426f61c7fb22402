"""Copying of finished datasets to object stores: all other files first, the index last."""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from operator import methodcaller
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec
import xxhash

from sharmill.errors import ConfigError, FatalError, RejectRecord, refuse
from sharmill.files.checksums import checksum
from sharmill.files.clients import FETCHES_AT_ONCE, Version
from sharmill.files.remote import request
from sharmill.files.stored import NOT_JSON
from sharmill.grow.join import SourceDataset
from sharmill.prefetch import prefetch
from sharmill.shar.fields import CUTS, DATASET_FILE, SHARDS_FILE
from sharmill.shar.index import FieldFile, ShardRecord, write_dataset, write_shards

# The number of bytes per request when an object is read back.
_BLOCK_BYTES: Final = 16 << 20


def publish_dataset(
    dataset: str | Path, url: str, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, int]:
    """Copy a finished dataset to an object store, resuming an interrupted copy.

    Each object is read back and compared with the checksum in the dataset's index. Objects that the index in the store
    already lists are skipped, since that index is written last, after all comparisons.

    Args:
        dataset: the dataset directory; another tool may have written its files.
        url: the URL for the dataset in the store. Nothing may exist there, except for an earlier state of the same
            dataset.
        progress: called after each file with the number of finished files and the total number.

    Returns:
        The numbers of files that were ``copied``, and that were already ``there``.

    Raises:
        ConfigError: the dataset does not exist, the store cannot be used, or the URL contains something else.
        DamagedShard: a file of the dataset differs from its index, and was not copied.
        FatalError: the store does not answer, refuses a request, or returns other bytes than were sent.

    Example:
        >>> publish_dataset("data/speech", "s3://bucket/speech")  # doctest: +SKIP
        {'copied': 24, 'there': 0}
    """
    refuse(
        (not re.fullmatch(r"(s3|gs|ais)://[^/?#]+(/[^?#]*)?", url),
         f"{url} is not a place in an object store: use s3://, gs:// or ais://BUCKET/FOLDER"),
        code="bad_usage",
    )  # fmt: skip
    source = SourceDataset.read(Path(dataset), any_tool=True)
    try:
        return _publish(source, url.rstrip("/"), progress)
    except (RejectRecord, OSError) as error:
        problem = error.detail if isinstance(error, RejectRecord) else error
        raise FatalError(
            f"{url} is not complete: {problem}; check that the bucket exists and is writable, and run the same command "
            "again",
            code="disk",
        ) from error


def _publish(source: SourceDataset, url: str, progress: Callable[[int, int], None]) -> dict[str, int]:
    before = {name: _find(f"{url}/{name}") for name in (SHARDS_FILE, DATASET_FILE)}
    listed = _read_listed(url, before)
    if not listed <= {file for shard in source.shards for file in shard.fields.values()}:
        raise _foreign(url)
    written: dict[str, Version] = {}

    def place(item: tuple[ShardRecord, str]) -> None:
        """Copy a file unless it already exists."""
        shard, field = item
        file = shard.fields[field]
        target = f"{url}/{file.file}"
        found = _find(target)
        if found is None:
            written[target] = _upload(source.path(shard, field), target, file.xxh3)
        elif found.size != file.size or (file not in listed and not _holds(target, found, file.size, file.xxh3)):
            raise _foreign(target)

    # Copy the cuts last.
    fields = sorted(source.record.fields, key=lambda field: field == CUTS)
    items = [(shard, field) for field in fields for shard in source.shards if field in shard.fields]
    for done, _ in enumerate(prefetch(place, items, threads=FETCHES_AT_ONCE, ahead=FETCHES_AT_ONCE), 1):
        progress(done, len(items))
    copied = len(written)
    written |= _write_index(source, url, before)
    # Another publisher may have replaced objects after the checks above.
    found = prefetch(_find, written, threads=FETCHES_AT_ONCE, ahead=FETCHES_AT_ONCE)
    for target, version in zip(written, found, strict=True):
        if version != written[target]:
            raise _changed(target)
    return {"copied": copied, "there": len(items) - copied}


def _write_index(source: SourceDataset, url: str, before: Mapping[str, Version | None]) -> dict[str, Version]:
    """Store the index as it was read, since a run may have changed it meanwhile; return the objects' versions by URL.

    Args:
        before: the versions of the index files in the store when this copy began; other versions are not replaced.
    """
    written = {}
    with TemporaryDirectory() as folder:
        write_shards(Path(folder), source.shards)
        write_dataset(Path(folder), source.record)
        for name in (SHARDS_FILE, DATASET_FILE):
            path, target = Path(folder, name), f"{url}/{name}"
            found = _find(target)
            if found is None or not _holds(target, found, path.stat().st_size, checksum(path)):
                if found != before[name]:
                    raise _changed(target)
                found = _upload(path, target, checksum(path), replace=found is not None)
            written[target] = found
    return written


def _read_listed(url: str, index: Mapping[str, Version | None]) -> set[FieldFile]:
    """Return the files that the index in a store lists; raise ConfigError if it is not an index of sharmill.

    Args:
        index: the versions of the files of the index.
    """
    found, target = index[SHARDS_FILE], f"{url}/{SHARDS_FILE}"
    if found is None:
        if index[DATASET_FILE] is not None:
            raise _foreign(f"{url}/{DATASET_FILE}")
        return set()
    try:
        shards = msgspec.json.Decoder(ShardRecord).decode_lines(
            request(target, lambda client: client.read(target, 0, found.size))
        )
    except NOT_JSON:
        raise _foreign(target) from None
    return {file for shard in shards for file in shard.fields.values()}


def _foreign(url: str) -> ConfigError:
    return ConfigError(
        f"{url} already exists, and does not belong to this state of the dataset or an earlier one: choose another "
        "URL, or remove the existing objects",
        code="foreign_output",
    )


def _changed(url: str) -> FatalError:
    return FatalError(
        f"{url} has changed since this command uploaded or checked it: make sure that nothing else publishes to this "
        "URL, and run the same command again",
        code="disk",
    )


def _find(url: str) -> Version | None:
    """Return the version of an object, or None if it does not exist."""
    try:
        return request(url, lambda client: client.version(url))
    except RejectRecord as reject:
        if reject.reason != "missing_audio":
            raise
        return None


def _holds(url: str, found: Version, size: int, xxh3: str) -> bool:
    """Return True if the object, whose version is ``found``, has this size and checksum."""
    if found.size != size:
        return False
    hashed = xxhash.xxh3_64()
    for start in range(0, size, _BLOCK_BYTES):
        hashed.update(request(url, methodcaller("read", url, start, min(start + _BLOCK_BYTES, size))))
    return hashed.hexdigest() == xxh3


def _upload(path: Path, url: str, xxh3: str, *, replace: bool = False) -> Version:
    """Store a file, read it back, and return its version; raise FatalError if the stored object differs."""
    # An earlier attempt whose response was lost, or another publisher of this dataset, may have stored the file
    # already.
    with suppress(FileExistsError):
        request(url, lambda client: client.upload(path, url, replace=replace))
    found = _find(url)
    if found is None or not _holds(url, found, path.stat().st_size, xxh3):
        raise _changed(url)
    return found
