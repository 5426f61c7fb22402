"""Annotations as stretches of recordings: RTTM, CTM, TextGrid, labels of Audacity, SRT, and words of AMI."""

from __future__ import annotations

import html
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

Token = TypeVar("Token", str, float)

# Two stretches that overlap by less only have rounded times.
_MIN_OVERLAP: Final = 1e-3
_CLOCK: Final = r"(\d+):(\d\d):(\d\d)[,.](\d{1,3})"
_SRT_TIMES: Final = re.compile(rf"\s*{_CLOCK}\s*-->\s*{_CLOCK}")
_SRT_STYLE: Final = re.compile(r"</?(?:[ibu]|font)\b[^>]*>|\{\\[^}]*\}")
_AMI_WORD: Final = re.compile(r"<w\b([^>]*)>([^<]*)</w>")
# Of a TextGrid, Praat itself takes numbers, texts and flags that stand alone, and skips all else, such as ``xmin =``.
_TOKEN: Final = re.compile(r'"([^"]*(?:""[^"]*)*)"|([^\s"]+)')
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_ATTRIBUTE: Final = re.compile(r'(\w+)\s*=\s*"([^"]*)"')


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


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot be read, and what is wrong with it."""

    line: str
    detail: str


@dataclass(frozen=True)
class AnnotationFormat:
    """One form of annotations.

    Attributes:
        suffix: end of the names of its files.
        words: its stretches are words, to be joined.
        parse: (text of a file, tier, name of the file without suffix) -> its stretches. Raises ValueError where the
            file as a whole is none.
    """

    suffix: str
    words: bool
    parse: Callable[[str, str | None, str], Iterator[Stretch | BadLine]]


def _lines(text: str) -> Iterator[str]:
    return (line for line in text.splitlines() if line.strip())


def _parse_rttm(text: str, tier: str | None, name: str) -> Iterator[Stretch | BadLine]:
    for line in _lines(text):
        words = line.split()
        # Others are about speakers, words and noises.
        if words[0] != "SPEAKER":
            continue
        try:
            start = _number(words[3])
            end = start + _number(words[4])
            said, speaker = words[5], words[7]
        except (ValueError, IndexError):
            yield BadLine(line, "the line is no SPEAKER of RTTM, with numbers as times")
            continue
        named = None if speaker == "<NA>" else speaker
        yield Stretch(words[1], start, end, None if said == "<NA>" else said, named, words[2])


def _parse_ctm(text: str, tier: str | None, name: str) -> Iterator[Stretch | BadLine]:
    for line in _lines(text):
        if line.startswith(";;"):
            continue
        words = line.split()
        try:
            start = _number(words[2])
            yield Stretch(words[0], start, start + _number(words[3]), words[4], None, words[1])
        except (ValueError, IndexError):
            yield BadLine(line, "the line is no word of CTM: recording, channel, begin, duration, word")


def _parse_audacity(text: str, tier: str | None, name: str) -> Iterator[Stretch | BadLine]:
    for line in _lines(text):
        # The frequencies of the label before.
        if line.startswith("\\"):
            continue
        start, _, rest = line.partition("\t")
        end, _, label = rest.partition("\t")
        try:
            yield Stretch("", _number(start), _number(end), label.strip())
        except ValueError:
            yield BadLine(line, "the line is no label: begin, end and text, with tabs between them")


def _parse_srt(text: str, tier: str | None, name: str) -> Iterator[Stretch | BadLine]:
    for block in re.split(r"\n[ \t]*\n", "\n".join(text.splitlines())):
        lines = block.strip().split("\n")
        times = next((number for number, line in enumerate(lines[:2]) if _SRT_TIMES.match(line)), None)
        if times is not None:
            match = _SRT_TIMES.match(lines[times])
            assert match is not None
            said = _SRT_STYLE.sub("", " ".join(line.strip() for line in lines[times + 1 :]))
            yield Stretch("", _clock(match.groups()[:4]), _clock(match.groups()[4:]), said.strip())
        elif block.strip():
            yield BadLine(block.strip(), "the block has no line of times, 00:00:01,000 --> 00:00:02,000")


def _clock(parts: Sequence[str]) -> float:
    hours, minutes, seconds, fraction = parts
    return int(hours) * 3600 + int(minutes) * 60 + int(seconds) + int(fraction.ljust(3, "0")) / 1000


def _parse_textgrid(text: str, tier: str | None, name: str) -> Iterator[Stretch | BadLine]:
    tiers, pattern = parse_textgrid(text), tier_pattern(tier)
    chosen = [(found, match) for found in tiers if (match := pattern.fullmatch(found.name))]
    if not chosen:
        names = ", ".join(repr(found.name) for found in tiers[:20])
        raise ValueError(f"the file has no tier of intervals that is {tier!r}; it has {names or 'none'}")
    for found, match in chosen:
        for start, end, said in found.intervals:
            if said.strip():
                yield Stretch("", start, end, said.strip(), "".join(match.groups()).strip() or None)


def tier_pattern(tier: str | None) -> re.Pattern[str]:
    """Return a pattern of the names of tiers, whose group is what ``*`` stands for, the speaker; None is ``*``.

    >>> tier_pattern("* - words").fullmatch("Anna - words")[1]
    'Anna'
    """
    return re.compile(re.escape("*" if tier is None else tier).replace(r"\*", "(.*)"), re.DOTALL)


@dataclass(frozen=True)
class Tier:
    """A tier of intervals: (begin, end, text), times in seconds."""

    name: str
    intervals: list[tuple[float, float, str]]


def parse_textgrid(text: str) -> list[Tier]:
    """Return the tiers of intervals of a TextGrid; tiers of points are left out.

    Raises:
        ValueError: the text is no TextGrid, or it is cut off.

    Example:
        >>> parse_textgrid('"ooTextFile" "TextGrid" 0 1 <exists> 1 "IntervalTier" "words" 0 1 1 0 1 "yes"')
        [Tier(name='words', intervals=[(0.0, 1.0, 'yes')])]
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
        tiers.append(Tier(name, [(numbers(), numbers(), texts()) for _ in count()]))
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


