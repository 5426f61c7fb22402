"""Speaker groups over a whole manifest, and their division into units.

In an append they may have candidates for contexts beside the records: cuts of the dataset that is appended to, whose
audio is what is stored there.
"""

import dataclasses
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np
import xxhash

from sharmill.audio.roots import AudioRoots
from sharmill.config import Config
from sharmill.files.stored import decode_stored, read_stored_lines
from sharmill.manifest import AudioNotes, Member, Utterance, tagged_speaker, write_lines
from sharmill.match.config import MatchConfig
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.fields import CUTS
from sharmill.shar.items import NO_DATA, ItemTable
from sharmill.shar.manifests import read_utterances

# Of a line of a manifest: where it begins in its file, its number in the prepared manifest, the durations of target and
# context, and the 128-bit hash of the key of its group.
LINE: Final = np.dtype([("offset", "i8"), ("index", "u4"), ("seconds", "f4"), ("context", "f4"), ("group", "u8", 2)])


class _Head(msgspec.Struct):
    audio_filepath: str
    speaker: str
    duration: float


class _MatchedHead(msgspec.Struct):
    duration: float
    context_audio_duration: float
    index: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = msgspec.field(name="_index")


def index_lines(*paths: Path, group_key: Callable[[str, str], str] | None = None) -> np.ndarray:
    """Read manifests once, one behind the other, for planning: return their lines (N,) as ``LINE``.

    Without a ``group_key`` they are matched manifests, whose lines lie by group already and are all of one here.
    """

    def rows() -> Iterator[tuple[int, int, float, float, tuple[int, int]]]:
        number = 0
        for path in paths:
            offset = 0
            # Line by line: of what is no manifest a line may have 64 MiB.
            for line in read_stored_lines(path):
                if group_key is None:
                    matched = decode_stored(path, line, _MatchedHead)
                    yield offset, matched.index, matched.duration, matched.context_audio_duration, (0, 0)
                else:
                    head = decode_stored(path, line, _Head)
                    key = group_key(head.audio_filepath, tagged_speaker(head.speaker))
                    group = xxhash.xxh3_128_intdigest(key.encode())
                    yield offset, number, head.duration, 0.0, (group >> 64, group & (1 << 64) - 1)
                offset += len(line)
                number += 1

    return np.fromiter(rows(), LINE)


def order_by_group(groups: np.ndarray, *, mixed: bool = False) -> np.ndarray:
    """Return the numbers of lines (N,) uint32 sorted by group, those of a group in their order.

    Args:
        groups: (N,) the number of the first line of each line's group.
        mixed: mix the lines of each group, so that parts of it have records and candidates.
    """
    if mixed:
        numbers = np.random.Generator(np.random.PCG64(0)).permutation(len(groups))
        return np.lexsort((numbers, groups)).astype(np.uint32)
    return np.argsort(groups, kind="stable").astype(np.uint32)


def divide(
    seconds: np.ndarray, groups: np.ndarray, *, unit_seconds: float, max_group: int | None
) -> Iterator[tuple[int, int]]:
    """Divide lines into spans: whole groups, about ``unit_seconds`` together, and parts of those above ``max_group``.

    A group is never divided unless ``max_group`` says so, since contexts are sought within a span.

    Args:
        seconds: (N,) durations of lines sorted by group.
        groups: (N,) their groups.

    Yields:
        The first line of each span, and the line behind its last.
    """
    begin = position = 0
    until = np.append(0.0, np.cumsum(seconds, dtype=np.float64))
    ends = np.append(np.flatnonzero(groups[1:] != groups[:-1]) + 1, len(groups)) if len(groups) else groups
    # One at a time: a list of all would take ten times the memory.
    for end in map(int, ends):
        too_large = max_group is not None and end - position > max_group
        if begin < position and (too_large or until[end] - until[begin] > unit_seconds):
            yield begin, position
            begin = position
        if too_large:
            # Parts of nearly equal size.
            size = end - position
            count = -(-size // (max_group or size))
            yield from pairwise([position + size * part // count for part in range(count + 1)])
            begin = end
        position = end
    if begin < position:
        yield begin, position


def segment_roots(config: Config) -> AudioRoots:
    """Return the audio roots of all segments of a dataset: those of its sources and, last, that of the candidates."""
    roots: list[str | list[str] | None] = [source.audio_root for source in config.sources]
    match = config.find(MatchConfig)
    if match is not None and match.contexts_from_dataset:
        roots.append(config.append_to)
    return AudioRoots.of(roots, config.cache, [source.float_scale for source in config.sources])


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
    return write_lines(path, (one.to_json() for pair in files for one in _candidates(dataset, *pair, root)))


def _candidates(dataset: Path, cuts: str, container: str, root: int) -> Iterator[Utterance]:
    modified = (dataset / container).stat().st_mtime_ns
    utterances = list(read_utterances(dataset / cuts))
    table = ItemTable(dataset / container, ids=[str(cut.get("id")) for cut, _ in utterances])
    for number, (cut, utterance) in enumerate(utterances):
        if table.pair(number)[1] == NO_DATA:
            raise table.damage(f"it has no audio of the cut {cut['id']} at its place")
        start, size = table.place(2 * number)
        kept = {key: value for key, value in utterance.custom.items() if key == "normalized_text"}
        segment = dataclasses.replace(
            utterance.segment,
            root=root,
            whole_file=True,
            notes=AudioNotes(size, modified),
            channel=None,
            member=Member(container, "bytes", start, size),
        )
        yield dataclasses.replace(utterance, segment=segment, custom=kept)
