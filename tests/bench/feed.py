"""Rows of the feeders of a device: how busy they keep a simulated device, and what a second of audio costs.

The simulated device is a model that sleeps for a share of the time in which all cores could decode the same audio in a
plain loop. A thread that waits for a GPU also holds no lock and takes no processor time.
"""

import math
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import soundfile as sf
import soxr
import torch

from bench.rows import Case, Way, row
from bench.speech import RATE, write_corpus
from sharmill.audio.roots import AudioRoots
from sharmill.audio.segments import SegmentReader
from sharmill.encode.config import EncodeConfig
from sharmill.encode.encoder import EncodeProcessor
from sharmill.encode.segments import SEGMENT
from sharmill.engine.feeders import Feeders
from sharmill.engine.unit import make_unit
from sharmill.manifest import Segment
from sharmill.match.embed import Embedder
from sharmill.shar.index import CodecRecord
from sharmill.shar.places import make_place

SOURCE_RATE = 22050
# The default length of a batch of match.
MATCH_SECONDS = 60.0
UNITS = 4


# A function that does the work, and may return the processor time of its feeders.
Work = Callable[[], float | None]


def decode_plainly(paths: Sequence[Path]) -> None:
    """Decode and resample files as a plain script does."""
    for path in paths:
        samples, rate = sf.read(path, dtype="float32", always_2d=True)
        samples = samples[:, 0]
        if rate != RATE:
            soxr.resample(samples, rate, RATE, quality="HQ")


def cores() -> int:
    return len(os.sched_getaffinity(0))


