"""Fields that no stage of sharmill makes, added to a finished dataset: a score for each cut, which may be missing, and
an array. Both follow from the id of the cut.
"""

import zlib
from pathlib import Path

import numpy as np

from sharmill.files.checksums import checksum
from sharmill.shar.arrays import array_to_bytes
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.fields import Field
from sharmill.shar.index import FieldFile
from sharmill.shar.items import FieldWriter, Item
from sharmill.shar.json_lines import read_cut_ids, write_values
from sharmill.shar.manifests import array_json

SCORE = Field(
    name="score", file="score/score.{:06d}.jsonl.gz", kind="value", attribute="score", optional=True,
    limits=(0.0, 1.0), by="scorer",
)  # fmt: skip
VOICE = Field(
    name="voices/voice", file="voices/voice/array.{:06d}.tar", kind="array", attribute="voice", limits=(-1.0, 1.0),
    by="voices",
)  # fmt: skip


def score_of(cut_id: str) -> float | None:
    number = zlib.crc32(cut_id.encode())
    return number % 1000 / 1000 if number % 3 else None


def voice_of(cut_id: str) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(cut_id.encode())).uniform(-1, 1, 4).astype(np.float32)


def write_shard(directory: Path, shard: int, ids: list[str], scores: list, voices: list[np.ndarray | None]) -> dict:
    """Write both files of a shard and return them as the index lists them."""
    files = {field.name: directory / field.path(shard) for field in (SCORE, VOICE)}
    for file in files.values():
        file.parent.mkdir(parents=True, exist_ok=True)
    write_values(files[SCORE.name], SCORE.attribute, zip(ids, scores, strict=True))
    with FieldWriter(files[VOICE.name]) as writer:
        for cut_id, array in zip(ids, voices, strict=True):
            data, metadata = (None, None) if array is None else (array_to_bytes(array), array_json(array.shape))
            writer.add(Item(cut_id, "npy", data, metadata))
    return {
        name: FieldFile(file.relative_to(directory).as_posix(), file.stat().st_size, checksum(file))
        for name, file in files.items()
    }


def add_fields(directory: Path) -> Path:
    """Add both fields to a finished dataset."""
    dataset = ShardedDataset(directory)
    files = []
    for shard in dataset.shards():
        ids = list(read_cut_ids(directory / shard.fields["cuts"].file))
        files.append(write_shard(directory, shard.index, ids, [*map(score_of, ids)], [*map(voice_of, ids)]))
    dataset.add_fields([SCORE, VOICE], files)
    return directory


def require_fields(directory: Path) -> int:
    """Assert that every cut has its values; return how many cuts there are."""
    from sharmill.shar import open_shar

    cuts = list(open_shar(directory, ["score", "voice"]))
    for cut in cuts:
        assert (cut.custom or {}).get("score") == score_of(cut.id)
        np.testing.assert_array_equal(cut.load_voice(), voice_of(cut.id))
    return len(cuts)
