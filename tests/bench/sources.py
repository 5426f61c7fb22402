"""Rows of planning by source, which is what a driver does before any work: the identity of the input, its pieces.

The audio of archives and tables is a few bytes each.
"""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

from bench.rows import Case, records, row, with_peak
from sharmill.sources import Source
from sharmill.sources.lhotse import LhotseSource
from sharmill.sources.lhotse_shar import LhotseSharSource
from sharmill.sources.nemo import NemoSource
from sharmill.sources.nemo_tarred import NemoTarredSource
from sharmill.sources.parquet import ParquetSource
from sharmill.sources.webdataset import WebDatasetSource

PER_SHARD = 1000
_SAID = "so many words as are in a sentence that is read aloud"


def nemo(folder: Path, count: int) -> Source:
    with (folder / "m.json").open("w") as stream:
        for number in range(count):
            stream.write(
                f'{{"audio_filepath":"{number % 999}/{number}.flac","duration":{2 + number % 97 / 10},'
                f'"speaker":"| Language:en Dataset:Bench Speaker:{number % 999} |","text":"{_SAID}"}}\n'
            )
    return NemoSource(manifest=str(folder / "m.json"), audio_root=str(folder))


def nemo_tarred(folder: Path, count: int) -> Source:
    """A manifest and an archive for each 10,000 records; planning does not look into the archives."""
    shards = max(1, count // 10_000)
    for shard in range(shards):
        with (folder / f"m_{shard}.json").open("w") as stream:
            for number in range(shard, count, shards):
                stream.write(
                    f'{{"audio_filepath":"{number}.flac","duration":{2 + number % 97 / 10},"text":"{_SAID}",'
                    f'"shard_id":{shard}}}\n'
                )
        with tarfile.open(folder / f"audio_{shard}.tar", "w") as tar:
            _add(tar, f"{shard}.flac", b"fLaC")
    last = shards - 1
    return NemoTarredSource(manifest=f"{folder}/m_{{0..{last}}}.json", tars=f"{folder}/audio_{{0..{last}}}.tar")


def lhotse(folder: Path, count: int, *, packed: bool = False) -> Source:
    path = folder / ("cuts.jsonl.gz" if packed else "cuts.jsonl")
    with gzip.open(path, "wt", 1) if packed else path.open("w") as stream:
        for number in range(count):
            stream.write(json.dumps(_cut(number)) + "\n")
    return LhotseSource(cuts=str(path), audio_root=str(folder))


def lhotse_gz(folder: Path, count: int) -> Source:
    return lhotse(folder, count, packed=True)


def lhotse_shar(folder: Path, count: int) -> Source:
    """Shards without an index, as lhotse's to_shar leaves them: their cuts have to be counted."""
    for shard, first in enumerate(range(0, count, PER_SHARD)):
        lines = (json.dumps(_cut(number)) + "\n" for number in range(first, min(count, first + PER_SHARD)))
        (folder / f"cuts.{shard:06d}.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode(), 6))
        with tarfile.open(folder / f"recording.{shard:06d}.tar", "w") as tar:
            _add(tar, f"{first}.flac", b"fLaC")
            _add(tar, f"{first}.json", json.dumps(_cut(first)["recording"]).encode())
    return LhotseSharSource(shar=str(folder))


def parquet(folder: Path, count: int) -> Source:
    import pyarrow as pa
    import pyarrow.parquet

    schema = pa.schema([("audio", pa.struct([("bytes", pa.binary()), ("path", pa.string())])), ("text", pa.string())])
    for file, first in enumerate(range(0, count, 100_000)):
        rows = range(first, min(count, first + 100_000))
        audio = [{"bytes": b"fLaC", "path": f"{number}.flac"} for number in rows]
        table = pa.table({"audio": audio, "text": [_SAID] * len(audio)}, schema=schema)
        pyarrow.parquet.write_table(table, folder / f"train-{file:05d}.parquet", row_group_size=PER_SHARD)
    return ParquetSource(parquet=f"{folder}/train-*.parquet")


def webdataset(folder: Path, count: int) -> Source:
    for shard, first in enumerate(range(0, count, 10_000)):
        with tarfile.open(folder / f"speech-{shard:05d}.tar", "w") as tar:
            for number in range(first, min(count, first + 10_000)):
                _add(tar, f"{number}.flac", b"fLaC")
                _add(tar, f"{number}.txt", _SAID.encode())
    return WebDatasetSource(tars=f"{folder}/speech-*.tar")


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def _cut(number: int) -> dict[str, object]:
    recording = {"id": str(number), "sources": [{"type": "file", "channels": [0], "source": f"{number}.flac"}],
                 "sampling_rate": 16000, "num_samples": 32000, "duration": 2.0, "channel_ids": [0]}  # fmt: skip
    said = {"id": f"s{number}", "recording_id": str(number), "start": 0.0, "duration": 2.0, "channel": 0,
            "text": _SAID, "speaker": str(number % 999), "language": "en"}  # fmt: skip
    return {"id": str(number), "start": 0.0, "duration": 2.0, "channel": 0, "supervisions": [said],
            "recording": recording, "type": "MonoCut"}  # fmt: skip


def lhotse_sets(folder: Path, count: int) -> Source:
    """Recordings and supervisions in gzip, the supervisions in another order than their recordings."""
    files = {name: folder / f"{name}.jsonl.gz" for name in ("recordings", "supervisions")}
    with gzip.open(files["recordings"], "wt", 1) as recordings, gzip.open(files["supervisions"], "wt", 1) as said:
        for number in range(count):
            recordings.write(json.dumps(_cut(number)["recording"]) + "\n")
            (supervision,) = _cut(number * 7919 % count)["supervisions"]  # type: ignore[misc]
            said.write(json.dumps(supervision) + "\n")
    return LhotseSource(**{name: str(path) for name, path in files.items()}, audio_root=str(folder))


def _add_row(form: Callable[[Path, int], Source]) -> None:
    def make(folder: Path, tiny: bool) -> Case:
        count = 200 if tiny else records(200_000)
        source = form(folder, count)

        def plan() -> None:
            source.identity()
            assert sum(piece.num_records for piece in source.pieces(2000)) == count

        return Case(amount=count, unit="records", by="wall", ours=lambda: with_peak(plan))

    name = form.__name__.replace("_", " ")
    make.__doc__ = f"Identity and pieces of {records(200_000):,} records."
    row(f"source {name}", group="scale", once=True)(make)


for _form in (nemo, nemo_tarred, lhotse, lhotse_gz, lhotse_sets, lhotse_shar, parquet, webdataset):
    _add_row(_form)
