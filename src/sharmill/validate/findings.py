"""Findings of the checker, and its report: what was found, what was checked and could not be, what mends it.

The report as JSON is what ``--json FILE`` writes and ``--redo FILE`` reads; docs/checking.md describes its keys. Redo
takes back the commits of the units that it names, so that the next ordinary run does them again.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from sharmill.config import Config
from sharmill.engine.launch import describe_workers, find_workers
from sharmill.engine.order import make_stages
from sharmill.engine.plan import refuse_linked_folders, revoke
from sharmill.engine.run import locked
from sharmill.engine.run_dir import RunDir
from sharmill.engine.stage import StageRun, step_of
from sharmill.errors import ConfigError, refuse
from sharmill.files.atomic import remove
from sharmill.files.location import Location
from sharmill.files.regular import open_regular
from sharmill.files.stored import NOT_JSON
from sharmill.models.config import CodecConfig
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.fields import BASE_FIELDS, CUTS, DATASET_FILE, SHARDS_FILE, Field, codec_of_field

REPORT_VERSION: Final = 1
_MAX_REPORT_BYTES: Final = 1 << 29
# In the place of a stage where the index of the dataset is to be made again.
INDEX: Final = "index"
# The same for all fields of a shard: its files are made again, or its audio is encoded again too.
_SHARD: Final = "shard"
_CODES: Final = "codes"


@dataclass(frozen=True, slots=True)
class FindingKind:
    """The meaning of a code, what to do about it, and what mends it when done again: the shard, the index or both."""

    meaning: str
    to_do: str
    mended_by: tuple[str, ...] = ()
    severity: Literal["error", "warning"] = "error"

    def to_do_for(self, foreign: bool) -> str:
        """Return what to do: no run of sharmill can do the shards of another tool again."""
        if foreign and self.to_do.startswith(_REDO):
            return "write the shard again with the tool that made it, or remove all of its files and index the rest"
        return self.to_do


_REDO: Final = "rebuild the shard: sharmill run CONFIG --redo FINDINGS.json"
_INDEX: Final = "make the index again: sharmill run CONFIG --redo FINDINGS.json, or sharmill index DATASET"
_LISTEN: Final = "listen to it; drop the record from the manifest if it is of no use"

CODES: Final[dict[str, FindingKind]] = {
    "missing_file": FindingKind("a file that belongs to the dataset is not there", _REDO, (_SHARD,)),
    "wrong_size": FindingKind("a file does not have the recorded size", _REDO, (_SHARD,)),
    "wrong_checksum": FindingKind("a file does not have the recorded checksum", _REDO, (_SHARD,)),
    "stray_file": FindingKind("a file does not belong to the dataset", "look whose it is, then remove it"),
    "wrong_name": FindingKind("a file is not called as its field and shard ask for", _INDEX, (INDEX,)),
    "index_gap": FindingKind(
        "the shard indices have gaps, or in a dataset of sharmill's do not run from 0",
        "run CONFIG again if the shards were never written; else make the index again as for wrong_totals",
        (INDEX,),
    ),
    "missing_field": FindingKind("a shard lacks a field that the others have", _REDO, (INDEX, _SHARD)),
    "damaged": FindingKind("a file cannot be read to its end", _REDO, (_SHARD,)),
    "wrong_count": FindingKind("a field does not have as many items as the shard has cuts", _REDO, (INDEX, _SHARD)),
    "wrong_id": FindingKind("the n-th item of a field does not belong to the n-th cut", _REDO, (_SHARD,)),
    "duplicate_id": FindingKind("two cuts of the dataset have the same id", _REDO, (_SHARD,)),
    "bad_cut": FindingKind("a cut is not as the contract says", _REDO, (_SHARD,)),
    "bad_audio": FindingKind("audio and its metadata disagree, or it cannot be decoded", _REDO, (_SHARD,)),
    "copied_context": FindingKind(
        "the context of a cut is a copy of its target",
        "match again, which picks no copies, and make what follows anew: sharmill run CONFIG --restart. "
        "--redo would write the same context again",
    ),
    "bad_value": FindingKind(
        "a value or an array of a field is missing, or is not as the dataset says of the field", _REDO, (_SHARD,)
    ),
    "bad_codes": FindingKind(
        "codes have another shape, type or range than the codec and the audio ask for", _REDO, (_SHARD,)
    ),
    "wrong_totals": FindingKind(
        "dataset.json, shards.jsonl and the files disagree about fields, numbers or seconds", _INDEX, (INDEX,)
    ),
    "different_codes": FindingKind(
        "the codec gives other codes for the stored audio",
        f"{_REDO}; if it is found again, the codec is not the one that made them",
        (_CODES,),
    ),
    "lost_record": FindingKind(
        "a record of the manifest is neither in the dataset nor among the rejects",
        "check that all --rejects were given, and --audio-root for absolute paths; then begin anew with --restart",
    ),
    "doubled_record": FindingKind(
        "a record of the manifest ended more often than it was there",
        "check that no --rejects was given twice; then begin the run anew with --restart",
    ),
    "different_text": FindingKind(
        "the text of a cut is not that of its record in the manifest",
        "see which of the two is right; if it is the manifest, begin the run anew with --restart",
    ),
    "unknown_record": FindingKind(
        "a record of the dataset or the rejects is in none of the manifests",
        "give all manifests of the dataset: --against is repeatable",
        severity="warning",
    ),
    "foreign_tag": FindingKind(
        "the language of a speaker tag is not written as NeMo's Magpie-TTS reads it",
        "read the dataset with speaker_tags: nemo in its entry of input_cfg",
        severity="warning",
    ),
    "silent_audio": FindingKind("most of an audio item is silence", _LISTEN, severity="warning"),
    "clipped_audio": FindingKind("an audio item is clipped", _LISTEN, severity="warning"),
}


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that the checker says about a dataset.

    Attributes:
        shard: its index; None where it concerns the dataset as a whole.
        field: as in ``shards.jsonl``, such as ``codes_mimi/target_codes``.
        file: relative to the dataset directory.
        member: the id of the cut whose item it is, or what names the record.
    """

    code: str
    sentence: str
    shard: int | None = None
    field: str | None = None
    file: str | None = None
    member: str | None = None

    def __post_init__(self) -> None:
        assert self.code in CODES, f"unknown finding {self.code!r}"

    @property
    def is_of_index(self) -> bool:
        """True if it is the index itself that is missing or damaged."""
        return self.file in (DATASET_FILE, SHARDS_FILE)

    def to_row(self, *, foreign: bool = False) -> dict[str, Any]:
        """Return the finding as a report has it, with its place in the shard or the dataset in one phrase."""
        kind, where = CODES[self.code], self.file or self.field or ""
        if self.member is not None:
            where = f"{self.field}: {self.member}" if self.field else self.member
        keys = {"code": self.code, "severity": kind.severity, **msgspec.structs.asdict(self)}
        return {**keys, "where": where, "to_do": _INDEX if self.is_of_index else kind.to_do_for(foreign)}


