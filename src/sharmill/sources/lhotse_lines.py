"""Lines of lhotse's manifests, and the keys that they contribute to records, except keys about the audio."""

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Annotated, Any, Final, TypeVar

import msgspec

from sharmill.errors import RejectRecord, refuse_record
from sharmill.manifest import (
    ALIGNMENT,
    Channel,
    Member,
    fit_alignments,
)
from sharmill.sources import DescribedRecord
from sharmill.sources.files import (
    decode_json,
    decode_object,
)
from sharmill.sources.nemo import skip_mark

T = TypeVar("T")
# Times must be finite; NaN is accepted only in custom keys.
_Seconds = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
# Range of integers that a float represents exactly.
_Number = Annotated[int, msgspec.Meta(ge=-1 << 53, le=1 << 53)]
# Custom keys that are not copied to the record, because they describe other audio or are sharmill's own.
_AUDIO_KEYS: Final = frozenset({"audio_filepath", "offset", "duration", "channel", ALIGNMENT})
_SEVERAL_VALUES: Final = "several values of {}"
_decoder: Final[Callable[[Any], msgspec.json.Decoder[Any]]] = functools.cache(msgspec.json.Decoder)


class AudioPart(msgspec.Struct):
    """A file of a recording, or another source of its audio; ``channels`` are the channels that it contains."""

    type: str
    source: Any
    channels: list[int]
    video: Any = None


class RecordingLine(msgspec.Struct):
    """A line of a RecordingSet, or the Recording that describes an audio file in a tar archive."""

    id: str
    sources: list[AudioPart]
    sampling_rate: _Number
    num_samples: _Number
    channel_ids: list[int] | None = None
    transforms: list[dict[str, Any]] | None = None

    @property
    def seconds(self) -> float:
        """The duration of the audio in seconds."""
        return self.num_samples / max(1, self.sampling_rate)


class Supervision(msgspec.Struct):
    """A line of a SupervisionSet, or a supervision of a cut.

    In a SupervisionSet, ``start`` is in seconds from the start of the recording; in a cut, from the start of the cut.
    The times of ``alignment`` are always relative to the recording.
    """

    id: str
    recording_id: str
    start: _Seconds
    duration: _Seconds
    channel: int | list[int] = 0
    text: str | None = None
    language: str | None = None
    speaker: str | int | None = None
    gender: str | None = None
    custom: dict[str, Any] | None = None
    alignment: Any = None


class Cut(msgspec.Struct):
    """A line of a CutSet: a MonoCut, a MultiCut, or a cut of another type, which cannot become a record."""

    id: str
    type: str = "MonoCut"
    start: _Seconds = 0.0
    duration: _Seconds = 0.0
    channel: int | list[int] = 0
    supervisions: list[Supervision] = []
    recording: RecordingLine | None = None
    features: Any = None
    custom: dict[str, Any] | None = None


def decode_lhotse_line(line: bytes, kind: type[T]) -> T:
    """Decode a Cut, Supervision or Recording; NaN and Infinity, which lhotse may write, are kept.

    Raises:
        RejectRecord: ``malformed`` if the line is not of this kind.
    """
    problem = f"the line is not a lhotse {kind.__name__.removesuffix('Line').lower()}"
    try:
        return decode_json(line, _decoder(kind), problem)
    except RejectRecord:
        with suppress(msgspec.ValidationError, RejectRecord):
            return msgspec.convert(decode_object(line, problem), kind)
        raise


def describe(encoded: bytes, lost: Iterable[str], member: Member | None = None) -> DescribedRecord:
    """Return a record with the location of its audio and with notes.

    Args:
        encoded: the record as JSON.
        lost: names of things that the dataset does not store; each becomes a note.
        member: location of the audio in a container; None if the audio is a file.
    """
    return DescribedRecord(
        encoded, member, {f"records have {name[:80]}, which the dataset does not store": 1 for name in lost}
    )


def select_supervisions(cut: Cut, chosen: Channel, lost: set[str]) -> list[Supervision]:
    """Return the supervisions of a cut in the chosen channel; report dropped supervisions in ``lost``.

    A cut with one channel keeps all supervisions, as does any cut if ``chosen`` is not a number.
    """
    if not isinstance(chosen, int) or not isinstance(cut.channel, list) or len(cut.channel) == 1:
        return cut.supervisions
    heard = [supervision for supervision in cut.supervisions if chosen in listed(supervision.channel)]
    if len(heard) < len(cut.supervisions):
        lost.add("supervisions of other channels")
    return heard


