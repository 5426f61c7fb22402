"""Stage ``validate``: the checker. One unit is one shard; nothing in the dataset is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Stage, add_up
from sharmill.engine.unit import Commit, Output, Totals, Unit, make_unit
from sharmill.engine.versions import versions
from sharmill.errors import ConfigError, DamagedShard
from sharmill.manifest import iterate_lines
from sharmill.shar.index import DatasetRecord, ShardRecord, read_dataset, read_shards
from sharmill.shar.layout import DATASET_FILE, SHARDS_FILE, lhotse_field
from sharmill.store import Staging, checksum, open_atomic
from sharmill.validate.findings import Finding, findings_to_lines, read_findings
from sharmill.validate.shard import ShardCheck


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
            dataset = read_dataset(self.dataset_dir)
            count = sum(1 for _ in read_shards(self.dataset_dir))
        except DamagedShard as error:
            raise ConfigError(
                f"the index of the dataset is damaged, so that nothing can be checked: {error}"
            ) from error
        return {
            "dataset_dir": str(self.dataset_dir.absolute()),
            "input": [checksum(self.dataset_dir / name) for name in (DATASET_FILE, SHARDS_FILE)],
            # Damage does not change the index: what was checked before may have changed since.
            "files": [dataset.num_shards, count, *_file_times(self.dataset_dir)],
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
        staging.path(f"{part}.ids.txt").write_bytes("".join(f"{cut_id}\n" for cut_id in ids).encode())
        return Output(
            files=[f"{part}.findings.jsonl", f"{part}.ids.txt"],
            num_out=unit.size,
            stats={"seconds": shard.target_seconds},
        )

    def finalize(self, units: list[Unit], commits: Iterable[Commit]) -> Totals:
        commits = list(commits)
        dataset, shards = read_dataset(self.dataset_dir), list(read_shards(self.dataset_dir))
        whole = [
            *_check_totals(dataset, shards),
            *_check_strays(self.dataset_dir, shards),
            *_check_duplicates(self.root / commit.files[1].name for commit in commits),
        ]
        with open_atomic(self.findings_file) as merged:
            merged.write(findings_to_lines(whole))
            for commit in commits:
                merged.write((self.root / commit.files[0].name).read_bytes())
        return add_up(commits)

    def findings(self) -> list[Finding]:
        """What the finished validation found."""
        return read_findings(self.findings_file)


def _file_times(directory: Path) -> list[int]:
    """The newest change in the dataset and the number of its files."""
    times = [path.stat().st_mtime_ns for path in directory.rglob("*")]
    return [max(times, default=0), len(times)]


def _check_totals(dataset: DatasetRecord, shards: list[ShardRecord]) -> Iterator[Finding]:
    if [shard.index for shard in shards] != list(range(len(shards))):
        yield _dataset_finding("index_gap", SHARDS_FILE, "the indices do not run from 0 without gaps")
    counted = (len(shards), sum(shard.count for shard in shards))
    recorded = (dataset.num_shards, dataset.num_cuts)
    if counted != recorded:
        sentence = f"shards and cuts are {counted} in {SHARDS_FILE}, {recorded} in {DATASET_FILE}"
        yield _dataset_finding("wrong_totals", DATASET_FILE, sentence)
    known = {field for codec in dataset.codecs for field in dataset.fields if field.startswith(f"codes_{codec.name}/")}
    unknown = [field for field in dataset.fields if "/" in field and field not in known]
    if unknown:
        sentence = f"there is no codec for the fields {', '.join(map(lhotse_field, unknown))}"
        yield _dataset_finding("wrong_totals", DATASET_FILE, sentence)


def _check_strays(directory: Path, shards: list[ShardRecord]) -> Iterator[Finding]:
    expected = {DATASET_FILE, SHARDS_FILE} | {file.file for shard in shards for file in shard.fields.values()}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if not path.is_dir() and name not in expected:
            yield _dataset_finding("stray_file", name, "the file does not belong to the dataset")


def _check_duplicates(id_files: Iterable[Path]) -> Iterator[Finding]:
    counts = Counter(line for path in id_files for line in iterate_lines(path))
    for cut_id, count in counts.items():
        if count > 1:
            yield _dataset_finding("duplicate_id", cut_id.decode(), f"{count} cuts have this id")


def _dataset_finding(code: str, where: str, sentence: str) -> Finding:
    return Finding(code=code, shard=None, where=where, sentence=sentence)
