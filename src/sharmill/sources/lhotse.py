"""lhotse's manifests and Shars.

Manifests are a CutSet, or a RecordingSet with or without its SupervisionSet, as JSON lines, plain or in gzip. Shars are
sharmill's own or of any other tool: each cut is a record, and its audio stays in the tar that it is in.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, Final, TypeVar

import msgspec

from sharmill.config import require
from sharmill.errors import ConfigError, DamagedShard, RejectRecord, refuse, refuse_record
from sharmill.files.checksums import checksum, checksum_bytes
from sharmill.manifest import (
    ALIGNMENT,
    CONTEXT_KEYS,
    DURATION_FROM_HEADER,
    MAX_BEYOND,
    SOURCE_CUT_ID,
    TIME_DIGITS,
    Channel,
    Member,
    fit_alignments,
)
from sharmill.registry import nearest
from sharmill.shar.fields import CONTEXT_UNALIGNED, CUTS, DATASET_FILE, RECORDING, TARGET_AUDIO
from sharmill.shar.index import ShardRecord, is_indexed, read_dataset, read_shards
from sharmill.shar.items import NO_DATA, ItemTable
from sharmill.shar.json_lines import salvage_lines
from sharmill.shar.rebuild import find_foreign_shards
from sharmill.sources import ContainerSource, Described, LineSource, RawRecord, RunSource, Unreadable
from sharmill.sources.files import (
    KeyedLines,
    check_json_lines,
    decode_json,
    decode_object,
    encode_record,
    expand_home,
    iterate_lines,
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
# Fields of a Shar that usually have the audio.
_USUAL_FIELDS: Final = (TARGET_AUDIO, RECORDING)
# Stored audio is the segment that the cut stands for if they are equally long, but for the delay of a codec.
_SAME_SECONDS: Final = 0.025
# Keys of cuts that a record does not carry.
_DROPPED: Final = (*CONTEXT_KEYS, DURATION_FROM_HEADER, CONTEXT_UNALIGNED, SOURCE_CUT_ID)
_decoder: Final[Callable[[Any], msgspec.json.Decoder[Any]]] = functools.cache(msgspec.json.Decoder)
# Types of sources of a recording that are no files, and the reason and the sentence of the reject.
_NO_FILES: Final = {
    "command": ("outside_root", "the audio is the output of a command, which is never run"),
    "shar": ("unsupported_cut", "the audio is in the tars of a Shar, and these are its cuts only"),
    "memory": ("unsupported_cut", "the audio is in memory only"),
}
# Keys of a line that tell of which manifest it is.
_OWN_KEYS: Final = {
    "sources": "recordings", "tracks": "cuts", "supervisions": "cuts", "recording_id": "supervisions",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LhotseSource(LineSource):
    """Records of lhotse manifests: cuts, supervisions with the recordings that they belong to, or recordings."""

    file_keys: ClassVar[tuple[str, ...]] = ("cuts", "supervisions", "recordings")
    type: str = "lhotse"
    cuts: str | list[str] | None = None
    """Path of a CutSet, ``.jsonl`` or ``.jsonl.gz``, or a list of them, as ``manifest`` of ``nemo``."""
    recordings: str | list[str] | None = None
    """Path of a RecordingSet, or a list of them; instead of ``cuts``. Without ``supervisions`` each is a record."""
    supervisions: str | list[str] | None = None
    """Path of a SupervisionSet, or a list of them: each supervision is a record, in this order."""
    split: bool = False
    """Every supervision of a cut is a record. ``false``: the cut is one, with the texts of its supervisions joined; a
    cut with several speakers is then rejected."""
    keep_ids: bool = False
    """The ids of the cuts are those of the dataset: of cuts with ``split: true`` and of supervisions their ids, of
    recordings alone theirs. All sources of a dataset keep ids, or none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        named = [key for key in self.file_keys if getattr(self, key) is not None]
        is_manifest = named in (["cuts"], ["recordings"], ["supervisions", "recordings"])
        require(is_manifest, "give either cuts, or recordings, or recordings and supervisions")
        is_usable = not self.split or self.cuts is not None
        require(is_usable, "split is for cuts; of supervisions each one is a record anyway")

    def check(self) -> None:
        """Raise ConfigError where a file cannot be the manifest that it is named as."""
        for key in self.file_keys:
            for file in self.find(key):
                check_json_lines(
                    file,
                    key,
                    "write it by lhotse as .jsonl or .jsonl.gz, such as by lhotse copy",
                    functools.partial(_mistaken, key),
                    compressed=("gzip",),
                )

    def identity(self) -> dict[str, Any]:
        """Return the size and checksum of every file, by its key, number and name; also prove that each can be read."""
        found = super().identity()
        for file in self.find("recordings"):
            # The pieces prove that the records can be read.
            for _ in iterate_lines(file, "recordings"):
                pass
        return found

    def split_line(self, line: bytes) -> list[Any]:
        """Return a line and, with ``split``, its cut with one of the supervisions."""
        if self.split:
            with suppress(RejectRecord):  # of which ``record`` tells
                cut = decode_lhotse_line(line, Cut)
                return [(line, cut, [supervision]) for supervision in cut.supervisions] or [(line, cut, [])]
        return [(line, None, [])]

    def record(self, entry: Any) -> RawRecord:
        """Return the record of a cut, of a supervision or of a recording."""
        line, cut, supervisions = entry
        lost: set[str] = set()
        if self.cuts is not None:
            if cut is None:
                cut = decode_lhotse_line(line, Cut)
                supervisions = cut.supervisions
        elif self.supervisions is None:
            recording = decode_lhotse_line(line, RecordingLine)
            channels = [channel for part in recording.sources for channel in part.channels]
            cut = Cut(recording.id, duration=recording.seconds, channel=channels, recording=recording)
        else:
            one = decode_lhotse_line(line, Supervision)
            # A set may have a recording twice, as it is where parts of a corpus were put together.
            found = sorted(set(self._recordings.find(one.recording_id.encode())))
            number = "several recordings have" if found else "no recording has"
            detail = f"{number} the id {one.recording_id[:80]!r} of the supervision"
            refuse_record((len(found) != 1, "malformed", detail))
            supervisions = [one]
            cut = Cut(one.id, duration=math.inf, recording=decode_lhotse_line(found[0], RecordingLine))
        record = _cut_record(cut, supervisions, self.split or self.supervisions is not None, self.channel, lost)
        if not self.keep_ids:
            del record[SOURCE_CUT_ID]
        return _describe(encode_record(record, line), lost) if lost else encode_record(record, line)

    def shown(self, entry: Any) -> str:
        """Return the begin of a line."""
        return entry[0][:4096].decode("utf-8", "replace")

    @cached_property
    def _recordings(self) -> KeyedLines:
        return KeyedLines(self.find("recordings"), "recordings", _recording_id)


