"""Index files (sidecars) beside shards, with which lhotse 2 reads any cut by number:
``CutSet.from_shar(indexed=True)``.

An index file contains the offsets of a file's items and then the file's size, all as little-endian 64-bit integers.
Compressed lines cannot be indexed, so files of cuts and of values get uncompressed copies. sharmill's own reader needs
sidecars only for ``shuffle="global"``.
"""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from sharmill.files.atomic import make_folder, remove, remove_temp_files, require_writable, write_atomic
from sharmill.files.disk import stopping_errors
from sharmill.files.trust import require_trusted_owner
from sharmill.shar.fields import CUTS, INDEX_PACK_FILE, sidecar_files
from sharmill.shar.index import ShardRecord, changing_index, read_dataset, read_shards
from sharmill.shar.items import ItemTable
from sharmill.shar.json_lines import read_json_lines
from sharmill.shar.reading.shard_source import IndexedShardSource


def write_sidecars(dataset: str | Path, into: str | Path | None = None) -> None:
    """Write the index files of a finished dataset, and uncompressed copies of its cuts and values.

    If the installed lhotse supports index packs, all index files are also combined in ``dataset.idxpack``, with one
    collection per field. A collection's role and source are the name of the field, and its kind is ``json-lines`` or
    ``tar-members``. The paths in a pack are absolute, because lhotse would resolve relative paths against the working
    directory of the reader. A dataset that was moved therefore needs a new pack.

    Args:
        dataset: the dataset directory.
        into: the folder to write them to, in the same subfolders as in the dataset; by default the dataset directory,
            where the checker recognizes them. No other command updates them, so write them again after adding a codec
            or shards.

    Raises:
        ConfigError: the dataset is not finished, or a folder is not writable or is a link.
        DamagedShard: a file of the dataset is damaged.

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
        # Remove an earlier index pack, and any unfinished pack of a killed process.
        remove(root / INDEX_PACK_FILE, *root.glob(f".{INDEX_PACK_FILE}.tmp.*"))
        shards = list(read_shards(directory, num_shards))
        for shard in shards:
            require_trusted_owner(root, {(root / file.file).parent for file in shard.fields.values()})
            for name in shard.files.values():
                _write_sidecars_of(name, directory, root)
        _write_index_pack(shards, directory, root)


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
        into: the folder that the sidecars were written to, if not the dataset directory.
    """
    directory = Path(dataset)
    root = directory if into is None else Path(into)
    source = IndexedShardSource(directory, fields, codec)
    files: dict[str, list[str]] = {}
    indices: dict[str, list[str]] = {}
    for shard in range(source.num_shards):
        found = source.files(shard)
        for name, path in ((CUTS, found.cuts), *found.fields.items()):
            indexed, index = _indexed_file(str(Path(str(path)).relative_to(directory)), directory, root)
            files.setdefault(name, []).append(str(indexed))
            indices.setdefault(name, []).append(str(index))
    return {"fields": files, "index_path": indices}


def _indexed_file(name: str, directory: Path, root: Path) -> tuple[Path, Path]:
    """Return the file to be indexed (a file of the dataset, or its uncompressed copy), and its index file."""
    *plain, index = sidecar_files(name)
    return (root / plain[0] if plain else directory / name), root / index


def _write_sidecars_of(name: str, directory: Path, root: Path) -> None:
    """Write the index of one file of a shard and, if the file is compressed, an uncompressed copy."""
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


def _write_index_pack(shards: Sequence[ShardRecord], directory: Path, root: Path) -> None:
    """Combine the index files of all shards in one index pack, if the installed lhotse supports packs."""
    try:
        from lhotse.index_pack import IndexPackCollectionSpec, write_index_pack
    except ImportError:
        return
    fields: dict[str, list[str]] = {}
    indices: dict[str, Path] = {}
    for shard in shards:
        for field, name in shard.files.items():
            path, index = _indexed_file(name, directory.absolute(), root.absolute())
            fields.setdefault(field, []).append(str(path))
            indices[str(path)] = index
    collections = [
        IndexPackCollectionSpec(field, "tar-members" if paths[0].endswith(".tar") else "json-lines", field, paths)
        for field, paths in fields.items()
    ]
    # Pass the sizes, so that lhotse also accepts files whose modification times are in the future.
    sizes = {path: Path(path).stat().st_size for path in indices}
    pack = root / INDEX_PACK_FILE
    with stopping_errors(pack):
        write_index_pack(pack, collections, index_path_overrides=indices, source_size_overrides=sizes)
