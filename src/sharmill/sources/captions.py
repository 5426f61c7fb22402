"""Parser for SRT and WebVTT captions, which drops the lines that rolling captions repeat."""

import html
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Final

from sharmill.sources import UnreadableRecord
from sharmill.sources.files import split_lines
from sharmill.sources.stretches import Stretch

_CLOCK: Final = r"(?:(\d{1,4}):)?(\d{1,2}):(\d\d)(?:[,.](\d{1,9}))?"
_SRT_TIMES: Final = re.compile(rf"\s*{_CLOCK}\s*-->\s*{_CLOCK}")
# Tags must not contain "<"; otherwise, the search for the end of each unclosed tag would read to the end of the file.
_SRT_STYLE: Final = re.compile(r"</?(?:[bciuv]|font|lang|rt|ruby)\b[^<>]*>|<[\d:.]+>|\{\\[^{}]*\}")
# WebVTT blocks that are not captions.
_VTT_BLOCKS: Final = ("WEBVTT", "NOTE", "STYLE", "REGION")
# Maximum number of lines of a rolling caption that are compared with the previous caption.
_MOST_LINES: Final = 10
# Duration in seconds. Shorter captions contain no speech of their own, and the pauses between rolling captions are
# shorter too.
_SHORT_CAPTION: Final = 0.1


def parse_captions(text: str) -> Iterator[Stretch | UnreadableRecord | str]:
    """Yield segments, unreadable blocks, and notes about lines that are left out, from a text in SRT or WebVTT."""
    is_vtt = text.startswith("WEBVTT")
    blocks = _split_captions(text, is_vtt=is_vtt)
    captions: list[tuple[float, float, list[str]]] = []
    for times, lines in blocks:
        if times is not None:
            plain = (_SRT_STYLE.sub("", line) for line in lines)
            said = (html.unescape(line).strip() if is_vtt else line.strip() for line in plain)
            captions.append((_clock(times.groups()[:4]), _clock(times.groups()[4:]), list(filter(None, said))))
        elif lines and not (is_vtt and lines[0].startswith(_VTT_BLOCKS) and len(blocks) > 1):
            yield UnreadableRecord(
                "malformed", "the block has no times such as 00:00:01,000 --> 00:00:02,000", "\n".join(lines)
            )
    yield from _drop_repeats(captions)


def _split_captions(text: str, *, is_vtt: bool) -> list[tuple[re.Match[str] | None, list[str]]]:
    """Return (regex match for the times or None, nonblank lines without the caption number) for each block.

    A caption may contain blank lines. A blank line ends it only if it is followed by a number, by times or, in WebVTT,
    by a name or a comment. In WebVTT, a line with an arrow always counts as times, even if they cannot be read.
    """

    def is_times(line: str) -> bool:
        return bool(_SRT_TIMES.match(line)) or (is_vtt and "-->" in line)

    lines = ["", *map(str.strip, split_lines(text))]
    rows = [(line, not before) for before, line in itertools.pairwise(lines) if line]
    blocks: list[tuple[re.Match[str] | None, list[str]]] = [(None, [])]
    for (line, is_apart), (following, follows_apart) in itertools.pairwise([*rows, ("", True)]):
        times, said, is_number = _SRT_TIMES.match(line), blocks[-1][1], line.isdecimal()
        is_name = is_number or (is_vtt and is_apart) if not follows_apart else is_number and is_apart and said
        if is_name and is_times(following):
            continue
        if is_times(line) or (is_apart and said and (is_number or (is_vtt and line.startswith(_VTT_BLOCKS)))):
            blocks.append((times, []))
        if not times:
            blocks[-1][1].append(line)
    return blocks


def _drop_repeats(captions: list[tuple[float, float, list[str]]]) -> Iterator[Stretch | str]:
    """Yield a segment for each caption (start, end, lines), without repeated lines, and notes about repeated lines.

    A rolling caption repeats the last lines of the previous caption, and either adds lines or is very short. Speakers
    may also repeat themselves, so lines are dropped only if at least half of the captions in a file are rolling, or if
    a very short caption consists of repeated lines only.
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
    is_rolling = 2 * num_rolling >= len(rows) - 1
    kept: list[Stretch] = []
    for start, end, lines, repeated, is_short in rows:
        dropped = repeated if is_rolling or (is_short and repeated == len(lines)) else 0
        if dropped < len(lines) or not lines:
            yield from ["caption lines that only repeat the previous caption are left out"] * dropped
            kept.append(Stretch("", start, end, " ".join(lines[dropped:])))
        else:
            yield "captions that only repeat the previous one are left out"
    # A rolling caption stays on the screen while the next line is spoken.
    for caption, following in itertools.zip_longest(kept, kept[1:]):
        is_cut = is_rolling and following is not None and caption.start < following.start < caption.end
        yield replace(caption, end=following.start) if is_cut else caption


def _clock(parts: Sequence[str | None]) -> float:
    hours, minutes, seconds, fraction = (part or "0" for part in parts)
    return int(hours) * 3600 + int(minutes) * 60 + float(f"{seconds}.{fraction}")