class PlainLoops:
    """Plain loops, one process per core."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._pool = ProcessPoolExecutor(cores(), multiprocessing.get_context("spawn"))
        self._parts = [list(paths[number :: cores()]) for number in range(cores())]
        self.seconds()  # lets the processes import their modules

    def seconds(self) -> float:
        """Return the seconds that the processes take for all files."""
        started = time.monotonic()
        list(self._pool.map(decode_plainly, self._parts))
        return time.monotonic() - started


class PacedEncoder:
    """Simulated speaker encoder that takes time in proportion to the audio, but no processor time."""

    sampling_rate = RATE
    dim = 2

    def __init__(self) -> None:
        self.pace = 1.0
        self.slept = 0.0
        self.began = 0.0
        # Created once, because results of a device cost the processor nothing.
        self._given = torch.ones(1)

    def embed(self, audio: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
        seconds = audio.numel() / RATE / self.pace
        self.began = self.began or time.monotonic()
        self.slept += seconds
        time.sleep(seconds)
        return self._given.expand(audio.shape[0], self.dim)


class PacedCodec(PacedEncoder):
    """Simulated codec, like ``PacedEncoder``."""

    samples_per_frame = 1280
    num_codebooks = 2
    codebook_size = 64
    checksum = ""
    trained = False
    equal_lengths_only = False
    _codes = torch.zeros(1, dtype=torch.int64)

    def encode(self, audio: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
        self.embed(audio, num_samples)
        frames = audio.shape[1] // self.samples_per_frame
        return self._codes.expand(audio.shape[0], self.num_codebooks, frames)


class Corpus:
    """Some minutes of recordings, plain loops over them, and a device to keep busy."""

    def __init__(self, folder: Path, tiny: bool, rate: int) -> None:
        self.records = write_corpus(folder, 8 if tiny else 200, rate=rate)
        self.seconds = sum(one["duration"] for one in self.records)
        self.paths = [folder / "audio" / one["audio_filepath"] for one in self.records]
        self._plain = PlainLoops(self.paths)

    def case(self, device: PacedEncoder, share: float, ways: Sequence[tuple[Feeders[Any, Any], Work]]) -> Case:
        """Return the case of two ways, with a device at ``share`` of the speed of the plain loops."""

        def pace() -> None:
            device.pace = share * self.seconds / self._plain.seconds()

        def busy(feeders: Feeders[Any, Any], work: Work) -> Way:
            def run() -> dict[str, float]:
                device.slept, device.began, used = 0.0, 0.0, own_seconds()
                feeders.take_cpu_seconds()
                feeder_seconds = work() or feeders.take_cpu_seconds()
                spent, used = time.monotonic() - device.began, own_seconds() - used
                return {
                    "busy": device.slept / spent,
                    "ms of the rank": 1000 * used / self.seconds / UNITS,
                    "ms of feeders": 1000 * feeder_seconds / self.seconds / UNITS,
                }

            return run

        ours, theirs = (busy(*way) for way in ways)
        amount = self.seconds * UNITS / 3600
        return Case(amount=amount, unit="hours of audio", ours=ours, baseline=theirs, by="wall", before=pace)


def own_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def fed_match(folder: Path, tiny: bool, share: float) -> Case:
    """Run the embedder alone, unit after unit."""
    corpus, device = Corpus(folder, tiny, SOURCE_RATE), PacedEncoder()
    reader, segments = segments_of(folder, corpus.records)
    embedders = [Embedder(device, reader, MATCH_SECONDS, number) for number in (cores(), 0)]

    def work(embed: Embedder) -> None:
        units = [segments] * UNITS
        begun = [embed.begin(units.pop())]

        def begin_next() -> None:
            if units and not begun:
                begun.append(embed.begin(units.pop()))

        while begun:
            embed.finish(begun.pop(), when_all_begun=begin_next)
            begin_next()

    return corpus.case(device, share, [(embed.feeders, partial(work, embed)) for embed in embedders])


def segments_of(folder: Path, records: Sequence[dict[str, Any]]) -> tuple[SegmentReader, list[Segment]]:
    return SegmentReader(AudioRoots.of([folder / "audio"])), [
        Segment(
            root=0,
            audio_filepath=one["audio_filepath"],
            offset=0.0,
            duration=one["duration"],
            whole_file=True,
            channel=0,
        )
        for one in records
    ]


def fed_encode(folder: Path, tiny: bool, share: float) -> Case:
    """Encode one unit, with batches as on a GPU."""
    corpus, device = Corpus(folder, tiny, RATE), PacedCodec()
    stored, places, offset = folder / "stored.tar", [], 0
    with stored.open("wb") as stream:
        for path, record in zip(corpus.paths, corpus.records, strict=True):
            data = path.read_bytes()
            places.append((make_place(data, offset, round(record["duration"] * RATE), RATE), 0, 0))
            offset += stream.write(data)
    segments = np.array(places, SEGMENT)
    params = {"start": 0, "stop": len(segments)}
    unit = make_unit(0, cost=corpus.seconds, size=len(segments), params=params)
    (folder / "parts").mkdir()

    def path(name: str) -> Path:
        (folder / name).unlink(missing_ok=True)
        return folder / name

    staging = SimpleNamespace(path=path)

    def encode(processor: EncodeProcessor) -> float:
        feeder_seconds = 0.0
        with as_on_gpu():
            for left in range(UNITS, 0, -1):
                processor.expect(unit if left > 1 else None)
                output = processor.process(unit, staging, lambda cost: None)  # type: ignore[arg-type]
                feeder_seconds += output.stats["feeder_seconds"]
        return feeder_seconds

    record = CodecRecord(name="paced", model="paced", checksum="", trained=False, sampling_rate=RATE,
                         samples_per_frame=1280, num_codebooks=2, codebook_size=64, precision="fp32")  # fmt: skip
    with as_on_gpu():
        processors = [
            EncodeProcessor(EncodeConfig(), record, device, segments, [[stored]], "cpu", "", number)
            for number in (cores(), 0)
        ]  # fmt: skip
    return corpus.case(device, share, [(one.feeders, partial(encode, one)) for one in processors])


@contextmanager
def as_on_gpu() -> Iterator[None]:
    with ExitStack() as stack:
        for module in ("encode.encoder", "models.batches"):
            stack.enter_context(mock.patch(f"sharmill.{module}.fit_batch_seconds", lambda seconds, device: seconds))
        yield


UNFED = "the same without feeders"


@row("feed match", baseline=UNFED, targets={"busy": ">= 0.9", "ms of the rank": "<= 0.04"})
def feed_match(folder: Path, tiny: bool) -> Case:
    """The embedder with a feeder per core, and a simulated device at 0.6 of the speed of plain loops on all cores."""
    return fed_match(folder, tiny, 0.6)


@row("feed encode", baseline=UNFED, targets={"busy": ">= 0.9", "ms of the rank": "<= 0.04"})
def feed_encode(folder: Path, tiny: bool) -> Case:
    """A unit of encode with a feeder per core, 16 kHz FLAC, and a device as in `feed match`."""
    return fed_encode(folder, tiny, 0.6)


def add_row(name: str, fed: Callable[[Path, bool, float], Case], share: float) -> None:
    """Add a row like the previous ones, with another speed of the device."""

    def make(folder: Path, tiny: bool) -> Case:
        return fed(folder, tiny, share)

    make.__doc__ = f"The same with {share} of that speed."
    row(f"{name} {share}", baseline=UNFED, group="further")(make)


for share in (0.5, 0.8):
    add_row("feed match", fed_match, share)
    add_row("feed encode", fed_encode, share)


def decoding(folder: Path, tiny: bool, **options: Any) -> Case:
    """A rank without feeders, for a speaker encoder that takes no time."""
    records = write_corpus(folder, 8 if tiny else 150, **options)
    reader, segments = segments_of(folder, records)
    device = PacedEncoder()
    device.pace = math.inf
    embed = Embedder(device, reader, MATCH_SECONDS)
    paths = [folder / "audio" / one["audio_filepath"] for one in records]
    seconds = sum(one["duration"] for one in records)
    return Case(
        amount=seconds, unit="seconds of audio", ours=lambda: embed(segments) and None,
        baseline=lambda: decode_plainly(paths),
    )  # fmt: skip


PLAIN = "`soundfile.read` and soxr HQ, without checksums and measures of the sound"


@row("decode", baseline=PLAIN, inverse=True, targets={"ratio": "<= 1.5"})
def decode_flac(folder: Path, tiny: bool) -> Case:
    """Decoding of 22.05 kHz FLAC for a speaker encoder, with checksums and measures of the sound."""
    return decoding(folder, tiny, rate=SOURCE_RATE)


@row("decode 16 kHz", baseline=PLAIN, inverse=True, group="further")
def decode_flac_16(folder: Path, tiny: bool) -> Case:
    """The same for 16 kHz FLAC, which is not resampled."""
    return decoding(folder, tiny, rate=RATE)


@row("decode WAV", baseline=PLAIN, inverse=True, group="further")
def decode_wav(folder: Path, tiny: bool) -> Case:
    """The same for 44.1 kHz stereo WAV."""
    return decoding(folder, tiny, rate=44100, suffix="wav", channels=2)


@row("decode MP3", baseline=PLAIN, inverse=True, group="further")
def decode_mp3(folder: Path, tiny: bool) -> Case:
    """The same for 44.1 kHz MP3."""
    return decoding(folder, tiny, rate=44100, suffix="mp3")
