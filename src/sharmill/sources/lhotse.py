"""lhotse's manifests as JSON lines, plain or gzip: a CutSet, or a RecordingSet with an optional SupervisionSet."""

import functools
import math
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final

import msgspec

from sharmill.config import require
from sharmill.errors import RejectRecord, refuse_record
from sharmill.manifest import (
    MAX_BEYOND,
    SOURCE_CUT_ID,
    TIME_DIGITS,
    Channel,
)
from sharmill.sources import ColumnSource, LineSource, RawRecord
from sharmill.sources.files import (
    KeyedLines,
    check_json_lines,
    encode_record,
    iterate_lines,
)
from sharmill.sources.lhotse_lines import (
    AudioPart,
    Cut,
    RecordingLine,
    Supervision,
    decode_lhotse_line,
    describe,
    listed,
    select_supervisions,
    speech_record,
)

# Types of a recording's sources that are not files, with the reason and message of the reject.
_NO_FILES: Final = {
    "command": ("outside_root", "the audio is the output of a command, which is never run"),
    "shar": ("unsupported_cut", "the audio is in the tar files of a Shar; use the source type lhotse_shar for it"),
    "memory": ("unsupported_cut", "the audio is stored inside the manifest; save it as a file"),
}
# Keys that show which kind of manifest a line belongs to.
_OWN_KEYS: Final = {
    "sources": "recordings", "tracks": "cuts", "supervisions": "cuts", "recording_id": "supervisions",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LhotseSource(LineSource, ColumnSource):
    """Records of lhotse manifests: cuts, supervisions with their recordings, or recordings alone."""

    file_keys: ClassVar[tuple[str, ...]] = ("cuts", "supervisions", "recordings")
    type: str = "lhotse"
    cuts: str | list[str] | None = None
    """Path of a CutSet, ``.jsonl`` or ``.jsonl.gz``, or a list of paths, as for ``manifest`` of ``nemo``."""
    recordings: str | list[str] | None = None
    """Path of a RecordingSet, or a list of paths; used instead of ``cuts``. Without ``supervisions``, each recording
    becomes a record."""
    supervisions: str | list[str] | None = None
    """Path of a SupervisionSet, or a list of paths. Each supervision becomes a record, in this order."""
    split: bool = False
    """``true`` makes each supervision of a cut a record. ``false`` makes each cut a record with the joined texts of its
    supervisions, and rejects cuts with several speakers."""
    keep_ids: bool = False
    """Keep the ids of supervisions (with ``split: true`` or ``supervisions``), otherwise of cuts or recordings. Set
    this for all sources or for none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        named = [key for key in self.file_keys if getattr(self, key) is not None]
        is_manifest = named in (["cuts"], ["recordings"], ["supervisions", "recordings"])
        require(is_manifest, "set either cuts, or recordings, or recordings and supervisions")
        is_usable = not self.split or self.cuts is not None
        require(is_usable, "split applies only to cuts; each supervision of a SupervisionSet is a record anyway")

    def check(self) -> None:
        """Raise ConfigError if a file cannot be the kind of manifest that its key names."""
        for key in self.file_keys:
            for file in self.find(key):
                check_json_lines(
                    file,
                    key,
                    "convert it to .jsonl or .jsonl.gz, for example with lhotse copy",
                    functools.partial(_mistaken, key),
                )

    def identity(self) -> dict[str, Any]:
        """Return the size and checksum of each file by key, number and name, and check that the files are readable."""
        found = super().identity()
        for file in self.find("recordings"):
            # Check all lines here, because reading the pieces later checks only the files whose lines become records.
            for _ in iterate_lines(file, "recordings"):
                pass
        return found

    def split_line(self, line: bytes) -> list[Any]:
        """Return the entries of a line: with ``split``, one for each supervision of its cut, otherwise one."""
        if self.split:
            with suppress(RejectRecord):  # ``record`` reports the error
                cut = decode_lhotse_line(line, Cut)
                return [(line, cut, [supervision]) for supervision in cut.supervisions] or [(line, cut, [])]
        return [(line, None, [])]

    def record(self, entry: Any) -> RawRecord:
        """Return the record of a cut, a supervision, or a recording."""
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
            # A set may contain a recording twice if it was concatenated from parts of a corpus.
            found = sorted(set(self._recordings.find(one.recording_id.encode())))
            number = "several different recordings have" if found else "no recording has"
            detail = f"{number} the supervision's recording_id {one.recording_id[:80]!r}"
            refuse_record((len(found) != 1, "malformed", detail))
            supervisions = [one]
            cut = Cut(one.id, duration=math.inf, recording=decode_lhotse_line(found[0], RecordingLine))
        record = _cut_record(cut, supervisions, self.split or self.supervisions is not None, self.channel, lost)
        if not self.keep_ids:
            del record[SOURCE_CUT_ID]
        record = self.name_keys(record)
        return describe(encode_record(record, line), lost) if lost else encode_record(record, line)

    def shown(self, entry: Any) -> str:
        """Return the start of a line."""
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
    """Return a message if a file's first object belongs to another kind of manifest than ``key``, otherwise None."""
    if "audio_filepath" in first:
        return "has the records of a NeMo manifest; use type: nemo"
    is_cut = str(first.get("type")).endswith("Cut")
    found = next((kind for own, kind in _OWN_KEYS.items() if own in first), "cuts" if is_cut else key)
    return None if found == key else f"has {found}, not {key}; set the key {found} instead of {key}"


def _cut_record(
    cut: Cut, supervisions: list[Supervision], split: bool, chosen: Channel, lost: set[str]
) -> dict[str, Any]:
    """Return the record of a cut with its supervisions or, with ``split``, of one supervision of the cut.

    Args:
        supervisions: supervisions of the cut; with ``split``, at most one.
        chosen: channel that the source selects.
        lost: see ``speech_record``.
    """
    if not split:
        supervisions = select_supervisions(cut, chosen, lost)
    start, end, channels = 0.0, cut.duration, listed(cut.channel)
    if split and supervisions:
        start = max(0.0, supervisions[0].start)
        end = min(cut.duration, supervisions[0].start + supervisions[0].duration)
        channels = listed(supervisions[0].channel)
    own = supervisions[0].id if len(supervisions) == 1 else cut.id
    record = speech_record(cut, supervisions, own, cut.start + start, lost)
    if cut.recording is None:
        raise RejectRecord("missing_field", "the cut has no recording")
    for supervision in supervisions:
        beyond = max(-supervision.start, supervision.start + supervision.duration - cut.duration)
        # A supervision may extend far beyond its cut if the cut is a window of a recording.
        refuse_record(
            (
                beyond > MAX_BEYOND,
                "duration_mismatch",
                f"the supervision {supervision.id[:80]} extends {beyond:.3g} s beyond its cut, so its text would not "
                "match the audio",
            )
        )
    record |= _audio(cut.recording, cut.start + start, end - start, channels, chosen)
    return record | {SOURCE_CUT_ID: own if split else cut.id}


def _audio(
    recording: RecordingLine, start: float, duration: float, channels: list[int], chosen: Channel
) -> dict[str, Any]:
    """Return the keys of a record that locate its audio; ``offset`` is left out for a whole file."""
    # Resampling changes neither speech nor times, and write.sampling_rate decides which rate is stored.
    changes = [str(transform.get("name"))[:40] for transform in recording.transforms or []]
    other_changes = [name for name in changes if name != "Resample"]
    channel = channels[0] if len(channels) == 1 else chosen
    refuse_record(
        (
            other_changes,
            "unsupported_cut",
            f"its recording has the transform {''.join(other_changes[:1])!r}, which sharmill does not apply; "
            "save the transformed audio (lhotse: CutSet.save_audios), and use the new cuts",
        ),
        (
            channel != "downmix" and channel not in channels,
            "unsupported_channels",
            f"the channels are {', '.join(map(str, channels[:20]))}; set the key channel of the source to one of them",
        ),
    )
    part, index = _part(recording, channels, channel)
    other_type = "malformed", f"the audio has type {part.type[:40]!r}, but no path of a file and no URL"
    is_named = part.type in ("file", "url") and isinstance(part.source, str)
    refuse_record((not is_named, *_NO_FILES.get(part.type, other_type)))
    record: dict[str, Any] = {"audio_filepath": part.source}
    if abs(start) * recording.sampling_rate >= 0.5 or (
        abs(duration * recording.sampling_rate - recording.num_samples) >= 0.5
    ):
        record["offset"] = round(start, TIME_DIGITS)
    record["duration"] = round(duration, TIME_DIGITS)
    if len(part.channels) > 1:
        record["channel"] = index
    return record


def _part(recording: RecordingLine, channels: list[int], channel: Channel) -> tuple[AudioPart, Channel]:
    """Return the file with a channel, and the channel's index in it; for ``downmix``, the file with all channels."""
    if channel == "downmix":
        whole = [part for part in recording.sources if sorted(part.channels) == sorted(channels)]
        refuse_record(
            (not whole, "unsupported_channels", "downmix needs all channels in one file, and these are in several")
        )
        return whole[0], channel
    for part in recording.sources:
        if channel in part.channels:
            return part, part.channels.index(channel)
    raise RejectRecord("malformed", f"no source of the recording has channel {channel}")
