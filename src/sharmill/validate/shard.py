"""The check of one shard: its files, and how cuts, audio and codes belong together."""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

import xxhash

from sharmill.errors import DamagedShard, RejectRecord
from sharmill.files.storage import checksum_stream, open_regular
from sharmill.shar.cut_lines import read_cuts
from sharmill.shar.items import Item, open_items
from sharmill.shar.layout import CUTS, DATASET_FILE, SHARDS_FILE
from sharmill.validate.accounts import hash_cut
from sharmill.validate.checked_dataset import SECONDS_TOLERANCE, CheckedDataset, Shard
from sharmill.validate.contract import check_contract
from sharmill.validate.findings import Finding
from sharmill.validate.foreign import check_foreign
from sharmill.validate.items import MALFORMED
from sharmill.validate.levels import MAX_CLIPPING_SHARE, MAX_SILENCE_SHARE, Levels, measure
from sharmill.validate.recheck import Rechecker

# What a damaged disk, or a lack of permission, answers to reading a file.
_UNREADABLE: Final = (errno.EIO, errno.EACCES, errno.EPERM)


@dataclass
class Checked:
    """The outcome of checking a shard.

    Attributes:
        hashes: of each cut, as ``CUT_HASHES``.
        stats: what adds up over the shards: cuts, bytes, items, seconds decoded ...
    """

    findings: list[Finding] = field(default_factory=list)
    hashes: list[tuple[int, int, int]] = field(default_factory=list)
    stats: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class ShardCheck:
    """Check of the shards of one dataset, one after the other. ``deep`` decodes every audio item as well."""

    def __init__(self, subject: CheckedDataset, *, deep: bool = False, recheck: Rechecker | None = None) -> None:
        self.subject = subject
        self.deep = deep
        self.recheck = recheck

    def __call__(self, shard: Shard, advance: Callable[[float], None] = lambda seconds: None) -> Checked:
        """Return the findings of a shard. ``advance`` is called with seconds of audio as these are worked on."""
        checked = Checked()
        contents = self._read_files(shard, checked)
        checked.findings += _check_items(shard, contents)
        cuts: list[dict[str, Any]] = contents.pop(CUTS, [])
        checked.hashes = [hash_cut(cut) for cut in cuts]
        checked.stats["cuts"] += len(cuts)
        if self.subject.is_own:
            assert self.subject.dataset is not None
            checked.findings += check_contract(self.subject.dataset, shard, cuts, contents)
        else:
            checked.findings += check_foreign(self.subject, shard, cuts, contents, checked.stats)
        # All audio is gone through once to decode it, and once for each codec.
        passes = self.deep + (len(self.subject.codecs) if self.recheck is not None else 0)

        def finish(item: Item) -> None:
            advance(_seconds(item) / passes)

        if self.deep:
            _measure_all(shard, contents, checked, finish)
        if self.recheck is not None:
            checked.findings += self.recheck(shard, contents, checked.stats, finish)
        return checked

    def _read_files(self, shard: Shard, checked: Checked) -> dict[str, list[Any]]:
        """Return the contents of the fields whose files could be read to their ends."""
        add, contents = checked.findings.append, dict[str, list[Any]]()
        for name in self.subject.fields:
            if name not in shard.files:
                add(shard.finding("missing_field", name, f"the shard has no {name}"))
        for name, file in shard.files.items():
            if shard.record is not None and name not in self.subject.fields:
                add(shard.finding("wrong_totals", name, f"{DATASET_FILE} does not name the field"))
            field = self.subject.dataset.field(name) if self.subject.dataset and self.subject.is_own else None
            if shard.record is not None and field is not None and file != field.path(shard.index):
                sentence = f"{SHARDS_FILE} has {file} where {field.path(shard.index)} belongs"
                add(shard.finding("wrong_name", name, sentence))
            path = self.subject.directory / file
            try:
                stream = _open(path)
                if stream is None:
                    add(shard.finding("missing_file", name, "the file is not there", file=file))
                    continue
                with stream:
                    size = os.fstat(stream.fileno()).st_size
                    checked.stats["files"] += 1
                    checked.stats["bytes"] += size
                    recorded = shard.record.fields[name] if shard.record else None
                    if recorded is not None and size != recorded.size:
                        # Not read for its checksum: it may be sparse, and a terabyte.
                        add(shard.finding("wrong_size", name, f"{size} bytes instead of {recorded.size}", file=file))
                    elif recorded is not None and checksum_stream(stream) != recorded.xxh3:
                        sentence = "the bytes have changed since they were written"
                        add(shard.finding("wrong_checksum", name, sentence, file=file))
                contents[name] = read_contents(path, name)
            except DamagedShard as error:
                add(shard.finding("damaged", name, str(error), file=file))
            except OSError as error:
                if error.errno not in _UNREADABLE:
                    raise
                add(shard.finding("damaged", name, f"it cannot be read: {error.strerror}", file=file))
        return contents


