"""Long recordings with separate annotation files; each annotated segment becomes a record."""

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Final, Literal

import msgspec

from sharmill.config import require
from sharmill.errors import ConfigError, RejectRecord, refuse
from sharmill.files.checksums import checksum
from sharmill.manifest import TIME_DIGITS
from sharmill.registry import nearest
from sharmill.sources import DescribedRecord, RawRecord, UnreadableRecord, record_text
from sharmill.sources.annotations import parse_aligned, parse_ami_words, parse_lines, parse_whisper
from sharmill.sources.captions import parse_captions
from sharmill.sources.files import decode_text, expand_home, read_small
from sharmill.sources.folder import WalkedSource, path_from_text, path_to_text, walk_files
from sharmill.sources.speakers import Template
from sharmill.sources.stretches import Stretch, find_overlaps, join_stretches
from sharmill.sources.textgrid import choose_tier, parse_textgrid, parse_tiers, tier_pattern

_SHOWN: Final = 1000

# Formats of NeMo's forced aligner, each with the level of its CTM files.
_ALIGNED: Final = {"nfa_words": "words", "nfa_segments": "segments"}
# Suffix of the annotation files of each format.
_SUFFIXES: Final = {
    "rttm": ".rttm", "ctm": ".ctm", "textgrid": ".TextGrid", "audacity": ".txt", "srt": ".srt", "vtt": ".vtt",
    "ami": ".words.xml", "whisper": ".json", **dict.fromkeys(_ALIGNED, "_with_output_file_paths.json"),
}  # fmt: skip
# Formats that annotate single words, which are joined into segments.
_WORD_FORMATS: Final = ("ctm", "ami", "nfa_words")
# Annotation files are read completely, so their size is limited. The limit allows hours of annotations per file, or one
# RTTM file for a whole corpus.
_MAX_ANNOTATION_BYTES: Final = 64 << 20
# Pause in seconds; words with a longer pause between them belong to different segments.
_MAX_GAP: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class AnnotatedSource(WalkedSource):
    """Records for segments of long recordings, from annotations beside the audio or in another folder."""

    folder_keys: ClassVar[tuple[str, ...]] = ("annotation_root",)
    type: str = "annotated"
    annotations: Literal[
        "rttm", "ctm", "textgrid", "audacity", "srt", "vtt", "ami", "whisper", "nfa_words", "nfa_segments"
    ]  # fmt: skip
    """Format of the annotations: ``textgrid`` (Praat), ``audacity`` (label tracks), ``ami`` (words in NXT format, one
    file per speaker), ``whisper`` (JSON of Whisper or WhisperX), ``nfa_words`` and ``nfa_segments`` (manifests of
    NeMo's forced aligner). UTF-16 files with a byte order mark are recognized."""
    annotation_root: str | None = None
    """Folder of the annotations, searched recursively; ``null`` is ``audio_root``."""
    annotation_suffix: str | None = None
    """Suffix of annotation files; ``null`` is ``.rttm``, ``.ctm``, ``.TextGrid``, ``.txt``, ``.srt``, ``.vtt``,
    ``.words.xml``, ``.json`` or ``_with_output_file_paths.json``."""
    audio: str | None = None
    """Template for ``audio_filepath``, such as ``audio/{recording}.wav``. ``{recording}`` is the recording's name in
    the annotation, or the annotation file's name; ``{path[0]}`` is a part of that file's path. ``null`` looks for a
    file with the recording's name in the same folder below ``audio_root``."""
    tier: str | None = None
    """Tier of a TextGrid. A ``*`` in it matches the speaker's name: ``"* - words"``. ``"*"`` selects all tiers,
    ``null`` the only tier."""
    overlap: Literal["keep", "drop"] = "keep"
    """``drop`` rejects segments that overlap with another speaker, as ``overlapped_speech``."""
    max_gap: float | None = None
    """Longest pause, in seconds, at which segments of one speaker are joined. ``null`` is 0.5 for ``ctm``, ``ami`` and
    ``nfa_words``, and joins nothing in other formats."""
    max_duration: float = 20.0
    """Longest joined segment, in seconds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_tier = self.tier is None or (self.annotations == "textgrid" and self.tier.count("*") < 2)
        has_path = self.annotations in _ALIGNED and self.audio is not None
        require(not has_path, "audio does not apply to manifests of NeMo's aligner, which name the audio themselves")
        require(is_tier, "tier applies only to textgrid, and may contain at most one *")
        are_times = self.max_duration > 0 and (self.max_gap is None or self.max_gap >= 0)
        require(are_times, "max_duration must be greater than 0, and max_gap must not be negative")
        if self.annotation_root is None or self.audio is None:
            self.refuse_url_roots()
        self._audio  # noqa: B018 (raises if the template is not valid)

    @cached_property
    def _audio(self) -> Template | None:
        template = None if self.audio is None else Template(self.audio)
        if template and (unknown := [key for key in template.keys if key != "recording"]):
            raise ValueError(
                f"audio uses {{{unknown[0]}}}; use only {{recording}} and parts of the path such as {{path[0]}}"
            )
        return template

    def check(self) -> None:
        """Raise ConfigError if there are no annotations, or if none of the first files has the configured tier."""
        is_there = self._annotations.is_dir()
        first = list(itertools.islice(self._groups(), 20)) if is_there else []
        refuse(
            (not is_there, f"the folder {self._annotations} does not exist; correct annotation_root in sources"),
            (
                not first,
                f"no file name below {self._annotations} ends in {self._suffix}; correct "
                "annotation_root or annotation_suffix in sources",
            ),
            code="missing_input",
        )
        names: dict[str, None] = {}
        files = [self._annotations / folder / name for folder, group in first for name in group]
        for file in files if self.annotations == "textgrid" else ():
            with suppress(ValueError, RejectRecord):  # its segments will be rejected
                tiers = [name for name, _ in parse_textgrid(self._text(file))]
                refuse((self.tier is None and len(tiers) > 1, f"{file.name} {choose_tier(tiers)}"), code="missing_key")
                names |= dict.fromkeys(tiers)
        if names and not any(map(tier_pattern(self.tier).fullmatch, names)):
            raise ConfigError(
                f"none of the first {len(files)} TextGrids has the tier {self.tier!r}"
                f"{nearest(str(self.tier), list(names))}",
                code="unknown_key",
            )

    def file_identities(self) -> Iterator[list[Any]]:
        """Yield the path and checksum of each annotation file, and of the CTM files that it may name."""
        level = _ALIGNED.get(self.annotations)
        named = walk_files(self._annotations, [".ctm"]) if level else ()
        for folder, names in itertools.chain(self._groups(), named):
            for name in names or ():
                try:
                    found = checksum(self._annotations / folder / name)
                except PermissionError:  # the file will be rejected
                    found = ""
                yield [os.fsencode(f"{folder}/{name}"), found]

    def runs(self, size: int) -> Iterator[tuple[list[Any], int]]:
        """Yield each group of annotation files that belong together, with its number of segments."""
        for folder, names in self._groups():
            yield [path_to_text(folder), list(map(path_to_text, names))], len(self._items(folder, tuple(names)))

    def entries(self, place: list[Any], begin: int, end: int) -> Iterator[Any]:
        """Yield the records of segments ``begin`` to ``end`` in a group of annotation files."""
        folder, names = place
        return iter(self._items(path_from_text(folder), tuple(map(path_from_text, names)))[begin:end])

    @property
    def _annotations(self) -> Path:
        return expand_home(self.annotation_root) if self.annotation_root else self._root

    @property
    def _suffix(self) -> str:
        return self.annotation_suffix or _SUFFIXES[self.annotations]

    def _groups(self) -> Iterator[tuple[str, list[str]]]:
        """Yield groups of annotation files that belong together, as (folder, names)."""
        for folder, names in walk_files(self._annotations, [self._suffix]):
            if names is None:  # the folder cannot be listed; reading it later yields a reject
                yield folder, [""]
            elif self.annotations != "ami":
                yield from ((folder, [name]) for name in names)
            else:  # the files of all speakers of a meeting belong together
                groups = itertools.groupby(names, lambda name: name.partition(".")[0])
                yield from ((folder, list(group)) for _, group in groups)

    @cached_property
    def _items(self) -> Callable[[str, tuple[str, ...]], list[RawRecord]]:
        """The function that returns the records of a group of annotation files; its last result is cached."""
        return lru_cache(maxsize=1)(self._make_items)

    def _make_items(self, folder: str, names: tuple[str, ...]) -> list[RawRecord]:
        stretches: list[Stretch] = []
        items: list[RawRecord] = []
        notes = Counter[str]()
        for name in names:
            stem = name[: -len(self._suffix)]
            shown = os.fsencode(os.path.join(folder, name)).decode("utf-8", "replace")  # noqa: PTH118
            try:
                for found in self._parse(self._text(self._annotations / folder / name), folder, stem):
                    if isinstance(found, UnreadableRecord):
                        items.append(UnreadableRecord(found.reason, f"{shown}: {found.detail}", found.record[:_SHOWN]))
                    elif isinstance(found, str):
                        notes[found] += 1
                    else:
                        stretches.append(replace(found, recording=found.recording or stem))
            except RejectRecord as reject:
                items.append(UnreadableRecord(reject.reason, reject.detail, shown))
            except ValueError as error:
                items.append(UnreadableRecord("malformed", f"{shown}: {error}", shown))
        gap = _MAX_GAP if self.max_gap is None and self.annotations in _WORD_FORMATS else self.max_gap
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
            items[first] = DescribedRecord(record_text(items[first]), notes=notes)
        return items

    def _parse(self, text: str, folder: str, name: str) -> Iterator[Stretch | UnreadableRecord | str]:
        """Yield the segments of a file, its unreadable entries, and notes (as str) about entries that are left out.

        Args:
            text: content of the file.
            folder: folder of the file.
            name: name of the file without its suffix.

        Raises:
            ValueError: the file as a whole does not have the configured format.
        """
        level = _ALIGNED.get(self.annotations, "")
        parsers: dict[str, Callable[[str], Iterator[Stretch | UnreadableRecord | str]]] = {
            "textgrid": partial(parse_tiers, tier=self.tier),
            "srt": parse_captions,
            "vtt": parse_captions,
            "ami": partial(parse_ami_words, name=name),
            "whisper": parse_whisper,
            **dict.fromkeys(_ALIGNED, partial(parse_aligned, level=level, read=partial(self._ctm, folder))),
        }
        return parsers.get(self.annotations, partial(parse_lines, self.annotations))(text)

    def _ctm(self, folder: str, written: str) -> str:
        """Return the text of a CTM file that a manifest in ``folder`` names.

        The aligner writes ``ctm/<level>/<name>.ctm`` beside the manifest. Only the name is taken from the manifest, so
        the files can be moved, and a manifest cannot name files elsewhere.
        """
        file = self._annotations / folder / "ctm" / _ALIGNED[self.annotations] / PurePosixPath(written).name
        try:
            return self._text(file)
        except FileNotFoundError as error:
            raise RejectRecord(
                "malformed", f"{file} does not exist; keep the folder ctm beside the manifest"
            ) from error
        except ValueError as error:
            raise RejectRecord("malformed", f"{file}: {error}") from error

    def _text(self, file: Path) -> str:
        data = read_small(file, _MAX_ANNOTATION_BYTES)
        return decode_text(data, "utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else self.encoding, file.name)

    def _path(self, folder: str, name: str, recording: str) -> str | RejectRecord:
        """Return the path of a recording's audio, or a RejectRecord if no valid path can be formed."""
        place = os.path.join(folder, "")  # noqa: PTH118
        if self.annotations in _ALIGNED:
            path = recording
        elif self._audio is None:
            paths = [f"{place}{recording}{suffix}" for suffix in self.audio_suffixes]
            # A missing file is reported later, when the record is checked.
            path = next((path for path in paths if os.path.exists(os.path.join(self._root, path))), paths[0])  # noqa: PTH110, PTH118
        else:
            try:
                path = self._audio.fill({"recording": recording}, place + name[: -len(self._suffix)])
            except ValueError as error:
                return RejectRecord("malformed", f"the template audio of the source cannot be filled: {error}")
        if os.fsencode(path).decode("utf-8", "replace") != path:
            return RejectRecord("malformed", "the file name is not valid UTF-8; rename the file")
        return path


