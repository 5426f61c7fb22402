"""Stage ``validate``: the checker. One unit is one shard; nothing in the dataset is changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import numpy as np
import xxhash

from sharmill.config import Config
from sharmill.encode.config import EncodeConfig
from sharmill.engine.identity import identify_folder, versions
from sharmill.engine.listener import Listener
from sharmill.engine.plan import read_identity
from sharmill.engine.run import Executor, run_stage
from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Advance, Processor, Stage, add_up
from sharmill.engine.unit import Commit, Output, Totals, Unit, make_unit
from sharmill.errors import FatalError
from sharmill.files.staging import Staging
from sharmill.files.storage import checksum, open_atomic, remove_for_good, write_atomic
from sharmill.files.stored import load_stored_array, read_stored, save_array
from sharmill.shar.layout import DATASET_FILE, SHARDS_FILE
from sharmill.validate.accounts import CUT_HASHES, CutHashes, ExpectedRecords, check_accounts
from sharmill.validate.checked_dataset import (
    CheckedDataset,
    Shard,
    check_index,
    check_strays,
    read_checked_dataset,
    regular_size,
)
from sharmill.validate.config import ValidateConfig
from sharmill.validate.findings import (
    Finding,
    Report,
    encode_report,
    findings_to_lines,
    make_report,
    read_findings,
    read_report,
)
from sharmill.validate.recheck import Rechecker
from sharmill.validate.shard import ShardCheck

# For shards of unknown length, in seconds of audio a byte: FLAC at 16 kHz has some 20 kB a second.
_SECONDS_PER_BYTE: Final = 5e-5
_NOT_DEEP: Final = "samples, silence and clipping: audio was not decoded (--deep)"
# A sparse file of any size is told by its size, which is among the files.
_MAX_INDEX_BYTES: Final = 1 << 32
_NOT_RECHECKED: Final = "whether the codes are those of the audio: none was encoded again (--recheck-codes)"
_NONE_CHOSEN: Final = "whether the codes are those of the audio: no segment fell in the sample, raise --recheck-codes"
_NOT_AGAINST: Final = "completeness: the dataset was not compared with its manifests (--against)"


class ValidateStage(Stage):
    """The check of a dataset, which leaves ``findings.jsonl`` and ``report.json`` in its folder of the run directory.

    Args:
        deep: decode every audio item.
        recheck_codes: the share of segments to encode again; 0 for none.
        codec_models: by codec, what to load for that where the model of the dataset has moved.
        codec_options: by codec, the options of its model.
        against: the manifests and rejects that the dataset is to account for.
    """

    kind: ClassVar[str] = "validate"
    section: ClassVar = ValidateConfig
    after: ClassVar = ("*",)
    replan_when_changed: ClassVar[bool] = True
    reads_rejects: ClassVar[bool] = True

    def __init__(
        self,
        dataset_dir: Path,
        run_dir: RunDir,
        *,
        deep: bool = False,
        recheck_codes: float = 0.0,
        codec_models: Mapping[str, str] | None = None,
        codec_options: Mapping[str, Mapping[str, Any]] | None = None,
        against: ExpectedRecords | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.root = self.dir.path
        self.dataset_dir = dataset_dir
        self.deep = deep
        self.recheck_codes = recheck_codes
        self.codec_models = dict(codec_models or {})
        self.codec_options = dict(codec_options or {})
        self.against = against

    @classmethod
    def of(cls, config: Config) -> list[Self]:
        level, run_dir, against = config.section(ValidateConfig), RunDir(Path(config.run_dir)), None
        if level.against_sources:
            against = ExpectedRecords(sources=tuple(config.sources), rejects=(str(run_dir.rejects),))
        # The checker loads no model because a dataset names it, but those that the configuration names itself.
        codecs = config.section(EncodeConfig).codecs
        own = {codec.name: codec.model for codec in codecs if codec.model != "builtin"}
        stage = cls(
            Path(config.dataset_dir), run_dir, deep=level.deep, recheck_codes=level.recheck_share,
            codec_models=own | level.codec_models if level.recheck_share else level.codec_models, against=against,
            codec_options={codec.name: codec.options for codec in codecs},
        )  # fmt: skip
        return [stage]

    @property
    def findings_file(self) -> Path:
        return self.root / "findings.jsonl"

    @property
    def report_file(self) -> Path:
        return self.root / "report.json"

    def level(self) -> dict[str, Any]:
        """Return what the checks depend on beside the files."""
        return {
            "deep": self.deep,
            "recheck_codes": self.recheck_codes,
            "codec_models": self.codec_models,
            "against": None if self.against is None else self.against.identity(),
        }

    def identity(self) -> dict[str, Any]:
        if self.against is not None:
            self.against.check()
        subject = read_checked_dataset(self.dataset_dir)
        if self.recheck_codes:
            self._rechecker(subject).check()
        return {
            "dataset_dir": identify_folder(self.dataset_dir, self.run_dir.path),
            "input": self._index(),
            # Damage does not change the index: what was checked before may have changed since.
            "files": _fingerprint(self.dataset_dir),
            "level": self.level(),
            "versions": versions(),
        }

    def plan(self, folder: Path) -> Iterator[Unit]:
        for position, shard in enumerate(read_checked_dataset(self.dataset_dir).shards):
            yield make_unit(position, cost=self._cost(shard), size=shard.size, params={"line": position})

    def sees_input(self) -> bool:
        return bool(self._index() == read_identity(self)["input"])

    def open(self, device: str) -> Processor:
        subject = read_checked_dataset(self.dataset_dir)
        recheck = self._rechecker(subject) if self.recheck_codes else None
        if recheck is not None:
            recheck.load()
        return ValidateProcessor(subject.shards, ShardCheck(subject, deep=self.deep, recheck=recheck))

    def finalize(self, units: list[Unit], commits: Iterable[Commit]) -> Totals:
        commits = list(commits)
        subject = read_checked_dataset(self.dataset_dir)
        hashes = CutHashes(subject, [load_stored_array(self.root / commit.files[1].name) for commit in commits])
        found, counts = list[Finding](), dict[str, int]()
        if self.against is not None:
            found, counts = check_accounts(self.against, hashes.records(), compare_texts=subject.is_own)
        with open_atomic(self.findings_file) as merged:
            for findings in (check_index(subject), check_strays(subject), hashes.find_duplicates(), found):
                merged.write(findings_to_lines(findings))
            for commit in commits:
                merged.write(read_stored(self.root / commit.files[0].name))
        checked = _add_up_stats(commits)
        report = make_report(
            self.dataset_dir,
            self.findings(),
            level=self.references.hide(self.level()),
            checked={"shards": len(commits), **checked, **counts},
            unchecked=[*subject.unchecked, *self._unchecked(checked, hashes)],
            fields=subject.dataset.added_fields if subject.dataset else (),
            foreign=subject.dataset is not None and not subject.is_own,
        )
        write_atomic(self.report_file, encode_report(report))
        return add_up(commits)

    def products(self) -> list[Path]:
        return [self.findings_file, self.report_file]

    def discard(self) -> None:
        remove_for_good(self.products())

    def findings(self) -> list[Finding]:
        """Read the findings of the finished validation."""
        return read_findings(self.findings_file)

    def report(self) -> Report:
        """Read the report of the finished validation."""
        return read_report(self.report_file)

    def _index(self) -> list[str]:
        """Return the checksums of the files of the index that are there and not far too large."""
        paths = [self.dataset_dir / name for name in (DATASET_FILE, SHARDS_FILE)]
        return [checksum(path) for path in paths if path.is_file() and path.stat().st_size <= _MAX_INDEX_BYTES]

    def _unchecked(self, checked: dict[str, float], hashes: CutHashes) -> Iterator[str]:
        """Yield what this level leaves unchecked, a phrase each."""
        for name, number in checked.items():
            if name.startswith("unchecked "):
                yield f"{number:.0f} {name.removeprefix('unchecked ')}: nothing is known of such data"
        if not self.deep:
            yield _NOT_DEEP
        if not self.recheck_codes:
            yield _NOT_RECHECKED
        elif not checked.get("segments encoded again"):
            yield _NONE_CHOSEN
        if self.against is None:
            yield _NOT_AGAINST
        elif unknown := int((hashes.column("record") == 0).sum()):
            yield f"which records {unknown} cuts came from: they do not say"

    def _rechecker(self, subject: CheckedDataset) -> Rechecker:
        return Rechecker(subject, self.recheck_codes, self.codec_models, self.codec_options)

    def _cost(self, shard: Shard) -> float:
        if shard.record is not None:
            return round(shard.record.target_seconds + shard.record.context_seconds, 3)
        paths = [self.dataset_dir / file for file in shard.files.values()]
        return round(sum(regular_size(path) or 0 for path in paths) * _SECONDS_PER_BYTE, 3)


class ValidateProcessor(Processor):
    """The check of shards in one rank."""

    def __init__(self, shards: Sequence[Shard], check: ShardCheck) -> None:
        self._shards = shards
        self._check = check

    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        shard = self._shards[unit.params["line"]]
        checked = self._check(shard, advance)
        findings, hashes = f"parts/{unit.index:06d}.findings.jsonl", f"parts/{unit.index:06d}.npy"
        staging.path(findings).write_bytes(findings_to_lines(checked.findings))
        save_array(staging.path(hashes), np.array(checked.hashes, dtype=CUT_HASHES))
        seconds = shard.record.target_seconds if shard.record else 0.0
        stats = {"seconds": seconds, "checked": checked.stats}
        return Output(files=[findings, hashes], num_out=unit.size, stats=stats)


def _add_up_stats(commits: Iterable[Commit]) -> dict[str, float]:
    total: dict[str, float] = {}
    for commit in commits:
        for name, number in commit.stats["checked"].items():
            total[name] = total.get(name, 0) + number
    rounded = {name: round(number, 3) for name, number in sorted(total.items())}
    return {name: int(number) if number == int(number) else number for name, number in rounded.items()}


def _fingerprint(directory: Path) -> str:
    """Return a hash of the names, sizes and times of all files.

    The time of change is among them, for copying may keep that of the content.
    """
    digest = xxhash.xxh3_64()
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        found = [path.relative_to(directory).as_posix(), status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        digest.update(repr(found).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def validate_dataset(
    dataset_dir: Path,
    scratch: Path,
    listener: Listener,
    level: ValidateConfig,
    executor: Executor,
    against: ExpectedRecords | None = None,
) -> Report:
    """Check a dataset that need not have a run directory; ``scratch`` is a folder that may be removed afterwards.

    Raises:
        ConfigError: there is no dataset, or what it is to be compared with cannot be used.
        FatalError: a unit of the check failed.
    """
    stage = ValidateStage(
        dataset_dir, RunDir(scratch), deep=level.deep, recheck_codes=level.recheck_share,
        codec_models=level.codec_models, against=against,
    )  # fmt: skip
    result = run_stage(stage, executor, listener, max_reject_fraction=0.0)
    if not result.ok:
        reasons = "; ".join(error.message for error in result.failures.values())
        raise FatalError(f"the check itself failed: {reasons}", code="units_failed")
    return stage.report()
