"""lhotse's manifests as records: a cut, or a supervision with its recording, becomes the keys of a manifest.

Lines are decoded as far as records need it, without lhotse's own classes, which take many times as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import msgspec

from sharmill.errors import RejectRecord
from sharmill.manifest import SOURCE_CUT_ID, Channel

# Seconds by which a supervision may go beyond its cut; one of a window of a recording goes on far beyond it.
_MAX_BEYOND: Final = 0.1
# lhotse has eight digits, too.
_DIGITS: Final = 8
_NOT_APPLIED: Final = (
    "which sharmill does not apply: store the changed audio (lhotse: CutSet.save_audios), and name the new cuts"
)
_NOT_HERE: Final = {"shar": "is in the tars of a Shar, and these are its cuts only", "memory": "is in memory only"}
_RECORDING_KEYS: Final = frozenset({"id", "sources", "sampling_rate"})
_OF_THE_AUDIO: Final = frozenset({"audio_filepath", "offset", "duration", "channel"})


Line = TypeVar("Line", "Cut", "LhotseRecording", "Supervision")


class AudioPart(msgspec.Struct):
    """A file of a recording, or what stands for one; ``channels`` are those of the recording that it has."""

    type: str
    source: Any
    channels: list[int]


class LhotseRecording(msgspec.Struct):
    """A line of a RecordingSet."""

    id: str
    sources: list[AudioPart]
    sampling_rate: int
    num_samples: int
    transforms: list[dict[str, Any]] | None = None


class Supervision(msgspec.Struct):
    """A line of a SupervisionSet, or a supervision of a cut; ``start`` in seconds of the recording, or of the cut."""

    id: str
    recording_id: str
    start: float
    duration: float
    channel: int | list[int] = 0
    text: str | None = None
    language: str | None = None
    speaker: str | int | None = None
    gender: str | None = None
    custom: dict[str, Any] | None = None


class Cut(msgspec.Struct):
    """A line of a CutSet: a MonoCut or a MultiCut, or of another kind, of which no record can be made."""

    id: str
    type: str = "MonoCut"
    start: float = 0.0
    duration: float = 0.0
    channel: int | list[int] = 0
    supervisions: list[Supervision] = []
    recording: LhotseRecording | None = None
    custom: dict[str, Any] | None = None


class _Counted(msgspec.Struct):
    supervisions: list[msgspec.Raw] = []


_NAMES: Final[dict[type, str]] = {Cut: "cut", LhotseRecording: "recording", Supervision: "supervision"}


def decode_lhotse(line: bytes, kind: type[Line]) -> Line:
    """Decode a line of a manifest; raise RejectRecord ``malformed`` where it is none of its kind."""
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RejectRecord("malformed", f"the line is no {_NAMES[kind]} of lhotse: {error}") from error


def count_records(line: bytes, split: bool) -> int:
    """Return how many records a line of a CutSet is; with ``split`` each supervision is one. Bad lines are one."""
    if not split:
        return 1
    try:
        return max(1, len(msgspec.json.decode(line, type=_Counted).supervisions))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return 1


def cut_records(line: bytes, split: bool, channel: Channel) -> Iterator[dict[str, Any] | RejectRecord]:
    """Yield the records of a line of a CutSet, so many as ``count_records`` says, each or the reason why it is none.

    Args:
        split: each supervision is a record; else the cut is one.
        channel: that of cuts with several.
    """
    try:
        cut = decode_lhotse(line, Cut)
        if cut.type not in ("MonoCut", "MultiCut", "Cut"):
            raise RejectRecord("unsupported_cut", f"the cut is a {cut.type[:40]}, not audio as it is in one recording")
        if cut.recording is None:
            raise RejectRecord("missing_field", "the cut has no recording")
    except RejectRecord as reject:
        yield from [reject] * count_records(line, split)
        return
    groups = [[supervision] for supervision in cut.supervisions] if split else [cut.supervisions]
    for supervisions in groups or [[]]:
        try:
            yield _cut_record(cut, cut.recording, supervisions, split, channel)
        except RejectRecord as reject:
            yield reject


def _cut_record(
    cut: Cut, recording: LhotseRecording, supervisions: list[Supervision], split: bool, chosen: Channel
) -> dict[str, Any]:
    speakers = list(dict.fromkeys(supervision.speaker for supervision in supervisions))
    if len(speakers) > 1:
        raise RejectRecord(
            "unsupported_cut",
            f"the cut has {len(supervisions)} supervisions of {len(speakers)} speakers; split: true of the source "
            "makes a record of each",
        )
    for supervision in supervisions:
        beyond = max(-supervision.start, supervision.start + supervision.duration - cut.duration)
        if beyond > _MAX_BEYOND:
            raise RejectRecord(
                "duration_mismatch",
                f"the supervision {supervision.id[:80]} goes {beyond:.3g} s beyond its cut, so that its text would not "
                "fit the audio",
            )
    start, end, channels = 0.0, cut.duration, _listed(cut.channel)
    if split and supervisions:
        start = max(0.0, supervisions[0].start)
        end = min(cut.duration, supervisions[0].start + supervisions[0].duration)
        channels = _listed(supervisions[0].channel)
    further = [cut.custom or {}, *common_keys([supervision.custom or {} for supervision in supervisions])]
    own = supervisions[0].id if len(supervisions) == 1 else cut.id
    audio = _audio(recording, cut.start + start, end - start, channels, chosen)
    return speech_record(further, supervisions, own) | audio | {SOURCE_CUT_ID: own if split else cut.id}


def supervision_record(recording: LhotseRecording, supervision: Supervision, channel: Channel = None) -> dict[str, Any]:
    """Return the record of a supervision of a recording; ``channel`` is chosen of several.

    Raises:
        RejectRecord: the audio is none of a file below an audio root, or has several channels of which none is chosen.
    """
    audio = _audio(recording, supervision.start, supervision.duration, _listed(supervision.channel), channel)
    record = speech_record([supervision.custom or {}], [supervision], supervision.id)
    return record | audio | {SOURCE_CUT_ID: supervision.id}


def recording_record(recording: LhotseRecording, channel: Channel = None) -> dict[str, Any]:
    """Return the record of a whole recording; raise RejectRecord as ``supervision_record``."""
    channels = [channel for part in recording.sources for channel in part.channels]
    duration = recording.num_samples / max(1, recording.sampling_rate)
    audio = _audio(recording, 0.0, duration, channels, channel)
    return {"utterance_id": recording.id} | audio | {SOURCE_CUT_ID: recording.id}


def speech_record(further: Iterable[dict[str, Any]], supervisions: Sequence[Supervision], own: str) -> dict[str, Any]:
    """Return the keys of a record that do not concern its audio; ``own`` is its id, ``further`` has custom keys."""
    record: dict[str, Any] = {"utterance_id": own}
    for custom in further:
        record |= {key: value for key, value in custom.items() if key not in _OF_THE_AUDIO and not _is_data(value)}
    for key in ("speaker", "language", "gender"):
        values = {getattr(supervision, key) for supervision in supervisions}
        if len(values) == 1 and (value := values.pop()) is not None:
            record[key] = value
    ordered = sorted(supervisions, key=lambda supervision: supervision.start)
    texts = [supervision.text for supervision in ordered if supervision.text is not None]
    return record | ({"text": " ".join(texts)} if texts else {})


def common_keys(customs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the keys that all have with one value."""
    first, *others = customs or [{}]
    return [{key: value for key, value in first.items() if all(o.get(key, ...) == value for o in others)}]


