"""Findings of the checker: typed, so that they can be counted, filtered and acted upon."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from sharmill.manifest import iterate_lines
from sharmill.shar.layout import DATASET_FILE, SHARDS_FILE

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Kind:
    """The meaning of a code, and what to do about it."""

    meaning: str
    to_do: str
    severity: Severity = "error"


_REDO: Final = "rebuild the shard: sharmill run CONFIG --redo FINDINGS.json"
_INDEX: Final = "make the index again: sharmill run CONFIG --redo FINDINGS.json, or sharmill index DATASET"
_LISTEN: Final = "listen to it; drop the record from the manifest if it is of no use"

CODES: Final[dict[str, Kind]] = {
    "missing_file": Kind("a file that belongs to the dataset is not there", _REDO),
    "wrong_size": Kind("a file does not have the recorded size", _REDO),
    "wrong_checksum": Kind("a file does not have the recorded checksum", _REDO),
    "stray_file": Kind("a file does not belong to the dataset", "look whose it is, then remove it"),
    "wrong_name": Kind("a file is not called as its field and shard ask for", _INDEX),
    "index_gap": Kind(
        "the shard indices do not run from 0 without gaps",
        "run CONFIG again if the shards were never written; else make the index again as for wrong_totals",
    ),
    "missing_field": Kind("a shard lacks a field that the others have", _REDO),
    "damaged": Kind("a file cannot be read to its end", _REDO),
    "wrong_count": Kind("a field does not have as many items as the shard has cuts", _REDO),
    "wrong_id": Kind("the n-th item of a field does not belong to the n-th cut", _REDO),
    "duplicate_id": Kind("two cuts of the dataset have the same id", _REDO),
    "bad_cut": Kind("a cut is not as the contract says", _REDO),
    "bad_audio": Kind("audio and its metadata disagree, or it cannot be decoded", _REDO),
    "copied_context": Kind(
        "the context of a cut is a copy of its target",
        "match again, which picks no copies, and make what follows anew: sharmill run CONFIG --restart. "
        "--redo would write the same context again",
    ),
    "bad_codes": Kind("codes have another shape, type or range than the codec and the audio ask for", _REDO),
    "wrong_totals": Kind("dataset.json, shards.jsonl and the files disagree about fields, numbers or seconds", _INDEX),
    "different_codes": Kind(
        "the codec gives other codes for the stored audio",
        f"{_REDO}; if it is found again, the codec is not the one that made them",
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
        "warning",
    ),
    "silent_audio": Kind("most of an audio item is silence", _LISTEN, "warning"),
    "clipped_audio": Kind("an audio item is clipped", _LISTEN, "warning"),
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
    def where(self) -> str:
        """The place within the shard, or the dataset, in one phrase."""
        if self.member is not None:
            return f"{self.field}: {self.member}" if self.field else self.member
        return self.file or self.field or ""


def to_do_for(finding: Finding) -> str:
    """Return what to do about a finding: as for its kind, unless it is the index itself that is missing or damaged."""
    return _INDEX if finding.file in (DATASET_FILE, SHARDS_FILE) else CODES[finding.code].to_do


def findings_to_lines(findings: Iterable[Finding]) -> bytes:
    return b"".join(msgspec.json.encode(finding) + b"\n" for finding in findings)


def read_findings(path: Path) -> list[Finding]:
    """Read the findings that a validation left."""
    return [msgspec.json.decode(line, type=Finding) for line in iterate_lines(path)]
