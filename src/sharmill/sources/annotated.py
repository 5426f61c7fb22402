"""Long recordings with annotations beside them, each segment of which is a record."""

import html
import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, TypeVar

import msgspec

from sharmill.config import require
from sharmill.errors import ConfigError, RejectRecord, refuse
from sharmill.files.checksums import checksum
from sharmill.manifest import TIME_DIGITS
from sharmill.registry import nearest
from sharmill.sources import Described, RawRecord, Unreadable, record_text
from sharmill.sources.files import decode_text, expand_home, read_small, split_lines
from sharmill.sources.folder import WalkedSource, path_from_text, path_to_text, walk_files
from sharmill.sources.speakers import Template

_SHOWN: Final = 1000
Token = TypeVar("Token", str, float)

# The ends of the names of files in each form.
_SUFFIXES: Final = {
    "rttm": ".rttm", "ctm": ".ctm", "textgrid": ".TextGrid", "audacity": ".txt", "srt": ".srt", "ami": ".words.xml",
}  # fmt: skip
# The forms whose stretches are words, to be joined.
_OF_WORDS: Final = ("ctm", "ami")
# Two stretches that overlap by less only have rounded times.
_MIN_OVERLAP: Final = 1e-3
_CLOCK: Final = r"(?:(\d{1,4}):)?(\d{1,2}):(\d\d)(?:[,.](\d{1,9}))?"
_SRT_TIMES: Final = re.compile(rf"\s*{_CLOCK}\s*-->\s*{_CLOCK}")
# A tag ends before the next one begins, or each of many that never end would be looked for to the end of the file.
_SRT_STYLE: Final = re.compile(r"</?(?:[bciu]|font|lang|rt|ruby)\b[^<>]*>|<[\d:.]+>|\{\\[^{}]*\}")
# Blocks of WebVTT that are no captions.
_VTT_BLOCKS: Final = ("WEBVTT", "NOTE", "STYLE", "REGION")
# Files are read as a whole; these are some hours of annotations each, or a corpus in one RTTM.
_MAX_ANNOTATION_BYTES: Final = 64 << 20
# Words with longer pauses between them, in seconds, are of two segments.
_MAX_GAP: Final = 0.5
# A rolling caption has no more lines.
_MOST_LINES: Final = 10
# In seconds. Nothing is said in a shorter time, and no longer pause is between rolling captions.
_SHORT_CAPTION: Final = 0.1
# Blanks and words of a line. Blanks of Unicode do not count, since a word or a name may have them.
_GAP: Final = r"[ \t\v\f]++"
_WORD: Final = r"[^ \t\v\f]++"
# The end of a line behind a word or the name of a speaker; anything else is a further part of that.
_CONFIDENCE: Final = rf"(?:{_GAP}(?:<?NA>?|[-+.\deE]+)(?:{_GAP}.*)?)?\s*"
_PLACE: Final = (
    rf"(?P<recording>{_WORD}){_GAP}(?P<channel>{_WORD}){_GAP}(?P<start>{_WORD}){_GAP}(?P<duration>{_WORD}){_GAP}"
)
# The forms with a stretch in each line: lines that are passed over, all others, and the detail of other rejects.
_LINES: Final = {
    # Further lines of RTTM are about speakers, words and noises.
    "rttm": (
        re.compile(rf"(?!\s*SPEAKER(?:{_GAP}|$))"),
        re.compile(
            rf"\s*SPEAKER{_GAP}{_PLACE}(?:<NA>|(?P<text>{_WORD})){_GAP}{_WORD}{_GAP}(?:<NA>|(?P<speaker>{_WORD}))"
            rf"{_CONFIDENCE}"
        ),
        "the line is no SPEAKER of RTTM, with numbers as times",
    ),
    "ctm": (
        re.compile(";;"),
        re.compile(rf"\s*{_PLACE}(?P<text>{_WORD}){_CONFIDENCE}"),
        "the line is no word of CTM: recording, channel, begin, duration, word",
    ),
    # A line that begins with a backslash has the frequencies of the label before.
    "audacity": (
        re.compile(r"\\"),
        re.compile(r"(?P<start>[^\t]*)\t(?P<end>[^\t]*)(?P<text>.*)"),
        "the line is no label: begin, end and text with tabs between",
    ),
}
_AMI_WORD: Final = re.compile(r"<w\b([^<>]*)>([^<]*)</w>")
# Praat itself takes numbers, texts and flags that stand alone in a TextGrid, and skips all else, such as ``xmin =``.
_TOKEN: Final = re.compile(r'"([^"]*(?:""[^"]*)*)"|([^\s"]+)')
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_ATTRIBUTE: Final = re.compile(r'\b(\w+)\s*=\s*"([^"]*)"')


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
                refuse((self.tier is None and len(tiers) > 1, f"{file.name} {_choose_tier(tiers)}"), code="missing_key")
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
                for found in _parse(self.annotations, self._text(self._annotations / folder / name), self.tier, stem):
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
    stretch: "Stretch", path: str | RejectRecord, channels: dict[str, int | None] | None, dropped: bool
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


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of a recording, times in seconds.

    Attributes:
        recording: its name in the file; "" where the file is about one recording.
        channel: its name in the file; "" where there is none.
        glued: the text is a mark that stands behind the word before without a blank.
    """

    recording: str
    start: float
    end: float
    text: str | None = None
    speaker: str | None = None
    channel: str = ""
    glued: bool = False


def _parse_lines(form: str, text: str) -> Iterator[Stretch | Unreadable]:
    """Yield the stretches of a form that has one in a line."""
    passed_over, whole, mistake = _LINES[form]
    for line in filter(str.strip, split_lines(text)):
        if passed_over.match(line):
            continue
        match = whole.fullmatch(line)
        found: dict[str, Any] = {"recording": "", "channel": "", "speaker": None}
        found |= match.groupdict() if match else {}
        try:
            start = _number(found["start"])
            end = start + _number(found["duration"]) if "duration" in found else _number(found["end"])
        except (ValueError, KeyError):
            yield Unreadable("malformed", mistake, line)
        else:
            said = found["text"] and found["text"].strip()
            yield Stretch(found["recording"], start, end, said, found["speaker"], found["channel"])


def _parse_srt(text: str) -> Iterator[Stretch | Unreadable | str]:
    is_vtt = text.startswith("WEBVTT")
    blocks = _split_captions(text, is_vtt=is_vtt)
    captions: list[tuple[float, float, list[str]]] = []
    for times, lines in blocks:
        if times is not None:
            plain = (_SRT_STYLE.sub("", line) for line in lines)
            said = (html.unescape(line).strip() if is_vtt else line.strip() for line in plain)
            captions.append((_clock(times.groups()[:4]), _clock(times.groups()[4:]), list(filter(None, said))))
        elif lines and not (is_vtt and lines[0].startswith(_VTT_BLOCKS) and len(blocks) > 1):
            yield Unreadable(
                "malformed", "the block has no line of times, 00:00:01,000 --> 00:00:02,000", "\n".join(lines)
            )
    yield from _drop_repeats(captions)


def _split_captions(text: str, *, is_vtt: bool) -> list[tuple[re.Match[str] | None, list[str]]]:
    """Return the times of each block, if it has some, and its further lines that are not blank, without its number.

    A caption may have blank lines: one ends it only if a number, times or, in WebVTT, a name or a comment follows.
    """
    lines = ["", *map(str.strip, split_lines(text))]
    rows = [(line, not before) for before, line in itertools.pairwise(lines) if line]
    blocks: list[tuple[re.Match[str] | None, list[str]]] = [(None, [])]
    for (line, is_apart), (following, follows_apart) in itertools.pairwise([*rows, ("", True)]):
        times, said, is_number = _SRT_TIMES.match(line), blocks[-1][1], line.isdecimal()
        is_name = is_number or (is_vtt and is_apart) if not follows_apart else is_number and is_apart and said
        if is_name and _SRT_TIMES.match(following):
            continue
        if times or (is_apart and said and (is_number or (is_vtt and line.startswith(_VTT_BLOCKS)))):
            blocks.append((times, []))
        if not times:
            blocks[-1][1].append(line)
    return blocks


def _drop_repeats(captions: list[tuple[float, float, list[str]]]) -> Iterator[Stretch | str]:
    """Yield the stretches of captions, (start, end, lines), with each line of rolling ones once, and notes.

    A rolling caption repeats the last lines of the one before, and goes on, or lasts for a hundredth of a second only.
    Speakers repeat themselves too, so lines are left out only if half of the captions of a file are rolling.
    """
    rows: list[tuple[float, float, list[str], int, bool]] = []
    before: list[str] = []
    last = -math.inf
    for start, end, lines in sorted(captions, key=itemgetter(0, 1)):
        sizes = range(min(len(before), len(lines), _MOST_LINES), 0, -1) if start < last + _SHORT_CAPTION else ()
        repeated = next((size for size in sizes if before[-size:] == lines[:size]), 0)
        is_short = 0 <= end - start < _SHORT_CAPTION
        rows.append((start, end, lines, repeated, is_short))
        before, last = before if is_short else lines, max(last, end)
    num_rolling = sum(repeated > 0 and (is_short or repeated < len(lines)) for _, _, lines, repeated, is_short in rows)
    for start, end, lines, repeated, is_short in rows:
        dropped = repeated if 2 * num_rolling >= len(rows) - 1 or (is_short and repeated == len(lines)) else 0
        if dropped < len(lines) or not lines:
            yield from ["lines of captions that only repeat the one before are left out"] * dropped
            yield Stretch("", start, end, " ".join(lines[dropped:]))
        else:
            yield "captions that only repeat the one before are left out"


def _clock(parts: Sequence[str | None]) -> float:
    hours, minutes, seconds, fraction = (part or "0" for part in parts)
    return int(hours) * 3600 + int(minutes) * 60 + float(f"{seconds}.{fraction}")


def _parse_textgrid(text: str, tier: str | None) -> Iterator[Stretch | Unreadable]:
    tiers, pattern = parse_textgrid(text), tier_pattern(tier)
    chosen = [(intervals, match) for name, intervals in tiers if (match := pattern.fullmatch(name))]
    if tier is None and len(tiers) > 1:
        raise ValueError(f"the file {_choose_tier([name for name, _ in tiers])}")
    if not chosen:
        names = ", ".join(repr(name) for name, _ in tiers[:20])
        raise ValueError(f"the file has no tier of intervals that is {tier!r}; it has {names or 'none'}")
    for intervals, match in chosen:
        for start, end, said in intervals:
            if said.strip():
                yield Stretch("", start, end, said.strip(), "".join(match.groups()).strip() or None)


def _choose_tier(names: list[str]) -> str:
    """Return the end of a sentence about a file of several tiers, of which none is named."""
    shown = ", ".join(repr(name[:40]) for name in names[:20])
    return (
        f"has {len(names)} tiers, {shown}; name one as tier of the source, or set tier to '*' for all, each a speaker"
    )


def tier_pattern(tier: str | None) -> re.Pattern[str]:
    """Return a pattern of the names of tiers, whose group is what ``*`` stands for, the speaker; None is any name.

    >>> tier_pattern("* - words").fullmatch("Anna - words")[1]
    'Anna'
    """
    return re.compile(".*" if tier is None else re.escape(tier).replace(r"\*", "(.*)"), re.DOTALL)


def parse_textgrid(text: str) -> list[tuple[str, list[tuple[float, float, str]]]]:
    """Return the tiers of intervals of a TextGrid, (name, [(begin, end, text)]); tiers of points are left out.

    Raises:
        ValueError: the text is no TextGrid, or it is cut off.

    Example:
        >>> parse_textgrid('"ooTextFile" "TextGrid" 0 1 <exists> 1 "IntervalTier" "words" 0 1 1 0 1 "yes"')
        [('words', [(0.0, 1.0, 'yes')])]
    """
    tokens = _iterate_tokens(text)
    texts, numbers = partial(_take, tokens, str), partial(_take, tokens, float)

    def count() -> range:
        return range(int(min(numbers(), 1e9)))

    if [texts(), texts()] != ["ooTextFile", "TextGrid"]:
        raise ValueError("the file is no TextGrid in text form")
    numbers()
    numbers()
    tiers = []
    for _ in count():
        kind, name = texts(), texts()
        if kind not in ("IntervalTier", "TextTier"):
            raise ValueError(f"a tier is a {kind[:40]!r}, not one of intervals or points")
        numbers()
        numbers()
        if kind == "TextTier":
            for _ in count():
                numbers()
                texts()
            continue
        tiers.append((name, [(numbers(), numbers(), texts()) for _ in count()]))
    return tiers


def _iterate_tokens(text: str) -> Iterator[str | float]:
    for match in _TOKEN.finditer(text):
        if match[1] is not None:
            yield match[1].replace('""', '"')
        elif _NUMBER.fullmatch(match[2]) and math.isfinite(number := float(match[2])):
            yield number


def _take(tokens: Iterator[str | float], kind: type[Token]) -> Token:
    """Return the next token, a text or a number."""
    token = next(tokens, None)
    if not isinstance(token, kind):
        other, wanted = ("number", "text") if kind is str else ("text", "number")
        raise ValueError(
            "the file is cut off" if token is None else f"the file has a {other} in the place of a {wanted}"
        )
    return token


def _parse_ami(text: str, name: str) -> Iterator[Stretch | Unreadable]:
    if "<nite:root" not in text[:4096]:
        raise ValueError("the file has no words of AMI in NXT format")
    recording, _, speaker = name.partition(".")
    last = 0.0
    for match in _AMI_WORD.finditer(text):
        attributes = dict(_ATTRIBUTE.findall(match[1]))
        try:
            # Marks and a few words have no times of their own.
            start = _number(attributes.get("starttime") or str(last))
            end = _number(attributes.get("endtime") or str(start))
        except ValueError:
            yield Unreadable("malformed", "the times of the word are no numbers", match[0])
            continue
        said = html.unescape(match[2]).strip()
        last = end
        yield Stretch(recording, start, end, said, f"{recording}.{speaker}", glued=attributes.get("punc") == "true")


def _parse(form: str, text: str, tier: str | None, name: str) -> Iterator[Stretch | Unreadable | str]:
    """Yield the stretches of a file, what cannot be read of it, and as texts notes about what is left out.

    Args:
        form: the key ``annotations`` of the source.
        text: of the file.
        tier: the key of the source.
        name: of the file, without its suffix.

    Raises:
        ValueError: the file as a whole is not in this form.
    """
    if form in _LINES:
        return _parse_lines(form, text)
    if form == "textgrid":
        return _parse_textgrid(text, tier)
    return _parse_srt(text) if form == "srt" else _parse_ami(text, name)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not finite")
    return value


def join_stretches(stretches: Sequence[Stretch], max_gap: float, max_duration: float) -> list[Stretch]:
    """Join stretches of one speaker and channel where the pause is not longer than ``max_gap`` seconds.

    None becomes longer than ``max_duration`` seconds by it. The order is that of speakers, and of time.

    >>> words = [Stretch("", 0.0, 0.4, "good"), Stretch("", 0.5, 1.0, "day"), Stretch("", 3.0, 3.5, "yes")]
    >>> [(part.start, part.end, part.text) for part in join_stretches(words, 0.5, 20.0)]
    [(0.0, 1.0, 'good day'), (3.0, 3.5, 'yes')]
    """

    def voice(stretch: Stretch) -> tuple[str, str, str]:
        return stretch.recording, stretch.channel, stretch.speaker or ""

    groups = itertools.groupby(sorted(stretches, key=lambda s: (voice(s), s.start, s.end)), voice)
    return [_joined(run) for _, group in groups for run in split_runs(group, max_gap, max_duration)]


def split_runs(
    parts: Iterable[Any], max_gap: float = math.inf, max_duration: float = math.inf, *, enough: float = math.inf
) -> Iterator[list[Any]]:
    """Yield runs of what has ``start`` and ``end`` in seconds and is in the order of its starts.

    A run ends before a pause of more than ``max_gap`` seconds, before it would last more than ``max_duration``, and
    when it lasts ``enough`` seconds.
    """
    run: list[Any] = []
    end = 0.0
    for part in parts:
        if run and (
            part.start - end > max_gap
            or max(end, part.end) - run[0].start > max_duration
            or end - run[0].start >= enough
        ):
            yield run
            run = []
        end = max(end, part.end) if run else part.end
        run.append(part)
    if run:
        yield run


def _joined(run: list[Stretch]) -> Stretch:
    texts = [("" if part.glued else " ") + part.text for part in run if part.text]
    end = max(part.end for part in run)
    return replace(run[0], end=end, text="".join(texts).strip() if texts else None)


def find_overlaps(stretches: Sequence[Stretch]) -> list[bool]:
    """Mark the stretches during which another one of the same recording and channel goes on, by another speaker.

    Stretches of which the speaker is not known are by different ones.
    """
    marks = [False] * len(stretches)

    def track(number: int) -> tuple[str, str]:
        return stretches[number].recording, stretches[number].channel

    lasting = (number for number, stretch in enumerate(stretches) if stretch.end > stretch.start)
    for _, numbers in itertools.groupby(sorted(lasting, key=lambda n: (track(n), stretches[n].start)), track):
        ends: dict[str | int, float] = {}  # of the two voices that go on longest
        before: list[int] = []  # those since the voice changed last
        for voice, run in itertools.groupby(numbers, lambda n: stretches[n].speaker or n):
            following = list(run)
            for number in before:
                marks[number] |= stretches[number].end - stretches[following[0]].start > _MIN_OVERLAP
            longest = max((end for other, end in ends.items() if other != voice), default=-math.inf)
            for number in following:
                marks[number] = longest - stretches[number].start > _MIN_OVERLAP
            before = following
            ends[voice] = max(ends.get(voice, -math.inf), *(stretches[number].end for number in following))
            if len(ends) > 2:
                del ends[min(ends, key=ends.__getitem__)]
    return marks
