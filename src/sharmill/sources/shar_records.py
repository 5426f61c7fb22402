"""Records of the cuts of a Shar: the keys of the cut and of its supervision, and the place of its stored audio."""

from __future__ import annotations

import json
import math
from pathlib import Path, PurePosixPath
from typing import Any, Final

import msgspec

from sharmill.errors import RejectRecord
from sharmill.manifest import CONTEXT_KEYS, DURATION_FROM_HEADER, SOURCE_CUT_ID
from sharmill.shar.items import NO_DATA
from sharmill.shar.layout import CONTEXT_UNALIGNED
from sharmill.shar.tar import TarTable
from sharmill.sources.lhotse_records import Cut, common_keys, decode_lhotse_cut, speech_record

# What is stored is the segment that the cut stands for where they are equally long, but for the delay of a codec.
_SAME_SECONDS: Final = 0.025
# Of the audio that a segment was once taken from; what is stored is another file.
_OF_THE_ORIGIN: Final = ("audio_filepath", "offset", "channel")
_DROPPED: Final = (*CONTEXT_KEYS, DURATION_FROM_HEADER, CONTEXT_UNALIGNED, SOURCE_CUT_ID)


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


_decoder: Final = msgspec.json.Decoder(StoredRecording)


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
            return _decoder.decode(self.table.read(number))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RejectRecord("malformed", f"{self.table.names[number]} is no recording: {error}") from error


def decode_stored_cut(line: bytes) -> Cut:
    """Decode the line of a cut; raise RejectRecord ``malformed`` where it is none."""
    try:
        return decode_lhotse_cut(line)
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