class _Named(msgspec.Struct):
    id: str


def _recording_id(line: bytes) -> bytes | None:
    with suppress(msgspec.MsgspecError, UnicodeError, RecursionError):
        return msgspec.json.decode(line, type=_Named).id.encode()
    return None


def _mistaken(key: str, first: dict[str, Any]) -> str | None:
    """Return what is wrong with a file whose first object is of another manifest than its key says."""
    if "audio_filepath" in first:
        return "has the records of a NeMo manifest; read it by type: nemo"
    is_cut = str(first.get("type")).endswith("Cut")
    found = next((kind for own, kind in _OWN_KEYS.items() if own in first), "cuts" if is_cut else key)
    return None if found == key else f"has {found}, not {key}; name it as {found}"


class _AudioPart(msgspec.Struct):
    """A file of a recording, or what stands for one; ``channels`` are those of the recording that it has."""

    type: str
    source: Any
    channels: list[int]
    video: Any = None


class RecordingLine(msgspec.Struct):
    """A line of a RecordingSet, or the Recording beside an audio file in a tar: facts about that file."""

    id: str
    sources: list[_AudioPart]
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


def _describe(encoded: bytes, lost: Iterable[str], member: Member | None = None) -> Described:
    """Return a record with the place of its audio, and notes of what it does not carry."""
    return Described(
        encoded, member, {f"records have {name[:80]}, which the dataset does not take": 1 for name in lost}
    )


