"""Index files beside the shards, with which lhotse 2 takes any cut by its number: ``CutSet.from_shar(indexed=True)``.

Its format: little-endian 64-bit offsets of the items of a file, and the size of the file at the end. Compressed lines
cannot be indexed, so there are uncompressed copies of cuts and values. sharmill's own reader needs none of this.
"""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from sharmill.files.atomic import make_folder, remove_temp_files, require_writable, write_atomic
from sharmill.files.trust import require_trusted_owner
from sharmill.shar.fields import CUTS, sidecar_files
from sharmill.shar.index import changing_index, read_dataset, read_shards
from sharmill.shar.items import ItemTable
from sharmill.shar.json_lines import read_json_lines
from sharmill.shar.reading.shard_source import IndexedShardSource


def write_sidecars(dataset: str | Path, into: str | Path | None = None) -> None:
    """Write the index files of a finished dataset, and the uncompressed copies of its cuts.

    Args:
        dataset: the dataset directory.
        into: where to write, with the folders of the dataset; by default into the dataset, where the checker knows
            them. Nothing else writes them, so a dataset that gets another codec needs them anew.

    Raises:
        ConfigError: it is not a finished dataset, or a folder cannot be written to or is a link.
        DamagedShard: a file of it is damaged.

    Example:
        >>> write_sidecars("data/librispeech", into="data/librispeech-index")  # doctest: +SKIP
        >>> CutSet.from_shar(  # doctest: +SKIP
        ...     **indexed_shar("data/librispeech", ["target_codes"], into="data/librispeech-index"), indexed=True
        ... )
    """
    directory = Path(dataset)
    root = directory if into is None else Path(into)
    num_shards = read_dataset(directory).num_shards
    require_writable(root)
    with changing_index(root):
        for shard in read_shards(directory, num_shards):
            require_trusted_owner(root, {(root / file.file).parent for file in shard.fields.values()})
            for name in shard.files.values():
                _write_sidecars_of(name, directory, root)


def indexed_shar(
    dataset: str | Path,
    fields: Sequence[str] | None = None,
    *,
    codec: str | None = None,
    into: str | Path | None = None,
) -> dict[str, Any]:
    """Return the arguments ``fields`` and ``index_path`` of lhotse 2's ``CutSet.from_shar`` for a dataset.

    Args:
        dataset: the dataset directory.
        fields: as in ``open_shar``.
        codec: as in ``open_shar``.
        into: where the sidecars were written.
    """
    directory = Path(dataset)
    root = directory if into is None else Path(into)
    source = IndexedShardSource(directory, fields, codec)
    files: dict[str, list[str]] = {}
    indices: dict[str, list[str]] = {}
    for shard in range(source.num_shards):
        found = source.files(shard)
        for name, path in ((CUTS, found.cuts), *found.fields.items()):
            *plain, index = (
                str(root / sidecar) for sidecar in sidecar_files(str(Path(str(path)).relative_to(directory)))
            )
            files.setdefault(name, []).append(plain[0] if plain else str(path))
            indices.setdefault(name, []).append(index)
    return {"fields": files, "index_path": indices}


def _write_sidecars_of(name: str, directory: Path, root: Path) -> None:
    """Write the index of one file of a shard, and the copy of its lines."""
    *plain, index = sidecar_files(name)
    folder = (root / index).parent
    make_folder(folder)
    remove_temp_files(folder, {PurePosixPath(sidecar).name for sidecar in (*plain, index)})
    if name.endswith(".tar"):
        table = ItemTable(directory / name)
        for number in range(len(table)):
            table.pair(number)
        offsets = [*table.headers[::2], table.size]
    else:
        lines = read_json_lines(directory / name)
        for copy in plain:
            write_atomic(root / copy, b"".join(line + b"\n" for line in lines))
        offsets = [0, *accumulate(len(line) + 1 for line in lines)]
    write_atomic(root / index, np.array(offsets, "<u8").tobytes())
