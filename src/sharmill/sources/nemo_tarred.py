"""NeMo's tarred manifests: JSON lines that name members of tar archives, read without unpacking them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec

from sharmill.errors import ConfigError, RejectRecord
from sharmill.manifest import Member
from sharmill.sources import Located, Piece, RawRecord, Unreadable
from sharmill.sources.files import find_files
from sharmill.sources.nemo import NemoSource, decode_json_record
from sharmill.sources.tars import MemberTable, TarMember, TarSource, clean_name, read_table

# The n-th segment of a recording has -sub<n> behind the name of its member.
_SEGMENT: Final = re.compile(r"(.+)-sub[0-9]+(\.\w+)?")
_NUMBERS: Final = re.compile(r"_([0-9]+)")
_DIGITS: Final = re.compile(r"[0-9]+")


@dataclass(frozen=True)
class _Entry:
    """A record that names a member: its line, its values, the archive by its number among the files, and the name."""

    line: bytes
    record: dict[str, msgspec.Raw]
    tar: int
    name: str


@dataclass(frozen=True, kw_only=True)
class NemoTarredSource(TarSource):
    """Records of NeMo's tarred datasets: manifests beside tar archives, which are not unpacked."""

    file_keys: ClassVar[tuple[str, ...]] = ("manifest", "tars")
    type: str = "nemo_tarred"
    manifest: str | list[str]
    """Path of the manifest, or a list of them, sharded as the archives are: ``manifest__OP_0..63_CL_.json``,
    ``manifest_{0..63}.json``. One manifest for several archives has ``shard_id`` in its records."""
    tars: str | list[str]
    """Path of the archive, or a list of them: ``audio__OP_0..63_CL_.tar``; NeMo's ``tarred_audio_filepaths``. Archives
    and manifests belong together by the last number in their names."""

    @cached_property
    def _lines(self) -> NemoSource:
        """The manifests as such."""
        return NemoSource(manifest=self.manifest, audio_root=self.audio_root, speaker=self.speaker)

    def check(self) -> None:
        """Raise ConfigError where a file cannot be a manifest or an archive, or manifests and archives do not pair."""
        self._lines.check()
        super().check()
        self._pairs  # noqa: B018 (raises where there are none)

    def identity(self) -> dict[str, Any]:
        """Return sizes and checksums of the manifests, and sizes of the archives, by number and name."""
        return self._lines.identity() | super().identity()

    def pieces(self, records_per_piece: int) -> Iterator[Piece]:
        """Yield runs of lines of the manifests; archives are not looked at."""
        return self._lines.pieces(records_per_piece)

    def read(self, piece: dict[str, Any]) -> Iterator[RawRecord]:
        """Yield the records of a piece in the order of the manifest; each archive that they name is walked once."""
        entries = [self._entry(line, piece["file"]) for line in self._lines.read(piece)]
        named: dict[int, list[int]] = {}
        for number, entry in enumerate(entries):
            if isinstance(entry, _Entry):
                named.setdefault(entry.tar, []).append(number)
        found: dict[int, RawRecord] = {}
        for tar, numbers in named.items():
            found |= zip(numbers, self._locate_all(tar, [entries[number] for number in numbers]), strict=True)
        for number, entry in enumerate(entries):
            yield found[number] if isinstance(entry, _Entry) else entry

    def check_speaker(self) -> None:
        """Raise ConfigError where ``speaker`` takes a key that none of the first records has."""
        self._lines.check_speaker()

    @cached_property
    def _table(self) -> Callable[[Path], MemberTable]:
        """The members of an archive; those of the archives that were read last are kept."""
        return lru_cache(maxsize=4)(read_table)

    @cached_property
    def _pairs(self) -> list[dict[int | None, int]]:
        """For each manifest the archives that its records may name by shard_id; under None the one that needs none."""
        manifests, tars = self.manifest, self.tars
        try:
            return _pair(self.files, self.archives, 0)
        except ConfigError:
            # Buckets have the same numbers again: one entry of each list after the other.
            if not (isinstance(manifests, list) and isinstance(tars, list) and len(manifests) == len(tars) > 1):
                raise
        pairs, first = [], 0
        for manifest, tar in zip(manifests, tars, strict=True):
            files = find_files([tar])
            pairs += _pair(find_files([manifest]), files, first)
            first += len(files)
        return pairs

    def _entry(self, line: bytes, manifest: int) -> _Entry | bytes | Unreadable:
        """Return what a line names, or itself where the stage prepare rejects it anyway."""
        text = line.decode("utf-8", "replace")
        try:
            record, (name, shard, mark) = decode_json_record(line, ("audio_filepath", "shard_id", "_skipme"))
        except RejectRecord as reject:
            return Unreadable(reject.reason, reject.detail, text)
        if mark or not isinstance(name, str) or not name.strip():
            return line
        tars = self._pairs[manifest]
        if None in tars:
            return _Entry(line, record, tars[None], name)
        if shard is None:
            return Unreadable(
                "missing_field", "the record has no shard_id, which says in which archive its audio is", text
            )
        if type(shard) is not int or shard not in tars:  # of JSON's true Python makes 1
            return Unreadable(
                "missing_audio", f"tars names no archive of the record's shard_id, {str(shard)[:40]}", text
            )
        return _Entry(line, record, tars[shard], name)

    def _locate_all(self, tar: int, entries: Sequence[Any]) -> Iterator[RawRecord]:
        """Yield the records of entries that name members of one archive."""
        file = self.archives[tar]
        try:
            table = self._table(file)
        except RejectRecord as reject:
            yield from (Unreadable(reject.reason, reject.detail, e.line.decode("utf-8", "replace")) for e in entries)
            return
        container = self.container(file)
        for entry in entries:
            try:
                member = _find(table, entry.name, file)
            except RejectRecord as reject:
                yield Unreadable(reject.reason, reject.detail, entry.line.decode("utf-8", "replace"))
                continue
            path = msgspec.json.encode(f"{container}/{clean_name(member.name)}")
            record = msgspec.json.encode(entry.record | {"audio_filepath": msgspec.Raw(path)})
            yield Located(record, Member(container, "bytes", member.start, member.size))


