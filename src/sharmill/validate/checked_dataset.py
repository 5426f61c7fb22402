"""The dataset being checked: the shards in its index or, without an intact index, the shards found in its folders.

This module also makes the checks that read no shards: whether the index is consistent, and whether all files belong to
a shard.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Final, TypeVar

from sharmill.errors import ConfigError, DamagedShard
from sharmill.files.location import Location, RemoteLocation, is_remote
from sharmill.shar.fields import DATASET_FILE, INDEX_PACK_FILE, SHARDS_FILE, sidecar_files
from sharmill.shar.index import CodecRecord, DatasetRecord, ShardRecord, read_dataset, read_shards
from sharmill.shar.rebuild import find_shards
from sharmill.validate.findings import Finding

Read = TypeVar("Read")

# Tolerance in seconds. The index rounds seconds to three decimals, and the rounding errors add up.
SECONDS_TOLERANCE: Final = 2e-3


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard: its files, relative to the dataset directory, and its record in the index."""

    index: int
    files: dict[str, str]
    record: ShardRecord | None

    @property
    def size(self) -> int:
        """The number of cuts according to the index; 0 without an index."""
        return self.record.count if self.record else 0

    def finding(self, code: str, field: str, sentence: str, *, member: str | None = None,
                file: str | None = None) -> Finding:  # fmt: skip
        """Return a finding about a field of this shard."""
        return Finding(code=code, sentence=sentence, shard=self.index, field=field, file=file, member=member)


@dataclass(frozen=True)
class CheckedDataset:
    """A dataset directory as found on disk.

    Attributes:
        dataset: the content of ``dataset.json``, if it can be read.
        findings: findings about files of the index that cannot be read.
        unchecked: phrases that name what cannot be checked in this dataset, whatever checks are requested.
        has_index: True if at least one file of sharmill's index exists, so that all files not listed are strays.
    """

    directory: Location
    dataset: DatasetRecord | None
    shards: list[Shard]
    findings: list[Finding]
    unchecked: list[str]
    has_index: bool

    @cached_property
    def fields(self) -> list[str]:
        """The fields that every shard should have: from the index or, without it, all fields that any shard has."""
        return (
            self.dataset.fields if self.dataset else sorted({field for shard in self.shards for field in shard.files})
        )

    @property
    def is_own(self) -> bool:
        """True if the cuts must satisfy sharmill's contract."""
        return self.dataset is not None and self.dataset.contract == "sharmill"

    @property
    def codecs(self) -> list[CodecRecord]:
        return self.dataset.codecs if self.dataset else []


def read_checked_dataset(directory: Location) -> CheckedDataset:
    """Read the index of a directory, or list its shards if there is no index.

    Raises:
        ConfigError: there is no dataset, or its format version is not supported.
    """
    has_index = (directory / DATASET_FILE).exists() or (directory / SHARDS_FILE).exists()
    dataset, records, findings = None, None, list[Finding]()
    if has_index:
        dataset = _read(directory, DATASET_FILE, read_dataset, findings)
        records = _read(directory, SHARDS_FILE, lambda folder: list(read_shards(folder)), findings)
    found = records
    if found is None:
        found = [] if isinstance(directory, RemoteLocation) else _find_shards(directory, has_index)
    shards = [Shard(shard.index, shard.files, None if records is None else shard) for shard in found]
    is_own = dataset is not None and dataset.contract == "sharmill"
    causes = (
        (records is None, f"sizes and checksums of the files: there is no readable {SHARDS_FILE}"),
        (records is None, "missing shards at the beginning or end: the expected number of shards is unknown"),
        (dataset is None, f"the limits of contexts, and totals: there is no readable {DATASET_FILE}"),
        (dataset is None, "the range of codes and the exact number of their frames: no codec is recorded"),
        (is_remote(directory), "stray files: folders at a URL cannot be listed"),
        (not has_index, "stray files: without an index it is unknown which files belong to the dataset"),
        (not is_own, "speaker tags, contexts and provenance of cuts: another tool wrote them, without such guarantees"),
    )  # fmt: skip
    return CheckedDataset(
        directory, dataset, shards, findings, [phrase for is_so, phrase in causes if is_so], has_index
    )


