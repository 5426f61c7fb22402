"""Shars, written by sharmill or any other tool. Each cut becomes a record whose audio stays in its tar archive."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Final

import msgspec

from sharmill.errors import ConfigError, DamagedShard, RejectRecord, refuse, refuse_record
from sharmill.files.checksums import checksum, checksum_bytes
from sharmill.manifest import (
    CONTEXT_KEYS,
    DURATION_FROM_HEADER,
    SOURCE_CUT_ID,
    Channel,
    Member,
)
from sharmill.registry import nearest
from sharmill.shar.fields import CONTEXT_UNALIGNED, CUTS, DATASET_FILE, RECORDING, TARGET_AUDIO
from sharmill.shar.index import ShardRecord, is_indexed, read_dataset, read_shards
from sharmill.shar.items import NO_DATA, ItemTable
from sharmill.shar.json_lines import salvage_lines
from sharmill.shar.rebuild import find_foreign_shards
from sharmill.sources import ColumnSource, ContainerSource, RawRecord, RunSource, UnreadableRecord
from sharmill.sources.files import (
    encode_record,
    expand_home,
)
from sharmill.sources.lhotse_lines import (
    Cut,
    RecordingLine,
    decode_lhotse_line,
    describe,
    listed,
    select_supervisions,
    speech_record,
)

# Fields that usually contain the audio.
_USUAL_FIELDS: Final = (TARGET_AUDIO, RECORDING)
# Tolerance in seconds, since a codec may add a delay. If the durations of a cut and its stored audio differ by at most
# this, the audio is taken to be exactly the cut's segment.
_SAME_SECONDS: Final = 0.025
# Keys of cuts that are not copied to the record.
_DROPPED: Final = (*CONTEXT_KEYS, DURATION_FROM_HEADER, CONTEXT_UNALIGNED, SOURCE_CUT_ID)


@dataclass(frozen=True, kw_only=True)
class LhotseSharSource(ContainerSource, RunSource, ColumnSource):
    """Records of a Shar: a sharmill dataset, or shards written by lhotse or another tool."""

    file_keys: ClassVar[tuple[str, ...]] = ("shar",)
    type: str = "lhotse_shar"
    audio_root: str | None = None
    """Folder that names and ids are relative to; ``null`` is ``shar``."""
    shar: str
    """Folder of the Shar: a finished dataset directory, lhotse's layout, or a folder per field."""
    audio: str | None = None
    """Field with the audio, such as ``target_audio``; ``null`` uses ``target_audio`` or ``recording``, whichever
    exists."""
    keep_ids: bool = False
    """Keep the ids of the cuts. Set this for all sources or for none."""

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
        """Raise ConfigError if the folder is not a finished Shar, or lacks the field with the audio."""
        field = self._field
        self.container(self.folder / DATASET_FILE)
        lacking = [
            f"shard {shard.index} of {self.folder} has no {name}; copy the Shar again, or leave the shard out"
            for shard in self._shards for name in (CUTS, field) if name not in shard.fields
        ]  # fmt: skip
        refuse((lacking, "".join(lacking[:1])), code="bad_manifest")
        for shard in self._shards:
            try:
                table = ItemTable(self.folder / shard.files[field], salvage=True)
                number = next(number for number, name in enumerate(table.names) if name.endswith(".json"))
                decode_lhotse_line(table.member(number), RecordingLine)
                break
            except (DamagedShard, StopIteration):
                continue  # this shard has no item to check
            except RejectRecord as reject:
                raise ConfigError(
                    f"the field {field} of {self.folder} is not audio; set the key audio to a field with audio",
                    code="bad_config_value",
                ) from reject

    def identity(self) -> dict[str, Any]:
        """Return the number of shards, and a checksum over file names, sizes and known checksums.

        If the Shar has no index, the checksums of the cut files are computed.
        """
        self.check()
        told = []
        for shard in self._shards:
            for field in (CUTS, self._field):
                file = shard.fields[field]
                path = self.folder / file.file
                size = path.stat().st_size if path.is_file() else -1
                digest = file.xxh3 or (checksum(path) if field == CUTS and size >= 0 else "")
                told.append([shard.index, file.file, size, digest])
        return {"shards": [len(self._shards), checksum_bytes(msgspec.json.encode(told))]}

    def runs(self, size: int) -> Iterator[tuple[list[Any], int]]:
        """Yield each shard with its number of cuts; cuts are counted if there is no index."""
        for number, shard in enumerate(self._shards):
            count = shard.count
            if count < 0:
                lines, damage = salvage_lines(self.folder / shard.files[CUTS])
                # All cuts after a damaged place count as one unreadable cut.
                count = len(lines) + (damage is not None)
            yield [number, count], count

    def entries(self, place: list[Any], begin: int, end: int) -> Iterator[Any]:
        """Yield (audio of the shard, line) for the cuts of a shard."""
        shard, count = self._shards[place[0]], place[1]
        lines, damage = salvage_lines(self.folder / shard.files[CUTS])
        if damage is None and len(lines) != count:
            damage = DamagedShard(f"{shard.files[CUTS]} has {len(lines)} cuts instead of {count}")
            lines = []
        path = self.folder / shard.files[self._field]
        audio = _ShardAudio(path, self.container(path), shard.files.keys() - {CUTS, self._field})
        yield from ((audio, line) for line in lines[begin:end])
        for number in range(max(begin, len(lines)), end):
            yield UnreadableRecord(
                "malformed", f"the cut cannot be read: {damage}", f"{shard.files[CUTS]} line {number + 1}"
            )

    def record(self, entry: Any) -> RawRecord:
        """Return the record of a cut."""
        audio, line = entry
        record: dict[str, Any] = {}
        try:
            cut, lost = decode_lhotse_line(line, Cut), set(audio.other_fields)
            record = self.name_keys(_describe_cut(cut, self.channel, lost))
            record |= {SOURCE_CUT_ID: cut.id} if self.keep_ids else {}
            record["audio_filepath"] = f"{audio.container}/{cut.id}"
            name, recording, place = audio.find(cut.id)
            record["audio_filepath"] = f"{audio.container}/{name}"
            record = _place_cut(cut, recording) | record
        except RejectRecord as reject:
            text = encode_record(record, line) if record else line
            return UnreadableRecord(reject.reason, reject.detail, text.decode("utf-8", "replace"))
        return describe(encode_record(record, line), lost, Member(audio.container, "bytes", *place))

    @cached_property
    def _shards(self) -> list[ShardRecord]:
        is_there = self.folder.is_dir()
        refuse(
            (not is_there, f"{self.folder} is not a folder; set shar in sources to the folder of a Shar"),
            code="missing_input",
        )
        try:
            if is_indexed(self.folder):
                return list(read_shards(self.folder, read_dataset(self.folder).num_shards))
            return find_foreign_shards(self.folder)
        except DamagedShard as error:
            raise ConfigError(f"the Shar cannot be read: {error}; copy it again", code="bad_manifest") from error

    @cached_property
    def _field(self) -> str:
        """The field with the audio."""
        fields = sorted({field for shard in self._shards for field in shard.files} - {CUTS})
        wanted = _USUAL_FIELDS if self.audio is None else (self.audio,)
        found = [field for field in wanted if field in fields]
        has = "has both " + " and ".join(found) if found else "has neither " + " nor ".join(_USUAL_FIELDS)
        refuse(
            (
                not found and self.audio is not None,
                f"audio: {self.folder} has no field {self.audio!r}{nearest(str(self.audio), fields)}",
            ),
            (
                len(found) != 1,
                f"{self.folder} {has}; set audio to the field with the audio (fields: {', '.join(fields) or 'none'})",
            ),
            code="unknown_field",
        )
        return found[0]


