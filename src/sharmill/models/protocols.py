"""The two protocols of models, of a speaker encoder (stage match) and of a codec (stage encode), and their batches.

Decoding, resampling and the batching over a unit are the callers'; a backend gets float32 audio at its own
sampling rate, and its results do not depend on what else is in the batch (beyond the noise of float arithmetic).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class SpeakerEncoder(Protocol):
    """A model that turns utterances into vectors whose cosine similarity says how alike the voices are.

    Attributes:
        sampling_rate: rate of the audio that ``embed`` expects, in Hz.
        embedding_size: number of values in an embedding.
        checksum: xxh3 (hex) over the model's parameters and saved buffers, in the order of their names.
    """

    sampling_rate: int
    embedding_size: int
    checksum: str

    def embed(self, audio: Tensor, num_samples: Tensor) -> Tensor:
        """Embed a batch of utterances.

        Args:
            audio: (batch, samples) float32; what lies beyond an item's ``num_samples`` is ignored.
            num_samples: (batch,) int64, the length of each item in samples.

        Returns:
            (batch, embedding_size) float32, on the CPU or on the model's device. Every row has length 1, except that
            digital silence (all samples zero) has no voice and gives the zero vector: its similarity to everything,
            itself included, is 0.

        Raises:
            ValueError: for shapes that do not fit together.
        """
        ...


@runtime_checkable
class Codec(Protocol):
    """A model that turns audio into discrete codes.

    Attributes:
        sampling_rate: rate of the audio that ``encode`` expects, in Hz.
        samples_per_frame: samples of audio in one frame of codes.
        num_codebooks: number of codes per frame.
        codebook_size: every code is in ``range(codebook_size)``.
        checksum: xxh3 (hex) over the parameters and saved buffers, in the order of their names.
        trained: False for a model whose codes mean nothing.
        equal_lengths_only: True if padding on the right changes an item's codes. The backend then encodes only items
            with the same number of frames together, so that a caller who batches them by it loses no speed.
    """

    sampling_rate: int
    samples_per_frame: int
    num_codebooks: int
    codebook_size: int
    checksum: str
    trained: bool
    equal_lengths_only: bool

    def encode(self, audio: Tensor, num_samples: Tensor) -> Tensor:
        """Encode a batch of segments.

        An item of n samples has exactly ``ceil(n / samples_per_frame)`` frames: its last frame is filled up with
        zeros before the model sees it.

        Args:
            audio: (batch, samples) float32; what lies beyond an item's ``num_samples`` is ignored.
            num_samples: (batch,) int64, the length of each item in samples.

        Returns:
            (batch, num_codebooks, max_frames) int64 on the CPU, 0 beyond an item's last frame.

        Raises:
            ValueError: for shapes that do not fit together.
            FatalError: the model gives another number of frames.
            UnitFailed: it gives an index outside its codebook, as of values that are not finite.
        """
        ...


@runtime_checkable
class DecodingCodec(Codec, Protocol):
    """A codec that also turns codes into audio.

    Attributes:
        decoded_sampling_rate: rate of the audio that ``decode`` gives, in Hz; None if this model cannot decode.
    """

    decoded_sampling_rate: int | None

    def decode(self, codes: Tensor, num_frames: Tensor) -> Tensor:
        """Turn codes into audio. Each item is decoded alone, so that it does not depend on its batch.

        Args:
            codes: (batch, num_codebooks, frames) integers; what lies beyond an item's ``num_frames`` is ignored.
            num_frames: (batch,) int64, the length of each item in frames.

        Returns:
            (batch, samples) float32 on the CPU, at ``decoded_sampling_rate``; 0 beyond an item's last frame.

        Raises:
            ValueError: for shapes that do not fit together, or codes outside the codebook.
            ConfigError: if this model cannot decode.
        """
        ...


def padded_batches(lengths: Sequence[float], max_padded: float, *, equal_only: bool = False) -> list[list[int]]:
    """Return the indices of the items in batches, sorted by length, so that little is padded.

    A batch's number of items times its longest is at most ``max_padded``; an item that is longer is alone.
    ``equal_only`` puts only items of the same length together.
    """
    batches: list[list[int]] = []
    longest = 0.0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = bool(batches) and (len(batches[-1]) + 1) * longest <= max_padded
        if fits and (not equal_only or lengths[index] == longest):
            batches[-1].append(index)
        else:
            batches.append([index])
            longest = lengths[index]
    return batches


def pad(
    items: Sequence[np.ndarray], *, at_least: tuple[int, int] = (0, 0), pinned: bool = False
) -> tuple[Tensor, Tensor]:
    """Return arrays (samples,) as one zero-padded float32 tensor (batch, samples), and their lengths (items,).

    Args:
        at_least: rows and samples of a larger batch.
        pinned: for a model on a GPU: its copies need not wait then, and torch uses such memory again.
    """
    import torch

    lengths = torch.tensor([len(item) for item in items], dtype=torch.int64)
    shape = max(len(items), at_least[0]), max(int(lengths.max()), at_least[1])
    padded = torch.zeros(shape, dtype=torch.float32, pin_memory=pinned)
    for row, item in zip(padded, items, strict=False):
        row[: len(item)] = torch.from_numpy(item)
    return padded, lengths
