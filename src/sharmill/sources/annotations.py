"""Annotations of a stretch each: lines of RTTM, CTM and Audacity's labels, and words of AMI."""

import html
import math
import re
from collections.abc import Iterator
from typing import Any, Final

from sharmill.sources import Unreadable
from sharmill.sources.files import split_lines
from sharmill.sources.stretches import Stretch

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
_ATTRIBUTE: Final = re.compile(r'\b(\w+)\s*=\s*"([^"]*)"')


def parse_lines(form: str, text: str) -> Iterator[Stretch | Unreadable]:
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


def parse_ami_words(text: str, name: str) -> Iterator[Stretch | Unreadable]:
    """Yield the words of a file in NXT format, whose ``name`` is that of the meeting and the speaker."""
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


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not finite")
    return value
