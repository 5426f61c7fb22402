"""Shars, sharmill's own or of any other tool: each cut is a record, and its audio stays in the tar that it is in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec

from sharmill.errors import ConfigError, DamagedShard, RejectRecord
from sharmill.files.staging import STAGING_NAME
from sharmill.files.storage import checksum, checksum_bytes
from sharmill.manifest import SOURCE_CUT_ID, Member
from sharmill.registry import nearest
from sharmill.shar.cut_lines import salvage_lines
from sharmill.shar.index import read_dataset, read_shards
from sharmill.shar.layout import CONTEXT_UNALIGNED, CUTS, DATASET_FILE, RECORDING, SHARDS_FILE, TARGET_AUDIO
from sharmill.shar.reading.foreign import find_shards
from sharmill.sources import ContainerSource, Located, Piece, RawRecord, Unreadable
from sharmill.sources.files import expand_home
from sharmill.sources.shar_records import AudioMembers, decode_stored_cut, describe_cut, place_cut

_USUAL_FIELDS: Final = (TARGET_AUDIO, RECORDING)


class _Shard(msgspec.Struct, frozen=True):
    """The files of one shard by their fields, as an index or the folder says; ``count`` is -1 where nothing says it."""

    index: int
    files: dict[str, str]
    checksums: dict[str, str]
    count: int


@dataclass(frozen=True, kw_only=True)
class LhotseSharSource(ContainerSource):
    """Records of a Shar: a dataset by sharmill, or shards that lhotse or another tool wrote."""

    file_keys: ClassVar[tuple[str, ...]] = ("shar",)
    type: str = "lhotse_shar"
    audio_root: str | None = None
    """Folder that the names of the audio begin below, and so its ids; ``null`` is ``shar``."""
    shar: str
    """Folder of the Shar: a finished dataset directory, lhotse's own layout, or a folder for each field."""
    audio: str | None = None
    """Field that has the audio, such as ``target_audio``; ``null`` takes ``target_audio`` or ``recording``, whichever
    there is."""
    keep_ids: bool = False
    """The ids of the cuts are those of the dataset. All sources of a dataset keep ids, or none."""

    def __post_init__(self) -> None:
        if self.audio_root is None:
            object.__setattr__(self, "audio_root", self.shar)
        super().__post_init__()
        self.refuse_url_roots()

    @property
    def folder(self) -> Path:
        """The folder of the Shar."""
        return expand_home(self.shar)

    def check(self) -> None:
        """Raise ConfigError where the folder is no finished Shar, or has not the field of the audio."""
        field = self._field
        self.container(self.folder / DATASET_FILE)
        for shard in self._shards:
            first = self._first_recording(shard, field)
            if first is False:
                raise ConfigError(
                    f"the field {field} of {self.folder} is not audio; name the one that is with audio",
                    code="bad_config_value",
                )
            if first:
                return

    def identity(self) -> dict[str, Any]:
        """Return the number of shards, and a checksum of names, sizes and the checksums of the index or of the cuts."""
        self.check()
        told = []
        for shard in self._shards:
            for field in (CUTS, self._field):
                path = self.folder / shard.files[field]
                size = path.stat().st_size if path.is_file() else -1
                digest = shard.checksums.get(field) or (checksum(path) if field == CUTS and size >= 0 else "")
                told.append([shard.index, shard.files[field], size, digest])
        return {"shards": [len(self._shards), checksum_bytes(msgspec.json.encode(told))]}

    def pieces(self, records_per_piece: int) -> Iterator[Piece]:
        """Yield runs of cuts of one shard; of shards without an index the cuts are counted."""
        for number, shard in enumerate(self._shards):
            count = shard.count if shard.count >= 0 else _count_cuts(self.folder / shard.files[CUTS])
            for begin in range(0, count, records_per_piece):
                end = min(count, begin + records_per_piece)
                yield Piece(end - begin, {"shard": number, "begin": begin, "end": end, "cuts": count})

    def read(self, piece: dict[str, Any]) -> Iterator[RawRecord]:
        """Yield the records of the cuts of a piece."""
        shard = self._shards[piece["shard"]]
        lines, damage = self._lines(shard, piece["cuts"])
        audio = _ShardAudio.open(self.folder / shard.files[self._field], self.container, self.keep_ids)
        try:
            for number in range(piece["begin"], piece["end"]):
                if number < len(lines):
                    yield audio.record(lines[number])
                else:
                    name = f"{shard.files[CUTS]} line {number + 1}"
                    yield Unreadable("malformed", f"the cut cannot be read: {damage}", name)
        finally:
            audio.close()

    def _lines(self, shard: _Shard, count: int) -> tuple[list[bytes], DamagedShard | None]:
        """Return the lines of the cuts of a shard that can be read, and what is wrong with the others."""
        try:
            lines, damage = salvage_lines(self.folder / shard.files[CUTS])
        except DamagedShard as error:
            return [], error
        if damage is None and len(lines) != count:
            return [], DamagedShard(f"{shard.files[CUTS]} has {len(lines)} cuts, and there should be {count}")
        return lines, damage

    @cached_property
    def _shards(self) -> list[_Shard]:
        try:
            if self._is_indexed():
                dataset = read_dataset(self.folder)
                return [
                    _Shard(
                        shard.index,
                        {field: file.file for field, file in shard.fields.items()},
                        {field: file.xxh3 for field, file in shard.fields.items()},
                        shard.count,
                    )
                    for shard in read_shards(self.folder, dataset.num_shards)
                ]
            found = find_shards(self.folder)
            self._require_finished(found[0].files[CUTS])
        except DamagedShard as error:
            raise ConfigError(f"the Shar cannot be read: {error}; copy it again", code="bad_manifest") from error
        return [
            _Shard(
                shard.index,
                {field: path.relative_to(self.folder).as_posix() for field, path in shard.files.items()},
                {},
                -1,
            )
            for shard in found
        ]

    def _is_indexed(self) -> bool:
        if not self.folder.is_dir():
            raise ConfigError(f"the Shar {self.folder} is not a folder; correct shar in sources", code="missing_input")
        return any((self.folder / name).exists() for name in (DATASET_FILE, SHARDS_FILE, STAGING_NAME))

    def _require_finished(self, cuts: Path) -> None:
        """Raise ConfigError where sharmill wrote the shards: without an index they are not all."""
        lines, _ = salvage_lines(cuts)
        try:
            custom = decode_stored_cut(lines[0]).custom if lines else None
        except RejectRecord:
            return
        if custom and CONTEXT_UNALIGNED in custom:
            raise ConfigError(
                f"{self.folder} is not a finished dataset: there is no {DATASET_FILE}. Finish the run that writes it; "
                "if the index was lost, sharmill index makes it again",
                code="no_dataset",
            )

    @cached_property
    def _field(self) -> str:
        """The field that has the audio."""
        fields = sorted({field for shard in self._shards for field in shard.files} - {CUTS})
        if self.audio is not None:
            if self.audio not in fields:
                raise ConfigError(
                    f"audio: {self.folder} has no field {self.audio!r}{nearest(self.audio, fields)}",
                    code="unknown_field",
                )
            found = [self.audio]
        else:
            found = [field for field in _USUAL_FIELDS if field in fields]
        if len(found) != 1:
            has = "has both " + " and ".join(found) if found else "has neither " + " nor ".join(_USUAL_FIELDS)
            raise ConfigError(
                f"{self.folder} {has}; name the field of the audio with audio: one of {', '.join(fields) or 'none'}",
                code="unknown_field",
            )
        return found[0]

    def _first_recording(self, shard: _Shard, field: str) -> bool | None:
        """Return True if the first item of a field is audio, False if it is something else, None if there is none."""
        try:
            members = AudioMembers(self.folder / shard.files[field])
        except DamagedShard:
            return None
        with members.table as table:
            metadata = next((number for number, name in enumerate(table.names) if name.endswith(".json")), None)
            if metadata is None:
                return None
            try:
                members.recording(metadata)
            except RejectRecord:
                return False
            return True


