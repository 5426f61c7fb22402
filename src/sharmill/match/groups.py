"""Division of the speaker groups of a whole manifest into units.

In an append, groups may include additional candidates for contexts: cuts of the dataset that is appended to, with their
stored audio.
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
    """Divide lines into spans of about ``unit_seconds``; only groups of more than ``max_group`` lines are split.

    Contexts are chosen within a span, so smaller groups are never split.

    Args:
        seconds: (N,) durations of lines sorted by group.
        groups: (N,) group of each line.

    Yields:
        The first line of each span, and the line after its last one.
    """
    begin = position = 0
    until = np.append(0.0, np.cumsum(seconds, dtype=np.float64))
    ends = np.append(np.flatnonzero(groups[1:] != groups[:-1]) + 1, len(groups)) if len(groups) else groups
    # Converting the array to a list of Python integers would need ten times its memory.
    for end in map(int, ends):
        too_large = max_group is not None and end - position > max_group
        if begin < position and (too_large or until[end] - until[begin] > unit_seconds):
            yield begin, position
            begin = position
        if too_large:
            # Divide the group into parts of nearly equal size.
            size = end - position
            count = -(-size // (max_group or size))
            yield from pairwise([position + size * part // count for part in range(count + 1)])
            begin = end
        position = end
    if begin < position:
        yield begin, position


def write_candidates(path: Path, dataset: Path, root: int, speaker_key: SpeakerKey) -> np.ndarray:
    """Write a dataset's cuts as lines of a manifest, and return their columns (N,), of dtype ``stages.lines.LINE``.

    The lines have the original paths and times, but refer to the audio stored in the tars of the dataset.

    Args:
        path: path of the manifest.
        dataset: a finished sharmill dataset.
        root: number of the dataset's folder among the audio roots.

    Raises:
        DamagedShard: a file of the dataset cannot be read.
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
            raise table.damage(f"the audio of the cut {cut['id']} is not at its place")
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
