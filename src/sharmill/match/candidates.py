"""Candidates for contexts from the dataset that is appended to: its cuts, whose audio is what is stored there."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

import numpy as np

from sharmill.audio.roots import AudioRoots
from sharmill.config import Config
from sharmill.engine.rundir import RunDir
from sharmill.errors import DamagedShard
from sharmill.manifest import AudioNotes, Member, Utterance, write_lines
from sharmill.match.config import MatchConfig
from sharmill.match.groups import ManifestIndex
from sharmill.shar.cut_lines import read_cuts
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.items import NO_DATA, ItemTable
from sharmill.shar.layout import CUTS
from sharmill.shar.lhotse_json import utterance_of

CANDIDATES_NAME: Final = "candidates.jsonl"


def segment_roots(config: Config) -> AudioRoots:
    """Return the audio roots of all segments of a dataset: those of its sources and, last, that of the candidates."""
    roots: list[str | list[str] | None] = [source.audio_root for source in config.sources]
    match = config.find(MatchConfig)
    if match is not None and match.contexts_from_dataset:
        roots.append(config.append_to)
    return AudioRoots.of(roots, RunDir(Path(config.run_dir)).copies)


def write_candidates(path: Path, dataset: Path, root: int) -> int:
    """Write the cuts of a dataset as lines of a manifest, and return their number.

    Their paths and times are those that they once had; their audio is a member of a tar of target audio.

    Args:
        path: of the manifest.
        dataset: a finished dataset of sharmill's own.
        root: number of its folder among the audio roots.

    Raises:
        DamagedShard: a file of it cannot be read.
    """
    shards, audio = ShardedDataset(dataset).shards(), ShardedDataset(dataset).record().audio_fields[0]
    files = [(shard.fields[CUTS].file, shard.fields[audio].file) for shard in shards]
    lines = (candidate.to_json() for pair in files for candidate in _candidates(dataset, *pair, root))
    return write_lines(path, lines)


def _candidates(dataset: Path, cuts: str, container: str, root: int) -> list[Utterance]:
    modified = (dataset / container).stat().st_mtime_ns
    table = ItemTable(dataset / container)
    found = []
    try:
        for number, cut in enumerate(read_cuts(dataset / cuts)):
            cut_id, extension = table.pair(number)
            if cut_id != cut.get("id") or extension == NO_DATA:
                raise table.damage(f"it has no audio of the cut {cut.get('id')} at its place")
            start, size = table.place(number)
            found.append(
                dataclasses.replace(
                    _utterance(cut, dataset),
                    root=root,
                    whole_file=True,
                    notes=AudioNotes(size, modified),
                    channel=None,
                    member=Member(container, "bytes", start, size),
                )
            )
    finally:
        table.close()
    return found


def _utterance(cut: dict[str, object], dataset: Path) -> Utterance:
    try:
        utterance = utterance_of(cut)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DamagedShard(f"{dataset}: a cut does not say which record it was made of: {error!r}") from error
    kept = {key: value for key, value in utterance.custom.items() if key == "normalized_text"}
    return dataclasses.replace(utterance, custom=kept)


def origin_of(utterance: Utterance, roots: AudioRoots) -> str:
    """Return a name of the file that a record or a candidate was taken from; ``roots`` are ``segment_roots``."""
    *sources, dataset = roots.roots
    if utterance.member is None and roots.roots[utterance.root] is not dataset:
        return roots.real_name(utterance.segment)
    # What lies in a container, or was stored in the dataset, is known by its name.
    name = utterance.audio_filepath
    return next((root.name_of(name) for root in sources if root.has(name)), name)


def leave_out_strangers(index: ManifestIndex, num_records: int) -> ManifestIndex:
    """Return an index without the lines of groups that have no record; the records are its first lines."""
    wanted = np.isin(index.groups, np.unique(index.groups[:num_records]))
    return ManifestIndex(index.offsets[wanted], index.seconds[wanted], index.groups[wanted])


def mix_groups(index: ManifestIndex) -> np.ndarray:
    """Return the numbers of lines (N,) uint32 by group, records and candidates mixed, as parts of groups need it."""
    mixed = np.random.Generator(np.random.PCG64(0)).permutation(len(index.groups))
    return np.lexsort((mixed, index.groups)).astype(np.uint32)
