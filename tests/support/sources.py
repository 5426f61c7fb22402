"""One corpus in the forms of all sources: each function writes it into a folder and returns the entry of ``sources``.

A corpus is a list of records of whole files, with plain names of speakers, below one audio root.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import shutil
import tarfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import soundfile as sf

from sharmill.sources import DescribedRecord, RawRecord, Source, UnreadableRecord, record_text
from support.project import voice, write_lines

Record = dict[str, Any]


def nemo(folder: Path, records: Sequence[Record], audio: Path) -> dict[str, Any]:
    return {"manifest": str(write_lines(folder / "m.json", records)), "audio_root": str(audio)}


def nemo_tarred(folder: Path, records: Sequence[Record], audio: Path) -> dict[str, Any]:
    """Two archives, each with a manifest of its own."""
    for number in (0, 1):
        part = records[number::2]
        named = [record | {"audio_filepath": Path(record["audio_filepath"]).name} for record in part]
        write_lines(folder / f"manifest_{number}.json", named)
        members = [
            (Path(record["audio_filepath"]).name, (audio / record["audio_filepath"]).read_bytes()) for record in part
        ]
        write_tar(folder / f"audio_{number}.tar", members)
    return {
        "type": "nemo_tarred",
        "manifest": str(folder / "manifest__OP_0..1_CL_.json"),
        "tars": str(folder / "audio__OP_0..1_CL_.tar"),
    }


def table(folder: Path, records: Sequence[Record], audio: Path) -> dict[str, Any]:
    with (folder / "table.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, ["audio_filepath", "duration", "speaker", "text"])
        writer.writeheader()
        writer.writerows(records)
    return {"type": "table", "table": str(folder / "table.csv"), "audio_root": str(audio)}


def folder_of_texts(folder: Path, records: Sequence[Record], audio: Path) -> dict[str, Any]:
    """Texts below a folder of their own; the speaker is the part of the name before the first dash."""
    for record in records:
        path = folder / "texts" / Path(record["audio_filepath"]).with_suffix(".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(record["text"], encoding="utf-8")
        copy = folder / "audio" / record["audio_filepath"]
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(audio / record["audio_filepath"], copy)
    return {
        "type": "folder",
        "audio_root": str(folder / "audio"),
        "text_root": str(folder / "texts"),
        "speaker": "{path[-1]:prefix}",
    }


def lhotse_cuts(folder: Path, records: Sequence[Record], audio: Path) -> dict[str, Any]:
    from lhotse import CutSet

    CutSet.from_manifests(*_lhotse_sets(records, audio)).to_file(folder / "cuts.jsonl.gz")
    return {"type": "lhotse", "cuts": str(folder / "cuts.jsonl.gz"), "audio_root": str(audio)}


def lhotse_sets(folder: Path, records: Sequence[Record], audio: Path) -> dict[str, Any]:
    paths = {"recordings": folder / "recordings.jsonl", "supervisions": folder / "supervisions.jsonl"}
    for manifest, path in zip(_lhotse_sets(records, audio), paths.values(), strict=True):
        manifest.to_file(path)
    return {"type": "lhotse", "audio_root": str(audio)} | {key: str(path) for key, path in paths.items()}


def kaldi(folder: Path, records: Sequence[Record], audio: Path) -> dict[str, Any]:
    paths = [str(audio / record["audio_filepath"]) for record in records]
    texts, speakers = ([record[key] for record in records] for key in ("text", "speaker"))
    for name, values in (("wav.scp", paths), ("text", texts), ("utt2spk", speakers)):
        rows = [f"utt{number:03d} {value}\n" for number, value in enumerate(values)]
        (folder / name).write_text("".join(rows), encoding="utf-8")
    return {"type": "kaldi", "data_dir": str(folder), "audio_root": str(audio)}


def webdataset(folder: Path, records: Sequence[Record], audio: Path) -> dict[str, Any]:
    for number, part in enumerate((records[: len(records) // 2], records[len(records) // 2 :])):
        members = []
        for record in part:
            path = audio / record["audio_filepath"]
            members.append((path.name, path.read_bytes()))
            members.append((f"{path.stem}.json", json.dumps({"speaker": record["speaker"]}).encode()))
            members.append((f"{path.stem}.txt", record["text"].encode()))
        write_tar(folder / f"speech-{number}.tar", members)
    return {"type": "webdataset", "tars": str(folder / "speech-{0..1}.tar")}


def wenet_raw(folder: Path, records: Sequence[Record], audio: Path) -> dict[str, Any]:
    lines = [
        {
            "key": Path(record["audio_filepath"]).stem,
            "wav": str(audio / record["audio_filepath"]),
            "txt": record["text"],
        }
        for record in records
    ]
    path = write_lines(folder / "data.list", lines)
    return {"type": "wenet", "data_list": str(path), "audio_root": str(audio), "speaker": "{key:prefix}"}


def wenet_shards(folder: Path, records: Sequence[Record], audio: Path) -> dict[str, Any]:
    members = []
    for record in records:
        path = audio / record["audio_filepath"]
        members += [(f"{path.stem}.txt", record["text"].encode()), (path.name, path.read_bytes())]
    write_tar(folder / "shard_0.tar", members)
    (folder / "shards.list").write_text(f"{folder / 'shard_0.tar'}\n")
    return {
        "type": "wenet", "data_list": str(folder / "shards.list"), "data_type": "shard", "audio_root": str(folder),
        "speaker": "{key:prefix}",
    }  # fmt: skip


def parquet(folder: Path, records: Sequence[Record], audio: Path) -> dict[str, Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "audio": {"bytes": (audio / record["audio_filepath"]).read_bytes(), "path": record["audio_filepath"]},
            "sentence": record["text"],
            "speaker": record["speaker"],
        }
        for record in records
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet", row_group_size=5)
    return {"type": "parquet", "parquet": str(folder / "train.parquet"), "columns": {"text": "sentence"}}


def lhotse_shar(folder: Path, records: Sequence[Record], audio: Path) -> dict[str, Any]:
    """As lhotse's own writer makes it; FLAC is decoded and encoded again by it."""
    from lhotse import CutSet

    cuts = CutSet.from_manifests(*_lhotse_sets(records, audio))
    (folder / "shar").mkdir()
    cuts.to_shar(folder / "shar", fields={"recording": "flac"}, shard_size=5, warn_unused_fields=False)
    return {"type": "lhotse_shar", "shar": str(folder / "shar")}


