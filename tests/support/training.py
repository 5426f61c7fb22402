"""What training tests share: a tokenizer of letters, a dataset that gives what it gets, and samples of a loader."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch


class Letters:
    """One token per character; NeMo's prompt formats can use it."""

    bos, eos = 1, 2

    def __call__(self, text: str) -> list[int]:
        return self.text_to_ids(text)

    def text_to_ids(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def ids_to_text(self, ids: list[int]) -> str:
        return "".join(chr(token) for token in ids)


class AsIs(torch.utils.data.Dataset):
    """A batch is its examples."""

    def __getitem__(self, cuts: Any) -> list[Any]:
        return list(cuts)


class Ids(torch.utils.data.Dataset):
    """A batch is the ids of its cuts, or the texts where there are none."""

    def __getitem__(self, cuts: Any) -> list[str]:
        return [getattr(cut, "id", None) or cut.text.strip() for cut in cuts]


def take(loader: Any, batches: int | None = None) -> list[Any]:
    """The first batches of a loader, or all."""
    return list(islice(iter(loader), batches))


def flat(batches: list[list[Any]]) -> list[Any]:
    """The examples of batches."""
    return [example for batch in batches for example in batch]


def number(example: Any) -> int:
    """The number that the manifest has for an utterance of the test corpora."""
    cut = example.list_cuts()[0] if hasattr(example, "list_cuts") else example
    return cut.supervisions[0].custom["number"]


def numbers(batches: list[list[Any]]) -> list[list[int]]:
    """Those of the cuts of each batch."""
    return [[number(example) for example in batch] for batch in batches]