def _cut_record(
    cut: Cut, supervisions: list[Supervision], split: bool, chosen: Channel, lost: set[str]
) -> dict[str, Any]:
    """Return the record of some supervisions of a cut, with ``split`` that of the only one; see ``_speech_record``."""
    if not split:
        supervisions = _find_heard(cut, chosen, lost)
    _check_speech(cut, supervisions)
    if cut.recording is None:
        raise RejectRecord("missing_field", "the cut has no recording")
    for supervision in supervisions:
        beyond = max(-supervision.start, supervision.start + supervision.duration - cut.duration)
        # The supervision of a window of a recording may go far beyond it.
        if beyond > MAX_BEYOND:
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
    own = supervisions[0].id if len(supervisions) == 1 else cut.id
    audio = _audio(cut.recording, cut.start + start, end - start, channels, chosen)
    record = _speech_record(cut, supervisions, own, cut.start + start, lost)
    return record | audio | {SOURCE_CUT_ID: own if split else cut.id}


def _find_heard(cut: Cut, chosen: Channel, lost: set[str]) -> list[Supervision]:
    """Return the supervisions of a cut, of a MultiCut those in the channel that is chosen; name others in ``lost``."""
    if not isinstance(chosen, int) or not isinstance(cut.channel, list) or len(cut.channel) == 1:
        return cut.supervisions
    heard = [supervision for supervision in cut.supervisions if chosen in _listed(supervision.channel)]
    if len(heard) < len(cut.supervisions):
        lost.add("supervisions of other channels")
    return heard


def _check_speech(cut: Cut, supervisions: Sequence[Supervision]) -> None:
    """Raise RejectRecord where a cut is not of one recording and speaker, or is marked as records of NeMo are."""
    if cut.type not in ("MonoCut", "MultiCut", "Cut"):
        raise RejectRecord("unsupported_cut", f"the cut is a {cut.type[:40]}, not audio as it is in one recording")
    speakers = {supervision.speaker for supervision in supervisions}
    if len(speakers) > 1:
        raise RejectRecord(
            "unsupported_cut",
            f"the cut has {len(supervisions)} supervisions of {len(speakers)} speakers; split: true of the source "
            "makes a record of each, and lhotse's CutSet.trim_to_supervisions, before a Shar is written, a cut",
        )
    customs = [cut.custom, *(supervision.custom for supervision in supervisions)]
    is_marked = any(skip_mark(custom or {}) for custom in customs)
    refuse_record((is_marked, "skipped", "the cut, or a supervision of it, is marked with _skipme"))


