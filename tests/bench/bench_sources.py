"""Prints time and peak memory of planning by source: ``python tests/bench/bench_sources.py [N] [SOURCE...]``.

N records (default 1,000,000) are made in the form of each source; the audio of archives and tables is a few bytes each.
Planning is what a driver does before any work: the identity of the input, and its pieces. Every figure comes from a
process of its own, since the peak of a process never goes down.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

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


FORMS: dict[str, Callable[[Path, int], Source]] = {
    form.__name__: form for form in (nemo, nemo_tarred, lhotse, lhotse_gz, lhotse_shar, parquet, webdataset)
}


def measure(source: Source) -> dict[str, float]:
    started = time.perf_counter(), time.process_time()
    source.identity()
    records = sum(piece.num_records for piece in source.pieces(2000))
    # Not getrusage: its ru_maxrss also counts what the parent held when it started this process.
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    return {
        "seconds": time.perf_counter() - started[0], "cpu": time.process_time() - started[1], "peak_mib": peak,
        "records": records,
    }  # fmt: skip


def main(count: int, forms: list[str]) -> None:
    for form in forms or list(FORMS):
        with tempfile.TemporaryDirectory() as name:
            source = FORMS[form](Path(name), count)
            size = sum(path.stat().st_size for path in Path(name).iterdir()) / 2**20
            pickled = Path(name) / "source.pickle"
            pickled.write_bytes(pickle.dumps(source))
            command = [sys.executable, __file__, "--measure", str(pickled)]
            found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            print(
                f"{form:12} {found['records']:>12,.0f} records, {size:7.0f} MiB: {found['seconds']:7.1f} s "
                f"({found['cpu']:.1f} s CPU), peak {found['peak_mib']:5.0f} MiB",
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(pickle.loads(Path(sys.argv[2]).read_bytes()))))
    else:
        main(int((sys.argv[1:] or ["1000000"])[0].replace(",", "")), sys.argv[2:])
