"""Long recordings with annotations beside them, each segment of which is a record."""

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import msgspec

from sharmill.config import require
from sharmill.errors import ConfigError, RejectRecord, refuse
from sharmill.files.checksums import checksum
from sharmill.manifest import TIME_DIGITS
from sharmill.registry import nearest
from sharmill.sources import Described, RawRecord, Unreadable, record_text
from sharmill.sources.annotations import parse_ami_words, parse_lines
from sharmill.sources.captions import parse_captions
from sharmill.sources.files import decode_text, expand_home, read_small
from sharmill.sources.folder import WalkedSource, path_from_text, path_to_text, walk_files
from sharmill.sources.speakers import Template
from sharmill.sources.stretches import Stretch, find_overlaps, join_stretches
from sharmill.sources.textgrid import choose_tier, parse_textgrid, parse_tiers, tier_pattern

_SHOWN: Final = 1000

# The ends of the names of files in each form.
_SUFFIXES: Final = {
    "rttm": ".rttm", "ctm": ".ctm", "textgrid": ".TextGrid", "audacity": ".txt", "srt": ".srt", "ami": ".words.xml",
}  # fmt: skip
# The forms whose stretches are words, to be joined.
_OF_WORDS: Final = ("ctm", "ami")
# Files are read as a whole; these are some hours of annotations each, or a corpus in one RTTM.
_MAX_ANNOTATION_BYTES: Final = 64 << 20
# Words with longer pauses between them, in seconds, are of two segments.
_MAX_GAP: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class AnnotatedSource(WalkedSource):
    """Records of segments of long recordings, from annotations beside the audio or in another folder."""

    folder_keys: ClassVar[tuple[str, ...]] = ("annotation_root",)
    type: str = "annotated"
    annotations: Literal["rttm", "ctm", "textgrid", "audacity", "srt", "ami"]
    """Form of the annotations: ``textgrid`` is Praat's, ``audacity`` labels, ``ami`` words in NXT format, a file for
    each speaker. A file in UTF-16 with its mark is read as such."""
    annotation_root: str | None = None
    """Folder of the annotations, with all folders in it; ``null`` is ``audio_root``."""
    annotation_suffix: str | None = None
    """End of the names of annotations; ``null`` is ``.rttm``, ``.ctm``, ``.TextGrid``, ``.txt``, ``.srt`` or
    ``.words.xml``."""
    audio: str | None = None
    """Template of ``audio_filepath``, such as ``audio/{recording}.wav``: ``{recording}`` is the recording's name in the
    annotation, or the file's own name, ``{path[0]}`` a part of the annotation's path. ``null`` is a file of this name
    at the place of the annotation."""
    tier: str | None = None
    """Tier of a TextGrid. A ``*`` in it stands for the speaker: ``"* - words"``; ``"*"`` is all tiers, ``null`` the
    only one."""
    overlap: Literal["keep", "drop"] = "keep"
    """``drop`` rejects segments during which another speaker speaks, as ``overlapped_speech``."""
    max_gap: float | None = None
    """Stretches of one speaker are joined where the pause is no longer than so many seconds. ``null``: the words of
    ``ctm`` and ``ami`` are joined at 0.5, others not."""
    max_duration: float = 20.0
    """Seconds that no segment becomes longer than by joining."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_tier = self.tier is None or (self.annotations == "textgrid" and self.tier.count("*") < 2)
        require(is_tier, "tier is for textgrid, and may have one *")
        are_times = self.max_duration > 0 and (self.max_gap is None or self.max_gap >= 0)
        require(are_times, "max_duration must be above 0, max_gap not below 0")
        if self.annotation_root is None or self.audio is None:
            self.refuse_url_roots()
        self._audio  # noqa: B018 (raises where it is no template)

    @cached_property
    def _audio(self) -> Template | None:
        template = None if self.audio is None else Template(self.audio)
        if template and (unknown := [key for key in template.keys if key != "recording"]):
            raise ValueError(f"audio takes {{{unknown[0]}}}, and there are only {{recording}} and parts of the path")
        return template

    def check(self) -> None:
        """Raise ConfigError where there are no annotations, or none of the first ones has the tier."""
        is_there = self._annotations.is_dir()
        first = list(itertools.islice(self._groups(), 20)) if is_there else []
        refuse(
            (not is_there, f"there is no folder {self._annotations}; correct annotation_root in sources"),
            (
                not first,
                f"there is no file below {self._annotations} whose name ends in {self._suffix}; correct "
                "annotation_root or annotation_suffix in sources",
            ),
            code="missing_input",
        )
        names: dict[str, None] = {}
        files = [self._annotations / folder / name for folder, group in first for name in group]
        for file in files if self.annotations == "textgrid" else ():
            with suppress(ValueError, RejectRecord):  # its segments are rejects
                tiers = [name for name, _ in parse_textgrid(self._text(file))]
                refuse((self.tier is None and len(tiers) > 1, f"{file.name} {choose_tier(tiers)}"), code="missing_key")
                names |= dict.fromkeys(tiers)
        if names and not any(map(tier_pattern(self.tier).fullmatch, names)):
            raise ConfigError(
                f"the tier {self.tier!r} is in none of the first {len(files)} TextGrids"
                f"{nearest(str(self.tier), list(names))}",
                code="unknown_key",
            )

    def described(self) -> Iterator[list[Any]]:
        """Yield the path and the checksum of each file of annotations."""
        for folder, names in self._groups():
            for name in names:
                try:
                    found = checksum(self._annotations / folder / name)
                except PermissionError:  # a reject
                    found = ""
                yield [os.fsencode(f"{folder}/{name}"), found]

    def runs(self, size: int) -> Iterator[tuple[list[Any], int]]:
        """Yield the annotations that belong together and their numbers of segments."""
        for folder, names in self._groups():
            yield [path_to_text(folder), list(map(path_to_text, names))], len(self._items(folder, tuple(names)))

    def entries(self, place: list[Any], begin: int, end: int) -> Iterator[Any]:
        """Yield the records of segments."""
        folder, names = place
        return iter(self._items(path_from_text(folder), tuple(map(path_from_text, names)))[begin:end])

    @property
    def _annotations(self) -> Path:
        return expand_home(self.annotation_root) if self.annotation_root else self._root

    @property
    def _suffix(self) -> str:
        return self.annotation_suffix or _SUFFIXES[self.annotations]

    def _groups(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the files of annotations that belong together, as (folder, names)."""
        for folder, names in walk_files(self._annotations, [self._suffix]):
            if names is None:  # cannot be read, which rejects it
                yield folder, [""]
            elif self.annotations != "ami":
                yield from ((folder, [name]) for name in names)
            else:  # the speakers of a meeting
                groups = itertools.groupby(names, lambda name: name.partition(".")[0])
                yield from ((folder, list(group)) for _, group in groups)

    @cached_property
    def _items(self) -> Callable[[str, tuple[str, ...]], list[RawRecord]]:
        """The records of files that belong together, by folder and names; those of the last ones are kept."""
        return lru_cache(maxsize=1)(self._make_items)

    def _make_items(self, folder: str, names: tuple[str, ...]) -> list[RawRecord]:
        stretches: list[Stretch] = []
        items: list[RawRecord] = []
        notes = Counter[str]()
        for name in names:
            stem = name[: -len(self._suffix)]
            shown = os.fsencode(os.path.join(folder, name)).decode("utf-8", "replace")  # noqa: PTH118
            try:
                for found in self._parse(self._text(self._annotations / folder / name), stem):
                    if isinstance(found, Unreadable):
                        items.append(Unreadable(found.reason, f"{shown}: {found.detail}", found.record[:_SHOWN]))
                    elif isinstance(found, str):
                        notes[found] += 1
                    else:
                        stretches.append(replace(found, recording=found.recording or stem))
            except RejectRecord as reject:
                items.append(Unreadable(reject.reason, reject.detail, shown))
            except ValueError as error:
                items.append(Unreadable("malformed", f"{shown}: {error}", shown))
        gap = _MAX_GAP if self.max_gap is None and self.annotations in _OF_WORDS else self.max_gap
        if gap is not None:
            stretches = join_stretches(stretches, gap, self.max_duration)
        stretches.sort(key=lambda part: (part.recording, part.start, part.end, part.channel, part.speaker or ""))
        overlapped = find_overlaps(stretches) if self.overlap == "drop" else [False] * len(stretches)
        marked = zip(stretches, overlapped, strict=True)
        for recording, found_in in itertools.groupby(marked, lambda pair: pair[0].recording):
            pairs = list(found_in)
            channels = _number_channels(list({stretch.channel for stretch, _ in pairs}))
            path = self._path(folder, names[0], recording)
            items += [_item(stretch, path, channels, dropped) for stretch, dropped in pairs]
        first = next((number for number, item in enumerate(items) if isinstance(item, bytes)), None)
        if notes and first is not None:
            items[first] = Described(record_text(items[first]), notes=notes)
        return items

    def _parse(self, text: str, name: str) -> Iterator[Stretch | Unreadable | str]:
        """Yield the stretches of a file, what cannot be read of it, and as texts notes about what is left out.

        Args:
            text: of the file.
            name: of the file, without its suffix.

        Raises:
            ValueError: the file as a whole is not in this form.
        """
        parsers: dict[str, Callable[[str], Iterator[Stretch | Unreadable | str]]] = {
            "textgrid": partial(parse_tiers, tier=self.tier),
            "srt": parse_captions,
            "ami": partial(parse_ami_words, name=name),
        }
        return parsers.get(self.annotations, partial(parse_lines, self.annotations))(text)

    def _text(self, file: Path) -> str:
        data = read_small(file, _MAX_ANNOTATION_BYTES)
        return decode_text(data, "utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else self.encoding, file.name)

    def _path(self, folder: str, name: str, recording: str) -> str | RejectRecord:
        """Return the path of the audio of a recording, or why there is none."""
        place = os.path.join(folder, "")  # noqa: PTH118
        if self._audio is None:
            paths = [f"{place}{recording}{suffix}" for suffix in self.audio_suffixes]
            # The check of the records says what is wrong with a path.
            path = next((path for path in paths if os.path.exists(os.path.join(self._root, path))), paths[0])  # noqa: PTH110, PTH118
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
    record = {
        "audio_filepath": path,
        "offset": round(stretch.start, TIME_DIGITS),
        "duration": round(stretch.end - stretch.start, TIME_DIGITS),
    }
    further = {"channel": channels[stretch.channel], "speaker": stretch.speaker, "text": stretch.text}
    return msgspec.json.encode(record | {key: value for key, value in further.items() if value is not None})


def _number_channels(names: list[str]) -> dict[str, int | None] | None:
    """Return the number from 0 of each channel of a recording; None for the names of channels that have none.

    A only channel that is the first one needs no number: there is nothing to choose, or the source chooses.
    """
    if len(names) == 1 and names[0] in ("", "0", "1", "A", "<NA>"):
        return {names[0]: None}
    if all(name in ("A", "B") for name in names):
        return {name: "AB".index(name) for name in names}
    # They are counted from 1, where none is called 0.
    if all(name.isascii() and name.isdigit() and len(name) < 4 for name in names):
        return {name: int(name) - ("0" not in names) for name in names}
    return None
