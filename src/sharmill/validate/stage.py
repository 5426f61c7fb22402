"""Stage ``validate``: the checker. One unit is one shard; nothing in the dataset is changed."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

import xxhash
from msgspec.structs import replace

from sharmill.config import Config, Precision, Presence, StageSection, require
from sharmill.engine.run_dir import RunDir
from sharmill.engine.stage import Processor, Stage, StageRun, identify_folder, versions
from sharmill.engine.unit import Commit, Totals, Unit, add_up, make_unit
from sharmill.errors import refuse
from sharmill.files.atomic import write_atomic
from sharmill.files.checksums import checksum
from sharmill.files.location import Location, fetch, tell_version
from sharmill.files.stored import load_record, read_records
from sharmill.models import find_recorded_codec, load_recorded_codec
from sharmill.models.config import CodecConfig
from sharmill.shar.fields import DATASET_FILE, SHARDS_FILE
from sharmill.validate.accounts import ExpectedRecords, RecordRow, open_accounts
from sharmill.validate.checked_dataset import check_directory, read_checked_dataset
from sharmill.validate.findings import Finding, encode_report, make_report
from sharmill.validate.shard import ValidateProcessor

# The maximum size of an index file whose checksum is computed. A larger file is sparse; ``files``, which includes the
# sizes of all files, identifies it.
_MAX_INDEX_BYTES: Final = 1 << 32


@dataclass(frozen=True, kw_only=True)
class ValidateConfig(StageSection):
    """Optional checks of the stage ``validate``, in addition to the checks that it always makes."""

    presence: ClassVar[Presence] = "always"

    deep: bool = False
    """Also decode all audio."""
    recheck_codes: float | str = 0.0
    """Share of the segments to encode again, such as ``0.001`` or ``0.1%``."""
    codec_models: dict[str, str] = field(default_factory=dict)
    """Model of each codec, if it is not the model that made the codes: ``{nano: "nemo:/new/place/model.nemo"}``."""
    against_sources: bool = False
    """Account for every record of the sources: each must be in the dataset or among the rejects."""

    def __post_init__(self) -> None:
        require(0 <= self.recheck_share <= 1, "recheck_codes must be a share between 0 and 1, or a percentage")

    @property
    def recheck_share(self) -> float:
        """``recheck_codes`` as a number; -1 if it is not a number."""
        text = str(self.recheck_codes).strip()
        try:
            return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            return -1.0


class ValidateStage(Stage):
    """The check of a dataset, which writes ``report.json`` to the stage's folder in the run directory.

    Args:
        subject: the dataset and the checks; by default taken from the run's configuration.
    """

    kind = "validate"
    section = ValidateConfig
    after = ("*",)

    def __init__(self, subject: "Subject | None" = None) -> None:
        self._subject = subject

    def subject(self, run: StageRun) -> "Subject":
        """Return the dataset to check and how to check it."""
        return self._subject or Subject.from_config(run.config)

    def identity(self, run: StageRun) -> dict[str, Any]:
        subject = self.subject(run)
        if subject.against is not None:
            subject.against.check()
        dataset = read_checked_dataset(subject.dataset_dir)
        if subject.level.recheck_share:
            models = subject.level.codec_models
            unknown = sorted(models.keys() - {codec.name for codec in dataset.codecs})
            refuse(
                (not dataset.codecs, f"--recheck-codes: {subject.dataset_dir} records no codec"),
                (unknown, f"--codec-model: {subject.dataset_dir} has no codec {', '.join(map(repr, unknown))}"),
                code="unknown_codec",
            )
            for codec in dataset.codecs:
                find_recorded_codec(codec, models.get(codec.name), subject.codec_options.get(codec.name, {}))
        folder = subject.dataset_dir
        return {
            "dataset_dir": identify_folder(folder, run.run_dir.path) if isinstance(folder, Path) else str(folder),
            "input": _index_of(folder),
            # Damage does not change the index, so include the state of all files, which may have changed since an
            # earlier check. A check of a URL is never resumed.
            "files": _fingerprint(folder) if isinstance(folder, Path) else "",
            "level": subject.describe_level(),
            "versions": versions(),
        }

    def plan(self, run: StageRun) -> Iterator[Unit]:
        for position, shard in enumerate(read_checked_dataset(self.subject(run).dataset_dir).shards):
            # All shards cost the same if there is no index, since their seconds of audio are unknown.
            cost = 1.0 if shard.record is None else round(sum(shard.record.seconds.values()), 3)
            yield make_unit(position, cost=cost, size=shard.size, params={"line": position})

    def input_visible(self, run: StageRun) -> bool:
        planned = load_record(run.dir.identity, dict[str, Any])["input"]
        return bool(_index_of(self.subject(run).dataset_dir) == planned)

    def open(self, run: StageRun, device: str) -> Processor:
        subject = self.subject(run)
        dataset, level = read_checked_dataset(subject.dataset_dir), subject.level
        codecs = {}
        for record in dataset.codecs if level.recheck_share else ():
            # The check runs on a CPU, which has no tf32.
            precision: Precision = "bf16" if record.precision == "bf16" else "fp32"
            given, options = level.codec_models.get(record.name), subject.codec_options.get(record.name)
            codecs[record.name] = load_recorded_codec(record, given, options, precision)
        return ValidateProcessor(
            dataset, deep=level.deep, share=level.recheck_share, codecs=codecs, with_records=subject.against is not None
        )

    def finalize(self, run: StageRun) -> Totals:
        subject = self.subject(run)
        dataset, checked = read_checked_dataset(subject.dataset_dir), _add_up_stats(run.commits)
        unchecked = [*dataset.unchecked, *subject.unchecked(checked)]
        findings, found = list(check_directory(dataset)), list[Finding]()
        with open_accounts() as accounts:
            for shard, commit in zip(dataset.shards, run.commits, strict=True):
                accounts.add("cuts", read_records(run.root / commit.files[1].name, RecordRow), shard.index)
            findings += accounts.find_duplicates()
            if subject.against is not None:
                found, counts = accounts.check(subject.against, compare_texts=dataset.is_own)
                checked |= counts
                if unknown := accounts.count_unknown_origins():
                    unchecked.append(f"the records that {unknown} cuts came from: the cuts do not name them")
        findings += found
        for commit in run.commits:
            findings += read_records(run.root / commit.files[0].name, Finding)
        report = make_report(
            subject.dataset_dir,
            findings,
            level=run.options.references.hide(subject.describe_level()),
            checked={"shards": len(run.commits), **checked},
            unchecked=unchecked,
            fields=dataset.dataset.added_fields if dataset.dataset else (),
            foreign=dataset.dataset is not None and not dataset.is_own,
        )
        path = run.root / "report.json"
        write_atomic(path, encode_report(report))
        return replace(add_up(run.commits), products=run.record_products(report=path))


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A dataset to check, and how to check it.

    Attributes:
        level: the optional checks.
        codec_options: the options of each codec's model, by codec.
        against: the manifests and rejects that the dataset must account for.
    """

    dataset_dir: Location
    level: ValidateConfig = ValidateConfig()
    codec_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    against: ExpectedRecords | None = None

    @classmethod
    def from_config(cls, config: Config) -> "Subject":
        """Return the dataset of a configuration with the checks that it requests."""
        level, against = config.section(ValidateConfig), None
        if level.against_sources:
            against = ExpectedRecords(
                sources=tuple(config.sources), rejects=(str(RunDir(Path(config.run_dir)).rejects),)
            )
        codecs = config.items(CodecConfig)
        if level.recheck_share:
            # Load the models that the user's configuration names, but no model just because the dataset names it.
            own = {codec.name: codec.model for codec in codecs if codec.model != "builtin"}
            level = dataclasses.replace(level, codec_models=own | level.codec_models)
        options = {codec.name: codec.options for codec in codecs}
        return cls(dataset_dir=Path(config.dataset_dir), level=level, codec_options=options, against=against)

    def describe_level(self) -> dict[str, Any]:
        """Return the values that the checks depend on, except for the dataset's files."""
        return {
            "deep": self.level.deep,
            "recheck_codes": self.level.recheck_share,
            "codec_models": self.level.codec_models,
            "against": None if self.against is None else self.against.identity(),
        }

    def unchecked(self, checked: dict[str, float]) -> Iterator[str]:
        """Yield a phrase for everything that these checks leave out.

        Args:
            checked: the counts of what was checked.
        """
        for name, number in checked.items():
            if name.startswith("unchecked "):
                yield f"{number:.0f} {name.removeprefix('unchecked ')}: their format is unknown"
        none_sampled = self.level.recheck_share and not checked.get("segments encoded again")
        causes = (
            (not self.level.deep, "samples, silence and clipping: audio was not decoded (--deep)"),
            (not self.level.recheck_share,
             "that codes match the audio: none was encoded again (use --recheck-codes)"),
            (none_sampled,
             "that codes match the audio: no segment was in the sample (increase --recheck-codes)"),
            (self.against is None, "completeness: the dataset was not compared with its manifests (--against)"),
        )  # fmt: skip
        yield from (phrase for is_so, phrase in causes if is_so)


def _index_of(directory: Location) -> list[str]:
    """Return the checksums of the index files that exist and are not absurdly large."""
    paths = [directory / name for name in (DATASET_FILE, SHARDS_FILE)]
    return [checksum(fetch(path)) for path in paths if path.is_file() and tell_version(path)[0] <= _MAX_INDEX_BYTES]


def _add_up_stats(commits: Iterable[Commit]) -> dict[str, float]:
    total = Counter[str]()
    for commit in commits:
        total.update(commit.stats["checked"])
    rounded = {name: round(number, 3) for name, number in sorted(total.items())}
    return {name: int(number) if number == int(number) else number for name, number in rounded.items()}


def _fingerprint(directory: Path) -> str:
    """Return a hash of the names, sizes and times of all files.

    The times include the change time, since copying may preserve the modification time.
    """
    digest = xxhash.xxh3_64()
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        found = [path.relative_to(directory).as_posix(), status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        digest.update(repr(found).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