def _open(path: Path) -> BinaryIO | None:
    """Open a regular file; return None where there is none, or where it cannot be the name of one."""
    try:
        return open_regular(path, buffering=0)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def read_contents(path: Path, name: str) -> list[Any]:
    """Return the cuts of a field's file, or its items; their data are views of the file, which stays mapped.

    Raises:
        DamagedShard: it cannot be read to its end.
    """
    if name == CUTS:
        return list(read_cuts(path))
    table = open_items(path)
    return [table.item(number, copy=False) for number in range(len(table))]


def _check_items(shard: Shard, contents: dict[str, list[Any]]) -> Iterator[Finding]:
    """Yield where number, order or seconds of a field's items are not those of the cuts and of the index."""
    record, cuts = shard.record, contents.get(CUTS)
    ids = [str(cut.get("id")) for cut in cuts or ()]
    expected, source = (record.count, "in the index") if record else (None if cuts is None else len(cuts), "cuts")
    seconds = record.seconds if record else {}
    for name, items in contents.items():
        if expected is not None and len(items) != expected:
            yield shard.finding("wrong_count", name, f"{len(items)} items, but {expected} {source}")
        if name == CUTS:
            continue
        for position, (cut_id, item) in enumerate(zip(ids, items, strict=False)):
            if item.cut_id != cut_id:
                sentence = f"item {position} is {item.cut_id!r}, the cut there is {cut_id!r}"
                yield shard.finding("wrong_id", name, sentence)
                break
        if name in seconds:
            found = sum(map(_seconds, items))
            if abs(found - seconds[name]) > SECONDS_TOLERANCE:
                yield shard.finding("wrong_totals", name, f"{found:.3f} s of audio, but {seconds[name]} s in the index")


def _measure_all(
    shard: Shard, contents: dict[str, list[Item]], checked: Checked, finish: Callable[[Item], None]
) -> None:
    """Decode every audio item, and call ``finish`` with it; the same bytes once, be they target or context."""
    reported = {(finding.field, finding.member) for finding in checked.findings if finding.code == "bad_audio"}
    known: dict[str, Levels | RejectRecord] = {}
    for name, items in contents.items():
        for item in items:
            if not is_recording(item) or (name, item.cut_id) in reported:
                continue
            assert item.data is not None
            key = xxhash.xxh3_128_hexdigest(item.data)
            if key not in known:
                known[key] = _measure(item, checked.stats)
            checked.stats["items decoded"] += 1
            finish(item)
            if found := _level_problem(item, known[key]):
                checked.findings.append(shard.finding(found[0], name, found[1], member=item.cut_id))


def is_recording(item: Item) -> bool:
    """Return whether an item is audio, by its metadata."""
    return item.data is not None and item.metadata is not None and "sampling_rate" in item.metadata


def _measure(item: Item, stats: dict[str, float]) -> Levels | RejectRecord:
    """Return the levels of an item, or why it cannot be decoded."""
    try:
        levels = measure(item)
    except RejectRecord as reject:
        return reject
    stats["seconds decoded"] += levels.seconds
    stats["seconds of silence"] += levels.seconds * levels.silence
    stats["seconds clipped"] += levels.seconds * levels.clipping
    return levels


def _level_problem(item: Item, levels: Levels | RejectRecord) -> tuple[str, str] | None:
    """Return the code and sentence of what decoding an item shows, if anything."""
    if isinstance(levels, RejectRecord):
        return "bad_audio", str(levels)
    assert item.metadata is not None
    found = (levels.num_samples, levels.sampling_rate)
    promised = (item.metadata.get("num_samples"), item.metadata.get("sampling_rate"))
    if found != promised:
        return "bad_audio", f"samples and rate are {found}, the metadata says {promised}"
    if levels.silence > MAX_SILENCE_SHARE:
        return "silent_audio", f"{levels.silence:.0%} of it is silence"
    if levels.clipping > MAX_CLIPPING_SHARE:
        return "clipped_audio", f"{levels.clipping:.2%} of its samples are at full scale"
    return None


def _seconds(item: Item) -> float:
    """Return the duration in the metadata; 0 where that is malformed, which is another finding."""
    try:
        return float((item.metadata or {})["duration"])
    except MALFORMED:
        return 0.0