@dataclass(frozen=True)
class _ShardAudio:
    """The audio of an open shard; ``members`` is what is wrong with an archive that cannot be opened."""

    container: str
    members: AudioMembers | RejectRecord
    keep_ids: bool

    @classmethod
    def open(cls, path: Path, name: Callable[[Path], str], keep_ids: bool) -> _ShardAudio:
        members: AudioMembers | RejectRecord
        try:
            members = AudioMembers(path)
        except DamagedShard as error:
            members = RejectRecord("unreadable_audio" if path.exists() else "missing_audio", str(error))
        return cls(name(path), members, keep_ids)

    def close(self) -> None:
        if isinstance(self.members, AudioMembers):
            self.members.table.close()

    def record(self, line: bytes) -> RawRecord:
        """Return the record of a cut."""
        record: dict[str, Any] = {}
        try:
            cut = decode_stored_cut(line)
            record = describe_cut(cut) | ({SOURCE_CUT_ID: cut.id} if self.keep_ids else {})
            record["audio_filepath"] = f"{self.container}/{cut.id}"
            if isinstance(self.members, RejectRecord):
                raise self.members
            number, recording = self.members.find(cut.id)
            record["audio_filepath"] = f"{self.container}/{self.members.table.names[number]}"
            record = place_cut(cut, recording) | record
        except RejectRecord as reject:
            text = msgspec.json.encode(record) if record else line
            return Unreadable(reject.reason, reject.detail, text.decode("utf-8", "replace"))
        start, size = self.members.table.place(number)
        return Located(msgspec.json.encode(record), Member(self.container, "bytes", start, size))


def _count_cuts(path: Path) -> int:
    """Return the number of cuts of a file; what a damage cuts off counts as one."""
    try:
        lines, damage = salvage_lines(path)
    except DamagedShard:
        return 1
    return len(lines) + (damage is not None)