class UnitToRepeat(msgspec.Struct, frozen=True, order=True, omit_defaults=True):
    """A unit that repairs findings when it is done again.

    Attributes:
        stage: the name of its stage, such as ``encode/<codec>``, or ``index``, which has no shards.
        encode_again: the codec encodes the segments of the shard again; otherwise their codes are only written again.
    """

    stage: str
    shard: int | None
    encode_again: bool = False


def units_to_repeat(finding: Finding, makers: Mapping[str, str]) -> list[UnitToRepeat]:
    """Return the units that repair a finding when they are done again; none if none does.

    Args:
        makers: the names of the stages that made the fields which are not of the published layout.
    """
    repaired_by = CODES[finding.code].mended_by
    units: list[UnitToRepeat] = []
    if INDEX in repaired_by or (repaired_by and finding.is_of_index):
        units.append(UnitToRepeat(INDEX, None))
    if repaired_by and repaired_by[-1] in (_SHARD, _CODES) and finding.shard is not None:
        field = finding.field or CUTS
        codec = codec_of_field(field)
        maker = f"encode/{codec}" if codec else makers.get(field, "write" if field in BASE_FIELDS else "")
        if maker:
            again = codec is not None and repaired_by[-1] == _CODES
            units.append(UnitToRepeat(maker, finding.shard, again))
    return units


class KindCount(msgspec.Struct, frozen=True):
    """The number of findings of a code, and what the code stands for."""

    code: str
    severity: str
    count: int
    meaning: str
    to_do: str


class Report(msgspec.Struct, frozen=True, kw_only=True, rename={"units_to_repeat": "redo"}):
    """One validation. ``findings`` have the keys of ``Finding``, ``where``, ``severity`` and ``to_do``."""

    format_version: int
    dataset: str
    level: dict[str, Any]
    checked: dict[str, int | float]
    unchecked: list[str]
    errors: int
    warnings: int
    kinds: list[KindCount]
    units_to_repeat: list[UnitToRepeat]
    findings: list[dict[str, Any]]


