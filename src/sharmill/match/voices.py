"""A sample of the voices of a dataset for the report: embeddings of some utterances, in whole or half groups.

Each unit adds its share to its commit record, so that a dataset of any size has about as many.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import xxhash

# Of a dataset, and of one group.
_WANTED: Final = 1500
_PER_GROUP: Final = 12


def sample_voices(
    groups: Iterable[tuple[str, list[tuple[str, Any]]]], unit_id: str, size: int, total: int
) -> list[tuple[str, str]]:
    """Return names of groups, each with the embedding of one of its utterances, packed in text.

    Args:
        groups: names of groups, and the ids and embeddings (D,) of their utterances.
        unit_id: the unit of these groups, by which the sample is drawn.
        size: number of utterances of the unit.
        total: number of utterances of the dataset.
    """
    wanted = _WANTED * size / max(1, total)
    found: list[tuple[str, str]] = []
    for name, members in sorted(groups, key=lambda group: _draw(unit_id, group[0])):
        chosen = sorted(members, key=lambda member: _draw(unit_id, member[0]))[:_PER_GROUP]
        # Part of a group would say nothing of how its voices lie together: all of it, or by chance none.
        if wanted < len(chosen) and _draw(f"share of {unit_id}", name) / 2**64 >= wanted / len(chosen):
            break
        found += [(name, pack_voice(embedding)) for _, embedding in chosen]
        wanted -= len(chosen)
        if wanted <= 0:
            break
    return found


def _draw(unit_id: str, name: str) -> int:
    return xxhash.xxh3_64_intdigest(f"{unit_id}\n{name}".encode("utf-8", "surrogatepass"))


def pack_voice(embedding: Any) -> str:
    """Return an embedding (D,), an array or a tensor, as text: in steps of 1/127 of its largest value."""
    values = np.asarray(embedding.cpu() if hasattr(embedding, "cpu") else embedding, np.float32)
    steps = np.rint(values * (127 / max(float(np.abs(values).max(initial=0.0)), 1e-9)))
    return base64.b64encode(steps.astype(np.int8).tobytes()).decode()


def unpack_voice(text: str) -> np.ndarray:
    """Return the embedding (D,) that ``pack_voice`` has made a text of, with length 1."""
    steps = np.frombuffer(base64.b64decode(text), np.int8).astype(np.float32)
    return steps / max(float(np.linalg.norm(steps)), 1e-9)