def _find_shards(directory: Path, has_index: bool) -> list[ShardRecord]:
    try:
        return find_shards(directory, complete=False)
    except ConfigError as error:
        if has_index:
            raise
        raise ConfigError(
            f"{directory} is neither a finished dataset nor a Shar of another tool: {error}", code="no_dataset"
        ) from error


def _read(directory: Location, name: str, read: Callable[[Location], Read], findings: list[Finding]) -> Read | None:
    """Return the content of a file of the index; if it cannot be read, add a finding and return None."""
    if not (directory / name).is_file():
        findings.append(Finding(code="missing_file", file=name, sentence="the file is missing"))
        return None
    try:
        return read(directory)
    except DamagedShard as error:
        findings.append(Finding(code="damaged", file=name, sentence=str(error)))
        return None


def _disagreements(dataset: DatasetRecord, shards: Sequence[Shard]) -> Iterator[str]:
    """Yield a sentence about each total and field of ``dataset.json`` that is wrong."""
    records = [shard.record for shard in shards if shard.record is not None]
    if len(records) == len(shards):
        counted = (len(records), sum(record.count for record in records))
        recorded = (dataset.num_shards, dataset.num_cuts)
        if counted != recorded:
            yield f"shards and cuts are {counted} in {SHARDS_FILE}, but {recorded} in {DATASET_FILE}"
        for name in ("target_seconds", "context_seconds"):
            total = sum(getattr(record, name) for record in records)
            if abs(total - getattr(dataset, name)) > SECONDS_TOLERANCE:
                yield f"{name} is {total:.3f} in {SHARDS_FILE}, but {getattr(dataset, name)} in {DATASET_FILE}"
    if dataset.contract == "sharmill":
        yield from dataset.contradictions()
        if dataset.added_fields:
            # Import here, so that a check of a dataset without added fields does not load lhotse.
            from sharmill.shar.reading.cuts import is_method_of_cuts

            for field in dataset.added_fields:
                if is_method_of_cuts(field.attribute):
                    yield f"the field {field.name} has the name of the method {field.attribute} of cuts"


def check_directory(subject: CheckedDataset) -> Iterator[Finding]:
    """Yield disagreements between ``shards.jsonl`` and ``dataset.json``, and files that belong to no shard."""
    yield from subject.findings
    # Other tools may begin with a number other than 0, as lhotse does with shard_offset.
    first = subject.shards[0].index if subject.shards and not subject.is_own else 0
    if [shard.index for shard in subject.shards] != list(range(first, first + len(subject.shards))):
        yield Finding(
            code="index_gap",
            sentence=f"the indices do not run from {first} without gaps",
            file=SHARDS_FILE if subject.has_index else None,
        )
    if subject.dataset is not None:
        for sentence in _disagreements(subject.dataset, subject.shards):
            yield Finding(code="wrong_totals", sentence=sentence, file=DATASET_FILE)
    if not subject.has_index or isinstance(subject.directory, RemoteLocation):
        return  # it is unknown which files belong to a shard, or the folders at a URL cannot be listed
    expected = {DATASET_FILE, SHARDS_FILE} | {file for shard in subject.shards for file in shard.files.values()}
    expected |= {sidecar for file in expected for sidecar in sidecar_files(file)} | {INDEX_PACK_FILE}
    folders = {parent.as_posix() for file in expected for parent in PurePosixPath(file).parents}
    for path in sorted(subject.directory.rglob("*")):
        name = path.relative_to(subject.directory).as_posix()
        if path.is_dir() and (name in folders or not path.is_symlink()):
            if name not in folders | expected and not any(path.iterdir()):
                yield Finding(code="stray_file", sentence="the empty folder does not belong to the dataset", file=name)
        elif name not in expected:
            yield Finding(code="stray_file", sentence="the file does not belong to the dataset", file=name)