def _speech_record(
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
    """
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


def _audio(
    recording: RecordingLine, start: float, duration: float, channels: list[int], chosen: Channel
) -> dict[str, Any]:
    """Return the keys of a record that say where its audio is; without ``offset`` where that is the whole file."""
    for transform in recording.transforms or []:
        # Another sampling rate is the same speech at the same times; write.sampling_rate is what is stored.
        if transform.get("name") != "Resample":
            raise RejectRecord(
                "unsupported_cut",
                f"its recording is changed by {str(transform.get('name'))[:40]!r}, which sharmill does not apply: "
                "store the changed audio (lhotse: CutSet.save_audios), and name the new cuts",
            )
    channel = channels[0] if len(channels) == 1 else chosen
    if channel != "downmix" and channel not in channels:
        names = ", ".join(map(str, channels[:20]))
        raise RejectRecord(
            "unsupported_channels", f"the channels are {names}; set channel of the source to one of them"
        )
    part, index = _part(recording, channels, channel)
    if part.type in _NO_FILES:
        raise RejectRecord(*_NO_FILES[part.type])
    if part.type not in ("file", "url") or not isinstance(part.source, str):
        raise RejectRecord("malformed", f"the audio is of the type {part.type[:40]!r}, and no path of a file or URL")
    record: dict[str, Any] = {"audio_filepath": part.source}
    if abs(start) * recording.sampling_rate >= 0.5 or (
        abs(duration * recording.sampling_rate - recording.num_samples) >= 0.5
    ):
        record["offset"] = round(start, TIME_DIGITS)
    record["duration"] = round(duration, TIME_DIGITS)
    if len(part.channels) > 1:
        record["channel"] = index
    return record


def _part(recording: RecordingLine, channels: list[int], channel: Channel) -> tuple[_AudioPart, Channel]:
    """Return the file that has a channel, and the channel's place in the file."""
    if channel == "downmix":
        whole = [part for part in recording.sources if sorted(part.channels) == sorted(channels)]
        refuse_record(
            (not whole, "unsupported_channels", "downmix is the mean of a file, and these channels are not a file")
        )
        return whole[0], channel
    for part in recording.sources:
        if channel in part.channels:
            return part, part.channels.index(channel)
    raise RejectRecord("malformed", f"no source of the recording has the channel {channel}")


def _listed(channel: int | list[int]) -> list[int]:
    return channel if isinstance(channel, list) else [channel]


@dataclass(frozen=True, kw_only=True)
class LhotseSharSource(ContainerSource, RunSource):
    """Records of a Shar: a dataset by sharmill, or shards that lhotse or another tool wrote."""

    file_keys: ClassVar[tuple[str, ...]] = ("shar",)
    type: str = "lhotse_shar"
    audio_root: str | None = None
    """Folder below which names and ids begin; ``null`` is ``shar``."""
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
                continue  # it has no item that would tell
            except RejectRecord as reject:
                raise ConfigError(
                    f"the field {field} of {self.folder} is not audio; name the one that is with audio",
                    code="bad_config_value",
                ) from reject

    def identity(self) -> dict[str, Any]:
        """Return the number of shards, and a checksum of names, sizes and the checksums of the index or of the cuts."""
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
        """Yield the shards and their numbers of cuts, which are counted where there is no index."""
        for number, shard in enumerate(self._shards):
            count = shard.count
            if count < 0:
                lines, damage = salvage_lines(self.folder / shard.files[CUTS])
                # The cuts that a damage cuts off count as one.
                count = len(lines) + (damage is not None)
            yield [number, count], count

    def entries(self, place: list[Any], begin: int, end: int) -> Iterator[Any]:
        """Yield the lines of the cuts of a shard, with the audio."""
        shard, count = self._shards[place[0]], place[1]
        lines, damage = salvage_lines(self.folder / shard.files[CUTS])
        if damage is None and len(lines) != count:
            damage = DamagedShard(f"{shard.files[CUTS]} has {len(lines)} cuts, and there should be {count}")
            lines = []
        path = self.folder / shard.files[self._field]
        audio = _ShardAudio(path, self.container(path), shard.files.keys() - {CUTS, self._field})
        yield from ((audio, line) for line in lines[begin:end])
        for number in range(max(begin, len(lines)), end):
            yield Unreadable("malformed", f"the cut cannot be read: {damage}", f"{shard.files[CUTS]} line {number + 1}")

    def record(self, entry: Any) -> RawRecord:
        """Return the record of a cut."""
        audio, line = entry
        record: dict[str, Any] = {}
        try:
            cut, lost = decode_lhotse_line(line, Cut), set(audio.other_fields)
            record = _describe_cut(cut, self.channel, lost) | ({SOURCE_CUT_ID: cut.id} if self.keep_ids else {})
            record["audio_filepath"] = f"{audio.container}/{cut.id}"
            name, recording, place = audio.find(cut.id)
            record["audio_filepath"] = f"{audio.container}/{name}"
            record = _place_cut(cut, recording) | record
        except RejectRecord as reject:
            text = encode_record(record, line) if record else line
            return Unreadable(reject.reason, reject.detail, text.decode("utf-8", "replace"))
        return _describe(encode_record(record, line), lost, Member(audio.container, "bytes", *place))

    @cached_property
    def _shards(self) -> list[ShardRecord]:
        is_there = self.folder.is_dir()
        refuse((not is_there, f"the Shar {self.folder} is not a folder; correct shar in sources"), code="missing_input")
        try:
            if is_indexed(self.folder):
                return list(read_shards(self.folder, read_dataset(self.folder).num_shards))
            return find_foreign_shards(self.folder)
        except DamagedShard as error:
            raise ConfigError(f"the Shar cannot be read: {error}; copy it again", code="bad_manifest") from error

    @cached_property
    def _field(self) -> str:
        """The field that has the audio."""
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
                f"{self.folder} {has}; name the field of the audio with audio: one of {', '.join(fields) or 'none'}",
            ),
            code="unknown_field",
        )
        return found[0]


