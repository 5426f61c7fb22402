"""Speed of the stages on a synthetic corpus, one rank, as ratios against the naive way in the same run.

    python tests/bench/bench_pipeline.py [--voices 4]

- match: the batched resemblyzer encoder against `embed_utterance` in a loop.
- write: byte copy and one encode per segment against decoding and encoding every record.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from sharmill.audio.encoding import encode
from sharmill.audio.resample import resample
from sharmill.audio.roots import AudioRoots
from sharmill.audio.segments import SegmentReader
from sharmill.config import WriteConfig
from sharmill.demo.corpus import make_corpus
from sharmill.errors import RejectRecord
from sharmill.manifest import Segment, iterate_lines
from sharmill.models import load_codec, load_speaker_encoder, make_deterministic
from sharmill.models.protocols import pad, padded_batches
from sharmill.prepare.check import parse_record
from sharmill.write.encoder import SegmentEncoder


def good_segments(manifest: Path) -> list[Segment]:
    """The segments of the corpus's records that are not bad on purpose."""
    segments = []
    for line in iterate_lines(manifest):
        try:
            record = parse_record(line)
        except RejectRecord:
            continue
        if "demo_defect" in record:
            continue
        offset = record.get("offset")
        segments.append(Segment(0, record["audio_filepath"], offset or 0.0, record["duration"], offset is None))
    return segments


def timed(function, *arguments) -> float:
    started = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - started


def embed_batched(encoder, waves, batch_seconds) -> None:
    for batch in padded_batches([len(wave) / 16000 for wave in waves], batch_seconds):
        encoder.embed(*pad([waves[index] for index in batch]))


def embed_one_by_one(waves) -> None:
    from resemblyzer import VoiceEncoder

    encoder = VoiceEncoder("cpu", verbose=False)
    for wave in waves:
        encoder.embed_utterance(wave)


def write_all(config, reader, segments) -> None:
    encode = SegmentEncoder(config, reader, segments)
    for segment in segments:
        encode(segment)


def encode_every_time(reader, segments) -> None:
    for segment in segments:
        encode(*reader.read(segment), "flac")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--voices", type=int, default=4)
    voices = parser.parse_args().voices
    make_deterministic("cpu")
    with tempfile.TemporaryDirectory() as folder:
        corpus = make_corpus(Path(folder) / "corpus", num_voices=voices)
        segments = good_segments(corpus.manifest)
        reader = SegmentReader(AudioRoots.of([corpus.audio_root]))
        waves = [resample(*reader.read(segment), 16000) for segment in segments]
        hours = sum(len(wave) for wave in waves) / 16000 / 3600
        print(f"{len(segments)} utterances, {hours * 60:.1f} minutes, one rank of one thread")

        encoder = load_speaker_encoder("resemblyzer")
        embed_batched(encoder, waves[:2], 60)
        ours, loop = timed(embed_batched, encoder, waves, 60), timed(embed_one_by_one, waves)
        print(f"embed   {hours / ours * 3600:8.0f} h/h   loop over embed_utterance {loop / ours:.2f} times as long")

        # As in a dataset: every utterance is a target once, and a fifth of them serve as the contexts of all.
        uses = segments + [segments[index - index % 5] for index in range(len(segments))]
        ours, naive = timed(write_all, WriteConfig(), reader, uses), timed(encode_every_time, reader, uses)
        print(f"write   {hours / ours * 3600:8.0f} h/h   encoding every record    {naive / ours:.2f} times as long")

        codec = load_codec("builtin")
        seconds = timed(lambda: [codec.encode(*pad([wave])) for wave in waves])
        print(f"encode  {hours / seconds * 3600:8.0f} h/h   (built-in codec, one utterance at a time)")


if __name__ == "__main__":
    main()
