"""The part of codecs that all backends share: padding to whole frames, forming safe batches, and checking the codes.

A backend sets the attributes of ``Codec`` and implements ``encode_frames`` for a batch of whole frames. A backend that
can decode also sets ``decoded_sampling_rate`` and implements ``decode_frames``.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sharmill.errors import ConfigError, FatalError, UnitFailed
from sharmill.models.batches import padded_batches
from sharmill.models.device import fit_batch_seconds
from sharmill.models.tensors import fit_length, move_batch

# Minimum number of frames for decoders with mirror padding. The last frame of a shorter item is repeated.
_MIN_DECODED_FRAMES = 16


@dataclass(eq=False, kw_only=True)
class CodecSpec:
    """Facts about a codec; the other fields are documented in the ``Codec`` protocol.

    Args:
        name: the name of the model in messages.
        min_frames_in_batch: items with fewer frames than this share a batch only with items of equal length, because
            padding changes their codes; 0 if padding never does.
        min_frames: the minimum number of frames that the model accepts. Shorter items are padded with silence, and only
            the codes of their own frames are kept.
        decoded_sampling_rate: the rate of decoded audio in Hz; None if the codec cannot decode.
    """

    name: str
    sampling_rate: int
    samples_per_frame: int
    num_codebooks: int
    codebook_size: int
    checksum: str
    trained: bool = True
    equal_lengths_only: bool = False
    min_frames_in_batch: int = 0
    min_frames: int = 1
    decoded_sampling_rate: int | None = None


class CodecBackend(CodecSpec, ABC):
    """Base class of codec backends, including those of other packages; implements ``DecodingCodec``."""

    def __init__(self, spec: CodecSpec, device: str) -> None:
        super().__init__(**vars(spec))
        self.spec = spec
        self.device = torch.device(device)

    @abstractmethod
    def encode_frames(self, audio: Tensor, num_frames: Tensor) -> Tensor:
        """Encode whole frames.

        Args:
            audio: (batch, max_frames * samples_per_frame) float32 on the model's device, zero beyond each item.
            num_frames: (batch,) int64 on the model's device.

        Returns:
            (batch, num_codebooks, max_frames) integers; codes beyond an item's frames are ignored.
        """

    def find_reach(self) -> tuple[int, int] | None:
        """Return the numbers of preceding and following frames that can affect the codes of a frame.

        The numbers hold for any audio. Return None if codes may depend on all of the audio, or if the backend does not
        implement this method.
        """
        return None

    def encode(self, audio: Tensor, num_samples: Tensor) -> Tensor:
        """Encode a batch of segments; see ``Codec.encode``."""
        # ``there`` is the copy of ``num_samples`` on the device, which is needed for masks.
        audio, there, num_samples = move_batch(audio, num_samples, self.device)
        num_frames = (num_samples + self.samples_per_frame - 1) // self.samples_per_frame
        max_frames = int(num_frames.max()) if len(num_frames) else 0
        codes = torch.zeros(len(audio), self.num_codebooks, max_frames, dtype=torch.int64)
        for rows in self._batches(num_frames):
            width = int(num_frames[rows].max())
            length = max(width, self.spec.min_frames) * self.samples_per_frame
            whole = fit_length(audio[rows], there[rows], length)
            codes[rows, :, :width] = self._encode_checked(whole, num_frames[rows])[:, :, :width]
        return codes

    def decode_frames(self, codes: Tensor) -> Tensor:
        """Decode one item; backends that set ``decoded_sampling_rate`` implement this.

        Args:
            codes: (1, num_codebooks, frames) int64 on the model's device.

        Returns:
            (1, samples) float32, up to a few samples longer or shorter than the frames.
        """
        raise NotImplementedError

    def decode(self, codes: Tensor, num_frames: Tensor) -> Tensor:
        """Turn codes into audio; see ``DecodingCodec.decode``."""
        if (rate := self.decoded_sampling_rate) is None:
            raise ConfigError(f"codec {self.spec.name} cannot turn codes into audio", code="no_decoder")
        if codes.ndim != 3 or codes.shape[1] != self.num_codebooks or num_frames.shape != codes.shape[:1]:
            raise ValueError(
                f"expected codes (batch, {self.num_codebooks}, frames) and num_frames (batch,), got "
                f"{tuple(codes.shape)} and {tuple(num_frames.shape)}"
            )
        lengths = num_frames.tolist()
        if lengths and not 0 <= min(lengths) <= max(lengths) <= codes.shape[2]:
            raise ValueError(f"num_frames must be between 0 and {codes.shape[2]}, the length of the padded codes")
        audio = torch.zeros(len(codes), max(lengths, default=0) * self.samples_per_frame * rate // self.sampling_rate)
        for row, item, length in zip(audio, codes.long(), lengths, strict=True):
            if length:
                num_samples = length * self.samples_per_frame * rate // self.sampling_rate
                decoded = self._decoded(item[:, :length])[:num_samples]
                row[: len(decoded)] = decoded
        return audio

    def _decoded(self, codes: Tensor) -> Tensor:
        """Return the audio (samples,) of codes (codebooks, frames)."""
        low, high = int(codes.min()), int(codes.max())
        if low < 0 or high >= self.codebook_size:
            raise ValueError(f"codes range from {low} to {high}, outside the codebook of {self.codebook_size} entries")
        missing = _MIN_DECODED_FRAMES - codes.shape[1]
        if missing > 0:
            codes = torch.cat([codes, codes[:, -1:].expand(-1, missing)], dim=1)
        with torch.inference_mode():
            return self.decode_frames(codes[None].to(self.device))[0].float().cpu()

    def _batches(self, num_frames: Tensor) -> Iterator[Tensor]:
        """Yield the row numbers of items to encode together; items without a frame are left out."""
        frames = num_frames.tolist()
        rows = [row for row, number in enumerate(frames) if number]
        for batch in padded_batches(
            [frames[row] for row in rows],
            fit_batch_seconds(math.inf, self.device.type) * self.sampling_rate / self.samples_per_frame,
            equal_below=math.inf if self.equal_lengths_only else self.spec.min_frames_in_batch,
        ):
            yield torch.tensor(sorted((rows[index] for index in batch), key=lambda row: frames[row]))

    def _encode_checked(self, audio: Tensor, num_frames: Tensor) -> Tensor:
        """Return the validated codes (batch, codebooks, frames) of whole frames, 0 beyond each item's end."""
        width = audio.shape[1] // self.samples_per_frame
        with torch.inference_mode():
            codes = self.encode_frames(audio.to(self.device), num_frames.to(self.device)).cpu()
        expected = (len(audio), self.num_codebooks, width)
        if tuple(codes.shape) != expected:
            raise FatalError(
                f"codec {self.spec.name} returned codes of shape {tuple(codes.shape)} instead of (items, codebooks, "
                f"frames) {expected} for {width} frames of {self.samples_per_frame} samples",
                code="bad_codes",
            )
        codes = codes.masked_fill(torch.arange(width)[None, None, :] >= num_frames[:, None, None], 0)
        low, high = codes.min().item(), codes.max().item()
        # The condition is written so that it also holds for NaN, for which both comparisons are false.
        if not (low >= 0 and high < self.codebook_size):
            raise UnitFailed(
                f"codec {self.spec.name} returned indices from {low} to {high}, but has only {self.codebook_size}",
                code="bad_codes",
            )
        return codes.long()