class _ShardAudio:
    """The audio of one shard by cut id; for a damaged archive, only the audio before the damaged place.

    Args:
        path: the archive.
        container: path of the archive relative to the audio root.
        other_fields: fields of the shard other than cuts and audio.
    """

    def __init__(self, path: Path, container: str, other_fields: set[str]) -> None:
        self._name = path.name
        self.container = container
        self.other_fields = other_fields
        self._of_cut: dict[str, list[int]] = {}
        try:
            self._table: ItemTable | RejectRecord = ItemTable(path, salvage=True)
        except DamagedShard as error:
            self._table = RejectRecord("unreadable_audio" if path.exists() else "missing_audio", str(error))
            return
        for number, name in enumerate(self._table.names):
            stem, _, extension = name.rpartition(".")
            if extension not in ("json", "nometa"):
                self._of_cut.setdefault(stem, []).append(number)

    def find(self, cut_id: str) -> tuple[str, RecordingLine, tuple[int, int]]:
        """Return the name of a cut's audio member, the Recording stored after it, and the member's location.

        Raises:
            RejectRecord: the cut has no such member, or more than one.
        """
        if isinstance(self._table, RejectRecord):
            raise self._table
        found = self._of_cut.get(cut_id, [])
        names, damage = self._table.names, self._table.cut_off
        audio = [number for number in found if not names[number].endswith(f".{NO_DATA}")]
        behind = [name for number in audio for name in names[number + 1 : number + 2]]
        refuse_record(
            (len(found) > 1, "malformed", f"{self._name} has {len(found)} members for this cut"),
            (
                not found and damage,
                "unreadable_audio",
                f"the archive is damaged before any member of this cut: {damage}",
            ),
            (not audio, "missing_audio", f"{self._name} has no audio for this cut"),
            (
                behind != [f"{cut_id}.json"],
                "unreadable_audio" if damage else "malformed",
                f"{self._name} has no {cut_id}.json after the audio of this cut",
            ),
        )
        recording = decode_lhotse_line(self._table.member(audio[0] + 1), RecordingLine)
        return names[audio[0]], recording, self._table.place(audio[0])


