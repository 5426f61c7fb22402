"""Shars, sharmill's own or of any other tool: each cut is a record, and its audio stays in the tar that it is in."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Final

import msgspec

from sharmill.errors import ConfigError, DamagedShard, RejectRecord
from sharmill.files.staging import STAGING_NAME
from sharmill.files.storage import checksum, checksum_bytes
from sharmill.manifest import CONTEXT_KEYS, DURATION_FROM_HEADER, SOURCE_CUT_ID, Member
from sharmill.registry import nearest
from sharmill.shar.cut_lines import salvage_lines
from sharmill.shar.index import read_dataset, read_shards
from sharmill.shar.items import NO_DATA
from sharmill.shar.layout import CONTEXT_UNALIGNED, CUTS, DATASET_FILE, RECORDING, SHARDS_FILE, TARGET_AUDIO
from sharmill.shar.reading.foreign import find_shards
from sharmill.shar.tar import TarTable
from sharmill.sources import ContainerSource, Located, Piece, RawRecord, Unreadable
from sharmill.sources.files import expand_home
from sharmill.sources.lhotse_records import Cut, common_keys, decode_lhotse, speech_record

_USUAL_FIELDS: Final = (TARGET_AUDIO, RECORDING)
# What is stored is the segment that the cut stands for where they are equally long, but for the delay of a codec.
_SAME_SECONDS: Final = 0.025
# Of the audio that a segment was once taken from; what is stored is another file.
_OF_THE_ORIGIN: Final = ("audio_filepath", "offset", "channel")
_DROPPED: Final = (*CONTEXT_KEYS, DURATION_FROM_HEADER, CONTEXT_UNALIGNED, SOURCE_CUT_ID)


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
            count = shard.count
            if count < 0:
                lines, damage = _salvage(self.folder / shard.files[CUTS])
                # What a damage cuts off counts as one.
                count = len(lines) + (damage is not None)
            for begin in range(0, count, records_per_piece):
                end = min(count, begin + records_per_piece)
                yield Piece(end - begin, {"shard": number, "begin": begin, "end": end, "cuts": count})

    def read(self, piece: dict[str, Any]) -> Iterator[RawRecord]:
        """Yield the records of the cuts of a piece."""
        shard = self._shards[piece["shard"]]
        lines, damage = _salvage(self.folder / shard.files[CUTS])
        if damage is None and len(lines) != piece["cuts"]:
            damage = DamagedShard(f"{shard.files[CUTS]} has {len(lines)} cuts, and there should be {piece['cuts']}")
            lines = []
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


def _salvage(path: Path) -> tuple[list[bytes], DamagedShard | None]:
    """Return the lines of the cuts of a file that can be read, and what is wrong with the others."""
    try:
        return salvage_lines(path)
    except DamagedShard as error:
        return [], error


class StoredRecording(msgspec.Struct):
    """The Recording beside an audio file in a tar: facts about that file."""

    sampling_rate: int
    num_samples: int
    channel_ids: list[int] = []
    transforms: list[Any] | None = None

    @property
    def seconds(self) -> float:
        """The length of the audio."""
        return self.num_samples / max(1, self.sampling_rate)


class AudioMembers:
    """The audio of one shard by the ids of its cuts: of a damaged archive, what comes before the damage.

    Raises:
        DamagedShard: there is no such archive.
    """

    def __init__(self, path: Path) -> None:
        self.table = TarTable(path, salvage=True)
        self._name = path.name
        self._of_cut: dict[str, list[int]] = {}
        for number, name in enumerate(self.table.names):
            stem, _, extension = name.rpartition(".")
            if extension not in ("json", "nometa"):
                self._of_cut.setdefault(stem, []).append(number)

    def find(self, cut_id: str) -> tuple[int, StoredRecording]:
        """Return the number of the member that has the audio of a cut, and the Recording that stands beside it.

        Raises:
            RejectRecord: there is none, or not one.
        """
        found = self._of_cut.get(cut_id, [])
        names, damage = self.table.names, self.table.damage
        if len(found) > 1:
            raise RejectRecord("malformed", f"{self._name} has {len(found)} members of this cut")
        if not found and damage:
            raise RejectRecord("unreadable_audio", f"no member of this cut comes before the damage: {damage}")
        if not found or names[found[0]].endswith(f".{NO_DATA}"):
            raise RejectRecord("missing_audio", f"{self._name} has no audio of this cut")
        number = found[0]
        if names[number + 1 : number + 2] != [f"{cut_id}.json"]:
            reason = "unreadable_audio" if damage else "malformed"
            raise RejectRecord(reason, f"{self._name} has no {cut_id}.json behind the audio of this cut")
        return number, self.recording(number + 1)

    def recording(self, number: int) -> StoredRecording:
        """Return the Recording that a member is; raise RejectRecord where it is none."""
        try:
            return msgspec.json.decode(self.table.read(number), type=StoredRecording)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RejectRecord("malformed", f"{self.table.names[number]} is no recording: {error}") from error


def decode_stored_cut(line: bytes) -> Cut:
    """Decode the line of a cut; raise RejectRecord ``malformed`` where it is none."""
    try:
        return decode_lhotse(line, Cut)
    except RejectRecord as reject:
        # Python writes NaN and Infinity, which are no JSON, and lhotse with it.
        try:
            return msgspec.convert(json.loads(line), Cut)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise reject from None


def describe_cut(cut: Cut) -> dict[str, Any]:
    """Return the keys of a cut's record but those of the stored audio.

    Where the audio was taken from is in ``source_audio_filepath``, ``source_offset`` and ``source_channel``.

    Raises:
        RejectRecord: its supervisions do not make one record.
    """
    speakers = {supervision.speaker for supervision in cut.supervisions}
    if len(speakers) > 1:
        raise RejectRecord(
            "unsupported_cut",
            f"the cut has {len(cut.supervisions)} supervisions of {len(speakers)} speakers; let lhotse make a cut of "
            "each (CutSet.trim_to_supervisions) before the Shar is written",
        )
    customs = [cut.custom or {}, *common_keys([supervision.custom or {} for supervision in cut.supervisions])]
    record = speech_record(customs, cut.supervisions, cut.id)
    # Of a Shar made of a Shar, what is known of the first one stays.
    for key in _OF_THE_ORIGIN:
        for custom in customs:
            if key in custom:
                record.setdefault(f"source_{key}", custom[key])
    if path := _origin(cut):
        record.setdefault("source_audio_filepath", path)
    return {key: value for key, value in record.items() if key not in _DROPPED}


def place_cut(cut: Cut, recording: StoredRecording) -> dict[str, Any]:
    """Return the keys of a cut's record that say which part of the stored audio it is, and of which channel.

    Raises:
        RejectRecord: the cut does not lie within the audio, or the audio would have to be changed.
    """
    if cut.type not in ("MonoCut", "MultiCut"):
        raise RejectRecord("unsupported_cut", f"the cut is a {cut.type[:40]}, not the audio of one recording")
    if recording.transforms:
        raise RejectRecord(
            "unsupported_cut",
            "its audio is changed by transforms while it is loaded; store the changed audio in the Shar",
        )
    place: dict[str, Any] = {"duration": cut.duration}
    if math.isclose(recording.seconds, cut.duration, rel_tol=0.0, abs_tol=_SAME_SECONDS):
        # Others leave in ``start`` where the segment began in the recording that it was taken from.
        place |= {"source_offset": cut.start} if cut.start else {}
    elif cut.start + cut.duration <= recording.seconds + _SAME_SECONDS:
        place["offset"] = cut.start
    else:
        raise RejectRecord(
            "duration_mismatch",
            f"the cut is {cut.start:g} to {cut.start + cut.duration:g} s of its audio, which has "
            f"{recording.seconds:g} s",
        )
    if len(recording.channel_ids) > 1 and cut.channel in recording.channel_ids:
        place["channel"] = recording.channel_ids.index(cut.channel)
    return place


def _origin(cut: Cut) -> str | None:
    """Return the relative path of the file that a cut says it was taken from."""
    sources = cut.recording.sources if cut.recording else []
    path = sources[0].source if len(sources) == 1 and sources[0].type == "file" else None
    # An absolute path says something about a machine, and nothing about the data.
    return path if isinstance(path, str) and path and not PurePosixPath(path).is_absolute() else None