def _item(
    stretch: Stretch, path: str | RejectRecord, channels: dict[str, int | None] | None, dropped: bool
) -> bytes | UnreadableRecord:
    """Return the record of a segment, or an UnreadableRecord if it cannot become one."""
    shown = f"{stretch.recording} {stretch.start:g} {stretch.end:g} {stretch.speaker or ''} {stretch.text or ''}"
    shown = shown[:_SHOWN].encode("utf-8", "replace").decode()
    if isinstance(path, RejectRecord):
        return UnreadableRecord(path.reason, path.detail, shown)
    if dropped:
        return UnreadableRecord("overlapped_speech", "another speaker speaks during the segment", shown)
    if channels is None:
        return UnreadableRecord(
            "malformed",
            f"the channels of the recording must all be numbers, or A and B; one is {stretch.channel!r}",
            shown,
        )
    record = {
        "audio_filepath": path,
        "offset": round(stretch.start, TIME_DIGITS),
        "duration": round(stretch.end - stretch.start, TIME_DIGITS),
    }
    further = {"channel": channels[stretch.channel], "speaker": stretch.speaker, "text": stretch.text}
    return msgspec.json.encode(record | {key: value for key, value in further.items() if value is not None})


def _number_channels(names: list[str]) -> dict[str, int | None] | None:
    """Return the number of each channel of a recording, counted from 0; None if a channel name is unknown.

    A single channel with a default name gets no number, so that the setting ``channel`` of the source decides.
    """
    if len(names) == 1 and names[0] in ("", "0", "1", "A", "<NA>"):
        return {names[0]: None}
    if all(name in ("A", "B") for name in names):
        return {name: "AB".index(name) for name in names}
    # Numbers start at 1 unless a channel is called 0.
    if all(name.isascii() and name.isdigit() and len(name) < 4 for name in names):
        return {name: int(name) - ("0" not in names) for name in names}
    return None
