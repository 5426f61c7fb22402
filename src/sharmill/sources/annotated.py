"""Long recordings with annotations beside them: the segments that these tell of become records."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import msgspec

from sharmill.errors import ConfigError, RejectRecord
from sharmill.files.storage import checksum, open_regular
from sharmill.registry import nearest
from sharmill.sources import Piece, Source, Unreadable
from sharmill.sources.annotations import (
    FORMATS,
    AnnotationFormat,
    BadLine,
    Stretch,
    find_overlaps,
    join_stretches,
    parse_textgrid,
    tier_pattern,
)
from sharmill.sources.files import check_encoding, expand_home
from sharmill.sources.folder import count_and_sum, pack_spans, path_from_text, path_to_text, walk_files
from sharmill.sources.speakers import Template

# Files are read as a whole; these are some hours of annotations each, or a corpus in one RTTM.
_MAX_BYTES: Final = 64 << 20
# Words with longer pauses between them are of two segments.
_MAX_GAP: Final = 0.5
_DIGITS: Final = 8
_SHOWN: Final = 1000
_UTF_16: Final = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, kw_only=True)
class AnnotatedSource(Source):
    """Records of segments of long recordings, from annotations beside the audio or in another folder."""

    folder_keys: ClassVar[tuple[str, ...]] = ("annotation_root",)
    type: str = "annotated"
    annotations: Literal["rttm", "ctm", "textgrid", "audacity", "srt", "ami"]
    """Form of the annotations: ``rttm``, ``ctm``, ``textgrid`` (Praat), ``audacity`` (labels), ``srt``, or ``ami``
    (words in NXT format, a file for each speaker)."""
    annotation_root: str | None = None
    """Folder of the annotations, with all folders in it; ``null`` is ``audio_root``."""
    annotation_suffix: str | None = None
    """End of the names of annotations; ``null`` is ``.rttm``, ``.ctm``, ``.TextGrid``, ``.txt``, ``.srt`` or
    ``.words.xml``."""
    audio: str | None = None
    """Template of ``audio_filepath``, such as ``audio/{recording}.wav``: ``{recording}`` is the recording's name in the
    annotation, or the file's own name, ``{path[0]}`` a part of the annotation's path. ``null`` is a file of this name
    at the place of the annotation."""
    audio_suffixes: list[str] = field(
        default_factory=lambda: [".wav", ".flac", ".mp3", ".ogg", ".opus", ".aiff", ".aif", ".sph", ".au", ".m4a"]
    )
    """Ends of the names of audio files, where ``audio`` is not given; the first file that is there counts."""
    tier: str | None = None
    """Tier of a TextGrid. A ``*`` in it stands for the speaker: ``"* - words"``. ``null`` takes all tiers of intervals,
    each as a speaker."""
    overlap: Literal["keep", "drop"] = "keep"
    """``drop`` rejects segments during which another speaker speaks, as ``overlapped_speech``."""
    max_gap: float | None = None
    """Stretches of one speaker are joined where the pause is no longer than so many seconds. ``null``: the words of
    ``ctm`` and ``ami`` are joined at 0.5, others not."""
    max_duration: float = 20.0
    """Seconds that no segment becomes longer than by joining."""
    encoding: str = "utf-8"
    """Encoding of the annotations, such as ``latin-1``; a file in UTF-16 with its mark is read as such."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.annotations not in FORMATS:
            raise ValueError(f"annotations must be one of {', '.join(FORMATS)}")
        if self.overlap not in ("keep", "drop"):
            raise ValueError("overlap must be keep or drop")
        if not isinstance(self.audio_root, str):
            raise ValueError("audio_root of annotated recordings must be one folder")
        if self.tier is not None and (self.annotations != "textgrid" or self.tier.count("*") > 1):
            raise ValueError("tier is for textgrid, and may have one *")
        if not self.audio_suffixes or self.max_duration <= 0 or (self.max_gap is not None and self.max_gap < 0):
            raise ValueError("audio_suffixes must not be empty, max_duration above 0, max_gap not below 0")
        if self.annotation_root is None or self.audio is None:
            self.refuse_url_roots()
        check_encoding(self.encoding)
        self._audio  # noqa: B018 (raises where it is no template)

    @cached_property
    def _audio(self) -> Template | None:
        template = None if self.audio is None else Template.parse(self.audio)
        if template and (unknown := [key for key in template.keys if key != "recording"]):
            raise ValueError(f"audio takes {{{unknown[0]}}}, and there are only {{recording}} and parts of the path")
        return template

    def check(self) -> None:
        """Raise ConfigError where there are no annotations, or none of the first ones has the tier."""
        if not self._annotations.is_dir():
            raise ConfigError(
                f"there is no folder {self._annotations}; correct annotation_root in sources", code="missing_input"
            )
        first = list(itertools.islice(self._groups(), 20))
        if not first:
            raise ConfigError(
                f"there is no file below {self._annotations} whose name ends in {self._suffix}; correct "
                "annotation_root or annotation_suffix in sources",
                code="missing_input",
            )
        if self.tier is not None:
            self._check_tier([self._annotations / folder / name for folder, names in first for name in names])

    def _check_tier(self, files: Sequence[Path]) -> None:
        names: dict[str, None] = {}
        for file in files:
            try:
                tiers = parse_textgrid(self._text(file))
            except ValueError:
                continue
            names |= dict.fromkeys(tier.name for tier in tiers)
        if names and not any(map(tier_pattern(self.tier).fullmatch, names)):
            hint = nearest(str(self.tier), list(names))
            raise ConfigError(
                f"the tier {self.tier!r} is in none of the first {len(files)} TextGrids{hint}", code="unknown_key"
            )

    def identity(self) -> dict[str, Any]:
        """Return the number of annotations, and a checksum of their paths and bytes."""
        self.check()
        described = (self._describe(folder, name) for folder, names in self._groups() for name in names)
        return {"files": count_and_sum(described)}

    def _describe(self, folder: str, name: str) -> list[Any]:
        try:
            found = checksum(self._annotations / folder / name)
        except PermissionError:  # a reject
            found = ""
        return [os.fsencode(f"{folder}/{name}"), found]

    def pieces(self, records_per_piece: int) -> Iterator[Piece]:
        """Yield runs of segments, each found again by the annotations that they are in and their place there."""
        runs = (
            ([path_to_text(folder), [path_to_text(name) for name in names]], len(self._items(folder, tuple(names))))
            for folder, names in self._groups()
        )
        yield from pack_spans(runs, records_per_piece)

    def read(self, piece: dict[str, Any]) -> Iterator[bytes | Unreadable]:
        """Yield the records of the segments of a piece."""
        for folder, names, begin, end in piece["spans"]:
            yield from self._items(path_from_text(folder), tuple(map(path_from_text, names)))[begin:end]

    @property
    def _annotations(self) -> Path:
        return expand_home(self.annotation_root or str(self.audio_root))

    @property
    def _format(self) -> AnnotationFormat:
        return FORMATS[self.annotations]

    @property
    def _suffix(self) -> str:
        return self.annotation_suffix or self._format.suffix

    def _groups(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the files of annotations that belong together, as (folder, names)."""
        for folder, names in walk_files(self._annotations, [self._suffix]):
            if self.annotations != "ami":
                yield from ((folder, [name]) for name in names)
            else:  # the speakers of a meeting
                groups = itertools.groupby(names, lambda name: name.partition(".")[0])
                yield from ((folder, list(group)) for _, group in groups)

    @cached_property
    def _items(self) -> Callable[[str, tuple[str, ...]], list[bytes | Unreadable]]:
        """The records of files that belong together, by folder and names; those of the last ones are kept."""
        return lru_cache(maxsize=1)(self._make_items)

    def _make_items(self, folder: str, names: tuple[str, ...]) -> list[bytes | Unreadable]:
        stretches: list[Stretch] = []
        items: list[bytes | Unreadable] = []
        for name in names:
            stem = name[: -len(self._suffix)]
            shown = os.fsencode(os.path.join(folder, name)).decode("utf-8", "replace")  # noqa: PTH118
            try:
                for found in self._format.parse(self._text(self._annotations / folder / name), self.tier, stem):
                    if isinstance(found, BadLine):
                        items.append(Unreadable("malformed", f"{shown}: {found.detail}", found.line[:_SHOWN]))
                    else:
                        stretches.append(replace(found, recording=found.recording or stem))
            except ValueError as error:
                items.append(Unreadable("malformed", str(error), shown))
        gap = _MAX_GAP if self.max_gap is None and self._format.words else self.max_gap
        if gap is not None:
            stretches = join_stretches(stretches, gap, self.max_duration)
        stretches.sort(key=lambda part: (part.recording, part.start, part.end, part.channel, part.speaker or ""))
        overlapped = find_overlaps(stretches) if self.overlap == "drop" else [False] * len(stretches)
        channels = _channels_of(stretches)
        paths: dict[str, str | RejectRecord] = {}
        for stretch, dropped in zip(stretches, overlapped, strict=True):
            if stretch.recording not in paths:
                paths[stretch.recording] = self._path(folder, names[0], stretch.recording)
            items.append(_item(stretch, paths[stretch.recording], channels[stretch.recording], dropped))
        return items

    def _text(self, file: Path) -> str:
        """Return the text of a file; raise ValueError where it cannot be read.

        What is wrong with the machine or the network stays an OSError, so that the unit is tried again.
        """
        try:
            with open_regular(file) as stream:
                data = stream.read(_MAX_BYTES + 1)
        except (PermissionError, IsADirectoryError) as error:
            raise ValueError(f"the file cannot be read: {error.strerror}") from error
        if len(data) > _MAX_BYTES:
            raise ValueError("the file has more than 64 MiB; divide it")
        encoding = "utf-16" if data.startswith(_UTF_16) else self.encoding
        try:
            return data.decode(encoding).removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            raise ValueError(f"the file is not {encoding}; set encoding of the source") from error

    def _path(self, folder: str, name: str, recording: str) -> str | RejectRecord:
        """Return the path of the audio of a recording, or why there is none."""
        place = os.path.join(folder, "")  # noqa: PTH118
        if self._audio is None:
            paths = [f"{place}{recording}{suffix}" for suffix in self.audio_suffixes]
            root = expand_home(str(self.audio_root))
            path = next((path for path in paths if (root / path).exists()), paths[0])
        else:
            try:
                path = self._audio.fill({"recording": recording}, place + name[: -len(self._suffix)])
            except ValueError as error:
                return RejectRecord("malformed", f"audio of the source: {error}")
        if os.fsencode(path).decode("utf-8", "replace") != path:
            return RejectRecord("malformed", "the name of the file is not UTF-8")
        return path


def _item(
    stretch: Stretch, path: str | RejectRecord, channels: dict[str, int | None] | None, dropped: bool
) -> bytes | Unreadable:
    """Return the record of a segment, or why there is none."""
    shown = f"{stretch.recording} {stretch.start:g} {stretch.end:g} {stretch.speaker or ''} {stretch.text or ''}"
    shown = shown[:_SHOWN].encode("utf-8", "replace").decode()
    if isinstance(path, RejectRecord):
        return Unreadable(path.reason, path.detail, shown)
    if dropped:
        return Unreadable("overlapped_speech", "another speaker speaks during the segment", shown)
    if channels is None:
        return Unreadable("malformed", f"the recording has channels that are no numbers, as {stretch.channel!r}", shown)
    record: dict[str, Any] = {"audio_filepath": path, "offset": round(stretch.start, _DIGITS)}
    record["duration"] = round(stretch.end - stretch.start, _DIGITS)
    further = {"channel": channels[stretch.channel], "speaker": stretch.speaker, "text": stretch.text}
    return msgspec.json.encode(record | {key: value for key, value in further.items() if value is not None})


def _channels_of(stretches: Sequence[Stretch]) -> dict[str, dict[str, int | None] | None]:
    """Return the number from 0 of each channel of each recording; None for the names of channels that have none.

    A only channel that is the first one needs no number: there is nothing to choose, or the source chooses.
    """
    names: dict[str, dict[str, int | None]] = {}
    for stretch in stretches:
        names.setdefault(stretch.recording, {})[stretch.channel] = None
    return {recording: _number_channels(list(channels)) for recording, channels in names.items()}


def _number_channels(names: list[str]) -> dict[str, int | None] | None:
    if len(names) == 1 and names[0] in ("", "0", "1", "A", "<NA>"):
        return {names[0]: None}
    if all(name in ("A", "B") for name in names):
        return {name: "AB".index(name) for name in names}
    # They are counted from 1, where none is called 0.
    if all(name.isascii() and name.isdigit() and len(name) < 4 for name in names):
        return {name: int(name) - ("0" not in names) for name in names}
    return None
