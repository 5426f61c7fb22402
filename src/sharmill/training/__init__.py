"""Tools for reading datasets in training: the loader, batches of tensors, chains, bins, batch sizes and transforms.

Names are imported lazily: batches need torch and the loader needs NeMo, but bins need neither.
"""

import importlib
from typing import Any

_HOMES = {
    "Chain": "sharmill.training.chain.chain",
    "ContextSpeechDataset": "sharmill.training.speech_text",
    "SpeechTextDataset": "sharmill.training.speech_text",
    "get_dataloader": "sharmill.training.nemo.loader",
    "interleave": "sharmill.training.chain.chain",
    "merge_data_states": "sharmill.training.nemo.loader",
    "parallel_map": "sharmill.training.parallel",
    "RawList": "sharmill.training.chain.sources",
    "ShardList": "sharmill.training.chain.sources",
    "TextLines": "sharmill.training.chain.sources",
}

__all__ = [
    "Chain",
    "ContextSpeechDataset",
    "RawList",
    "ShardList",
    "SpeechTextDataset",
    "TextLines",
    "get_dataloader",
    "interleave",
    "merge_data_states",
    "parallel_map",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
