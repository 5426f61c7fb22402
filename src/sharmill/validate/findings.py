"""What the checker may find: typed, so that it can be counted, filtered and acted upon."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from sharmill.manifest import iterate_lines

CODES: Final[dict[str, str]] = {
    "missing_file": "a file that shards.jsonl names is not there",
    "wrong_size": "a file does not have the recorded size",
    "wrong_checksum": "a file does not have the recorded checksum",
    "stray_file": "a file does not belong to the dataset",
    "wrong_name": "a file is not called as its field and shard ask for",
    "index_gap": "the shard indices do not run from 0 without gaps",
    "missing_field": "a shard lacks a field that dataset.json names",
    "damaged": "a file cannot be read to its end",
    "wrong_count": "a field does not have as many items as the shard has cuts",
    "wrong_id": "the n-th item of a field does not belong to the n-th cut",
    "duplicate_id": "two cuts of the dataset have the same id",
    "bad_cut": "a cut is not as the contract says",
    "bad_audio": "audio and its metadata disagree, or it cannot be decoded",
    "bad_codes": "codes have another shape, type or range than the codec and the audio ask for",
    "wrong_totals": "dataset.json, shards.jsonl and the files disagree about fields, numbers or seconds",
}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong. ``shard`` is None where it concerns the dataset as a whole."""

    code: str
    shard: int | None
    where: str
    sentence: str

    def __post_init__(self) -> None:
        assert self.code in CODES, f"unknown finding {self.code!r}"


def findings_to_lines(findings: Iterable[Finding]) -> bytes:
    return b"".join(msgspec.json.encode(finding) + b"\n" for finding in findings)


def read_findings(path: Path) -> list[Finding]:
    """The findings that a validation left."""
    return [msgspec.json.decode(line, type=Finding) for line in iterate_lines(path)]
