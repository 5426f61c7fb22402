"""A recording of hours with thousands of segments, through match and write: files opened, seconds, memory.

    PYTHONPATH=src:tests python tests/bench/bench_long_recording.py [HOURS [SEGMENTS]]

Each line is measured in a process of its own. Memory is the peak above what the imports and an idle encoder take.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import soundfile as sf
from support.audio import speech_like

from sharmill.audio import files
from sharmill.audio.roots import AudioRoots
from sharmill.audio.segments import SegmentReader
from sharmill.config import WriteConfig
from sharmill.manifest import Segment

RATE = 16000
FORMATS = {"wav": ("WAV", "PCM_16"), "flac": ("FLAC", "PCM_16"), "mp3": ("MP3", "MPEG_LAYER_III")}


def make_recording(path: Path, format: str, hours: float) -> None:
    container, subtype = FORMATS[format]
    minute = speech_like(60 * RATE, RATE)
    with sf.SoundFile(path, "w", RATE, 1, subtype, format=container) as sound:
        for number in range(round(hours * 60)):
            sound.write(np.roll(minute, 1000 * number))


def make_segments(name: str, hours: float, number: int) -> list[Segment]:
    """Segments all over a recording, some of them overlapping, in no order."""
    rng = np.random.default_rng(1)
    offsets = rng.uniform(0, hours * 3600 - 21, number)
    durations = rng.uniform(2, 2 * 0.9 * hours * 3600 / number - 2, number).clip(2, 20)
    return [
        Segment(0, name, round(float(o), 2), round(float(d), 2), False) for o, d in zip(offsets, durations, strict=True)
    ]


class LevelEncoder:
    """An encoder that costs nothing: only decoding is measured."""

    sampling_rate = 16000
    embedding_size = 4
    checksum = "level"

    def embed(self, audio, num_samples):
        import torch

        rows = [row[:length] for row, length in zip(audio, num_samples, strict=True)]
        levels = [[float(part.abs().mean()) for part in row.tensor_split(4)] for row in rows]
        return torch.nn.functional.normalize(torch.tensor(levels), dim=1)


def measure(stage: str, path: Path, hours: float, number: int) -> str:
    from sharmill.match.embed import Embedder
    from sharmill.write.encoder import SegmentEncoder

    segments = make_segments(path.name, hours, number)
    reader = SegmentReader(AudioRoots.of([str(path.parent)]))
    embed = Embedder(LevelEncoder(), reader, 60, 2)
    warm = [Segment(0, path.name, 0.0, 2.0, False)]
    embed(warm)
    SegmentEncoder(WriteConfig(), reader, warm)(warm[0])
    opened = []
    regular = files.open_audio
    files.open_audio = lambda path: opened.append(path) or regular(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    if stage == "match":
        failed = sum(isinstance(outcome, Exception) for outcome in embed(segments))
    else:
        encode, failed = SegmentEncoder(WriteConfig(), reader, segments), 0
        for segment in segments:
            encode(segment)
    seconds = time.perf_counter() - start
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    audio = sum(segment.duration for segment in segments) / 3600
    return (
        f"{path.suffix[1:]:5} {stage:6} {hours:g} h, {number} segments ({audio:.2f} h): opened {len(opened)} times, "
        f"{seconds:6.1f} s, {memory:5.0f} MiB above, {failed} failed"
    )


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        print(measure(sys.argv[2], Path(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])))
        return
    hours, number = (*map(float, sys.argv[1:]), *(3.0, 2000.0)[len(sys.argv) - 1 :])
    with tempfile.TemporaryDirectory() as folder:
        for format in FORMATS:
            path = Path(folder) / f"a.{format}"
            make_recording(path, format, hours)
            for stage in ("match", "write"):
                subprocess.run(
                    [sys.executable, __file__, "--measure", stage, str(path), str(hours), str(int(number))], check=True
                )
            path.unlink()


if __name__ == "__main__":
    main()
