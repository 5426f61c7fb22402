"""Batches for a model: by padded length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def padded_batches(lengths: Sequence[float], max_padded: float, *, equal_only: bool = False) -> list[list[int]]:
    """Return the indices of the items in batches, sorted by length, so that little is padded.

    A batch's number of items times its longest is at most ``max_padded``; an item that is longer is alone.
    ``equal_only`` puts only items of the same length together.
    """
    batches: list[list[int]] = []
    longest = 0.0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = bool(batches) and (len(batches[-1]) + 1) * longest <= max_padded
        if fits and (not equal_only or lengths[index] == longest):
            batches[-1].append(index)
        else:
            batches.append([index])
            longest = lengths[index]
    return batches


def pad(items: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return arrays (samples,) as one zero-padded float32 tensor (batch, samples), and their lengths (batch,)."""
    import torch

    lengths = torch.tensor([len(item) for item in items], dtype=torch.int64)
    padded = torch.zeros(len(items), int(lengths.max()), dtype=torch.float32)
    for row, item in zip(padded, items, strict=True):
        row[: len(item)] = torch.from_numpy(item)
    return padded, lengths
