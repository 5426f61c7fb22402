"""Cuts recordings into utterances by voice activity.

The detector is in ``models/silero.py``. Recordings are decoded and resampled in blocks. Only the measures of frames of
32 ms are kept for a whole recording: 16 bytes per frame, or 18 MB for ten hours.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from sharmill.audio.files import Recording, open_recording
from sharmill.audio.resample import resample_blocks, segment_bounds
from sharmill.audio.segments import find_peak
from sharmill.errors import RejectRecord, refuse
from sharmill.manifest import ALIGNMENT, Channel
from sharmill.models.device import make_deterministic
from sharmill.models.silero import FRAME_SAMPLES, SAMPLING_RATE, SileroVad, VadState

_FRAMES_PER_SECOND: Final = SAMPLING_RATE / FRAME_SAMPLES
# The probability at which speech begins, the probability below which it ends, and its minimum duration in seconds. The
# values are the defaults of silero-vad's get_speech_timestamps.
_SPEECH: Final = 0.5
_NO_SPEECH: Final = 0.35
_SHORTEST_SPEECH: Final = 0.25
# Seconds: an utterance ends at a longer pause, and includes this much padding before and after its speech.
_PAUSE: Final = 0.5
_PADDING: Final = 0.1
# Seconds: a short utterance is joined across a gap of up to this duration, not counting the padding.
_NEAR: Final = 1.0
_BLOCK_SECONDS: Final = 30.0
# Digits to which probabilities and levels (dB) are rounded, because smaller differences may depend on the CPU.
_PROBABILITY_DIGITS: Final = 2
_LEVEL_DIGITS: Final = 1
_FLOOR: Final = 1e-10
_NO_VALUES: Final = np.zeros(0, np.float32)

# Notes about changes of utterances, which are shown after their number.
JOINED: Final = "utterances shorter than --min-segment were joined to a neighbour"
LEFT_OUT: Final = "utterances shorter than --min-segment were left out, with no neighbour to join"
SPLIT: Final = "utterances longer than --max-segment were split at a quiet place"
TEXT_LEFT_OUT: Final = "texts were left out, because the recording has several utterances"

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class UtteranceLimits:
    """Shortest and longest utterance in seconds.

    Raises:
        ConfigError: ``longest`` is infinite, less than 0.1 s, or less than twice ``shortest``.
    """

    shortest: float = 1.0
    longest: float = 20.0

    def __post_init__(self) -> None:
        refuse(
            (
                not math.inf > self.longest >= max(2 * self.shortest, 0.1),
                f"--max-segment {self.longest:g} must be finite, at least 0.1, and twice --min-segment "
                f"{self.shortest:g}",
            ),
            code="bad_usage",
        )


@dataclass(frozen=True)
class Frames:
    """Measures of the frames of a recording, or of a part of it.

    Attributes:
        probabilities: (frames,) float32, the probability of speech.
        levels: (frames,) float32, the RMS level in dB of full scale.
        edges: (frames + 1,) int64, the samples at which frames begin and end, at the sampling rate of the recording.
        sampling_rate: that sampling rate, in Hz.
    """

    probabilities: np.ndarray
    levels: np.ndarray
    edges: np.ndarray
    sampling_rate: int


def find_utterances(frames: Frames, limits: UtteranceLimits) -> tuple[list[Span], Counter[str]]:
    """Return the utterances in order, each with its first sample and its end, and notes with their numbers.

    Speech is joined across pauses of up to 0.5 s and padded by 0.1 s. An utterance below the shortest duration is
    joined to the nearer of the neighbours with which it is not too long, if the gap is at most 1 s; otherwise it is
    left out. An utterance above the longest duration is split where the probability of speech is lowest and, among
    equal places, where the level is lowest. The first part has at least half of the longest duration.

    >>> probabilities = np.repeat([0.0, 1.0, 0.0, 1.0, 0.0], [40, 100, 5, 100, 40]).astype(np.float32)
    >>> frames = Frames(probabilities, np.zeros(285, np.float32), 512 * np.arange(286), 16000)
    >>> find_utterances(frames, UtteranceLimits())[0]
    [(18944, 126976)]
    >>> [(begin / 16000, end / 16000) for begin, end in find_utterances(frames, UtteranceLimits(longest=4.0))[0]]
    [(1.184, 4.576), (4.576, 7.936)]
    """
    rate = frames.sampling_rate
    shortest, longest = math.ceil(limits.shortest * rate), math.floor(limits.longest * rate)
    parts = [(int(frames.edges[begin]), int(frames.edges[end])) for begin, end in _find_speech(frames.probabilities)]
    counts = Counter[str]()
    index = 0
    while index < len(parts):
        begin, end = parts[index]
        if end - begin < shortest:
            before, after = parts[index - 1 : index], parts[index + 1 : index + 2]
            gaps = [(begin - other[1], index - 1) for other in before if end - other[0] <= longest]
            gaps += [(other[0] - end, index) for other in after if other[1] - begin <= longest]
            gap, first = min(gaps, default=(math.inf, index))
            if gap <= _NEAR * rate:
                parts[first : first + 2] = [(parts[first][0], parts[first + 1][1])]
                # The joined utterance may still be short.
                index = first
                counts[JOINED] += 1
            else:
                del parts[index]
                counts[LEFT_OUT] += 1
        else:
            index += 1
    found = []
    for begin, end in parts:
        while end - begin > longest:
            cut = _find_quietest(frames, begin + max(shortest, longest // 2), min(begin + longest, end - shortest))
            found.append((begin, cut))
            begin = cut
            counts[SPLIT] += 1
        found.append((begin, end))
    return found, counts


def _find_speech(probabilities: np.ndarray) -> Iterator[Span]:
    """Yield the first frame of each stretch of speech and the frame after its last one, with padding."""
    is_decided = (probabilities >= _SPEECH) | (probabilities < _NO_SPEECH)
    # Frames with probabilities between the thresholds continue the state of the last decided frame.
    last = np.maximum.accumulate(np.where(is_decided, np.arange(len(probabilities)), 0))
    changes = np.flatnonzero(np.diff(np.pad((probabilities[last] >= _SPEECH).astype(np.int8), 1)))
    stretches: list[Span] = []
    for begin, end in changes.reshape(-1, 2).tolist():
        if stretches and begin - stretches[-1][1] <= _PAUSE * _FRAMES_PER_SECOND:
            begin = stretches.pop()[0]
        stretches.append((begin, end))
    padding = round(_PADDING * _FRAMES_PER_SECOND)
    for begin, end in stretches:
        if end - begin >= _SHORTEST_SPEECH * _FRAMES_PER_SECOND:
            yield max(begin - padding, 0), min(end + padding, len(probabilities))


def _find_quietest(frames: Frames, low: int, high: int) -> int:
    """Return the sample in [low, high] at the quietest frame boundary; ``low`` if there is no boundary."""
    first, end = int(np.searchsorted(frames.edges, low)), int(np.searchsorted(frames.edges, high, side="right"))
    places = np.arange(max(first, 1), min(end, len(frames.probabilities)))
    if not len(places):
        return low
    # The frames on both sides of the boundary must be quiet.
    for values in (frames.probabilities, frames.levels):
        loudest = np.maximum(values[places - 1], values[places])
        places = places[loudest == loudest.min()]
    return int(frames.edges[places[len(places) // 2]])


class UtteranceCutter:
    """Cuts the recordings of records into utterances.

    Raises:
        ConfigError: the package silero-vad is missing or damaged.
    """

    def __init__(self, limits: UtteranceLimits) -> None:
        make_deterministic()
        self._limits = limits
        self._vad = SileroVad()

    def cut(
        self, record: dict[str, Any], path: Path, advance: Callable[[float], None]
    ) -> tuple[list[dict[str, Any]], Counter[str]]:
        """Return a record for each utterance of a record's audio, and notes with their numbers.

        A text is kept if the record has only one utterance. Otherwise, the text of each utterance is empty.

        Args:
            record: a record of ``sharmill manifest``, with its ``offset`` and ``duration`` if it is part of a file.
            path: the path of the file.
            advance: receives the shares of the record that are processed, which add up to 1.

        Raises:
            RejectRecord: the audio cannot be decoded, is far above full scale, or has several channels and none is
                chosen; or ``no_speech``.
        """
        with open_recording(path) as recording:
            rate, num_samples = recording.info.sampling_rate, recording.info.num_samples
            start = 0
            if "offset" in record:
                start, wanted = segment_bounds(record["offset"], record["duration"], rate)
                num_samples = min(wanted, num_samples - start)
            frames = self._measure(recording, start, num_samples, record.get("channel"), advance)
        found, counts = find_utterances(frames, self._limits)
        if not found:
            detail = f"no speech of at least {self._limits.shortest:g} s was found"
            raise RejectRecord("no_speech", detail)
        kept = {key: value for key, value in record.items() if key not in ("offset", "duration", "text", ALIGNMENT)}
        text = record.get("text", "") if len(found) == 1 else ""
        counts.update([TEXT_LEFT_OUT] * (bool(record.get("text")) and len(found) > 1))
        return [
            {
                "audio_filepath": kept["audio_filepath"], "offset": (start + begin) / rate,
                "duration": (end - begin) / rate, "text": text, **kept,
            }
            for begin, end in found
        ], counts  # fmt: skip

    def _measure(
        self, recording: Recording, start: int, num_samples: int, channel: Channel, advance: Callable[[float], None]
    ) -> Frames:
        rate = recording.info.sampling_rate
        blocks = _read_blocks(recording, start, num_samples, channel, advance)
        probabilities, levels, state = [_NO_VALUES], [_NO_VALUES], VadState()
        for samples in _whole_frames(resample_blocks(blocks, rate, SAMPLING_RATE)):
            probabilities.append(self._vad.speech_probabilities(samples, state))
            power = np.square(samples, dtype=np.float64).reshape(-1, FRAME_SAMPLES).mean(axis=1)
            levels.append((10 * np.log10(np.maximum(power, _FLOOR))).round(_LEVEL_DIGITS).astype(np.float32))
        found = np.concatenate(probabilities).round(_PROBABILITY_DIGITS)
        edges = np.minimum(np.arange(len(found) + 1) * FRAME_SAMPLES * rate // SAMPLING_RATE, num_samples)
        edges[-1] = num_samples
        return Frames(found, np.concatenate(levels), edges, rate)


def _read_blocks(
    recording: Recording, start: int, num_samples: int, channel: Channel, advance: Callable[[float], None]
) -> Iterator[np.ndarray]:
    block = round(_BLOCK_SECONDS * recording.info.sampling_rate)
    for position in range(0, num_samples, block):
        size = min(block, num_samples - position)
        samples = recording.read(start + position, size, channel)
        find_peak(samples)
        yield samples
        advance(size / num_samples)


def _whole_frames(blocks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Divide the same samples into blocks of whole frames; the last frame is padded with zeros."""
    left = _NO_VALUES
    for block in blocks:
        left = np.concatenate((left, block))
        size = len(left) // FRAME_SAMPLES * FRAME_SAMPLES
        yield left[:size]
        left = left[size:]
    yield np.pad(left, (0, -len(left) % FRAME_SAMPLES))
