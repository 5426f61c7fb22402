"""Reading datasets in training: batches of tensors, bins and batch sizes, parallel transforms.

Nothing is imported before it is asked for: batches need torch, bins do not.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "ContextSpeechDataset": "sharmill.training.dataset",
    "parallel_map": "sharmill.training.parallel",
}

__all__ = ["ContextSpeechDataset", "parallel_map"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
