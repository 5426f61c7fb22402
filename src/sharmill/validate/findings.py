"""The checker's findings and its report: what was checked and not checked, what was found, and how to repair it.

``--json FILE`` writes the report as JSON, and ``--redo FILE`` reads it; docs/checking.md describes its keys. Redo
revokes the commits of the units that the report names, so that the next ordinary run processes them again.
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
# Used in place of a stage's name in a list of repairs if the index of the dataset must be rebuilt.
INDEX: Final = "index"
# Repairs of a field in a shard: write its files again or, for codes, first encode the audio again.
_SHARD: Final = "shard"
_CODES: Final = "codes"


@dataclass(frozen=True, slots=True)
class FindingKind:
    """The meaning of a finding's code, its remedy, and what must be rebuilt: the shard, its codes or the index."""

    meaning: str
    to_do: str
    repaired_by: tuple[str, ...] = ()
    severity: Literal["error", "warning"] = "error"

    def to_do_for(self, foreign: bool) -> str:
        """Return the remedy, which differs for another tool's dataset, since sharmill cannot rebuild its shards."""
        if foreign and self.to_do.startswith(_REDO):
            return "write the shard again with the tool that made it, or remove all of its files and index the rest"
        return self.to_do


_REDO: Final = "rebuild the shard: sharmill run CONFIG --redo FINDINGS.json"
_INDEX: Final = "rebuild the index: sharmill run CONFIG --redo FINDINGS.json, or sharmill index DATASET"
_LISTEN: Final = "listen to it; remove the record from the manifest if it is useless"

CODES: Final[dict[str, FindingKind]] = {
    "missing_file": FindingKind("a file that belongs to the dataset is missing", _REDO, (_SHARD,)),
    "wrong_size": FindingKind("a file does not have the recorded size", _REDO, (_SHARD,)),
    "wrong_checksum": FindingKind("a file does not have the recorded checksum", _REDO, (_SHARD,)),
    "stray_file": FindingKind("a file does not belong to the dataset", "find out who wrote it, then remove it"),
    "wrong_name": FindingKind("a file does not have the name that its field and shard require", _INDEX, (INDEX,)),
    "index_gap": FindingKind(
        "the shard indices have gaps or, in a dataset written by sharmill, do not begin with 0",
        "run CONFIG again if the shards were never written; otherwise rebuild the index as for wrong_totals",
        (INDEX,),
    ),
    "missing_field": FindingKind("a shard lacks a field that the others have", _REDO, (INDEX, _SHARD)),
    "damaged": FindingKind("a file cannot be read to its end", _REDO, (_SHARD,)),
    "wrong_count": FindingKind("a field's number of items differs from the number of cuts", _REDO, (INDEX, _SHARD)),
    "wrong_id": FindingKind("the n-th item of a field does not belong to the n-th cut", _REDO, (_SHARD,)),
    "duplicate_id": FindingKind("two cuts of the dataset have the same id", _REDO, (_SHARD,)),
    "bad_cut": FindingKind("a cut violates the contract", _REDO, (_SHARD,)),
    "bad_audio": FindingKind("audio and its metadata disagree, or it cannot be decoded", _REDO, (_SHARD,)),
    "copied_context": FindingKind(
        "the context of a cut is a copy of its target",
        "match again, which excludes copies, and repeat the later stages: sharmill run CONFIG --restart. "
        "--redo would write the same context again",
    ),
    "bad_value": FindingKind(
        "a value or array of a field is missing, or does not fit the dataset's description of the field",
        _REDO,
        (_SHARD,),
    ),
    "bad_codes": FindingKind(
        "codes have a shape, type or range that does not fit the codec and the audio", _REDO, (_SHARD,)
    ),
    "wrong_totals": FindingKind(
        "dataset.json, shards.jsonl and the files disagree about fields, numbers or seconds", _INDEX, (INDEX,)
    ),
    "different_codes": FindingKind(
        "encoding the stored audio again gives other codes",
        f"{_REDO}; if it is found again, another codec made the codes",
        (_CODES,),
    ),
    "lost_record": FindingKind(
        "a record of the manifest is neither in the dataset nor among the rejects",
        "check that all --rejects were given, and --audio-root for absolute paths; then start over with --restart",
    ),
    "doubled_record": FindingKind(
        "a record of the manifest is in the dataset or the rejects more often than in the manifest",
        "check that no --rejects was given twice; then start over with --restart",
    ),
    "different_text": FindingKind(
        "the text of a cut differs from its record in the manifest",
        "find out which of the two is right; if it is the manifest, start over with --restart",
    ),
    "unknown_record": FindingKind(
        "a record of the dataset or the rejects is in none of the manifests",
        "give all manifests of the dataset: --against can be repeated",
        severity="warning",
    ),
    "foreign_tag": FindingKind(
        "the language of a speaker tag is not written in the form that NeMo's Magpie-TTS reads",
        "read the dataset with speaker_tags: nemo in its entry of input_cfg",
        severity="warning",
    ),
    "silent_audio": FindingKind("most of an audio item is silence", _LISTEN, severity="warning"),
    "clipped_audio": FindingKind("an audio item is clipped", _LISTEN, severity="warning"),
}


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A problem that the checker found in a dataset.

    Attributes:
        shard: the index of the shard; None if the problem concerns the whole dataset.
        field: the name of the field, such as ``codes_mimi/target_codes``.
        file: the path of the file, relative to the dataset directory.
        member: the id of the cut or the name of the record that has the problem.
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
        """True if a file of the index itself is missing or damaged."""
        return self.file in (DATASET_FILE, SHARDS_FILE)

    def to_row(self, *, foreign: bool = False) -> dict[str, Any]:
        """Return the finding as a row of a report, with one phrase for its place in the shard or dataset."""
        kind, where = CODES[self.code], self.file or self.field or ""
        if self.member is not None:
            where = f"{self.field}: {self.member}" if self.field else self.member
        keys = {"code": self.code, "severity": kind.severity, **msgspec.structs.asdict(self)}
        return {**keys, "where": where, "to_do": _INDEX if self.is_of_index else kind.to_do_for(foreign)}


