"""The checks over a whole dataset: its index, its files, and the ids of all shards together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np
import xxhash

from sharmill.errors import DamagedShard
from sharmill.shar.cut_lines import read_cuts
from sharmill.shar.index import DatasetRecord, ShardRecord
from sharmill.shar.layout import BASE_FIELDS, CUTS, DATASET_FILE, SHARDS_FILE, codec_fields, sidecar_files
from sharmill.validate.accounts import RECORD_HASHES, NamedRecord, Records, find_records
from sharmill.validate.checked_dataset import CheckedDataset
from sharmill.validate.findings import Finding

# A sum of seconds with three decimals each.
_SECONDS_TOLERANCE: Final = 2e-3
# What the check of a shard leaves of its cuts, for those over the whole dataset.
CUT_HASHES: Final = np.dtype([("id", "u8"), *RECORD_HASHES.descr])


def check_index(subject: CheckedDataset) -> Iterator[Finding]:
    """Yield where ``shards.jsonl`` and ``dataset.json`` disagree with each other."""
    yield from subject.findings
    if [shard.index for shard in subject.shards] != list(range(len(subject.shards))):
        file = SHARDS_FILE if subject.has_index else None
        yield Finding(code="index_gap", sentence="the indices do not run from 0 without gaps", file=file)
    records = [shard.record for shard in subject.shards if shard.record is not None]
    if subject.dataset is not None and len(records) == len(subject.shards):
        yield from _check_totals(subject.dataset, records)
    if subject.dataset is not None and subject.is_own:
        codes = {field for codec in subject.codecs for field in codec_fields(codec.name)}
        for field, times in Counter(subject.dataset.fields).items():
            if times > 1:
                yield _of_dataset(f"the field {field} is named {times} times")
        for field in sorted({*BASE_FIELDS, *codes} ^ set(subject.dataset.fields)):
            wrong = "is not of its codecs" if field in subject.dataset.fields else "is missing"
            yield _of_dataset(f"the field {field} {wrong}")


def _check_totals(dataset: DatasetRecord, shards: Sequence[ShardRecord]) -> Iterator[Finding]:
    counted = (len(shards), sum(shard.count for shard in shards))
    recorded = (dataset.num_shards, dataset.num_cuts)
    if counted != recorded:
        yield _of_dataset(f"shards and cuts are {counted} in {SHARDS_FILE}, {recorded} in {DATASET_FILE}")
    for name in ("target_seconds", "context_seconds"):
        total = sum(getattr(shard, name) for shard in shards)
        if abs(total - getattr(dataset, name)) > _SECONDS_TOLERANCE:
            yield _of_dataset(f"{name} is {total:.3f} in {SHARDS_FILE}, {getattr(dataset, name)} in {DATASET_FILE}")


def _of_dataset(sentence: str) -> Finding:
    return Finding(code="wrong_totals", sentence=sentence, file=DATASET_FILE)


def check_strays(subject: CheckedDataset) -> Iterator[Finding]:
    """Yield the files that belong to no shard. In a folder without an index, nothing tells which those are."""
    if not subject.has_index:
        return
    expected = {DATASET_FILE, SHARDS_FILE} | {file for shard in subject.shards for file in shard.files.values()}
    expected |= {sidecar for file in expected for sidecar in sidecar_files(file)}
    folders = {parent.as_posix() for file in expected for parent in PurePosixPath(file).parents}
    for path in sorted(subject.directory.rglob("*")):
        name = path.relative_to(subject.directory).as_posix()
        if path.is_dir() and (name in folders or not path.is_symlink()):
            if name not in folders | expected and not any(path.iterdir()):
                yield Finding(code="stray_file", sentence="the empty folder does not belong to the dataset", file=name)
        elif name not in expected:
            yield Finding(code="stray_file", sentence="the file does not belong to the dataset", file=name)


@dataclass(frozen=True)
class CutHashes:
    """The hashes of all cuts, one array (cuts,) of ``CUT_HASHES`` for each shard."""

    subject: CheckedDataset
    parts: Sequence[np.ndarray]

    @classmethod
    def load(cls, subject: CheckedDataset, paths: Sequence[Path]) -> CutHashes:
        return cls(subject, [np.load(path, allow_pickle=False) for path in paths])

    def column(self, name: str) -> np.ndarray:
        parts = [part[name] for part in self.parts]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint64)

    def find_duplicates(self) -> Iterator[Finding]:
        """Yield a finding for every cut whose id occurs more than once: nothing tells which is the right one."""
        ids = np.sort(self.column("id"))
        repeated = np.unique(ids[1:][ids[1:] == ids[:-1]])
        if not len(repeated):
            return
        places: dict[str, list[int]] = {}
        for index, cut in self._cuts("id", repeated):
            if xxhash.xxh3_64_intdigest(str(cut.get("id")).encode("utf-8", "surrogatepass")) in repeated:
                places.setdefault(str(cut.get("id")), []).append(index)
        for cut_id, shards in places.items():
            # Different ids may have the same hash.
            if len(shards) > 1:
                sentence = f"{len(shards)} cuts have this id, in the shards {', '.join(map(str, shards[:10]))}"
                for shard in sorted(set(shards)):
                    yield Finding(code="duplicate_id", sentence=sentence, shard=shard, field=CUTS, member=cut_id)

    def records(self) -> Records:
        """Return the records that the cuts came from, those that say so."""
        hashes = np.empty(sum(map(len, self.parts)), dtype=RECORD_HASHES)
        hashes["record"], hashes["text"] = self.column("record"), self.column("text")
        return Records(hashes[hashes["record"] != 0], self._find_records)

    def _find_records(self, column: str, wanted: set[int]) -> Iterator[NamedRecord]:
        return find_records(self._cuts(column, np.fromiter(wanted, np.uint64, len(wanted))), column, wanted)

    def _cuts(self, column: str, wanted: np.ndarray) -> Iterator[tuple[int, dict[str, Any]]]:
        """Read again the cuts of the shards that have any of the hashes."""
        for shard, part in zip(self.subject.shards, self.parts, strict=True):
            if CUTS in shard.files and np.isin(part[column], wanted).any():
                try:
                    for cut in read_cuts(self.subject.directory / shard.files[CUTS]):
                        yield shard.index, cut
                except DamagedShard:
                    return  # changed since its check, which the next one will find
