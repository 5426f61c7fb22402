"""What the speaker encoders share once the network has spoken: unit length, and no voice in silence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor


def unit_embeddings(embeddings: Tensor, audio: Tensor) -> Tensor:
    """Scales embeddings to length 1 and replaces those of silence by zeros.

    A network gives digital silence a vector like any other, the same for every silent utterance, so that silence
    would be the best match for silence. A zero vector is similar to nothing.

    Args:
        embeddings: (batch, embedding_size); a row with NaN, as from a division by a zero norm, counts as silence.
        audio: (batch, samples), zero beyond each item's end.

    Returns:
        (batch, embedding_size) float32 on the CPU.
    """
    embeddings = functional.normalize(embeddings.float(), dim=1)
    voiced = (audio != 0).any(dim=1).to(embeddings.device) & embeddings.isfinite().all(dim=1)
    return torch.where(voiced[:, None], embeddings, 0.0).cpu()