def _is_data(value: Any) -> bool:
    """Return True if a value is a manifest of lhotse about data elsewhere: an array, features, a recording."""
    if not isinstance(value, dict):
        return False
    return "storage_type" in value or _is_data(value.get("array")) or value.keys() >= _RECORDING_KEYS


def _audio(
    recording: LhotseRecording, start: float, duration: float, channels: list[int], chosen: Channel
) -> dict[str, Any]:
    """Return the keys of a record that say where its audio is; without ``offset`` where that is the whole file."""
    for transform in recording.transforms or []:
        # Another sampling rate is the same speech at the same times; write.sampling_rate is what is stored.
        if transform.get("name") != "Resample":
            raise RejectRecord(
                "unsupported_cut", f"its recording is changed by {str(transform.get('name'))[:40]!r}, {_NOT_APPLIED}"
            )
    channel = _choose(channels, chosen)
    part, index = _part(recording, channels, channel)
    record: dict[str, Any] = {"audio_filepath": _path(part)}
    if abs(start) * recording.sampling_rate >= 0.5 or (
        abs(duration * recording.sampling_rate - recording.num_samples) >= 0.5
    ):
        record["offset"] = round(start, _DIGITS)
    record["duration"] = round(duration, _DIGITS)
    if len(part.channels) > 1:
        record["channel"] = index
    return record


def _choose(channels: list[int], chosen: Channel) -> Channel:
    if len(channels) == 1:
        return channels[0]
    if chosen is None or (isinstance(chosen, int) and chosen not in channels):
        names = ", ".join(map(str, channels[:20]))
        raise RejectRecord(
            "unsupported_channels", f"the channels are {names}; set channel of the source to one of them"
        )
    return chosen


def _part(recording: LhotseRecording, channels: list[int], channel: Channel) -> tuple[AudioPart, Channel]:
    """Return the file that has a channel, and the channel's place in the file."""
    if channel == "downmix":
        whole = [part for part in recording.sources if sorted(part.channels) == sorted(channels)]
        if not whole:
            raise RejectRecord(
                "unsupported_channels", "downmix is the mean of a file, and these channels are not a file"
            )
        return whole[0], channel
    for part in recording.sources:
        if channel in part.channels:
            return part, part.channels.index(channel)
    raise RejectRecord("malformed", f"no source of the recording has the channel {channel}")


def _path(part: AudioPart) -> str:
    if part.type == "command":
        raise RejectRecord("outside_root", "the audio is the output of a command, which is never run")
    if part.type in _NOT_HERE:
        raise RejectRecord("unsupported_cut", f"the audio {_NOT_HERE[part.type]}")
    if part.type not in ("file", "url"):
        raise RejectRecord("malformed", f"the audio is of the type {part.type[:40]!r}, which is unknown")
    if not isinstance(part.source, str):
        raise RejectRecord("malformed", "the source of the audio is no path")
    return part.source


def _listed(channel: int | list[int]) -> list[int]:
    return channel if isinstance(channel, list) else [channel]
