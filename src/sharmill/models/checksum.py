"""The checksum of a loaded model's weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import xxhash

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


def weights_checksum(state: Mapping[str, Tensor]) -> str:
    """xxh3 (16 hex digits) of a state dict: names, types, shapes and bytes, in the order of the names.

    A state dict has the parameters and the saved buffers; buffers that are not saved, such as caches which grow with
    the longest input so far, say nothing about the model.
    """
    digest = xxhash.xxh3_64()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
