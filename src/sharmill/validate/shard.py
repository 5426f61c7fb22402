"""The check of one shard: its files, and how cuts, audio and codes belong together."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import xxhash

from sharmill.errors import RejectRecord
from sharmill.shar.items import Item
from sharmill.shar.layout import CONTEXT_AUDIO, CUTS, DATASET_FILE, SHARDS_FILE, TARGET_AUDIO, shard_file
from sharmill.validate.accounts import cut_hashes
from sharmill.validate.checked_dataset import CheckedDataset, Shard
from sharmill.validate.contract import MALFORMED, check_contract
from sharmill.validate.files import FileReader, ReadFile
from sharmill.validate.findings import Finding
from sharmill.validate.foreign import check_foreign
from sharmill.validate.levels import Levels, level_problem, measure
from sharmill.validate.recheck import Rechecker

# The index has seconds with three decimals.
_SECONDS_TOLERANCE: Final = 2e-3
# What a damaged disk, or a lack of permission, answers to reading a file.
_UNREADABLE: Final = (errno.EIO, errno.EACCES, errno.EPERM)


@dataclass
class Checked:
    """The outcome of checking a shard.

    Attributes:
        ids: a 64-bit hash of each cut's id.
        records: of each cut, the ``RECORD_HASHES`` of the manifest record that it came from.
        stats: what adds up over the shards: cuts, bytes, items, seconds decoded ...
    """

    findings: list[Finding] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    records: list[tuple[int, int]] = field(default_factory=list)
    stats: dict[str, float] = field(default_factory=dict)

    def count(self, name: str, number: float = 1) -> None:
        self.stats[name] = self.stats.get(name, 0) + number


class ShardCheck:
    """Check of the shards of one dataset, one after the other. ``deep`` decodes every audio item as well."""

    def __init__(self, subject: CheckedDataset, *, deep: bool = False, recheck: Rechecker | None = None) -> None:
        self.subject = subject
        self.deep = deep
        self.recheck = recheck
        self._reader = FileReader()
        self._levels: dict[str, Levels | RejectRecord] = {}

    def __call__(self, shard: Shard, advance: Callable[[float], None] = lambda seconds: None) -> Checked:
        """Return the findings of a shard. ``advance`` is called with the seconds of audio that have been decoded."""
        checked = Checked(findings=list(self._check_names(shard)))
        contents = self._read_files(shard, checked)
        checked.findings += _check_counts(shard, contents)
        cuts: list[dict[str, Any]] = contents.pop(CUTS, [])
        ids = [str(cut.get("id")) for cut in cuts]
        checked.ids = [xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass")) for name in ids]
        checked.records = [cut_hashes(cut) for cut in cuts]
        checked.count("cuts", len(cuts))
        for name, items in contents.items():
            checked.findings += _check_pairing(shard, name, ids, items)
        if shard.record is not None:
            checked.findings += _check_seconds(shard, contents)
        if self.subject.is_own:
            assert self.subject.dataset is not None
            checked.findings += check_contract(self.subject.dataset, shard.index, cuts, contents)
        else:
            check_foreign(self.subject, shard, cuts, contents, checked.findings, checked.count)
        if self.deep:
            self._measure_all(shard, contents, checked, advance)
        if self.recheck is not None:
            checked.findings += self.recheck(shard, contents, checked.count)
        return checked

    def _check_names(self, shard: Shard) -> Iterator[Finding]:
        for name in self.subject.fields:
            if name not in shard.files:
                yield _finding("missing_field", shard, f"the shard has no {name}", field=name)
        if shard.record is None:
            return
        for name, file in shard.files.items():
            if name not in self.subject.fields:
                yield _finding("wrong_totals", shard, f"{DATASET_FILE} does not name the field", field=name)
            if self.subject.is_own and file != shard_file(name, shard.index):
                sentence = f"{SHARDS_FILE} has {file} where {shard_file(name, shard.index)} belongs"
                yield _finding("wrong_name", shard, sentence, field=name)

    def _read_files(self, shard: Shard, checked: Checked) -> dict[str, list[Any]]:
        """Return the contents of the fields whose files could be read to their ends."""
        contents: dict[str, list[Any]] = {}
        for name, file in shard.files.items():
            path = self.subject.directory / file
            if not path.is_file():
                checked.findings.append(_finding("missing_file", shard, "the file is not there", field=name, file=file))
                continue
            try:
                read = self._reader.read_cuts(path) if name == CUTS else self._reader.read_field(path)
            except OSError as error:
                if error.errno not in _UNREADABLE:
                    raise
                sentence = f"it cannot be read: {error.strerror}"
                checked.findings.append(_finding("damaged", shard, sentence, field=name, file=file))
                continue
            checked.count("files")
            checked.count("bytes", read.size)
            checked.findings += _check_file(shard, name, file, read)
            if read.contents is not None:
                contents[name] = read.contents
        return contents

    def _measure_all(
        self, shard: Shard, contents: dict[str, list[Item]], checked: Checked, advance: Callable[[float], None]
    ) -> None:
        """Decode every audio item; the same bytes once, be they target or context."""
        self._levels.clear()
        reported = {(finding.field, finding.member) for finding in checked.findings if finding.code == "bad_audio"}
        for name, items in contents.items():
            for item in items:
                if not is_recording(item) or (name, item.cut_id) in reported:
                    continue
                checked.count("items decoded")
                advance(_seconds(item))
                if found := _audio_finding(item, self._measure(item, checked)):
                    checked.findings.append(_finding(found[0], shard, found[1], field=name, member=item.cut_id))

    def _measure(self, item: Item, checked: Checked) -> Levels | RejectRecord:
        assert item.data is not None
        key = xxhash.xxh3_128_hexdigest(item.data)
        if key not in self._levels:
            try:
                levels = self._levels[key] = measure(item)
            except RejectRecord as reject:
                self._levels[key] = reject
            else:
                seconds = levels.num_samples / levels.sampling_rate
                checked.count("seconds decoded", seconds)
                checked.count("seconds of silence", seconds * levels.silence)
                checked.count("seconds clipped", seconds * levels.clipping)
        return self._levels[key]


def _audio_finding(item: Item, levels: Levels | RejectRecord) -> tuple[str, str] | None:
    """Return the code and sentence of what decoding an item shows, if anything."""
    if isinstance(levels, RejectRecord):
        return "bad_audio", str(levels)
    assert item.metadata is not None
    found = (levels.num_samples, levels.sampling_rate)
    promised = (item.metadata.get("num_samples"), item.metadata.get("sampling_rate"))
    if found != promised:
        return "bad_audio", f"samples and rate are {found}, the metadata says {promised}"
    return level_problem(levels)


def is_recording(item: Item) -> bool:
    """Return whether an item is audio, by its metadata."""
    return item.data is not None and item.metadata is not None and "sampling_rate" in item.metadata


def _check_file(shard: Shard, name: str, file: str, read: ReadFile) -> Iterator[Finding]:
    recorded = shard.record.fields[name] if shard.record else None
    if recorded is not None and read.size != recorded.size:
        sentence = f"{read.size} bytes instead of {recorded.size}"
        yield _finding("wrong_size", shard, sentence, field=name, file=file)
    elif recorded is not None and read.xxh3 != recorded.xxh3:
        sentence = "the bytes have changed since they were written"
        yield _finding("wrong_checksum", shard, sentence, field=name, file=file)
    if read.damage is not None:
        yield _finding("damaged", shard, read.damage, field=name, file=file)


def _check_counts(shard: Shard, contents: dict[str, list[Any]]) -> Iterator[Finding]:
    if shard.record is not None:
        expected, source = shard.record.count, "in the index"
    elif CUTS in contents:
        expected, source = len(contents[CUTS]), "cuts"
    else:
        return
    for name, items in contents.items():
        if len(items) != expected:
            yield _finding("wrong_count", shard, f"{len(items)} items, but {expected} {source}", field=name)


def _check_pairing(shard: Shard, name: str, ids: list[str], items: Sequence[Item]) -> Iterator[Finding]:
    for position, (cut_id, item) in enumerate(zip(ids, items, strict=False)):
        if item.cut_id != cut_id:
            sentence = f"item {position} is {item.cut_id!r}, the cut there is {cut_id!r}"
            yield _finding("wrong_id", shard, sentence, field=name)
            return


def _check_seconds(shard: Shard, contents: dict[str, list[Item]]) -> Iterator[Finding]:
    record = shard.record
    assert record is not None
    for name, recorded in ((TARGET_AUDIO, record.target_seconds), (CONTEXT_AUDIO, record.context_seconds)):
        if name in contents:
            found = sum(_seconds(item) for item in contents[name])
            if abs(found - recorded) > _SECONDS_TOLERANCE:
                sentence = f"{found:.3f} s of audio, but {recorded} s in the index"
                yield _finding("wrong_totals", shard, sentence, field=name)


def _seconds(item: Item) -> float:
    """Return the duration in the metadata; 0 where that is malformed, which is another finding."""
    try:
        return float((item.metadata or {})["duration"])
    except MALFORMED:
        return 0.0


def _finding(
    code: str, shard: Shard, sentence: str, *, field: str | None = None, file: str | None = None,
    member: str | None = None,
) -> Finding:  # fmt: skip
    return Finding(code=code, sentence=sentence, shard=shard.index, field=field, file=file, member=member)
