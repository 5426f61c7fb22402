"""Datasets for the reader: as many tiny shards as wanted, made in no time."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sharmill.shar.arrays import array_to_bytes
from sharmill.shar.cut_lines import write_cuts
from sharmill.shar.index import (
    CodecRecord,
    DatasetRecord,
    FieldFile,
    ShardRecord,
    write_dataset,
    write_shards,
)
from sharmill.shar.items import FieldWriter, Item
from sharmill.shar.layout import codes_field, published_field
from sharmill.shar.lhotse_json import array_json, recording_json, temporal_array_json

TARGET_CODES = codes_field("toy", "target_codes")
CONTEXT_CODES = codes_field("toy", "context_codes")
FRAME_SHIFT = 0.02


def cut_id(number: int) -> str:
    return f"cut-rec-{number}-0.00-0.40"


def make_dataset(directory: Path, counts: list[int], *, codes: bool = False) -> Path:
    """A dataset with ``counts[n]`` cuts in shard n, whose ids are those of consecutive numbers; no audio in it."""
    directory.mkdir(parents=True, exist_ok=True)
    fields = ["cuts", *([TARGET_CODES, CONTEXT_CODES] if codes else [])]
    for field in fields:
        (directory / published_field(field).path(0)).parent.mkdir(parents=True, exist_ok=True)
    first, records = 0, []
    for index, count in enumerate(counts):
        numbers = range(first, first + count)
        write_cuts(directory / published_field("cuts").path(index), map(_cut, numbers))
        for field in fields[1:]:
            with FieldWriter(directory / published_field(field).path(index)) as writer:
                for number in numbers:
                    writer.add(_codes(number, temporal=field == TARGET_CODES))
        files = {field: FieldFile(file=published_field(field).path(index), size=0, xxh3="") for field in fields}
        records.append(ShardRecord(index=index, count=count, target_seconds=0, context_seconds=0, fields=files))
        first += count
    write_shards(directory, records)
    codec = CodecRecord(
        name="toy", model="toy", checksum="", trained=False, sampling_rate=16000, samples_per_frame=320,
        num_codebooks=2, codebook_size=1024,
    )  # fmt: skip
    write_dataset(
        directory,
        DatasetRecord(
            format_version=1, name="tiny", fields=fields, num_shards=len(counts), num_cuts=sum(counts),
            target_seconds=0, context_seconds=0, audio_format="flac", sampling_rate=16000, limits={},
            codecs=[codec] if codes else [],
        ),
    )  # fmt: skip
    return directory


def _cut(number: int) -> dict:
    recording = recording_json(f"rec-{number}", 16000, 6400)
    recording["sources"] = [{"type": "file", "channels": [0], "source": f"{number}.flac"}]
    return {
        "id": cut_id(number),
        "start": 0.0,
        "duration": 0.4,
        "channel": 0,
        "supervisions": [
            {"id": f"sup-{number}", "recording_id": f"rec-{number}", "start": 0.0, "duration": 0.4, "channel": 0,
             "text": f"text {number}", "custom": {"number": number}}
        ],
        "recording": recording,
        "custom": {"context_audio_unaligned": True},
        "type": "MonoCut",
    }  # fmt: skip


def _codes(number: int, *, temporal: bool) -> Item:
    codes = np.full((2, 20), number % 1024, np.int16)
    metadata = temporal_array_json(codes.shape, FRAME_SHIFT) if temporal else array_json(codes.shape)
    return Item(cut_id(number), "npy", array_to_bytes(codes), metadata)


def numbers(cuts) -> list[int]:
    """The numbers of cuts."""
    return [cut.supervisions[0].custom["number"] for cut in cuts]
