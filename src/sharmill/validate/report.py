"""The report of a validation: what was found, what was checked and could not be, and which units would mend it.

As JSON it is what ``--json FILE`` writes and ``--redo FILE`` reads; docs/checking.md describes its keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from sharmill.errors import ConfigError
from sharmill.shar.layout import CUTS, DATASET_FILE, SHARDS_FILE, codec_of_field
from sharmill.validate.findings import CODES, Finding, to_do_for

REPORT_VERSION: Final = 1
WRITE, INDEX, ENCODE = "write", "index", "encode/"

# Where it is the index that is wrong, or may be: it is made again from the ledger.
_INDEX_CODES: Final = frozenset({"index_gap", "wrong_totals", "wrong_name", "missing_field", "wrong_count"})
# Where the files are not to blame.
_ONLY_INDEX: Final = frozenset({"index_gap", "wrong_totals", "wrong_name"})
# No unit of the dataset mends these.
_NOT_MENDED: Final = frozenset(
    {"copied_context", "different_text", "doubled_record", "lost_record", "stray_file", "unknown_record"}
)


class Redo(msgspec.Struct, frozen=True, order=True):
    """A unit that mends findings: ``stage`` is write, encode/<codec>, or index, which has no shards."""

    stage: str
    shard: int | None = None


class KindCount(msgspec.Struct, frozen=True):
    """The number of findings of a code, and what the code stands for."""

    code: str
    severity: str
    count: int
    meaning: str
    to_do: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One validation. ``findings`` have the keys of ``Finding``, ``where``, ``severity`` and ``to_do``."""

    format_version: int
    dataset: str
    level: dict[str, Any]
    checked: dict[str, int | float]
    unchecked: list[str]
    errors: int
    warnings: int
    kinds: list[KindCount]
    redo: list[Redo]
    findings: list[dict[str, Any]]


def make_report(
    dataset: Path, findings: Sequence[Finding], *, level: dict[str, Any], checked: dict[str, float],
    unchecked: Iterable[str],
) -> Report:  # fmt: skip
    """Return the report of a dataset directory."""
    counts = Counter(finding.code for finding in findings)
    kinds = [KindCount(code, kind.severity, counts[code], kind.meaning, kind.to_do)
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
        redo=sorted({unit for finding in findings for unit in damaged_units(finding)}, key=_in_order),
        findings=[_to_row(finding) for finding in findings],
    )


def encode_report(report: Report) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def read_report(path: Path) -> Report:
    """Read a report; raises ConfigError where the file is none, or of another version."""
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
    except OSError as error:
        raise ConfigError(f"cannot read the findings {path}: {error.strerror}", code="bad_findings") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not what sharmill validate --json writes: {error}", code="bad_findings"
        ) from error
    if report.format_version != REPORT_VERSION:
        raise ConfigError(
            f"{path} has format version {report.format_version}; this sharmill reads {REPORT_VERSION}",
            code="wrong_version",
        )
    return report


def damaged_units(finding: Finding) -> list[Redo]:
    """Return the units that mend a finding when they are done again; none where none does."""
    if finding.severity == "warning" or finding.code in _NOT_MENDED:
        return []
    units: list[Redo] = []
    if finding.code in _INDEX_CODES or finding.file in (DATASET_FILE, SHARDS_FILE):
        units.append(Redo(INDEX))
    if finding.shard is not None and finding.code not in _ONLY_INDEX:
        codec = codec_of_field(finding.field or CUTS)
        units.append(Redo(WRITE if codec is None else f"{ENCODE}{codec}", finding.shard))
    return units


def _in_order(unit: Redo) -> tuple[str, int]:
    return unit.stage, -1 if unit.shard is None else unit.shard


def _to_row(finding: Finding) -> dict[str, Any]:
    row = msgspec.structs.asdict(finding)
    return {
        "code": row.pop("code"),
        "severity": finding.severity,
        **row,
        "where": finding.where,
        "to_do": to_do_for(finding),
    }
