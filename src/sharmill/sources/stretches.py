"""Stretches of recordings from annotations: joining them across pauses, and finding overlaps."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

# Overlap in seconds. Shorter overlaps result from rounded times, and are ignored.
_MIN_OVERLAP: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of a recording, with times in seconds.

    Attributes:
        recording: name of the recording in the annotation file; "" if the file is about one recording.
        channel: name of the channel in the annotation file; "" if there is none.
        glued: True if the text is punctuation that follows the previous word without a blank.
    """

    recording: str
    start: float
    end: float
    text: str | None = None
    speaker: str | None = None
    channel: str = ""
    glued: bool = False


def join_stretches(stretches: Sequence[Stretch], max_gap: float, max_duration: float) -> list[Stretch]:
    """Join stretches of one speaker and channel if the pause between them is at most ``max_gap`` seconds.

    Joining never creates a stretch longer than ``max_duration`` seconds. The result is sorted by recording, channel and
    speaker, then by time.

    >>> words = [Stretch("", 0.0, 0.4, "good"), Stretch("", 0.5, 1.0, "day"), Stretch("", 3.0, 3.5, "yes")]
    >>> [(part.start, part.end, part.text) for part in join_stretches(words, 0.5, 20.0)]
    [(0.0, 1.0, 'good day'), (3.0, 3.5, 'yes')]
    """

    def voice(stretch: Stretch) -> tuple[str, str, str]:
        return stretch.recording, stretch.channel, stretch.speaker or ""

    groups = itertools.groupby(sorted(stretches, key=lambda s: (voice(s), s.start, s.end)), voice)
    return [_merge_run(run) for _, group in groups for run in split_runs(group, max_gap, max_duration)]


def split_runs(
    parts: Iterable[Any], max_gap: float = math.inf, max_duration: float = math.inf, *, enough: float = math.inf
) -> Iterator[list[Any]]:
    """Split parts into runs; the parts have ``start`` and ``end`` in seconds and are sorted by start.

    A run ends before a pause of more than ``max_gap`` seconds, before it would exceed ``max_duration`` seconds, and as
    soon as it lasts ``enough`` seconds.
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


def _merge_run(run: list[Stretch]) -> Stretch:
    texts = [("" if part.glued else " ") + part.text for part in run if part.text]
    end = max(part.end for part in run)
    return replace(run[0], end=end, text="".join(texts).strip() if texts else None)


def find_overlaps(stretches: Sequence[Stretch]) -> list[bool]:
    """Return, for each stretch, True if it overlaps with another speaker's stretch in the same recording and channel.

    Each stretch without a speaker counts as a speaker of its own.
    """
    marks = [False] * len(stretches)

    def track(number: int) -> tuple[str, str]:
        return stretches[number].recording, stretches[number].channel

    lasting = (number for number, stretch in enumerate(stretches) if stretch.end > stretch.start)
    for _, numbers in itertools.groupby(sorted(lasting, key=lambda n: (track(n), stretches[n].start)), track):
        ends: dict[str | int, float] = {}  # the two voices that end last, each with its latest end
        before: list[int] = []  # stretches since the last change of voice
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
