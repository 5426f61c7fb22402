"""A causal transformer of pre-norm blocks: the body of the training example's model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from train_config import ModelConfig


class Attention(nn.Module):
    """Multi-head attention; the projections have no bias, since one on keys would change nothing but rounding."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(self, hidden: Tensor, allowed: Tensor) -> Tensor:
        """Attend in ``hidden`` (batch, positions, dim) where ``allowed`` (batch, 1, positions, positions) is true."""
        # The number of heads follows from the projections: under tensor parallelism a rank has some of them.
        query, key, value = (
            project(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        mixed: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return mixed


class FeedForward(nn.Module):
    """Two linear layers, four times as wide between them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, hidden: Tensor) -> Tensor:
        widened: Tensor = self.down(functional.gelu(self.up(hidden)))
        return widened


class Block(nn.Module):
    """Attention and feed-forward, each added to what it gets."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, num_heads)
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.feed_forward = FeedForward(dim)

    def forward(self, hidden: Tensor, allowed: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), allowed)
        added: Tensor = hidden + self.feed_forward(self.feed_forward_norm(hidden))
        return added


class Transformer(nn.Module):
    """Blocks and a last norm, in which no position sees a later one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config.dim, config.num_heads) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.dim)
        self.position_multiple = 1
        """Positions are padded to a multiple of this: sequence parallelism divides them evenly."""

    def forward(self, hidden: Tensor, present: Tensor) -> Tensor:
        """Return ``hidden`` (batch, positions, dim) transformed; ``present`` (batch, positions) is false at padding."""
        num_positions = hidden.shape[1]
        padding = -num_positions % self.position_multiple
        allowed = _causal_mask(functional.pad(present, (0, padding)))
        hidden = functional.pad(hidden, (0, 0, 0, padding))
        for block in self.blocks:
            hidden = block(hidden, allowed)
        normed: Tensor = self.norm(hidden)
        return normed[:, :num_positions]


def _causal_mask(present: Tensor) -> Tensor:
    """Return a mask (batch, 1, positions, positions), true where attention is allowed.

    A padded position sees itself, since a softmax over nothing is not a number.
    """
    size = present.shape[1]
    causal = torch.ones(size, size, dtype=torch.bool, device=present.device).tril()
    own = torch.eye(size, dtype=torch.bool, device=present.device)
    return ((causal & present[:, None, :]) | own)[:, None]
