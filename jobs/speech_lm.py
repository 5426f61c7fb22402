"""A small decoder-only transformer over text and codec codes: the model of the training example.

One sequence per utterance: text, then the frames of the context, then those of the target. A frame is one position: the
sum of its codebooks' embeddings goes in, one distribution per codebook comes out. Next-token prediction over text and
target; nothing is predicted within the context, which at inference is given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from train_config import ModelConfig
from transformer import Transformer

_IGNORED = -100


@dataclass(frozen=True)
class Losses:
    """Mean cross-entropies, in nats per text token and per code, and how many positions there were."""

    text: Tensor
    codes: Tensor
    num_positions: int

    @property
    def total(self) -> Tensor:
        return self.text + self.codes


class SpeechLM(nn.Module):
    """A decoder-only transformer over text and codes.

    ``text_size`` and ``codes_size`` count the ids of text tokens and of one codebook, special ones included.
    """

    def __init__(self, config: ModelConfig, text_size: int, num_codebooks: int, codes_size: int) -> None:
        super().__init__()
        self.num_codebooks, self.codes_size = num_codebooks, codes_size
        self.text_embedding = nn.Embedding(text_size, config.dim)
        self.codes_embedding = nn.Embedding(num_codebooks * codes_size, config.dim)
        self.part_embedding = nn.Embedding(3, config.dim)
        self.transformer = Transformer(config)
        self.text_head = nn.Linear(config.dim, text_size)
        self.codes_head = nn.Linear(config.dim, num_codebooks * codes_size)
        for embedding in (self.text_embedding, self.codes_embedding, self.part_embedding):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, batch: Mapping[str, Tensor]) -> Losses:
        """Return the losses of a padded batch.

        Args:
            batch: tensors of a ``ContextSpeechDataset``. ``text_tokens`` (batch, tokens) with its special tokens, and
                ``text_lens`` (batch,); ``context_codes`` and ``target_codes`` (batch, codebooks, frames) with their
                special frames, and ``context_code_lens`` and ``target_code_lens`` (batch,).
        """
        text, context, target = (batch[name] for name in ("text_tokens", "context_codes", "target_codes"))
        text_lens, target_lens = batch["text_lens"], batch["target_code_lens"]
        parts = (self.text_embedding(text), self._embed_codes(context), self._embed_codes(target))
        lengths = (text_lens, batch["context_code_lens"], target_lens)
        hidden = torch.cat([self._place(part, index) for index, part in enumerate(parts)], dim=1)
        present = torch.cat(
            [_present(part.shape[1], length) for part, length in zip(parts, lengths, strict=True)], dim=1
        )
        hidden = self.transformer(hidden, present)
        text_hidden, _, target_hidden = hidden.split([part.shape[1] for part in parts], dim=1)
        return Losses(
            text=_next_loss(self.text_head(text_hidden), text, text_lens),
            codes=_next_loss(
                self.codes_head(target_hidden).unflatten(-1, (self.num_codebooks, self.codes_size)),
                target.transpose(1, 2),
                target_lens,
            ),
            num_positions=int(present.sum()),
        )

    def _embed_codes(self, codes: Tensor) -> Tensor:
        """Embed codes (batch, codebooks, frames) as (batch, frames, dim)."""
        shift = torch.arange(self.num_codebooks, device=codes.device) * self.codes_size
        return self.codes_embedding(codes + shift[:, None]).sum(dim=1)

    def _place(self, part: Tensor, index: int) -> Tensor:
        """Add an embedding of the part, and sinusoidal positions within it (Vaswani et al., 2017, arXiv:1706.03762)."""
        frames, dim = part.shape[1:]
        rates = torch.exp(torch.arange(0, dim, 2, device=part.device) * (-math.log(10_000.0) / dim))
        angles = torch.arange(frames, device=part.device)[:, None] * rates
        return part + self.part_embedding.weight[index] + 0.1 * torch.cat([angles.sin(), angles.cos()], dim=-1)


def count_targets(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many text tokens and codes of a batch are predicted: all but the first of each sequence."""
    text, frames = ((batch[name] - 1).clamp(min=0).sum() for name in ("text_lens", "target_code_lens"))
    return int(text), int(frames) * batch["target_codes"].shape[1]


def _present(size: int, lengths: Tensor) -> Tensor:
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def _next_loss(logits: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean cross-entropy of the id after each position.

    Args:
        logits: (batch, positions, ..., size).
        ids: (batch, positions, ...).
        lengths: positions that are no padding (batch,).
    """
    present = _present(ids.shape[1], lengths)[:, 1:]
    following = ids[:, 1:].masked_fill(~present.view(*present.shape, *[1] * (ids.dim() - 2)), _IGNORED)
    # Logits in bfloat16 are too coarse for a loss.
    precise = logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(precise.flatten(0, -2), following.flatten(), ignore_index=_IGNORED)
