"""The lines of a manifest as planning needs them: places, durations and groups."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np
import xxhash

from sharmill.files.stored import decode_stored, read_stored_lines
from sharmill.manifest import tagged_speaker

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