def _find(table: MemberTable, name: str, file: Path) -> TarMember:
    """Return the member that a record names, which may be the n-th segment of one."""
    wanted = clean_name(name)
    segment = _SEGMENT.fullmatch(wanted)
    if wanted not in table.members and segment:
        wanted = segment[1] + (segment[2] or "")
    member = table.members.get(wanted)
    if member is not None:
        return member
    if wanted in table.members:
        raise RejectRecord("ambiguous_audio", f"the archive {file.name} has several members {wanted[:200]!r}")
    if table.damage:
        raise RejectRecord("unreadable_audio", f"there is no member {wanted[:200]!r}, and {table.damage}")
    raise RejectRecord("missing_audio", f"the archive {file.name} has no member {wanted[:200]!r} that is a file")


def _pair(manifests: Sequence[Path], tars: Sequence[Path], first: int) -> list[dict[int | None, int]]:
    """Pair manifests with archives by their numbers; ``first`` is the number of the first archive among all files.

    Raises:
        ConfigError: a number is missing, or there twice.
    """
    if len(manifests) == len(tars) == 1:
        return [{None: first}]
    numbers = _number_all(tars, "tars")
    if len(manifests) == 1:
        return [{shard: first + place for shard, place in numbers.items()}]
    wanted = _number_all(manifests, "manifest")
    for kind, other, missing in (
        ("manifest", "archive", wanted.keys() - numbers.keys()),
        ("archive", "manifest", numbers.keys() - wanted.keys()),
    ):
        if missing:
            shown = ", ".join(map(str, sorted(missing)[:10]))
            raise ConfigError(
                f"there is no {other} for the {kind}s of the numbers {shown}: manifests and tars belong together by "
                "the last number in their names; name as many of both",
                code="bad_config_value",
            )
    return [{None: first + numbers[shard]} for shard in wanted]


def _number_all(files: Sequence[Path], key: str) -> dict[int, int]:
    """Return the places of files by the last numbers in their names."""
    places: dict[int, int] = {}
    for place, file in enumerate(files):
        found = _NUMBERS.findall(file.stem) or _DIGITS.findall(file.stem)
        number = int(found[-1][:18]) if found else None
        if number is None or number in places:
            what = "has no number in its name" if number is None else f"has the number {number} as another one has"
            raise ConfigError(
                f"{key}: {file} {what}, and the last number of a name says which manifest and archive belong together; "
                "rename the files, or name each bucket as an entry of its own in the lists manifest and tars",
                code="bad_config_value",
            )
        places[number] = place
    return places