class _ShardAudio:
    """The audio of one shard by the ids of its cuts: of a damaged archive, what comes before the damage.

    Args:
        container: the path of the archive below the audio root.
        other_fields: names of the shard's fields that have neither the cuts nor the audio.
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
        """Return the name of the member that has the audio of a cut, the Recording behind it, and its place.

        Raises:
            RejectRecord: there is none, or not one.
        """
        if isinstance(self._table, RejectRecord):
            raise self._table
        found = self._of_cut.get(cut_id, [])
        names, damage = self._table.names, self._table.cut_off
        audio = [number for number in found if not names[number].endswith(f".{NO_DATA}")]
        behind = [name for number in audio for name in names[number + 1 : number + 2]]
        refuse_record(
            (len(found) > 1, "malformed", f"{self._name} has {len(found)} members of this cut"),
            (not found and damage, "unreadable_audio", f"no member of this cut comes before the damage: {damage}"),
            (not audio, "missing_audio", f"{self._name} has no audio of this cut"),
            (
                behind != [f"{cut_id}.json"],
                "unreadable_audio" if damage else "malformed",
                f"{self._name} has no {cut_id}.json behind the audio of this cut",
            ),
        )
        recording = decode_lhotse_line(self._table.member(audio[0] + 1), RecordingLine)
        return names[audio[0]], recording, self._table.place(audio[0])


def _describe_cut(cut: Cut, chosen: Channel, lost: set[str]) -> dict[str, Any]:
    """Return the keys of a cut's record but those of the stored audio; ``lost`` has names of what it does not carry.

    Where the audio was taken from is in ``source_audio_filepath``, ``source_offset`` and ``source_channel``.

    Raises:
        RejectRecord: its supervisions do not make one record.
    """
    channels = _listed(cut.channel)
    # A number of the source counts the channels that are stored.
    channel = channels[chosen] if isinstance(chosen, int) and chosen < len(channels) else None
    supervisions = _find_heard(cut, channel, lost)
    _check_speech(cut, supervisions)
    record = _speech_record(cut, supervisions, cut.id, cut.start, lost)
    sources = cut.recording.sources if cut.recording else []
    path = sources[0].source if len(sources) == 1 and sources[0].type == "file" else None
    # An absolute path says something about a machine, and nothing about the data.
    if isinstance(path, str) and path and not PurePosixPath(path).is_absolute():
        record.setdefault("source_audio_filepath", path)
    return {key: value for key, value in record.items() if key not in _DROPPED}


def _place_cut(cut: Cut, recording: RecordingLine) -> dict[str, Any]:
    """Return the keys of a cut's record that say which part of the stored audio it is, and of which channel.

    Raises:
        RejectRecord: the cut does not lie within the audio, or the audio would have to be changed.
    """
    end = cut.start + cut.duration
    is_whole = math.isclose(recording.seconds, cut.duration, rel_tol=0.0, abs_tol=_SAME_SECONDS)
    refuse_record(
        (
            recording.transforms,
            "unsupported_cut",
            "its audio is changed by transforms while it is loaded; store the changed audio in the Shar",
        ),
        (
            not is_whole and not end <= recording.seconds + _SAME_SECONDS,
            "duration_mismatch",
            f"the cut is {cut.start:g} to {end:g} s of its audio, which has {recording.seconds:g} s",
        ),
    )
    place: dict[str, Any] = {"duration": cut.duration}
    if not is_whole:
        place["offset"] = cut.start
    elif cut.start:
        # Other tools leave in ``start`` the place of the segment in the recording that it was taken from.
        place["source_offset"] = cut.start
    channels = recording.channel_ids or []
    if len(channels) > 1 and cut.channel in channels:
        place["channel"] = channels.index(cut.channel)
    return place
