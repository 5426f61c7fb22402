"""A small decoder-only transformer over text, codec codes and audio: the model of the training example.

It takes the sequences of a ``SpeechTextDataset``. A token is one position; so is a frame: the sum of its codebooks'
embeddings goes in, or the spectrum of its samples, and one distribution per codebook comes out. It learns to predict
the positions that the batch says: of TTS the text and the target, of text all of it, of conversations what the
assistant says.
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

from sharmill.training.speech_text import Kind


@dataclass(frozen=True)
class Losses:
    """Mean cross-entropies, in nats per text token and per code, and how many positions there were.

    Of what a batch does not have, the mean is 0.
    """

    text: Tensor
    codes: Tensor
    num_positions: int

    @property
    def total(self) -> Tensor:
        return self.text + self.codes


class SpeechLM(nn.Module):
    """A decoder-only transformer over text, codes and audio.

    ``text_size`` and ``codes_size`` count the ids of text tokens and of one codebook, special ones included;
    ``samples_per_frame`` those of a frame of audio.
    """

    def __init__(
        self, config: ModelConfig, text_size: int, num_codebooks: int, codes_size: int, samples_per_frame: int
    ) -> None:
        super().__init__()
        self.num_codebooks, self.codes_size = num_codebooks, codes_size
        self.text_embedding = nn.Embedding(text_size, config.dim)
        self.codes_embedding = nn.Embedding(num_codebooks * codes_size, config.dim)
        self.audio_projection = nn.Linear(samples_per_frame // 2 + 1, config.dim)
        # Of each kind of position, given or predicted.
        self.part_embedding = nn.Embedding(2 * len(Kind), config.dim)
        self.transformer = Transformer(config)
        self.text_head = nn.Linear(config.dim, text_size)
        self.codes_head = nn.Linear(config.dim, num_codebooks * codes_size)
        for embedding in (self.text_embedding, self.codes_embedding, self.part_embedding):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, batch: Mapping[str, Tensor]) -> Losses:
        """Return the losses of a batch of a ``SpeechTextDataset``, which lists its tensors.

        Every weight has a gradient, be it zero, whatever a batch has: ranks exchange the gradients of all of them.
        """
        kinds, predicted = batch["kinds"], batch["predicted"]
        present = kinds != Kind.PADDING
        hidden = self.transformer(self._embed(batch), present)
        # A position is predicted by the one before it.
        hidden, following = hidden[:, :-1], predicted[:, 1:]
        is_text, is_codes = (following & (kinds[:, 1:] == kind) for kind in (Kind.TEXT, Kind.CODES))
        codes_logits = self.codes_head(hidden[is_codes]).unflatten(-1, (self.num_codebooks, self.codes_size))
        return Losses(
            text=_mean_loss(self.text_head(hidden[is_text]), batch["text_tokens"][:, 1:][is_text]),
            codes=_mean_loss(codes_logits, batch["codes"].transpose(1, 2)[:, 1:][is_codes]),
            num_positions=int(present.sum()),
        )

    def _embed(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Embed a batch as (batch, positions, dim), each position by its kind, its part and its place in its span."""
        kinds = batch["kinds"]
        shift = torch.arange(self.num_codebooks, device=kinds.device) * self.codes_size
        codes = self.codes_embedding(batch["codes"] + shift[:, None]).sum(dim=1)
        hidden = torch.where((kinds == Kind.TEXT)[..., None], self.text_embedding(batch["text_tokens"]), codes)
        heard = self.audio_projection(_spectrum(batch["audio"].float()).to(self.audio_projection.weight.dtype))
        hidden = hidden.masked_scatter((kinds == Kind.AUDIO)[..., None], heard.to(hidden.dtype))
        part = self.part_embedding(kinds + len(Kind) * batch["predicted"])
        return hidden + part + 0.1 * _sinusoids(_places(batch["spans"]), hidden.shape[-1])


def count_targets(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many text tokens and codes of a batch are predicted."""
    text, frames = ((batch["predicted"] & (batch["kinds"] == kind)).sum() for kind in (Kind.TEXT, Kind.CODES))
    return int(text), int(frames) * batch["codes"].shape[1]


def _spectrum(audio: Tensor) -> Tensor:
    """Return the logarithmic spectrum (frames, bins) of samples (frames, samples of a frame)."""
    # A Fourier transform of nothing is an error.
    bins = torch.fft.rfft(audio).abs() if len(audio) else audio[:, : audio.shape[1] // 2 + 1]
    return bins.log1p()


def _places(spans: Tensor) -> Tensor:
    """Return the place of each position in its span, both (batch, positions)."""
    index = torch.arange(spans.shape[1], device=spans.device).expand_as(spans)
    begins = functional.pad(spans[:, 1:] != spans[:, :-1], (1, 0))
    return index - (index * begins).cummax(dim=1).values


def _sinusoids(places: Tensor, dim: int) -> Tensor:
    """Return sinusoids (..., dim) of places (Vaswani et al., 2017, arXiv:1706.03762)."""
    rates = torch.exp(torch.arange(0, dim, 2, device=places.device) * (-math.log(10_000.0) / dim))
    angles = places[..., None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def _mean_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the mean cross-entropy of ids (...,) under logits (..., size); 0 of none."""
    # Logits in bfloat16 are too coarse for a loss.
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = functional.cross_entropy(precise.flatten(0, -2), ids.flatten(), reduction="sum")
    return total / max(1, ids.numel())