def make_report(
    dataset: Location, findings: Sequence[Finding], *, level: dict[str, Any], checked: dict[str, float],
    unchecked: Iterable[str], foreign: bool = False, fields: Iterable[Field] = (),
) -> Report:  # fmt: skip
    """Return the report of a dataset directory, which another tool may have written (``foreign``).

    Args:
        fields: those that are not of the published layout.
    """
    makers = {field.name: field.by for field in fields}
    counts = Counter(finding.code for finding in findings)
    kinds = [KindCount(code, kind.severity, counts[code], kind.meaning, kind.to_do_for(foreign))
             for code, kind in CODES.items() if counts[code]]  # fmt: skip
    errors = sum(kind.count for kind in kinds if kind.severity == "error")
    return Report(
        format_version=REPORT_VERSION,
        dataset=str(dataset.absolute()),
        level=level,
        checked=checked,
        unchecked=list(unchecked),
        errors=errors,
        warnings=len(findings) - errors,
        kinds=kinds,
        units_to_repeat=sorted(
            {unit for finding in findings for unit in units_to_repeat(finding, makers) if not foreign}
        ),
        findings=[finding.to_row(foreign=foreign) for finding in findings],
    )


def encode_report(report: Report) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def read_report(path: Path) -> Report:
    """Read a report; raises ConfigError where the file is none, or of another version."""
    try:
        with open_regular(path) as stream:
            report = msgspec.json.decode(stream.read(_MAX_REPORT_BYTES), type=Report)
    except OSError as error:
        raise ConfigError(f"cannot read the findings {path}: {error.strerror}", code="bad_findings") from error
    except (*NOT_JSON, ValueError) as error:
        raise ConfigError(
            f"{path} is not what sharmill validate --json writes: {error}", code="bad_findings"
        ) from error
    if report.format_version != REPORT_VERSION:
        raise ConfigError(
            f"{path} has format version {report.format_version}; this sharmill reads {REPORT_VERSION}",
            code="wrong_version",
        )
    return report


def take_back_commits(config: Config, report: Report, stages: Sequence[str]) -> None:
    """Take back the commits of the units that a report names, so that the next run of ``stages`` does them again.

    Where codes are encoded again, all shards that hold one of these segments get the new codes if they are others. The
    index of the dataset is compared with the ledger again in any case. No ranks may be at work on the dataset.

    Raises:
        ConfigError: the report is of another dataset, names nothing that can be done again, or what it names was not
            made by this configuration, or not by these stages, or another process is at work; nothing has been done
            then.
    """
    refuse(
        (
            Path(report.dataset).resolve() != Path(config.dataset_dir).resolve(),
            f"these findings are of {report.dataset}, and {config.name} is in {config.dataset_dir}",
        ),
        (
            not report.units_to_repeat,
            "these findings name no unit that could be done again"
            + ("; see to_do of each" if report.findings else ": there are none"),
        ),
        code="bad_findings",
    )
    run_dir = RunDir(Path(config.run_dir))
    with locked(run_dir):
        # Ranks that are at work hold no lock.
        if live := find_workers(run_dir):
            raise ConfigError(
                f"{describe_workers(live)} at work on this run: wait until it ends, or end it by sharmill "
                f"cancel {run_dir.path}",
                code="locked",
            )
        every, of_index = make_stages(config), UnitToRepeat(INDEX, None) in report.units_to_repeat
        others = {unit.stage for unit in report.units_to_repeat} - {INDEX} - {stage.name for stage in every}
        missing = {name.partition("/")[2] or name for name in others}
        advice = "add that codec to encode.codecs, or that stage, with the run_dir that they were made from"
        if of_index:
            own = {codec.name for codec in config.items(CodecConfig)}
            missing.update(set(ShardedDataset(Path(config.dataset_dir)).stored_codecs()) - own)
            advice += "; or make the index with sharmill index"
        named = ", ".join(map(repr, sorted(missing)))
        if missing:
            raise ConfigError(
                f"the codes or fields called {named} are not of this configuration: {advice}", code="bad_findings"
            )
        found = [(stage, _units_of(stage, report.units_to_repeat)) for stage in every]
        concerned = [(stage, units) for stage, units in found if units or (of_index and stage.shares_root)]
        for stage, _ in concerned:
            refuse(
                (
                    stage.kind not in stages,
                    f"these findings concern {step_of(stage.kind)}: name it too, or no stage at all",
                ),
                (
                    not stage.dir.units.exists(),
                    f"{config.run_dir} has no plan of {stage.name}: it is not the run that made this dataset",
                ),
                code="bad_findings",
            )
            refuse_linked_folders(stage)
        for stage, units in concerned:
            remove(stage.dir.done)
            if known := units & {unit.index for unit in stage.dir.read_units()}:
                revoke(stage, known)


def _units_of(stage: StageRun, wanted: Iterable[UnitToRepeat]) -> set[int]:
    """Return the units of a stage that are to be done again."""
    shards = {
        unit.shard for unit in wanted
        if unit.stage == stage.name and unit.shard is not None and (stage.shares_root or unit.encode_again)
    }  # fmt: skip
    if not shards or stage.publication is None or not stage.dir.units.exists():
        return shards
    return stage.publication.units_of(shards)
