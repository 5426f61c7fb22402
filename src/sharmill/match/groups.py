"""Speaker groups over a whole manifest, and their division into units.

In an append they may have candidates for contexts beside the records: cuts of the dataset that is appended to, whose
audio is what is stored there.
"""

import dataclasses
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from sharmill.manifest import AudioNotes, Member, Utterance
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.fields import CUTS
from sharmill.shar.items import NO_DATA, ItemTable
from sharmill.shar.manifests import read_utterances
from sharmill.stages.lines import write_part
from sharmill.stages.speaker_key import SpeakerKey, key_of


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


def write_candidates(path: Path, dataset: Path, root: int, speaker_key: SpeakerKey) -> np.ndarray:
    """Write the cuts of a dataset as lines of a manifest, and return their columns (N,) of ``stages.lines.LINE``.

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
    found = (one for pair in files for one in _candidates(dataset, *pair, root))
    return write_part(path, found, partial(key_of, speaker_key))


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