class UnitToRepeat(msgspec.Struct, frozen=True, order=True, omit_defaults=True):
    """A unit that must be processed again to repair findings.

    Attributes:
        stage: the name of its stage, such as ``encode/<codec>``, or ``index``, which has no shards.
        encode_again: if True, the codec encodes the segments of the shard again; otherwise their existing codes are
            written again.
    """

    stage: str
    shard: int | None
    encode_again: bool = False


def units_to_repeat(finding: Finding, makers: Mapping[str, str]) -> list[UnitToRepeat]:
    """Return the units that must be processed again to repair a finding; an empty list if no unit would repair it.

    Args:
        makers: the names of the stages that made the fields outside the published layout, by field.
    """
    repaired_by = CODES[finding.code].repaired_by
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
    """A code with its number of findings, its severity, its meaning and its remedy."""

    code: str
    severity: str
    count: int
    meaning: str
    to_do: str


class Report(msgspec.Struct, frozen=True, kw_only=True, rename={"units_to_repeat": "redo"}):
    """The result of a validation. A row of ``findings`` also has the keys ``severity``, ``where`` and ``to_do``."""

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
    """Return the report of a dataset directory; ``foreign`` means that another tool wrote it.

    Args:
        fields: the fields outside the published layout.
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
    """Read a report; raise ConfigError if the file is not a report, or has another format version."""
    try:
        with open_regular(path) as stream:
            report = msgspec.json.decode(stream.read(_MAX_REPORT_BYTES), type=Report)
    except OSError as error:
        raise ConfigError(f"cannot read the findings {path}: {error.strerror}", code="bad_findings") from error
    except (*NOT_JSON, ValueError) as error:
        raise ConfigError(
            f"{path} was not written by sharmill validate --json: {error}", code="bad_findings"
        ) from error
    if report.format_version != REPORT_VERSION:
        raise ConfigError(
            f"{path} has format version {report.format_version}; this sharmill reads {REPORT_VERSION}",
            code="wrong_version",
        )
    return report


def take_back_commits(config: Config, report: Report, stages: Sequence[str]) -> None:
    """Revoke the commits of the units that a report names, so that the next run of ``stages`` processes them again.

    If a segment is encoded again and its codes differ, all shards that contain the segment get the new codes. The next
    run always compares the dataset's index with the commits as well. No ranks may be working on the dataset.

    Raises:
        ConfigError: the report belongs to another dataset, names no unit that can be processed again, or names
            something that this configuration or these stages did not make; or another process is working on the run. In
            all these cases nothing is changed.
    """
    refuse(
        (
            Path(report.dataset).resolve() != Path(config.dataset_dir).resolve(),
            f"these findings are about {report.dataset}, but {config.name} is in {config.dataset_dir}",
        ),
        (
            not report.units_to_repeat,
            "these findings name no unit that can be done again"
            + ("; see the to_do of each finding" if report.findings else ": the report has no findings"),
        ),
        code="bad_findings",
    )
    run_dir = RunDir(Path(config.run_dir))
    with locked(run_dir):
        # Look for working ranks separately, since they do not hold the lock.
        if live := find_workers(run_dir):
            raise ConfigError(
                f"this run is in use by {describe_workers(live)}: wait until it ends, or stop it with sharmill "
                f"cancel {run_dir.path}",
                code="locked",
            )
        every, of_index = make_stages(config), UnitToRepeat(INDEX, None) in report.units_to_repeat
        others = {unit.stage for unit in report.units_to_repeat} - {INDEX} - {stage.name for stage in every}
        missing = {name.partition("/")[2] or name for name in others}
        advice = "add that codec to encode.codecs, or that stage, with the run_dir that they were made with"
        if of_index:
            own = {codec.name for codec in config.items(CodecConfig)}
            missing.update(set(ShardedDataset(Path(config.dataset_dir)).stored_codecs()) - own)
            advice += "; or rebuild the index with sharmill index"
        named = ", ".join(map(repr, sorted(missing)))
        if missing:
            raise ConfigError(
                f"this configuration does not make the codes or fields {named}: {advice}", code="bad_findings"
            )
        found = [(stage, _units_of(stage, report.units_to_repeat)) for stage in every]
        concerned = [(stage, units) for stage, units in found if units or (of_index and stage.shares_root)]
        for stage, _ in concerned:
            refuse(
                (
                    stage.kind not in stages,
                    f"these findings concern {step_of(stage.kind)}: name this stage too, or no stage at all",
                ),
                (
                    not stage.dir.units.exists(),
                    f"{config.run_dir} has no plan of {stage.name}: this run did not make the dataset",
                ),
                code="bad_findings",
            )
            refuse_linked_folders(stage)
        for stage, units in concerned:
            remove(stage.dir.done)
            if known := units & {unit.index for unit in stage.dir.read_units()}:
                revoke(stage, known)


def _units_of(stage: StageRun, wanted: Iterable[UnitToRepeat]) -> set[int]:
    """Return the units of a stage that must be processed again, given the units that a report names."""
    shards = {
        unit.shard for unit in wanted
        if unit.stage == stage.name and unit.shard is not None and (stage.shares_root or unit.encode_again)
    }  # fmt: skip
    if not shards or stage.publication is None or not stage.dir.units.exists():
        return shards
    return stage.publication.units_of(shards)