def _describe_cut(cut: Cut, chosen: Channel, lost: set[str]) -> dict[str, Any]:
    """Return the keys of a cut's record, except those about the stored audio.

    The origin of the audio is in ``source_audio_filepath``, ``source_offset`` and ``source_channel``.

    Args:
        chosen: channel that the source selects.
        lost: see ``speech_record``.

    Raises:
        RejectRecord: the supervisions cannot be combined into one record.
    """
    channels = listed(cut.channel)
    # The source's key ``channel`` is an index into the stored channels, not a channel number of the recording.
    channel = channels[chosen] if isinstance(chosen, int) and chosen < len(channels) else None
    supervisions = select_supervisions(cut, channel, lost)
    record = speech_record(cut, supervisions, cut.id, cut.start, lost)
    sources = cut.recording.sources if cut.recording else []
    path = sources[0].source if len(sources) == 1 and sources[0].type == "file" else None
    # Do not keep an absolute path, which depends on the machine.
    if isinstance(path, str) and path and not PurePosixPath(path).is_absolute():
        record.setdefault("source_audio_filepath", path)
    return {key: value for key, value in record.items() if key not in _DROPPED}


def _place_cut(cut: Cut, recording: RecordingLine) -> dict[str, Any]:
    """Return the keys of a cut's record that select a part and channel of the stored audio.

    Raises:
        RejectRecord: the cut extends beyond the audio, or the audio would have to be modified.
    """
    end = cut.start + cut.duration
    is_whole = math.isclose(recording.seconds, cut.duration, rel_tol=0.0, abs_tol=_SAME_SECONDS)
    refuse_record(
        (
            recording.transforms,
            "unsupported_cut",
            "its audio has transforms, which sharmill does not apply; store the transformed audio in the Shar",
        ),
        (
            not is_whole and not end <= recording.seconds + _SAME_SECONDS,
            "duration_mismatch",
            f"the cut spans {cut.start:g} to {end:g} s, but its audio has {recording.seconds:g} s",
        ),
    )
    place: dict[str, Any] = {"duration": cut.duration}
    if not is_whole:
        place["offset"] = cut.start
    elif cut.start:
        # Other tools keep the position of the segment in its original recording in ``start``.
        place["source_offset"] = cut.start
    channels = recording.channel_ids or []
    if len(channels) > 1 and cut.channel in channels:
        place["channel"] = channels.index(cut.channel)
    return place
