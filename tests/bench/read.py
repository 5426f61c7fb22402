"""Rows of the reader: the fields of a dataset as cuts, compared with ``CutSet.from_shar`` on the same shards."""

import atexit
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
from lhotse import CutSet
from support.project import make_bare_dataset

from bench.rows import Case, row
from bench.speech import RATE, clip
from sharmill.audio.encoding import encode
from sharmill.shar import open_shar
from sharmill.shar.arrays import array_to_bytes
from sharmill.shar.items import FieldWriter, Item
from sharmill.shar.json_lines import write_cuts
from sharmill.shar.manifests import array_json, recording_json, temporal_array_json
from sharmill.shar.rebuild import rebuild_index

FRAME_SHIFT, CODEBOOKS = 0.02, 8
AUDIO, CODES = ("target_audio", "context_audio"), ("target_codes", "context_codes")
FOLDERS = {"cuts": "cuts", **{name: name for name in AUDIO}, **{name: f"codes_x/{name}" for name in CODES}}
FROM_SHAR = "lhotse's `from_shar`"

Use = Callable[[Any], object]


def make_shards(directory: Path, num_shards: int, shard_size: int) -> int:
    """Write shards without an index for both readers, and return the number of cuts.

    Audio is FLAC of 3 to 9 s; codes have 8 codebooks.
    """
    rng = np.random.default_rng(0)
    durations = np.linspace(3, 9, 16)
    clips = [encode(clip(rng, seconds), RATE, "flac") for seconds in durations]
    lengths = [round(seconds * RATE) for seconds in durations]
    for index in range(num_shards):
        ids = [f"cut-rec-speaker-{index:03d}-utterance-{n:05d}-0.00-5.00" for n in range(shard_size)]
        paths = {name: directory / folder / f"{name}.{index:06d}" for name, folder in FOLDERS.items()}
        for path in paths.values():
            path.parent.mkdir(parents=True, exist_ok=True)
        write_cuts(Path(f"{paths['cuts']}.jsonl.gz"), map(_cut, ids, [lengths[n % 16] for n in range(shard_size)]))
        for name in (*AUDIO, *CODES):
            with FieldWriter(Path(f"{paths[name]}.tar")) as writer:
                for n, cut_id in enumerate(ids):
                    kind = (n if name.startswith("target") else n + 5) % 16
                    writer.add(_item(name, cut_id, clips[kind], lengths[kind], rng))
    return num_shards * shard_size


def _cut(cut_id: str, num_samples: int) -> dict[str, Any]:
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


