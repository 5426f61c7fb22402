"""Rows of a recording of an hour with many segments, decoded for match: times opened, seconds, memory."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import soundfile as sf
import torch
from support.audio import speech_like

from bench.rows import Case, row, with_peak
from sharmill.audio import files
from sharmill.audio.roots import AudioRoots
from sharmill.audio.segments import SegmentReader
from sharmill.manifest import Segment
from sharmill.match.embed import Embedder

RATE = 16000
FORMATS = {"wav": ("WAV", "PCM_16"), "flac": ("FLAC", "PCM_16"), "mp3": ("MP3", "MPEG_LAYER_III")}


def make_recording(path: Path, minutes: int) -> None:
    container, subtype = FORMATS[path.suffix[1:]]
    minute = speech_like(60 * RATE, RATE)
    with sf.SoundFile(path, "w", RATE, 1, subtype, format=container) as sound:
        for number in range(minutes):
            sound.write(np.roll(minute, 1000 * number))


def make_segments(name: str, seconds: float, number: int) -> list[Segment]:
    """Segments all over a recording, some of them overlapping, in no order."""
    rng = np.random.default_rng(1)
    offsets = rng.uniform(0, seconds - 21, number)
    durations = rng.uniform(2, 2 * 0.9 * seconds / number - 2, number).clip(2, 20)
    return [
        Segment(0, name, round(float(o), 2), round(float(d), 2), False) for o, d in zip(offsets, durations, strict=True)
    ]


class LevelEncoder:
    """An encoder that costs nothing: only decoding is measured."""

    sampling_rate = RATE
    embedding_size = 1
    checksum = "level"

    def embed(self, audio: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(audio), 1)


def _add_row(suffix: str) -> None:
    def make(folder: Path, tiny: bool) -> Case:
        minutes, number = (2, 8) if tiny else (60, 600)
        path = folder / f"a.{suffix}"
        make_recording(path, minutes)
        segments = make_segments(path.name, minutes * 60, number)
        reader = SegmentReader(AudioRoots.of([str(folder)]))

        def ours() -> dict[str, float]:
            embed = Embedder(LevelEncoder(), reader, 60, 1)
            opened = mock.Mock(side_effect=files.open_audio)
            with mock.patch.object(files, "open_audio", opened):
                found = with_peak(lambda: embed(segments))
            return found | {"times opened": float(opened.call_count)}

        def theirs() -> None:
            for segment in segments:
                start = round(segment.offset * RATE)
                sf.read(path, start=start, stop=start + round(segment.duration * RATE), dtype="float32")

        seconds = sum(segment.duration for segment in segments)
        return Case(amount=seconds / 3600, unit="hours of segments", ours=ours, baseline=theirs)

    make.__doc__ = "600 segments of an hour, decoded in no order."
    row(f"long recording, {suffix}", baseline="`soundfile.read` of each", group="further")(make)


for _suffix in FORMATS:
    _add_row(_suffix)
