"""Stage ``validate``: the checker. One unit is one shard; nothing in the dataset is changed."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import xxhash

from sharmill.config import Config, Precision, Presence, StageSection, require
from sharmill.encode.config import EncodeConfig
from sharmill.engine.stage import (
    Commit,
    Processor,
    RunDir,
    Stage,
    Totals,
    Unit,
    add_up,
    identify_folder,
    make_unit,
    versions,
)
from sharmill.errors import refuse
from sharmill.files.atomic import write_atomic
from sharmill.files.cache import RemoteFile
from sharmill.files.checksums import checksum
from sharmill.files.stored import load_record, read_records
from sharmill.models import find_recorded_codec, load_recorded_codec
from sharmill.shar.fields import DATASET_FILE, SHARDS_FILE
from sharmill.validate.accounts import ExpectedRecords, RecordRow, open_accounts
from sharmill.validate.checked_dataset import check_directory, read_checked_dataset
from sharmill.validate.findings import Finding, Report, encode_report, make_report, read_report
from sharmill.validate.shard import ValidateProcessor

# A sparse file of any size is told by its size, which is among the files.
_MAX_INDEX_BYTES: Final = 1 << 32


@dataclass(frozen=True, kw_only=True)
class ValidateConfig(StageSection):
    """Checks beyond those that the stage ``validate`` always makes."""

    presence: ClassVar[Presence] = "always"

    deep: bool = False
    """Decode all audio as well."""
    recheck_codes: float | str = 0.0
    """Share of the segments to encode again, such as ``0.001`` or ``0.1%``."""
    codec_models: dict[str, str] = field(default_factory=dict)
    """Model of each codec, where it is not the one that made the codes: ``{nano: "nemo:/new/place/model.nemo"}``."""
    against_sources: bool = False
    """Account for every record of the sources: each is in the dataset or among the rejects."""

    def __post_init__(self) -> None:
        require(0 <= self.recheck_share <= 1, "recheck_codes must be a share between 0 and 1, or a percentage")

    @property
    def recheck_share(self) -> float:
        """``recheck_codes`` as a number; -1 where it is none."""
        text = str(self.recheck_codes).strip()
        try:
            return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            return -1.0


class ValidateStage(Stage):
    """The check of a dataset, which leaves ``report.json`` in its folder of the run directory.

    Args:
        level: checks beyond those that are always made.
        codec_options: by codec, the options of its model.
        against: the manifests and rejects that the dataset is to account for.
    """

    kind: ClassVar[str] = "validate"
    section: ClassVar = ValidateConfig
    after: ClassVar = ("*",)
    replan_when_changed: ClassVar[bool] = True

    def __init__(
        self,
        dataset_dir: Path,
        run_dir: RunDir,
        level: ValidateConfig | None = None,
        *,
        codec_options: Mapping[str, Mapping[str, Any]] | None = None,
        against: ExpectedRecords | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.root = self.dir.path
        self.dataset_dir = dataset_dir
        self.level = level or ValidateConfig()
        self.codec_options = codec_options or {}
        self.against = against

    @classmethod
    def of(cls, config: Config) -> list[Self]:
        level, run_dir, against = config.section(ValidateConfig), RunDir(Path(config.run_dir)), None
        if level.against_sources:
            against = ExpectedRecords(sources=tuple(config.sources), rejects=(str(run_dir.rejects),))
        codecs = config.section(EncodeConfig).codecs
        if level.recheck_share:
            # The checker loads no model because a dataset names it, but those that the configuration names itself.
            own = {codec.name: codec.model for codec in codecs if codec.model != "builtin"}
            level = replace(level, codec_models=own | level.codec_models)
        return [cls(
            Path(config.dataset_dir), run_dir, level, codec_options={codec.name: codec.options for codec in codecs},
            against=against,
        )]  # fmt: skip

    @property
    def report_file(self) -> Path:
        return self.root / "report.json"

    def describe_level(self) -> dict[str, Any]:
        """Return what the checks depend on beside the files."""
        return {
            "deep": self.level.deep,
            "recheck_codes": self.level.recheck_share,
            "codec_models": self.level.codec_models,
            "against": None if self.against is None else self.against.identity(),
        }

    def identity(self) -> dict[str, Any]:
        if self.against is not None:
            self.against.check()
        subject = read_checked_dataset(self.dataset_dir)
        if self.level.recheck_share:
            models = self.level.codec_models
            unknown = sorted(models.keys() - {codec.name for codec in subject.codecs})
            refuse(
                (not subject.codecs, f"--recheck-codes: {self.dataset_dir} records no codec"),
                (unknown, f"--codec-model: {self.dataset_dir} has no codec {', '.join(map(repr, unknown))}"),
                code="unknown_codec",
            )
            for codec in subject.codecs:
                find_recorded_codec(codec, models.get(codec.name), self.codec_options.get(codec.name, {}))
        is_remote = isinstance(self.dataset_dir, RemoteFile)
        return {
            "dataset_dir": str(self.dataset_dir) if is_remote else identify_folder(self.dataset_dir, self.run_dir.path),
            "input": self._index(),
            # Damage does not change the index: what was checked before may have changed since. A check of a URL is
            # never resumed.
            "files": "" if is_remote else _fingerprint(self.dataset_dir),
            "level": self.describe_level(),
            "versions": versions(),
        }

    def plan(self, folder: Path) -> Iterator[Unit]:
        for position, shard in enumerate(read_checked_dataset(self.dataset_dir).shards):
            # Without an index, which alone tells the seconds of audio, all shards are alike.
            cost = 1.0 if shard.record is None else round(sum(shard.record.seconds.values()), 3)
            yield make_unit(position, cost=cost, size=shard.size, params={"line": position})

    def sees_input(self) -> bool:
        return bool(self._index() == load_record(self.dir.identity, dict[str, Any])["input"])

    def open(self, device: str) -> Processor:
        subject, level = read_checked_dataset(self.dataset_dir), self.level
        codecs = {}
        for record in subject.codecs if level.recheck_share else ():
            # The check computes on a CPU, which has no tf32.
            precision: Precision = "bf16" if record.precision == "bf16" else "fp32"
            given, options = level.codec_models.get(record.name), self.codec_options.get(record.name)
            codecs[record.name] = load_recorded_codec(record, given, options, precision)
        return ValidateProcessor(
            subject, deep=level.deep, share=level.recheck_share, codecs=codecs, with_records=(self.against is not None)
        )

    def finalize(self, units: list[Unit], commits: list[Commit]) -> Totals:
        subject = read_checked_dataset(self.dataset_dir)
        checked = _add_up_stats(commits)
        unchecked = [*subject.unchecked, *self._unchecked(checked)]
        findings, found = list(check_directory(subject)), list[Finding]()
        with open_accounts() as accounts:
            for shard, commit in zip(subject.shards, commits, strict=True):
                accounts.add("cuts", read_records(self.root / commit.files[1].name, RecordRow), shard.index)
            findings += accounts.find_duplicates()
            if self.against is not None:
                found, counts = accounts.check(self.against, compare_texts=subject.is_own)
                checked |= counts
                if unknown := accounts.count_unknown_origins():
                    unchecked.append(f"which records {unknown} cuts came from: they do not say")
        findings += found
        for commit in commits:
            findings += read_records(self.root / commit.files[0].name, Finding)
        report = make_report(
            self.dataset_dir,
            findings,
            level=self.references.hide(self.describe_level()),
            checked={"shards": len(commits), **checked},
            unchecked=unchecked,
            fields=subject.dataset.added_fields if subject.dataset else (),
            foreign=subject.dataset is not None and not subject.is_own,
        )
        write_atomic(self.report_file, encode_report(report))
        return add_up(commits)

    def products(self) -> list[Path]:
        return [self.report_file]

    def report(self) -> Report:
        """Read the report of the finished validation."""
        return read_report(self.report_file)

    def _index(self) -> list[str]:
        """Return the checksums of the files of the index that are there and not far too large."""
        paths = [self.dataset_dir / name for name in (DATASET_FILE, SHARDS_FILE)]
        return [checksum(path) for path in paths if path.is_file() and path.stat().st_size <= _MAX_INDEX_BYTES]

    def _unchecked(self, checked: dict[str, float]) -> Iterator[str]:
        """Yield what this level leaves unchecked, a phrase each."""
        for name, number in checked.items():
            if name.startswith("unchecked "):
                yield f"{number:.0f} {name.removeprefix('unchecked ')}: nothing is known of such data"
        none_sampled = self.level.recheck_share and not checked.get("segments encoded again")
        causes = (
            (not self.level.deep, "samples, silence and clipping: audio was not decoded (--deep)"),
            (not self.level.recheck_share,
             "whether the codes are those of the audio: none was encoded again (--recheck-codes)"),
            (none_sampled,
             "whether the codes are those of the audio: no segment fell in the sample, raise --recheck-codes"),
            (self.against is None, "completeness: the dataset was not compared with its manifests (--against)"),
        )  # fmt: skip
        yield from (phrase for is_so, phrase in causes if is_so)


def _add_up_stats(commits: Iterable[Commit]) -> dict[str, float]:
    total = Counter[str]()
    for commit in commits:
        total.update(commit.stats["checked"])
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
