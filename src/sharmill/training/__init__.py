"""Reading shards in training: the loader, batching and the dataset class.

Names are imported when they are asked for, since torch and NeMo take seconds.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {"get_dataloader": "sharmill.training.loader"}

__all__ = ["get_dataloader"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
