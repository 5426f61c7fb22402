"""Prints the reader's figures beside lhotse's on the same shards: ``python tests/bench/bench_reader.py [ROUNDS]``.

Cuts per second, the time to the first cut of 10,000 shards, and the memory over ten epochs. The shards are made anew
in a temporary folder: speech-like audio of 3 to 9 s as FLAC, and codes of 8 codebooks. Each round measures one after
the other, and ratios are medians of the rounds': machines are seldom as fast one minute later.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from lhotse import CutSet
from support.reader import make_dataset

from sharmill.audio.encoding import encode
from sharmill.shar import open_shar
from sharmill.shar.arrays import array_to_bytes
from sharmill.shar.cut_lines import write_cuts
from sharmill.shar.items import FieldWriter, Item
from sharmill.shar.lhotse_json import array_json, recording_json, temporal_array_json

RATE, FRAME_SHIFT, CODEBOOKS = 16000, 0.02, 8
SHARDS = 4
AUDIO, CODES = ("target_audio", "context_audio"), ("target_codes", "context_codes")
FOLDERS = {"cuts": "cuts", **{name: name for name in AUDIO}, **{name: f"codes_x/{name}" for name in CODES}}


def make_shards(directory: Path, shard_size: int) -> None:
    """Shards in the layout of a dataset, without index: both readers get lists of files or the folder."""
    rng = np.random.default_rng(0)
    clips = [encode(clip(rng, seconds), RATE, "flac") for seconds in np.linspace(3, 9, 16)]
    lengths = [round(seconds * RATE) for seconds in np.linspace(3, 9, 16)]
    for index in range(SHARDS):
        ids = [f"cut-rec-speaker-{index:03d}-utterance-{n:05d}-0.00-5.00" for n in range(shard_size)]
        paths = {name: directory / folder / f"{name}.{index:06d}" for name, folder in FOLDERS.items()}
        for path in paths.values():
            path.parent.mkdir(parents=True, exist_ok=True)
        durations = [lengths[n % 16] for n in range(shard_size)]
        write_cuts(Path(f"{paths['cuts']}.jsonl.gz"), map(cut, ids, durations))
        for name in (*AUDIO, *CODES):
            with FieldWriter(Path(f"{paths[name]}.tar")) as writer:
                for n, cut_id in enumerate(ids):
                    kind = (n if name.startswith("target") else n + 5) % 16
                    writer.add(item(name, cut_id, clips[kind], lengths[kind], rng))


def clip(rng: np.random.Generator, seconds: float) -> np.ndarray:
    """Noise with the loudness and the spectrum of speech, so that FLAC takes as long as on speech."""
    noise = np.convolve(rng.normal(size=round(seconds * RATE)), np.hanning(24) / 12, "same")
    syllables = np.abs(np.sin(np.arange(len(noise)) * 2 * np.pi * 3 / RATE))
    return (0.1 * noise * syllables).astype(np.float32)


def cut(cut_id: str, num_samples: int) -> dict[str, Any]:
    duration = num_samples / RATE
    custom = {
        "audio_filepath": f"speaker/{cut_id}.flac", "offset": 0.0, "duration": duration, "text": "go do you hear",
        "speaker": "| Language:en Dataset:Bench Speaker:1 |", "language": "en", "context_recording_id": "rec-other",
        "context_audio_offset": 0.0, "context_audio_duration": 5.0, "context_speaker_similarity": 0.8,
    }  # fmt: skip
    supervision = {
        "id": f"sup-{cut_id}", "recording_id": "rec", "start": 0.0, "duration": duration, "channel": 0,
        "text": custom["text"], "language": "en", "speaker": custom["speaker"], "custom": custom,
    }  # fmt: skip
    recording = recording_json("rec", RATE, num_samples)
    recording["sources"] = [{"type": "file", "channels": [0], "source": custom["audio_filepath"]}]
    return {
        "id": cut_id, "start": 0.0, "duration": duration, "channel": 0, "supervisions": [supervision],
        "recording": recording, "type": "MonoCut",
    }  # fmt: skip


def item(name: str, cut_id: str, data: bytes, num_samples: int, rng: np.random.Generator) -> Item:
    if name in AUDIO:
        return Item(cut_id, "flac", data, recording_json(cut_id, RATE, num_samples))
    shape = (CODEBOOKS, -(-num_samples // round(RATE * FRAME_SHIFT)))
    metadata = temporal_array_json(shape, FRAME_SHIFT) if name == "target_codes" else array_json(shape)
    return Item(cut_id, "npy", array_to_bytes(rng.integers(0, 1024, shape, dtype=np.int16)), metadata)


def rate(cuts: Iterable[Any], use: Callable[[Any], Any] | None) -> float:
    """Cuts per second."""
    count, start = 0, time.perf_counter()
    for found in cuts:
        if use is not None:
            use(found)
        count += 1
    return count / (time.perf_counter() - start)


def compare(directory: Path, rounds: int) -> None:
    """One line per kind of reading."""
    files = {name: sorted(map(str, (directory / folder).iterdir())) for name, folder in FOLDERS.items()}

    def load_codes(cut: Any) -> None:
        cut.target_codes.load(), cut.context_codes.load()

    def load_audio(cut: Any) -> None:
        cut.target_audio.load_audio(), cut.context_audio.load_audio()

    kinds: list[tuple[str, tuple[str, ...], Any, int]] = [
        ("codes only", CODES, None, 0),
        ("codes only, loaded", CODES, load_codes, 0),
        ("audio, not decoded", AUDIO, None, 0),
        ("audio, decoded, 2 threads", AUDIO, load_audio, 2),
        ("audio, decoded, no threads", AUDIO, load_audio, 0),
    ]
    print(f"{'':28} {'lhotse':>10} {'sharmill':>10} {'ratio':>7}   cuts per second, median of {rounds}")
    for label, fields, use, threads in kinds:
        pairs = []
        for _ in range(rounds):
            theirs = rate(CutSet.from_shar(fields={name: files[name] for name in ("cuts", *fields)}), use)
            pairs.append((theirs, rate(open_shar(directory, fields, decode_threads=threads), use)))
        theirs, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(ours / theirs for theirs, ours in pairs)
        print(f"{label:28} {theirs:10,.0f} {ours:10,.0f} {ratio:7.2f}", flush=True)


def first_cut(directory: Path, num_shards: int) -> None:
    """The time until the first cut, in order and shuffled."""
    dataset = make_dataset(directory, [2] * num_shards)
    for shuffle in (False, True):
        start = time.perf_counter()
        next(iter(open_shar(dataset, shuffle=shuffle)))
        print(f"first cut of {num_shards:,} shards, shuffle={shuffle}: {time.perf_counter() - start:.3f} s", flush=True)


def memory(directory: Path, num_cuts: int, epochs: int) -> None:
    """The resident memory after each epoch, reading all fields shuffled and decoding ahead."""
    cuts = iter(open_shar(directory, shuffle=True, mix_shards=2, infinite=True, decode_threads=2))
    found = []
    for _ in range(epochs):
        for _ in islice(cuts, num_cuts):
            pass
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
    print(f"resident memory after each of {epochs} epochs, MiB: {' '.join(f'{value:.0f}' for value in found)}")


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as folder:
        make_shards(Path(folder) / "shards", 400)
        compare(Path(folder) / "shards", rounds)
        first_cut(Path(folder) / "many", 10_000)
        make_shards(Path(folder) / "few", 100)
        memory(Path(folder) / "few", SHARDS * 100, 10)


if __name__ == "__main__":
    main()
