"""Records that a finished dataset has already, told from 64-bit hashes: 16 bytes a cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash

from sharmill.errors import DamagedShard
from sharmill.manifest import Utterance
from sharmill.shar.cut_lines import read_cuts
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.layout import CUTS
from sharmill.shar.lhotse_json import utterance_of


class KnownRecords:
    """The cuts of a dataset, by what they were made of (path, channel, offset, duration) and by their ids.

    Args:
        directory: a finished dataset of sharmill's own.

    Raises:
        ConfigError: there is no finished dataset.
        DamagedShard: a file of cuts cannot be read, or a cut does not say what it was made of.
    """

    def __init__(self, directory: Path) -> None:
        dataset = ShardedDataset(directory)
        hashes: list[int] = []
        parts: list[np.ndarray] = []
        for shard in dataset.shards():
            path = directory / shard.fields[CUTS].file
            for cut in read_cuts(path):
                try:
                    hashes += _hashes(utterance_of(cut), cut["id"])
                except (LookupError, TypeError, ValueError, AttributeError) as error:
                    raise DamagedShard(f"{path}: a cut does not say which record it was made of: {error!r}") from error
            parts.append(np.array(hashes, np.uint64))
            hashes.clear()
        self._hashes = np.unique(np.concatenate([np.empty(0, np.uint64), *parts]))

    def __contains__(self, utterance: Utterance) -> bool:
        for value in _hashes(utterance, utterance.cut_id):
            position = int(np.searchsorted(self._hashes, np.uint64(value)))
            if position < len(self._hashes) and int(self._hashes[position]) == value:
                return True
        return False


def _hashes(utterance: Utterance, cut_id: str) -> tuple[int, int]:
    segment = f"{utterance.audio_filepath}\n{utterance.channel}\n{utterance.offset!r}\n{utterance.duration!r}"
    return xxhash.xxh3_64_intdigest(segment.encode()), xxhash.xxh3_64_intdigest(cut_id.encode())