def _item(name: str, cut_id: str, data: bytes, num_samples: int, rng: np.random.Generator) -> Item:
    if name in AUDIO:
        return Item(cut_id, "flac", data, recording_json(cut_id, RATE, num_samples))
    shape = (CODEBOOKS, -(-num_samples // round(RATE * FRAME_SHIFT)))
    metadata = temporal_array_json(shape, FRAME_SHIFT) if name == "target_codes" else array_json(shape)
    return Item(cut_id, "npy", array_to_bytes(rng.integers(0, 1024, shape, dtype=np.int16)), metadata)


def case(folder: Path, fields: tuple[str, ...], use: Use | None, shards: tuple[int, int], **options: Any) -> Case:
    """Return the case of reading all cuts once, from so many shards of so many cuts."""
    num_cuts = make_shards(folder, *shards)
    files = {name: sorted(map(str, (folder / path).iterdir())) for name, path in FOLDERS.items()}

    def read(cuts: Iterable[Any]) -> None:
        count = 0
        for found in cuts:
            count += 1
            if use is not None:
                use(found)
        assert count == num_cuts

    return Case(
        amount=num_cuts, unit="cuts", by="wall" if options else "processor",
        ours=lambda: read(open_shar(folder, fields, **options)),
        baseline=lambda: read(CutSet.from_shar(fields={name: files[name] for name in ("cuts", *fields)})),
    )  # fmt: skip


def load_audio(cut: Any) -> None:
    cut.target_audio.load_audio(), cut.context_audio.load_audio()


@row("read codes", baseline=FROM_SHAR, targets={"ratio": ">= 6"})
def codes(folder: Path, tiny: bool) -> Case:
    """Codes as arrays that are not loaded, in 4 shards of 1,000 cuts."""
    return case(folder, CODES, None, (2, 8) if tiny else (4, 1000))


@row("read codes, shards of 16", baseline=FROM_SHAR, targets={"ratio": ">= 5"})
def small_shards(folder: Path, tiny: bool) -> Case:
    """Codes as arrays that are not loaded, in 200 shards of 16 cuts."""
    return case(folder, CODES, None, (2, 8) if tiny else (200, 16))


@row("read audio, not decoded", baseline=FROM_SHAR, targets={"ratio": ">= 6"})
def audio(folder: Path, tiny: bool) -> Case:
    """Audio as recordings that are not decoded."""
    return case(folder, AUDIO, None, (2, 8) if tiny else (4, 1000))


@row("read audio, decoded, 2 threads", baseline=FROM_SHAR, targets={"ratio": ">= 2.3"})
def decoded_audio(folder: Path, tiny: bool) -> Case:
    """Audio decoded by two threads."""
    return case(folder, AUDIO, load_audio, (2, 8) if tiny else (4, 100), decode_threads=2)


@row("read first cut of 10,000 shards", targets={"wall": "<= 0.1"})
def first_cut(folder: Path, tiny: bool) -> Case:
    """The time to the first cut in shuffled order, with two cuts per shard."""
    dataset = make_bare_dataset(folder, [2] * (10 if tiny else 10_000))
    return Case(amount=1, unit="starts", by="wall", ours=lambda: next(iter(open_shar(dataset, shuffle=True))) and None)


_SERVE = """
import os, sys, time
from pathlib import Path
from support.stores import S3Store
with S3Store() as store:
    store.upload(Path(sys.argv[1]), "data")
    print(os.environ["AWS_ENDPOINT_URL"], flush=True)
    sys.stdin.read()
"""


def serve(folder: Path, tiny: bool) -> tuple[Callable[[], None], Callable[[], None], Callable[[], None]]:
    """Put a dataset into S3, and return its readings by sharmill from S3 and from disk, and by lhotse."""
    num_cuts = make_shards(folder / "data", *((2, 8) if tiny else (16, 250)))
    shutil.rmtree(folder / "data/codes_x")
    deque(rebuild_index(folder / "data"), maxlen=0)
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVE, folder / "data"], stdin=PIPE, stdout=PIPE, text=True,
        cwd=Path(__file__).parents[1],  # that has the stores
    )  # fmt: skip
    atexit.register(server.communicate)
    assert server.stdout is not None
    keys = {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "sharmill", "AWS_SECRET_ACCESS_KEY": "secret"}
    os.environ.update(keys, AWS_ENDPOINT_URL=server.stdout.readline().strip())
    files = {name: sorted((folder / "data" / FOLDERS[name]).iterdir()) for name in ("cuts", *AUDIO)}
    urls = {name: [f"s3://bucket/{path.relative_to(folder)}" for path in paths] for name, paths in files.items()}

    def read(cuts: Iterable[Any]) -> None:
        assert sum(1 for _ in cuts) == num_cuts

    def read_ours(place: str) -> None:
        read(open_shar(place, AUDIO, cache_dir=str(folder / "cache")))

    return (
        lambda: read_ours("s3://bucket/data"),
        lambda: read_ours(str(folder / "data")),
        lambda: read(CutSet.from_shar(fields=urls)),
    )


@row("read audio from S3", baseline="lhotse's `from_shar` of `s3://`", group="further")
def from_store(folder: Path, tiny: bool) -> Case:
    """Audio as recordings that are not decoded, in 16 shards of 250 cuts on a local moto server, with a cold cache."""
    ours, _, theirs = serve(folder, tiny)
    num_cuts, empty = 16 if tiny else 4000, folder / "cache"
    return Case(
        amount=num_cuts, unit="cuts", by="wall", ours=ours, baseline=theirs,
        before=lambda: shutil.rmtree(empty, ignore_errors=True),
    )  # fmt: skip


@row("read audio from S3, copied", baseline="the disk", group="further")
def from_copies(folder: Path, tiny: bool) -> Case:
    """The same with all shards in the cache."""
    ours, disk, _ = serve(folder, tiny)
    return Case(amount=16 if tiny else 4000, unit="cuts", by="wall", ours=ours, baseline=disk)


@row("read audio from S3, not copied", baseline="the disk", group="further")
def from_empty(folder: Path, tiny: bool) -> Case:
    """The same with an empty cache."""
    ours, disk, _ = serve(folder, tiny)
    return Case(
        amount=16 if tiny else 4000, unit="cuts", by="wall", ours=ours, baseline=disk,
        before=lambda: shutil.rmtree(folder / "cache", ignore_errors=True),
    )  # fmt: skip
