"""Lines of lhotse's manifests, and the keys that they give to records, except those about the audio."""

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
from sharmill.sources import Described
from sharmill.sources.files import (
    decode_json,
    decode_object,
)
from sharmill.sources.nemo import skip_mark

T = TypeVar("T")
# Finite: a custom key alone may be NaN.
_Seconds = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
# A float holds it exactly.
_Number = Annotated[int, msgspec.Meta(ge=-1 << 53, le=1 << 53)]
# Custom keys with these names do not describe the audio of the record, or are sharmill's own.
_OF_AUDIO: Final = frozenset({"audio_filepath", "offset", "duration", "channel", ALIGNMENT})
_SEVERAL_VALUES: Final = "several values of {}"
_decoder: Final[Callable[[Any], msgspec.json.Decoder[Any]]] = functools.cache(msgspec.json.Decoder)


class AudioPart(msgspec.Struct):
    """A file of a recording, or what stands for one; ``channels`` are those of the recording that it has."""

    type: str
    source: Any
    channels: list[int]
    video: Any = None


class RecordingLine(msgspec.Struct):
    """A line of a RecordingSet, or the Recording beside an audio file in a tar: facts about that file."""

    id: str
    sources: list[AudioPart]
    sampling_rate: _Number
    num_samples: _Number
    channel_ids: list[int] | None = None
    transforms: list[dict[str, Any]] | None = None

    @property
    def seconds(self) -> float:
        """The length of the audio."""
        return self.num_samples / max(1, self.sampling_rate)


class Supervision(msgspec.Struct):
    """A line of a SupervisionSet, or a supervision of a cut; ``start`` in seconds of the recording, or of the cut.

    The times of ``alignment`` are those of the recording in both.
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
    """A line of a CutSet: a MonoCut or a MultiCut, or of another kind, of which no record can be made."""

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
    """Decode a Cut, a Supervision or a Recording; NaN and Infinity, which Python and lhotse write, stay as they are.

    Raises:
        RejectRecord: ``malformed``.
    """
    problem = f"it is no {kind.__name__.lower()} of lhotse"
    try:
        return decode_json(line, _decoder(kind), problem)
    except RejectRecord:
        with suppress(msgspec.ValidationError, RejectRecord):
            return msgspec.convert(decode_object(line, problem), kind)
        raise


def describe(encoded: bytes, lost: Iterable[str], member: Member | None = None) -> Described:
    """Return a record with the place of its audio, and notes of what it does not carry."""
    return Described(
        encoded, member, {f"records have {name[:80]}, which the dataset does not take": 1 for name in lost}
    )


def find_heard(cut: Cut, chosen: Channel, lost: set[str]) -> list[Supervision]:
    """Return the supervisions of a cut, of a MultiCut those in the channel that is chosen; name others in ``lost``."""
    if not isinstance(chosen, int) or not isinstance(cut.channel, list) or len(cut.channel) == 1:
        return cut.supervisions
    heard = [supervision for supervision in cut.supervisions if chosen in listed(supervision.channel)]
    if len(heard) < len(cut.supervisions):
        lost.add("supervisions of other channels")
    return heard


def _check_speech(cut: Cut, supervisions: Sequence[Supervision]) -> None:
    """Raise RejectRecord where a cut is not of one recording and speaker, or is marked as records of NeMo are."""
    speakers = {supervision.speaker for supervision in supervisions}
    customs = [cut.custom, *(supervision.custom for supervision in supervisions)]
    is_marked = any(skip_mark(custom or {}) for custom in customs)
    refuse_record(
        (
            cut.type not in ("MonoCut", "MultiCut", "Cut"),
            "unsupported_cut",
            f"the cut is a {cut.type[:40]}, not audio as it is in one recording",
        ),
        (
            len(speakers) > 1,
            "unsupported_cut",
            f"the cut has {len(supervisions)} supervisions of {len(speakers)} speakers; split: true of the source "
            "makes a record of each, and lhotse's CutSet.trim_to_supervisions, before a Shar is written, a cut",
        ),
        (is_marked, "skipped", "the cut, or a supervision of it, is marked with _skipme"),
    )


def speech_record(
    cut: Cut, supervisions: Sequence[Supervision], own: str, start: float, lost: set[str]
) -> dict[str, Any]:
    """Return the keys of a record that do not concern its audio.

    Keys of the supervisions' ``custom`` replace those of the cut's, and their attributes replace both.

    Args:
        cut: gives the record.
        supervisions: those of the record.
        own: id of the record.
        start: seconds of the recording at which the record begins.
        lost: names of what the record does not carry, to which this function adds.

    Raises:
        RejectRecord: the supervisions do not make one record.
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
        kept = {key: value for key, value in layer.items() if key not in _OF_AUDIO and not _is_data(value)}
        lost |= layer.keys() - kept.keys() - _OF_AUDIO
        lost |= {_SEVERAL_VALUES.format(key) for key in kept.keys() & record.keys() if kept[key] != record[key]}
        record |= kept
    # The audio that a segment was once taken from, which is another file if it was stored since. Of a Shar made of a
    # Shar, what is known of the first one stays.
    custom = layers[1] | layers[0]
    taken_from = {f"source_{key}": custom[key] for key in ("audio_filepath", "offset", "channel") if key in custom}
    record |= {key: value for key, value in taken_from.items() if key not in record}
    return {"utterance_id": own} | record | _make_alignments(ordered, cut.start, start, lost)


def _make_alignments(
    supervisions: Iterable[Supervision], cut_start: float, start: float, lost: set[str]
) -> dict[str, dict[str, list[Any]]]:
    """Return the key of a record with the alignments of its supervisions, in seconds from its start, if it has some.

    lhotse counts their times from the start of the recording, also in cuts, and does not shift them when it stores cuts
    as new recordings. So the alignment of a supervision is taken only if all of it lies within the supervision.
    """
    made: dict[str, list[Any]] = {}
    for supervision in supervisions:
        begin = cut_start + supervision.start
        alignments = fit_alignments(supervision.alignment or {}, start, begin, begin + supervision.duration)
        if alignments is None:
            lost.add("an alignment that lies outside of its segment or is not in lhotse's form")
        for kind, items in (alignments or {}).items():
            made.setdefault(kind, []).extend(items)
    return {ALIGNMENT: made} if any(made.values()) else {}


def _common_keys(mappings: list[dict[str, Any]], lost: set[str]) -> dict[str, Any]:
    """Return the keys that all mappings have with one value; add the names of the others to ``lost``."""
    first, *others = mappings or [{}]
    common = {key: value for key, value in first.items() if all(o.get(key, ...) == value for o in others)}
    lost |= {_SEVERAL_VALUES.format(key) for key in set(chain(*mappings)) - common.keys() - _OF_AUDIO}
    return common


def _is_data(value: Any) -> bool:
    """Return True if a value is a manifest of lhotse about data elsewhere: an array, features, a recording."""
    return isinstance(value, dict) and (
        "storage_type" in value
        or _is_data(value.get("array"))
        or value.keys() >= frozenset({"id", "sources", "sampling_rate"})
    )


def listed(channel: int | list[int]) -> list[int]:
    return channel if isinstance(channel, list) else [channel]
