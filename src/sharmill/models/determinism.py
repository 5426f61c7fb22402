"""How torch behaves inside a rank."""

from __future__ import annotations


def make_deterministic(device: str) -> int:
    """Makes results independent of the machine's cores, and returns how many threads may decode audio meanwhile.

    One thread computes: sums then do not depend on the number of cores, and the other cores have ranks of their own.
    """
    import torch

    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return 8 if device == "cuda" else 1
