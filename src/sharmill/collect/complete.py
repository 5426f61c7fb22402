"""Raw records of folders and files, and their completion from headers alone."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import msgspec

from sharmill.audio.files import choose_channel, probe
from sharmill.audio.roots import AudioRoots
from sharmill.errors import ConfigError, RejectRecord
from sharmill.manifest import TYPED_KEYS, Reject, transcript_of
from sharmill.prepare.check import check_fields, parse_record
from sharmill.prepare.config import PrepareConfig
from sharmill.sources import Located, Source, Unreadable
from sharmill.sources.folder import FolderSource
from sharmill.sources.speakers import UNDETERMINED

# A record's own duration may differ by so many seconds from that of its audio.
_TOLERANCE: Final = PrepareConfig().duration_tolerance
# Segments of one recording follow one another.
_probe = lru_cache(maxsize=16)(probe)

# A record as a source yields it, or the path of an audio file below a folder, whose text is read where it is completed.
Raw = str | bytes | Unreadable


@dataclass(frozen=True, kw_only=True)
class Input:
    """One input of a manifest.

    Attributes:
        source: the reader of its records, with the rules for speakers and channels, and the audio root.
        prefix: path of its audio root below that of the manifest; "" if they are the same.
        dataset: for the speaker tags of records that name none.
    """

    source: Source
    prefix: str
    dataset: str


@dataclass(frozen=True)
class Chunk:
    """Consecutive raw records of the input ``number``, all of one split."""

    split: str
    number: int
    records: list[Raw]


@dataclass
class Completed:
    """The result of a chunk: lines of the manifest, rejects, numbers of records by what they have, seconds of audio.

    ``vocabulary`` counts the characters or words of the texts.
    """

    split: str
    num_in: int = 0
    lines: list[bytes] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    vocabulary: Counter[str] = field(default_factory=Counter)

    def add(self, other: Completed) -> None:
        """Add the numbers of another result."""
        self.num_in += other.num_in
        self.seconds += other.seconds
        self.counts.update(other.counts)
        self.vocabulary.update(other.vocabulary)


def read_input(source: Source, defaults: dict[str, str]) -> Iterator[Raw]:
    """Yield the raw records of a folder, a table or a manifest, with keys for those that have none of their own.

    Raises:
        ConfigError: the input cannot be used, or has no records.
    """
    is_empty = True
    for raw in _list(source) if isinstance(source, FolderSource) else source.records():
        assert not isinstance(raw, Located), "tables and manifests name files"
        is_empty = False
        yield msgspec.json.encode(defaults | msgspec.json.decode(raw)) if defaults and isinstance(raw, bytes) else raw
    if is_empty and isinstance(source, FolderSource):
        raise ConfigError(
            f"there is no audio below {source.audio_root} whose name ends in {', '.join(source.audio_suffixes)}; name "
            "another folder, or the ends of its names with --audio-suffix",
            code="missing_input",
        )
    if is_empty:
        names = ", ".join(path for key, path in source.paths().items() if not key.startswith("audio_root"))
        raise ConfigError(f"{names} has no records; name a file that has some", code="bad_manifest")


def _list(source: FolderSource) -> Iterator[str | Unreadable]:
    """Yield the path of every audio file below a folder, and a reject for a folder that cannot be listed."""
    refused: list[Unreadable] = []

    def note(folder: str, error: PermissionError) -> None:
        if not folder:
            raise ConfigError(
                f"this user may not list {source.audio_root}; permit it, or name another folder", code="missing_input"
            ) from error
        shown = os.fsencode(f"{folder}/").decode("utf-8", "replace")
        refused.append(Unreadable("unreadable_audio", "this user may not list the folder", shown))

    for folder, names in source.walk(note):
        yield from refused
        refused.clear()
        for name in names:
            yield f"{folder}/{name}" if folder else name
    yield from refused


class Completion:
    """The completion of chunks, with paths relative to the root of all inputs.

    Args:
        inputs: by number.
        of_words: the vocabulary is one of words, not of characters.
    """

    def __init__(self, inputs: Sequence[Input], *, of_words: bool) -> None:
        self._inputs = inputs
        self._of_words = of_words
        self._roots = AudioRoots.of(entry.source.audio_root for entry in inputs)
        self._rules = [entry.source.speaker_rule(entry.dataset) for entry in inputs]

    def __call__(self, chunk: Chunk) -> Completed:
        """Complete the records of a chunk."""
        done = Completed(chunk.split, len(chunk.records))
        source = self._inputs[chunk.number].source
        for raw in chunk.records:
            if isinstance(raw, str):
                assert isinstance(source, FolderSource)
                raw = source.record(*os.path.split(raw))
            try:
                record, channels = self._complete(raw, chunk.number)
            except RejectRecord as reject:
                done.rejects.append(Reject("manifest", reject.reason, reject.detail, _shown(raw), chunk.number))
                continue
            done.lines.append(msgspec.json.encode(record))
            done.seconds += record["duration"]
            done.counts["records"] += 1
            done.counts["with_text"] += "text" in record
            done.counts["with_speaker"] += "speaker" in record
            done.counts["of_several_channels"] += channels > 1 and "channel" not in record
            words = record.get("text", "").split()
            done.vocabulary.update(words if self._of_words else "".join(words))
        return done

    def _complete(self, raw: bytes | Unreadable, number: int) -> tuple[dict[str, Any], int]:
        """Return the completed record of a raw one, and the number of channels of its audio.

        Raises:
            RejectRecord: the record, its file or its header cannot be used.
        """
        if isinstance(raw, Unreadable):
            raise RejectRecord(raw.reason, raw.detail)
        record = parse_record(raw)
        check_fields(record)
        entry, rule = self._inputs[number], self._rules[number]
        root, below = self._roots.place(number, record["audio_filepath"])
        path = f"{entry.prefix}/{below}" if entry.prefix else below
        tag = rule.make_tag(record, path)
        info = _probe(self._roots.roots[root].path / below, whole=record.get("offset") is None)
        made = {"audio_filepath": path, **_times(record, info.num_samples / info.sampling_rate)}
        if text := transcript_of(record):
            made["text"] = text
        if tag is not None:
            made["speaker"] = str(tag)
        elif rule.language != UNDETERMINED:
            # It would stand in the tag.
            made["lang"] = rule.language
        made |= {key: value for key, value in record.items() if key not in TYPED_KEYS}
        own = record.get("channel")
        channel = entry.source.channel if own is None else own
        if info.channels > 1 and channel is not None:
            made["channel"] = choose_channel(channel, info.channels)
        return made, info.channels


def _times(record: dict[str, Any], seconds: float) -> dict[str, float]:
    """Return ``duration``, and ``offset`` if the record has one; the exact duration of a whole file.

    Raises:
        RejectRecord: ``duration_mismatch``, ``empty_audio``.
    """
    offset, given = record.get("offset"), record.get("duration")
    if offset is None:
        if given is not None and abs(given - seconds) > _TOLERANCE:
            raise RejectRecord("duration_mismatch", f"the record says {given:g} s, the audio has {seconds:g} s")
        return {"duration": seconds}
    if offset >= seconds:
        raise RejectRecord("duration_mismatch", f"the segment begins at {offset:g} s, the audio has {seconds:g} s")
    duration = seconds - offset if given is None else given
    if offset + duration > seconds + _TOLERANCE:
        raise RejectRecord(
            "duration_mismatch", f"the segment ends at {offset + duration:g} s, the audio at {seconds:g} s"
        )
    if duration <= 0:
        raise RejectRecord("empty_audio", "the segment has no duration")
    return {"offset": offset, "duration": duration}


def _shown(raw: bytes | Unreadable) -> Any:
    """Return the record of a reject as JSON has it, or its text if it is none."""
    if isinstance(raw, Unreadable):
        return raw.record
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return raw.decode("utf-8", "replace")
