"""Manifests for later stages, with columns: arrays of line values, so that plans need not parse the lines.

The rank that writes a part of a manifest also writes its columns. At the end of the stage, the columns are merged into
one array each, and become products of the stage beside the manifest.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import xxhash
from msgspec.structs import replace

from sharmill.engine.hashes import find_first
from sharmill.engine.stage import StageRun
from sharmill.engine.unit import Totals
from sharmill.files.arrays import load_stored_array, map_stored_array, publish_array, save_array, write_array
from sharmill.files.atomic import open_atomic, open_new, write_atomic
from sharmill.manifest import Utterance, records_checksum

# Columns of a part: the length of a line in bytes, the line's number in the prepared manifest, the durations of target
# and context in seconds, and the 128-bit hash of the key of the line's group.
LINE: Final = np.dtype([("length", "u4"), ("index", "u4"), ("seconds", "f4"), ("context", "f4"), ("group", "u8", 2)])
# The name of the column with the position of the first byte of each line, which is computed from the lengths.
OFFSET: Final = "offset"
# The name of the column with the number of the first line of each line's group.
FIRST_OF_GROUP: Final = "first_of_group"


def write_part(path: Path, utterances: Iterable[Utterance], group_of: Callable[[Utterance], str]) -> np.ndarray:
    """Write utterances as lines, and return their columns as an array of ``LINE``, shape (N,).

    The index of an utterance without a number is 0.
    """
    rows: list[tuple[int, int, float, float, tuple[int, int]]] = []
    with open_new(path) as stream:
        for utterance in utterances:
            line = utterance.to_json() + b"\n"
            stream.write(line)
            context = utterance.context.segment.duration if utterance.context is not None else 0.0
            group = hash_group(group_of(utterance))
            rows.append((len(line), max(0, utterance.index), utterance.segment.duration, context, group))
    return np.array(rows, LINE)


def hash_group(key: str) -> tuple[int, int]:
    """Return the 128-bit hash of the key of a group, as the column ``group`` has it."""
    hashed = xxhash.xxh3_128_intdigest(key.encode("utf-8", "surrogatepass"))
    return hashed >> 64, hashed & (1 << 64) - 1


def merge_columns(
    folder: Path, parts: Sequence[Path], names: Sequence[str], *, count: int, lengths: np.ndarray | None = None,
    kept: np.ndarray | None = None,
) -> dict[str, Path]:  # fmt: skip
    """Write columns of a merged manifest into a folder, each as an array with N items; return their paths by name.

    Args:
        folder: the folder of the files, which are named after the columns.
        parts: the files with the columns of the parts, in order.
        names: the columns to write besides ``offset``.
        count: number N of lines in the merged manifest.
        lengths: length of each merged line in bytes, (N,), if the lines differ from the lines of the parts.
        kept: for each line of the parts, True if it is in the merged manifest; by default all lines are.
    """
    folder.mkdir(exist_ok=True)

    paths = {name: folder / f"{name}.npy" for name in (OFFSET, *names)}
    found, begin = [np.empty(0, np.uint32)], 0
    with ExitStack() as stack:
        streams = {name: stack.enter_context(open_atomic(paths[name])) for name in names}
        for name, stream in streams.items():
            write_array(stream, LINE[name].base, (count, *LINE[name].shape), ())
        # Read each part only once for all columns.
        for part in parts:
            rows = load_stored_array(part)
            chosen = rows if kept is None else rows[kept[begin : begin + len(rows)]]
            begin += len(rows)
            found.append(chosen["length"])
            for name, stream in streams.items():
                stream.write(np.ascontiguousarray(chosen[name]).data)
    offsets = offsets_of(np.concatenate(found) if lengths is None else lengths)
    publish_array(paths[OFFSET], offsets.dtype, offsets.shape, [offsets])
    return paths


def identify_manifest(run: StageRun, stage: str) -> str:
    """Verify the manifest and the columns of a stage, and return a checksum that identifies the manifest's records.

    Ranks do not verify them again, because each rank would have to read all columns.

    Raises:
        ConfigError: the stage is not finished, or the manifest, a column or a fact is missing or has changed.
    """
    # Check that this fact exists, because ranks need it to read the segments of the manifest.
    run.totals_of("prepare", duration_tolerance=float)
    totals = run.totals_of(stage, "manifest", records=str)
    for name in totals.products.keys() & {"manifest", OFFSET, FIRST_OF_GROUP, *(LINE.names or ())}:
        run.product(f"{stage}/{name}", verify=True)
    return str(totals.facts["records"])


def number_groups(hashes: Path) -> Path:
    """Write the column with the number of the first line of each line's group; shape (N,), uint32.

    Args:
        hashes: the ``group`` column of a merged manifest.
    """
    path = hashes.with_name(f"{FIRST_OF_GROUP}.npy")
    firsts = find_first(*map_stored_array(hashes).T)
    publish_array(path, firsts.dtype, firsts.shape, [firsts])
    return path


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Return the position of the first byte of each line, (N,) int64, from the lengths of the lines in bytes, (N,)."""
    return np.cumsum(lengths, dtype=np.int64) - lengths


def order_by_group(groups: np.ndarray, *, mixed: bool = False) -> np.ndarray:
    """Return the numbers of the lines sorted by group, (N,) uint32; lines of the same group keep their order.

    Args:
        groups: the number of the first line of each line's group, (N,).
        mixed: True to shuffle the lines within each group, so that every part of a group has records and candidates.
    """
    if mixed:
        numbers = np.random.Generator(np.random.PCG64(0)).permutation(len(groups))
        return np.lexsort((numbers, groups)).astype(np.uint32)
    return np.argsort(groups, kind="stable").astype(np.uint32)


def column(run: StageRun, stage: str, name: str) -> np.ndarray:
    """Return a column of a stage's manifest, with one item per line, memory-mapped from its file.

    Raises:
        ConfigError: the stage is not finished, or the column is missing.
    """
    # Convert to a plain array, because numpy shuffles subclasses slowly, item by item.
    return np.asarray(map_stored_array(run.product(f"{stage}/{name}")))


def finish_manifest(run: StageRun, manifest: Path, columns: dict[str, Path], totals: Totals, **facts: Any) -> Totals:
    """Return the totals of a stage with its manifest and columns as products, and with facts for later stages."""
    products = run.record_products(manifest=manifest, **columns)
    return replace(totals, products=products, facts=facts | {"records": records_checksum(manifest)})


def leave_manifest(run: StageRun, name: str, utterances: Sequence[Utterance], **facts: Any) -> None:
    """Write a manifest for later stages as if it were the product of a stage, although that stage has not run."""
    manifest, part = run.run_dir.manifests / name, run.dir.merged / "part.npy"
    for folder in (manifest.parent, part.parent):
        folder.mkdir(parents=True, exist_ok=True)
    save_array(part, write_part(manifest, utterances, lambda utterance: utterance.speaker))
    columns = merge_columns(part.parent, [part], ["index", "seconds", "context", "group"], count=len(utterances))
    columns[FIRST_OF_GROUP] = number_groups(columns["group"])
    totals = Totals(num_in=len(utterances), num_out=len(utterances), rejects={}, hours=0.0)
    write_atomic(run.dir.done, msgspec.json.encode(finish_manifest(run, manifest, columns, totals, **facts)))