def _check_speech(cut: Cut, supervisions: Sequence[Supervision]) -> None:
    """Raise RejectRecord if a cut cannot become one record, or is marked to be skipped."""
    speakers = {supervision.speaker for supervision in supervisions}
    customs = [cut.custom, *(supervision.custom for supervision in supervisions)]
    is_marked = any(skip_mark(custom or {}) for custom in customs)
    refuse_record(
        (
            cut.type not in ("MonoCut", "MultiCut", "Cut"),
            "unsupported_cut",
            f"the cut is a {cut.type[:40]}; only cuts of one unmodified recording are supported",
        ),
        (
            len(speakers) > 1,
            "unsupported_cut",
            f"the cut has {len(supervisions)} supervisions of {len(speakers)} speakers; set split: true to make a "
            "record of each, or call lhotse's CutSet.trim_to_supervisions before writing a Shar",
        ),
        (is_marked, "skipped", "the cut or one of its supervisions is marked with _skipme"),
    )


def speech_record(
    cut: Cut, supervisions: Sequence[Supervision], own: str, start: float, lost: set[str]
) -> dict[str, Any]:
    """Return the keys of a record that do not concern its audio.

    Keys in ``custom`` of the supervisions override keys in ``custom`` of the cut, and the supervisions' attributes
    override both.

    Args:
        cut: the cut of the record.
        supervisions: supervisions of the record.
        own: id of the record.
        start: start of the record within the recording, in seconds.
        lost: names of things that the record does not contain; this function adds names to it.

    Raises:
        RejectRecord: the supervisions cannot be combined into one record.
    """
    _check_speech(cut, supervisions)
    sources = cut.recording.sources if cut.recording else []
    lost |= {"video"} if any(part.video for part in sources) else set()
    lost |= {"features"} if cut.features else set()
    attributes = [
        {key: value for key in ("speaker", "language", "gender") if (value := getattr(supervision, key)) is not None}
        for supervision in supervisions
    ]
    ordered = sorted(supervisions, key=lambda supervision: supervision.start)
    texts = [supervision.text for supervision in ordered if supervision.text is not None]
    layers = [
        cut.custom or {},
        _common_keys([supervision.custom or {} for supervision in supervisions], lost),
        _common_keys(attributes, lost),
        {"text": " ".join(texts)} if texts else {},
    ]
    record: dict[str, Any] = {}
    for layer in layers:
        kept = {key: value for key, value in layer.items() if key not in _AUDIO_KEYS and not _is_data(value)}
        lost |= layer.keys() - kept.keys() - _AUDIO_KEYS
        lost |= {_SEVERAL_VALUES.format(key) for key in kept.keys() & record.keys() if kept[key] != record[key]}
        record |= kept
    # Keep the origin of a segment that has since been stored in another file. If a Shar was built from another Shar,
    # the first origin is kept.
    custom = layers[1] | layers[0]
    taken_from = {f"source_{key}": custom[key] for key in ("audio_filepath", "offset", "channel") if key in custom}
    record |= {key: value for key, value in taken_from.items() if key not in record}
    return {"utterance_id": own} | record | _make_alignments(ordered, cut.start, start, lost)


def _make_alignments(
    supervisions: Iterable[Supervision], cut_start: float, start: float, lost: set[str]
) -> dict[str, dict[str, list[Any]]]:
    """Return ``{ALIGNMENT: alignments}`` of supervisions, in seconds from the record's start; {} if there are none.

    lhotse counts alignment times from the start of the recording, even in cuts, and does not shift them when it stores
    cuts as new recordings. An alignment is therefore used only if all of it lies within its supervision.
    """
    made: dict[str, list[Any]] = {}
    for supervision in supervisions:
        begin = cut_start + supervision.start
        alignments = fit_alignments(supervision.alignment or {}, start, begin, begin + supervision.duration)
        if alignments is None:
            lost.add("an alignment outside its segment or in an unknown format")
        for kind, items in (alignments or {}).items():
            made.setdefault(kind, []).extend(items)
    return {ALIGNMENT: made} if any(made.values()) else {}


def _common_keys(mappings: list[dict[str, Any]], lost: set[str]) -> dict[str, Any]:
    """Return the keys that have the same value in all mappings; report the others in ``lost``."""
    first, *others = mappings or [{}]
    common = {key: value for key, value in first.items() if all(o.get(key, ...) == value for o in others)}
    lost |= {_SEVERAL_VALUES.format(key) for key in set(chain(*mappings)) - common.keys() - _AUDIO_KEYS}
    return common


def _is_data(value: Any) -> bool:
    """Return True if a value is a lhotse manifest of data stored elsewhere: an array, features, or a recording."""
    return isinstance(value, dict) and (
        "storage_type" in value
        or _is_data(value.get("array"))
        or value.keys() >= frozenset({"id", "sources", "sampling_rate"})
    )


def listed(channel: int | list[int]) -> list[int]:
    return channel if isinstance(channel, list) else [channel]
