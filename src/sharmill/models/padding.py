"""Right padding of batches: what a backend does to the audio it gets, and whether a model notices the padding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# Far above the noise of float32 arithmetic (1e-6 to 1e-5), far below what a model does that sees the padding.
_RELATIVE_TOLERANCE = 1e-3


def check_batch(audio: Tensor, num_samples: Tensor) -> None:
    """Raises ValueError unless audio is (batch, samples) and num_samples (batch,) within it."""
    if audio.ndim != 2 or num_samples.shape != audio.shape[:1]:
        raise ValueError(
            f"expected audio (batch, samples) and num_samples (batch,), got {tuple(audio.shape)} "
            f"and {tuple(num_samples.shape)}"
        )
    if num_samples.numel() and not 0 <= int(num_samples.min()) <= int(num_samples.max()) <= audio.shape[1]:
        raise ValueError(f"num_samples must be within 0 and {audio.shape[1]}, the length of the padded audio")


def fit_length(audio: Tensor, num_samples: Tensor, length: int) -> Tensor:
    """Cuts or zero-pads a batch to a length and zeroes what lies beyond each item's end.

    Args:
        audio: (batch, samples) float32.
        num_samples: (batch,) int64.
        length: samples wanted.

    Returns:
        (batch, length) float32, a copy.
    """
    audio = functional.pad(audio, (0, length - audio.shape[1]))
    beyond = torch.arange(length, device=audio.device)[None, :] >= num_samples[:, None]
    return audio.masked_fill(beyond, 0.0)


def right_padding_matters(encode: Callable[[Tensor, Tensor], Tensor], short: int, long: int) -> bool:
    """Finds out by trial whether an item's encoding depends on the padding to its right.

    An architecture does not tell: one unmasked layer is enough. So seeded noise is encoded alone and beside a longer
    item.

    Args:
        encode: (audio (batch, samples), num_samples (batch,)) -> (batch, values) or (batch, channels, frames).
        short: samples of the item.
        long: samples of its neighbour.
    """
    noise = torch.randn(2, long, generator=torch.Generator().manual_seed(0)) * 0.1
    noise[0, short:] = 0.0
    alone = encode(noise[:1, :short], torch.tensor([short]))
    beside = encode(noise, torch.tensor([short, long]))[:1, ..., : alone.shape[-1]]
    return bool((alone - beside).abs().max() > _RELATIVE_TOLERANCE * alone.abs().max())