FORMS: dict[str, Callable[[Path, Sequence[Record], Path], dict[str, Any]]] = {
    function.__name__: function
    for function in (
        nemo, nemo_tarred, table, folder_of_texts, lhotse_cuts, lhotse_sets, kaldi, webdataset, wenet_raw, wenet_shards,
        parquet, lhotse_shar,
    )
}  # fmt: skip


def _lhotse_sets(records: Sequence[Record], audio: Path) -> tuple[Any, Any]:
    from lhotse import Recording, RecordingSet, SupervisionSegment, SupervisionSet

    recordings, supervisions = [], []
    for record in records:
        path = audio / record["audio_filepath"]
        found = Recording.from_file(path, recording_id=path.stem)
        said = SupervisionSegment(
            id=path.stem, recording_id=path.stem, start=0.0, duration=found.duration, text=record["text"],
            speaker=record["speaker"], language="en",
        )  # fmt: skip
        recordings.append(found)
        supervisions.append(said)
    return RecordingSet.from_recordings(recordings), SupervisionSet.from_segments(supervisions)


def whole_files(manifest: Path, audio: Path, count: int) -> list[Record]:
    """The first ``count`` records of each of three speakers of a manifest, with durations of the headers."""
    found: dict[str, list[Record]] = {}
    for line in manifest.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        speaker = record["speaker"].split("Speaker:")[1].split()[0]
        info = sf.info(audio / record["audio_filepath"])
        found.setdefault(speaker, []).append({
            "audio_filepath": record["audio_filepath"],
            "duration": info.frames / info.samplerate,
            "text": record["text"],
            "speaker": speaker,
        })  # fmt: skip
    return [record for speaker in sorted(found)[:3] for record in found[speaker][:count]]


# Ends of the names of compressed files.
PACKED = (".gz", ".bz2", ".xz", ".zst")


def pack(end: str, data: bytes) -> bytes:
    """Return data as a file whose name has this end has them."""
    if end == ".zst":
        import pyarrow as pa

        return bytes(pa.compress(data, "zstd", asbytes=True))
    return {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}[end](data)


def tar_bytes(members: Iterable[tuple[str, bytes | str]], format: int = tarfile.GNU_FORMAT, **headers: Any) -> bytes:
    """Return an archive of (name, content) pairs; ``headers`` are further attributes of each header.

    A text in place of a content is the target of a hard link.
    """
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=format) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            if isinstance(data, str):
                info.type, info.linkname, data = tarfile.LNKTYPE, data, b""
            info.size = len(data)
            for key, value in headers.items():
                setattr(info, key, value)
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def write_tar(path: Path, members: Iterable[tuple[str, bytes | str]], **options: Any) -> Path:
    """Write an archive, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar_bytes(members, **options))
    return path


def voice_bytes(seconds: float = 1.0, seed: int = 0, format: str = "FLAC", rate: int = 16000) -> bytes:
    """Return an audio file of a voice that no other seed has."""
    stream = io.BytesIO()
    sf.write(stream, voice(seconds, rate, pitch=150 + 10 * seed, seed=seed), rate, format=format)
    return stream.getvalue()


def read_raw(source: Source, size: int = 100) -> list[RawRecord]:
    """The raw records of pieces of at most ``size``; every piece has as many as it says.

    What finds a piece again goes through JSON, as in a plan.
    """
    pieces = list(source.pieces(size))
    rows = [list(source.read(json.loads(json.dumps(piece.params)))) for piece in pieces]
    assert [piece.num_records for piece in pieces] == [len(piece) for piece in rows]
    assert all(piece.num_records <= size for piece in pieces)
    return [row for piece in rows for row in piece]


def read(source: Source, size: int = 100) -> list[Any]:
    """Return the records as objects, and the records that cannot be read."""
    rows = read_raw(source, size)
    return [row if isinstance(row, UnreadableRecord) else json.loads(record_text(row)) for row in rows]


def contents(source: Source, folder: Path, size: int = 2) -> list[Any]:
    """Return the records in containers below a folder, with their bytes under "audio", or (reason, detail) instead."""
    found: list[Any] = []
    for raw in read_raw(source, size):
        if isinstance(raw, UnreadableRecord):
            found.append((raw.reason, raw.detail))
        else:
            assert isinstance(raw, DescribedRecord)
            place, data = raw.member, (folder / raw.member.container).read_bytes()
            found.append(json.loads(raw.record) | {"audio": data[place.start : place.start + place.size]})
    return found
