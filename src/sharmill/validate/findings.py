"""Findings of the checker, and its report: what was found, what was checked and could not be, what mends it.

The report as JSON is what ``--json FILE`` writes and ``--redo FILE`` reads; docs/checking.md describes its keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from sharmill.errors import ConfigError
from sharmill.files.storage import open_regular
from sharmill.manifest import iterate_lines
from sharmill.registry import STAGES
from sharmill.shar.cut_lines import NOT_JSON
from sharmill.shar.layout import CUTS, DATASET_FILE, SHARDS_FILE, Field

REPORT_VERSION: Final = 1
_MAX_REPORT_BYTES: Final = 1 << 29
# In the place of a stage where the index of the dataset is to be made again.
INDEX: Final = "index"
# The same for all fields of a shard: its files are made again, or its audio is encoded again too.
_SHARD: Final = "shard"
_CODES: Final = "codes"

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Kind:
    """The meaning of a code, what to do about it, and what mends it when done again: the shard, the index or both."""

    meaning: str
    to_do: str
    mended_by: tuple[str, ...] = ()
    severity: Severity = "error"

    def to_do_for(self, foreign: bool) -> str:
        """Return what to do: no run of sharmill can do the shards of another tool again."""
        return _FOREIGN_REDO if foreign and self.to_do.startswith(_REDO) else self.to_do


_REDO: Final = "rebuild the shard: sharmill run CONFIG --redo FINDINGS.json"
_FOREIGN_REDO: Final = "write the shard again with the tool that made it, or remove all of its files and index the rest"
_INDEX: Final = "make the index again: sharmill run CONFIG --redo FINDINGS.json, or sharmill index DATASET"
_LISTEN: Final = "listen to it; drop the record from the manifest if it is of no use"

CODES: Final[dict[str, Kind]] = {
    "missing_file": Kind("a file that belongs to the dataset is not there", _REDO, (_SHARD,)),
    "wrong_size": Kind("a file does not have the recorded size", _REDO, (_SHARD,)),
    "wrong_checksum": Kind("a file does not have the recorded checksum", _REDO, (_SHARD,)),
    "stray_file": Kind("a file does not belong to the dataset", "look whose it is, then remove it"),
    "wrong_name": Kind("a file is not called as its field and shard ask for", _INDEX, (INDEX,)),
    "index_gap": Kind(
        "the shard indices do not run from 0 without gaps",
        "run CONFIG again if the shards were never written; else make the index again as for wrong_totals",
        (INDEX,),
    ),
    "missing_field": Kind("a shard lacks a field that the others have", _REDO, (INDEX, _SHARD)),
    "damaged": Kind("a file cannot be read to its end", _REDO, (_SHARD,)),
    "wrong_count": Kind("a field does not have as many items as the shard has cuts", _REDO, (INDEX, _SHARD)),
    "wrong_id": Kind("the n-th item of a field does not belong to the n-th cut", _REDO, (_SHARD,)),
    "duplicate_id": Kind("two cuts of the dataset have the same id", _REDO, (_SHARD,)),
    "bad_cut": Kind("a cut is not as the contract says", _REDO, (_SHARD,)),
    "bad_audio": Kind("audio and its metadata disagree, or it cannot be decoded", _REDO, (_SHARD,)),
    "copied_context": Kind(
        "the context of a cut is a copy of its target",
        "match again, which picks no copies, and make what follows anew: sharmill run CONFIG --restart. "
        "--redo would write the same context again",
    ),
    "bad_value": Kind(
        "a value or an array of a field is missing, or is not as the dataset says of the field", _REDO, (_SHARD,)
    ),
    "bad_codes": Kind("codes have another shape, type or range than the codec and the audio ask for", _REDO, (_SHARD,)),
    "wrong_totals": Kind(
        "dataset.json, shards.jsonl and the files disagree about fields, numbers or seconds", _INDEX, (INDEX,)
    ),
    "different_codes": Kind(
        "the codec gives other codes for the stored audio",
        f"{_REDO}; if it is found again, the codec is not the one that made them",
        (_CODES,),
    ),
    "lost_record": Kind(
        "a record of the manifest is neither in the dataset nor among the rejects",
        "check that all --rejects were given, and --audio-root for absolute paths; then begin anew with --restart",
    ),
    "doubled_record": Kind(
        "a record of the manifest ended more often than it was there",
        "check that no --rejects was given twice; then begin the run anew with --restart",
    ),
    "different_text": Kind(
        "the text of a cut is not that of its record in the manifest",
        "see which of the two is right; if it is the manifest, begin the run anew with --restart",
    ),
    "unknown_record": Kind(
        "a record of the dataset or the rejects is in none of the manifests",
        "give all manifests of the dataset: --against is repeatable",
        severity="warning",
    ),
    "foreign_tag": Kind(
        "the language of a speaker tag is not written as NeMo's Magpie-TTS reads it",
        "read the dataset with speaker_tags: nemo in its entry of input_cfg",
        severity="warning",
    ),
    "silent_audio": Kind("most of an audio item is silence", _LISTEN, severity="warning"),
    "clipped_audio": Kind("an audio item is clipped", _LISTEN, severity="warning"),
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
    def severity(self) -> Severity:
        return CODES[self.code].severity

    @property
    def is_of_index(self) -> bool:
        """True if it is the index itself that is missing or damaged."""
        return self.file in (DATASET_FILE, SHARDS_FILE)

    @property
    def where(self) -> str:
        """The place within the shard, or the dataset, in one phrase."""
        if self.member is not None:
            return f"{self.field}: {self.member}" if self.field else self.member
        return self.file or self.field or ""

    def to_row(self, *, foreign: bool = False) -> dict[str, Any]:
        """Return the finding as a report has it."""
        to_do = _INDEX if self.is_of_index else CODES[self.code].to_do_for(foreign)
        keys = {"code": self.code, "severity": self.severity, **msgspec.structs.asdict(self)}
        return {**keys, "where": self.where, "to_do": to_do}


def findings_to_lines(findings: Iterable[Finding]) -> bytes:
    return b"".join(msgspec.json.encode(finding) + b"\n" for finding in findings)


def read_findings(path: Path) -> list[Finding]:
    """Read the findings that a validation left."""
    return [msgspec.json.decode(line, type=Finding) for line in iterate_lines(path)]


class UnitToRepeat(msgspec.Struct, frozen=True, order=True):
    """A unit that mends findings when it is done again.

    ``stage`` is the name of one, as encode/<codec>, by which what the shard holds is encoded and assembled again, or
    index, which has no shards.
    """

    stage: str
    shard: int | None = None


def units_to_repeat(finding: Finding, makers: Mapping[str, str]) -> list[UnitToRepeat]:
    """Return the units that mend a finding when they are done again; none where none does.

    Args:
        makers: the names of the stages that made the fields which are not of the published layout.
    """
    mended_by = CODES[finding.code].mended_by
    units: list[UnitToRepeat] = []
    if INDEX in mended_by or (mended_by and finding.is_of_index):
        units.append(UnitToRepeat(INDEX))
    if mended_by and mended_by[-1] in (_SHARD, _CODES) and finding.shard is not None:
        field, content = finding.field or CUTS, mended_by[-1] == _CODES
        own = (STAGES.load_class(kind).mender(field, content=content) for kind in STAGES.own)
        stages = filter(None, (makers.get(field), *own))
        units += [UnitToRepeat(stage, finding.shard) for stage in stages][:1]
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
    dataset: Path, findings: Sequence[Finding], *, level: dict[str, Any], checked: dict[str, float],
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