def _parse_ami(text: str, tier: str | None, name: str) -> Iterator[Stretch | BadLine]:
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
            yield BadLine(match[0], "the times of the word are no numbers")
            continue
        said = html.unescape(match[2]).strip()
        last = end
        yield Stretch(recording, start, end, said, f"{recording}.{speaker}", glued=attributes.get("punc") == "true")


FORMATS: Final[dict[str, AnnotationFormat]] = {
    "rttm": AnnotationFormat(".rttm", False, _parse_rttm),
    "ctm": AnnotationFormat(".ctm", True, _parse_ctm),
    "textgrid": AnnotationFormat(".TextGrid", False, _parse_textgrid),
    "audacity": AnnotationFormat(".txt", False, _parse_audacity),
    "srt": AnnotationFormat(".srt", False, _parse_srt),
    "ami": AnnotationFormat(".words.xml", True, _parse_ami),
}


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

    joined: list[Stretch] = []
    for _, group in itertools.groupby(sorted(stretches, key=lambda s: (voice(s), s.start, s.end)), voice):
        run: list[Stretch] = []
        end = 0.0
        for stretch in group:
            if run and (stretch.start - end > max_gap or max(end, stretch.end) - run[0].start > max_duration):
                joined.append(_joined(run, end))
                run = []
            end = max(end, stretch.end) if run else stretch.end
            run.append(stretch)
        joined.append(_joined(run, end))
    return joined


def _joined(run: list[Stretch], end: float) -> Stretch:
    texts = [("" if part.glued else " ") + part.text for part in run if part.text]
    return replace(run[0], end=end, text="".join(texts).strip() if texts else None)


def find_overlaps(stretches: Sequence[Stretch]) -> list[bool]:
    """Mark the stretches during which another one of the same recording and channel goes on, by another speaker.

    Stretches of which the speaker is not known are by different ones.
    """
    marks = [False] * len(stretches)

    def track(number: int) -> tuple[str, str]:
        return stretches[number].recording, stretches[number].channel

    lasting = (number for number, stretch in enumerate(stretches) if stretch.end > stretch.start)
    order = sorted(lasting, key=lambda n: (track(n), stretches[n].start, stretches[n].end))
    for _, group in itertools.groupby(order, track):
        _mark_overlaps(stretches, list(group), marks)
    return marks


def _mark_overlaps(stretches: Sequence[Stretch], numbers: list[int], marks: list[bool]) -> None:
    """Mark the overlapped ones of the stretches of these numbers, which are in the order of time."""
    voices: list[str | int] = [stretches[n].speaker or n for n in numbers]
    # The latest ends so far of two different speakers, one of whom is another than the present one.
    latest: list[tuple[float, str | int]] = [(-math.inf, -1), (-math.inf, -2)]
    for number, voice in zip(numbers, voices, strict=True):
        end = next(end for end, other in latest if other != voice)
        marks[number] |= end - stretches[number].start > _MIN_OVERLAP
        of_voice = max([stretches[number].end, *(end for end, other in latest if other == voice)])
        others = [item for item in latest if item[1] != voice]
        latest = sorted([(of_voice, voice), *others], key=lambda item: item[0], reverse=True)[:2]
    # The next one of another speaker.
    following = len(numbers)
    for place in range(len(numbers) - 2, -1, -1):
        if voices[place + 1] != voices[place]:
            following = place + 1
        if following < len(numbers):
            overlap = stretches[numbers[place]].end - stretches[numbers[following]].start
            marks[numbers[place]] |= overlap > _MIN_OVERLAP
