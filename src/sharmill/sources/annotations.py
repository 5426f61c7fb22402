"""Parsers for annotations of segments: RTTM, CTM, Audacity, AMI's words, Whisper, and NeMo's forced aligner."""

import html
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import msgspec

from sharmill.errors import RejectRecord
from sharmill.sources import UnreadableRecord
from sharmill.sources.files import decode_object, split_lines
from sharmill.sources.stretches import Stretch

# Patterns for the whitespace and the words of a line. Unicode whitespace does not separate words, since a word or name
# may contain it.
_GAP: Final = r"[ \t\v\f]++"
_WORD: Final = r"[^ \t\v\f]++"
# Optional end of a line after a word or speaker name. Any other trailing text is part of the word or name.
_CONFIDENCE: Final = rf"(?:{_GAP}(?:<?NA>?|[-+.\deE]+)(?:{_GAP}.*)?)?\s*"
_PLACE: Final = (
    rf"(?P<recording>{_WORD}){_GAP}(?P<channel>{_WORD}){_GAP}(?P<start>{_WORD}){_GAP}(?P<duration>{_WORD}){_GAP}"
)
# Formats with one segment per line. For each: a pattern for lines to ignore, a pattern for valid lines, and the message
# for all other lines.
_LINES: Final = {
    # RTTM lines of other types describe speakers, words and noises.
    "rttm": (
        re.compile(rf"(?!\s*SPEAKER(?:{_GAP}|$))"),
        re.compile(
            rf"\s*SPEAKER{_GAP}{_PLACE}(?:<NA>|(?P<text>{_WORD})){_GAP}{_WORD}{_GAP}(?:<NA>|(?P<speaker>{_WORD}))"
            rf"{_CONFIDENCE}"
        ),
        "the line is not a SPEAKER line of RTTM with numeric times",
    ),
    "ctm": (
        re.compile(";;"),
        re.compile(rf"\s*{_PLACE}(?P<text>{_WORD}){_CONFIDENCE}"),
        "the line is not a CTM entry: recording, channel, start, duration, word",
    ),
    # A line that begins with a backslash contains the frequencies of the previous label.
    "audacity": (
        re.compile(r"\\"),
        re.compile(r"(?P<start>[^\t]*)\t(?P<end>[^\t]*)(?P<text>.*)"),
        "the line is not a label: start, end and text separated by tabs",
    ),
}
_AMI_WORD: Final = re.compile(r"<w\b([^<>]*)>([^<]*)</w>")
_ATTRIBUTE: Final = re.compile(r'\b(\w+)\s*=\s*"([^"]*)"')


def parse_lines(form: str, text: str) -> Iterator[Stretch | UnreadableRecord]:
    """Yield the segments of a format that has one segment per line."""
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
            yield UnreadableRecord("malformed", mistake, line)
        else:
            said = found["text"] and found["text"].strip()
            yield Stretch(found["recording"], start, end, said, found["speaker"], found["channel"])


def parse_ami_words(text: str, name: str) -> Iterator[Stretch | UnreadableRecord]:
    """Yield the words of an NXT file; ``name`` is the file's name, which consists of the meeting and the speaker."""
    if "<nite:root" not in text[:4096]:
        raise ValueError("the file is not an AMI words file in NXT format")
    recording, _, speaker = name.partition(".")
    last = 0.0
    for match in _AMI_WORD.finditer(text):
        attributes = dict(_ATTRIBUTE.findall(match[1]))
        try:
            # Punctuation and a few words have no times; they are placed at the end of the previous word.
            start = _number(attributes.get("starttime") or str(last))
            end = _number(attributes.get("endtime") or str(start))
        except ValueError:
            yield UnreadableRecord("malformed", "the times of the word are not numbers", match[0])
            continue
        said = html.unescape(match[2]).strip()
        last = end
        yield Stretch(recording, start, end, said, f"{recording}.{speaker}", glued=attributes.get("punc") == "true")


class _WhisperSegment(msgspec.Struct):
    """A segment of Whisper's JSON; WhisperX adds the speaker."""

    start: float
    end: float
    text: str
    speaker: str | None = None


def parse_whisper(text: str) -> Iterator[Stretch | UnreadableRecord]:
    """Yield the segments of a JSON file of Whisper or WhisperX."""
    segments = decode_object(text.encode(), "the file is not a JSON object").get("segments")
    if not isinstance(segments, list):
        raise ValueError("the file has no list of segments, as Whisper and WhisperX write it")
    for given in segments:
        try:
            segment = msgspec.convert(given, _WhisperSegment)
            start, end = _number(segment.start), _number(segment.end)
        except (msgspec.ValidationError, ValueError) as error:
            yield UnreadableRecord("malformed", f"the segment cannot be used: {error}", str(given))
        else:
            yield Stretch("", start, end, segment.text.strip(), segment.speaker)


def parse_aligned(text: str, level: str, read: Callable[[str], str]) -> Iterator[Stretch | UnreadableRecord]:
    """Yield the words or segments of the CTM files that a manifest of NeMo's forced aligner names.

    The ``recording`` of a segment is the ``audio_filepath`` of its line.

    Args:
        level: ``words`` or ``segments``.
        read: a function that returns the text of a CTM file from its path, or raises RejectRecord.
    """
    key = f"{level}_level_ctm_filepath"
    for line in filter(str.strip, split_lines(text)):
        try:
            found = decode_object(line.encode(), "the line is not a JSON object")
            audio, ctm = found.get("audio_filepath"), found.get(key)
            if not isinstance(audio, str) or not isinstance(ctm, str):
                raise RejectRecord("missing_field", f"the line lacks audio_filepath, or {key}: it was not aligned")
            entries = list(parse_lines("ctm", read(ctm)))
        except RejectRecord as reject:
            yield UnreadableRecord(reject.reason, reject.detail, line)
            continue
        for entry in entries:
            if isinstance(entry, Stretch):
                # The aligner writes a blank within a segment as <space>.
                yield replace(entry, recording=audio, text=(entry.text or "").replace("<space>", " "))
            else:
                yield entry


def _number(text: str | float) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not finite")
    return value
