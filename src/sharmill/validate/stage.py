"""Stage ``validate``: the checker. One unit is one shard; nothing in the dataset is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import msgspec
import numpy as np
import xxhash

from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Stage, add_up
from sharmill.engine.unit import Commit, Output, Totals, Unit, make_unit
from sharmill.engine.versions import versions
from sharmill.errors import ConfigError, DamagedShard
from sharmill.manifest import iterate_lines, write_lines
from sharmill.shar.index import DatasetRecord, ShardRecord, read_dataset, read_shards
from sharmill.shar.layout import (
    BASE_FIELDS,
    CONTEXT_CODES,
    DATASET_FILE,
    SHARDS_FILE,
    TARGET_CODES,
    codes_field,
)
from sharmill.store import Staging, checksum, open_atomic
from sharmill.validate.findings import Finding, findings_to_lines, read_findings
from sharmill.validate.shard import ShardCheck

# A sum of seconds with three decimals each.
_SECONDS_TOLERANCE = 2e-3


class ValidateStage(Stage):
    """Checks a finished dataset and leaves ``findings.jsonl`` in its folder of the run directory."""

    replan_when_changed: ClassVar[bool] = True

    def __init__(self, dataset_dir: Path, run_dir: RunDir, *, deep: bool = False) -> None:
        self.name = "validate"
        self.run_dir = run_dir
        self.root = self.dir.path
        self.dataset_dir = dataset_dir
        self.deep = deep
        self._check: ShardCheck | None = None
        self._shards: list[ShardRecord] = []

    @property
    def findings_file(self) -> Path:
        return self.root / "findings.jsonl"

    def identity(self) -> dict[str, Any]:
        try:
            read_dataset(self.dataset_dir)
            for _ in read_shards(self.dataset_dir):
                pass
        except DamagedShard as error:
            raise ConfigError(
                f"the index of the dataset is damaged, so that nothing can be checked: {error}"
            ) from error
        return {
            "dataset_dir": str(self.dataset_dir.absolute()),
            "input": [checksum(self.dataset_dir / name) for name in (DATASET_FILE, SHARDS_FILE)],
            # Damage does not change the index: what was checked before may have changed since.
            "files": _fingerprint(self.dataset_dir),
            "deep": self.deep,
            "versions": versions(),
        }

    def plan(self, folder: Path) -> Iterator[Unit]:
        for position, shard in enumerate(read_shards(self.dataset_dir)):
            seconds = round(shard.target_seconds + shard.context_seconds, 3)
            yield make_unit(position, cost=seconds, size=shard.count, params={"line": position})

    def setup(self, device: str) -> None:
        self._check = ShardCheck(self.dataset_dir, read_dataset(self.dataset_dir), self.deep)
        self._shards = list(read_shards(self.dataset_dir))

    def process(self, unit: Unit, staging: Staging) -> Output:
        assert self._check is not None
        shard = self._shards[unit.params["line"]]
        findings, ids = self._check(shard)
        part = f"parts/{unit.index:06d}"
        staging.path(f"{part}.findings.jsonl").write_bytes(findings_to_lines(findings))
        write_lines(staging.path(f"{part}.ids.jsonl"), map(msgspec.json.encode, ids))
        return Output(
            files=[f"{part}.findings.jsonl", f"{part}.ids.jsonl"],
            num_out=unit.size,
            stats={"seconds": shard.target_seconds},
        )

    def finalize(self, units: list[Unit], commits: Iterable[Commit]) -> Totals:
        commits = list(commits)
        dataset, shards = read_dataset(self.dataset_dir), list(read_shards(self.dataset_dir))
        whole = [
            *_check_totals(dataset, shards),
            *_check_strays(self.dataset_dir, shards),
            *_check_duplicates([self.root / commit.files[1].name for commit in commits]),
        ]
        with open_atomic(self.findings_file) as merged:
            merged.write(findings_to_lines(whole))
            for commit in commits:
                merged.write((self.root / commit.files[0].name).read_bytes())
        return add_up(commits)

    def products(self) -> list[Path]:
        return [self.findings_file]

    def findings(self) -> list[Finding]:
        """What the finished validation found."""
        return read_findings(self.findings_file)


def _fingerprint(directory: Path) -> str:
    """Of the names, sizes and times of all files: the time of change too, for copying may keep that of the content."""
    digest = xxhash.xxh3_64()
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        found = [path.relative_to(directory).as_posix(), status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        digest.update(repr(found).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _check_totals(dataset: DatasetRecord, shards: list[ShardRecord]) -> Iterator[Finding]:
    if [shard.index for shard in shards] != list(range(len(shards))):
        yield _dataset_finding("index_gap", SHARDS_FILE, "the indices do not run from 0 without gaps")
    counted = (len(shards), sum(shard.count for shard in shards))
    recorded = (dataset.num_shards, dataset.num_cuts)
    if counted != recorded:
        sentence = f"shards and cuts are {counted} in {SHARDS_FILE}, {recorded} in {DATASET_FILE}"
        yield _dataset_finding("wrong_totals", DATASET_FILE, sentence)
    for name in ("target_seconds", "context_seconds"):
        total = sum(getattr(shard, name) for shard in shards)
        if abs(total - getattr(dataset, name)) > _SECONDS_TOLERANCE:
            sentence = f"{name} is {total:.3f} in {SHARDS_FILE}, {getattr(dataset, name)} in {DATASET_FILE}"
            yield _dataset_finding("wrong_totals", DATASET_FILE, sentence)
    codes = {codes_field(codec.name, field) for codec in dataset.codecs for field in (TARGET_CODES, CONTEXT_CODES)}
    for field, times in Counter(dataset.fields).items():
        if times > 1:
            yield _dataset_finding("wrong_totals", DATASET_FILE, f"the field {field} is named {times} times")
    for field in sorted({*BASE_FIELDS, *codes} ^ set(dataset.fields)):
        wrong = "is not of its codecs" if field in dataset.fields else "is missing"
        yield _dataset_finding("wrong_totals", DATASET_FILE, f"the field {field} {wrong}")


def _check_strays(directory: Path, shards: list[ShardRecord]) -> Iterator[Finding]:
    expected = {DATASET_FILE, SHARDS_FILE} | {file.file for shard in shards for file in shard.fields.values()}
    folders = {parent.as_posix() for file in expected for parent in PurePosixPath(file).parents}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_dir() and (name in folders or not path.is_symlink()):
            if name not in folders | expected and not any(path.iterdir()):
                yield _dataset_finding("stray_file", name, "the empty folder does not belong to the dataset")
        elif name not in expected:
            yield _dataset_finding("stray_file", name, "the file does not belong to the dataset")


def _check_duplicates(id_files: Sequence[Path]) -> Iterator[Finding]:
    """In two passes, so that only a hash of each id is in memory, and the ids whose hashes repeat."""
    hashes = np.fromiter((xxhash.xxh3_64_intdigest(line) for line in _lines(id_files)), dtype=np.uint64)
    hashes.sort()
    repeated = frozenset(hashes[1:][hashes[1:] == hashes[:-1]].tolist())
    if not repeated:
        return
    counts = Counter(line for line in _lines(id_files) if xxhash.xxh3_64_intdigest(line) in repeated)
    for cut_id, count in counts.items():
        if count > 1:
            yield _dataset_finding("duplicate_id", msgspec.json.decode(cut_id), f"{count} cuts have this id")


def _lines(paths: Iterable[Path]) -> Iterator[bytes]:
    return (line for path in paths for line in iterate_lines(path))


def _dataset_finding(code: str, where: str, sentence: str) -> Finding:
    return Finding(code=code, shard=None, where=where, sentence=sentence)
