"""A small decoder-only transformer over text, codec codes and audio: the model of the training example.

``parallelize`` divides the model over a device mesh by tensor and sequence parallelism, then by FSDP2.

The inputs are sequences of a ``SpeechTextDataset``, in which each text token and each frame is one position. A frame is
embedded as the sum of its codebooks' embeddings, or by the spectrum of its samples. The outputs are distributions over
text tokens and, for each codebook, over codes. The batch marks the positions to predict: text and target for TTS, the
whole text of text data, and the assistant's turns in conversations.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from train_config import ModelConfig, TrainConfig

from sharmill.training.speech_text import Kind


class Attention(nn.Module):
    """Multi-head attention without bias; a bias on keys would only change rounding."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(self, hidden: Tensor, allowed: Tensor) -> Tensor:
        """Attend in ``hidden`` (batch, positions, dim) with the mask ``allowed`` (batch, 1, positions, positions)."""
        # The number of heads is inferred, since a rank has only some of them under tensor parallelism.
        query, key, value = (
            project(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        return self.output(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two linear layers; the values between them have four times the width."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(hidden)))


class Block(nn.Module):
    """Attention and feed-forward layers with residual connections."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, num_heads)
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.feed_forward = FeedForward(dim)

    def forward(self, hidden: Tensor, allowed: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), allowed)
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))


class Transformer(nn.Module):
    """Causal transformer blocks and a final normalization."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config.dim, config.num_heads) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.dim)
        self.position_multiple = 1
        """The length is padded to a multiple of this number, so that sequence parallelism can divide it evenly."""

    def forward(self, hidden: Tensor, present: Tensor) -> Tensor:
        """Transform ``hidden`` (batch, positions, dim); ``present`` (batch, positions) is false at padding."""
        num_positions = hidden.shape[1]
        padding = -num_positions % self.position_multiple
        allowed = _causal_mask(functional.pad(present, (0, padding)))
        hidden = functional.pad(hidden, (0, 0, 0, padding))
        for block in self.blocks:
            hidden = block(hidden, allowed)
        return self.norm(hidden)[:, :num_positions]


def _causal_mask(present: Tensor) -> Tensor:
    """Return a mask (batch, 1, positions, positions), true where attention is allowed.

    A padded position sees itself, because a softmax over nothing is NaN.
    """
    size = present.shape[1]
    causal = torch.ones(size, size, dtype=torch.bool, device=present.device).tril()
    own = torch.eye(size, dtype=torch.bool, device=present.device)
    return ((causal & present[:, None, :]) | own)[:, None]


@dataclass(frozen=True)
class Losses:
    """Mean cross-entropies, in nats per text token and per code, and the number of positions.

    A mean is 0 if the batch has no text or no codes.
    """

    text: Tensor
    codes: Tensor
    num_positions: int

    @property
    def total(self) -> Tensor:
        return self.text + self.codes


class SpeechLM(nn.Module):
    """A decoder-only transformer over text, codes and audio.

    ``text_size`` is the number of text tokens and ``codes_size`` the number of codes of one codebook, both including
    special ids. ``samples_per_frame`` is the number of samples in a frame of audio.
    """

    def __init__(
        self, config: ModelConfig, text_size: int, num_codebooks: int, codes_size: int, samples_per_frame: int
    ) -> None:
        super().__init__()
        self.num_codebooks, self.codes_size = num_codebooks, codes_size
        self.text_embedding = nn.Embedding(text_size, config.dim)
        self.codes_embedding = nn.Embedding(num_codebooks * codes_size, config.dim)
        self.audio_projection = nn.Linear(samples_per_frame // 2 + 1, config.dim)
        # Two embeddings for each kind of position: one if the position is given, and one if it is to be predicted.
        self.part_embedding = nn.Embedding(2 * len(Kind), config.dim)
        self.transformer = Transformer(config)
        self.text_head = nn.Linear(config.dim, text_size)
        self.codes_head = nn.Linear(config.dim, num_codebooks * codes_size)
        for embedding in (self.text_embedding, self.codes_embedding, self.part_embedding):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, batch: Mapping[str, Tensor]) -> Losses:
        """Return the losses of a batch of a ``SpeechTextDataset``, whose docstring lists the tensors.

        For any batch, every weight gets a gradient (which may be zero), because ranks exchange the gradients of all
        weights.
        """
        kinds, predicted = batch["kinds"], batch["predicted"]
        present = kinds != Kind.PADDING
        hidden = self.transformer(self._embed(batch), present)
        # Each position predicts the next one.
        hidden, following = hidden[:, :-1], predicted[:, 1:]
        is_text, is_codes = (following & (kinds[:, 1:] == kind) for kind in (Kind.TEXT, Kind.CODES))
        codes_logits = self.codes_head(hidden[is_codes]).unflatten(-1, (self.num_codebooks, self.codes_size))
        return Losses(
            text=_mean_loss(self.text_head(hidden[is_text]), batch["text_tokens"][:, 1:][is_text]),
            codes=_mean_loss(codes_logits, batch["codes"].transpose(1, 2)[:, 1:][is_codes]),
            num_positions=int(present.sum()),
        )

    def _embed(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the embeddings (batch, positions, dim).

        Each is the sum of embeddings for content, kind (given or predicted) and place.
        """
        kinds = batch["kinds"]
        shift = torch.arange(self.num_codebooks, device=kinds.device) * self.codes_size
        codes = self.codes_embedding(batch["codes"] + shift[:, None]).sum(dim=1)
        hidden = torch.where((kinds == Kind.TEXT)[..., None], self.text_embedding(batch["text_tokens"]), codes)
        heard = self.audio_projection(_spectrum(batch["audio"].float()).to(self.audio_projection.weight.dtype))
        hidden = hidden.masked_scatter((kinds == Kind.AUDIO)[..., None], heard.to(hidden.dtype))
        part = self.part_embedding(kinds + len(Kind) * batch["predicted"])
        places = 0.1 * _sinusoids(_places(batch["spans"]), hidden.shape[-1])
        return (hidden + part + places).to(part.dtype)


def count_targets(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of text tokens and codes to predict in a batch."""
    text, frames = ((batch["predicted"] & (batch["kinds"] == kind)).sum() for kind in (Kind.TEXT, Kind.CODES))
    return int(text), int(frames) * batch["codes"].shape[1]


def _spectrum(audio: Tensor) -> Tensor:
    """Return the logarithmic spectrum (frames, bins) of samples (frames, samples per frame)."""
    # torch refuses a Fourier transform of an empty tensor.
    bins = torch.fft.rfft(audio).abs() if len(audio) else audio[:, : audio.shape[1] // 2 + 1]
    return bins.log1p()


def _places(spans: Tensor) -> Tensor:
    """Return the index of each position (batch, positions) within its span."""
    index = torch.arange(spans.shape[1], device=spans.device).expand_as(spans)
    begins = functional.pad(spans[:, 1:] != spans[:, :-1], (1, 0))
    return index - (index * begins).cummax(dim=1).values


def _sinusoids(places: Tensor, dim: int) -> Tensor:
    """Return sinusoids (..., dim) of places (Vaswani et al., 2017, arXiv:1706.03762)."""
    rates = torch.exp(torch.arange(0, dim, 2, device=places.device) * (-math.log(10_000.0) / dim))
    angles = places[..., None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def _mean_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the mean cross-entropy of ids (...,) under logits (..., size), or 0 if there are no ids."""
    # Logits in bfloat16 are too coarse for a loss.
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = functional.cross_entropy(precise.flatten(0, -2), ids.flatten(), reduction="sum")
    return total / max(1, ids.numel())


def parallelize(model: SpeechLM, mesh: DeviceMesh, config: TrainConfig) -> None:
    """Divide a model: its layers along ``tp``, then all parameters along ``dp``.

    The weights must be equal on all ranks. Gradients are summed along ``dp``, not averaged.
    """
    if config.tensor_parallel > 1:
        _divide_layers(model.transformer, mesh["tp"], config.sequence_parallel)
        # The flattened mesh lets norms over both axes use a single reduction.
        mesh["dp", "tp"]._flatten()
    dtype = torch.bfloat16 if config.precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)
    # FSDP2 gathers each block separately, and the embeddings and heads together.
    for module in (*model.transformer.blocks, model):
        sharded = fully_shard(module, mesh=mesh["dp"], mp_policy=policy)
        sharded.set_gradient_divide_factor(1.0)
        # Use sums, because only NCCL supports the other reductions of FSDP.
        sharded.set_force_sum_reduction_for_comms(True)


def _divide_layers(transformer: Transformer, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Divide heads, feed-forward layers and, with sequence parallelism, the positions between these layers."""
    between = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "blocks.*.attention.query": ColwiseParallel(),
        "blocks.*.attention.key": ColwiseParallel(),
        "blocks.*.attention.value": ColwiseParallel(),
        "blocks.*.attention.output": RowwiseParallel(output_layouts=between),
        "blocks.*.feed_forward.up": ColwiseParallel(input_layouts=between),
        "blocks.*.feed_forward.down": RowwiseParallel(output_layouts=between),
    }
    if sequence_parallel:
        transformer.position_multiple = mesh.size()
        plan |= {
            "blocks.0": PrepareModuleInput(
                input_layouts=(Replicate(), None), desired_input_layouts=(Shard(1), None), use_local_output=True
            ),
            "blocks.*.attention_norm": SequenceParallel(),
            "blocks.*.attention": PrepareModuleInput(
                input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
            ),
            "blocks.*.feed_forward_norm": SequenceParallel(),
            "norm": SequenceParallel(),
        }
    # All ranks have equal weights, so no weights need to be sent.
    parallelize_module(transformer, mesh, plan, src_data_rank=None)
    if sequence_parallel:
        whole = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
        parallelize_module(transformer.norm, mesh, whole)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> None:
    """Scale gradients so that their norm over the whole model is at most ``max_norm``.

    ``nn.utils.clip_grad_norm_`` accepts only parameters of one mesh, but layers divided along ``tp`` have a mesh of
    their own.
    """
    by_mesh: dict[DeviceMesh, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if isinstance(parameter.grad, DTensor):
            by_mesh[parameter.grad.device_mesh].append(parameter)
    norms = [
        nn.utils.get_total_norm([parameter.grad for parameter in group if parameter.grad is not None]).full_tensor()
        for group in by_mesh.values()
    ]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for group in by_mesh.values():
        nn.utils.clip_grads_with_norm_(group, max_norm, norm)
