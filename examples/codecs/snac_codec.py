"""SNAC, whose codebooks have different frame rates: pip install snac

    encode:
      codecs: [{name: snac, model: "python:snac_codec:SnacCodec:hubertsiuzdak/snac_24khz"}]

This needs the folder of this file on PYTHONPATH. The class name is followed by a name on the hub, or by a directory
with config.json and pytorch_model.bin.
"""

from dataclasses import dataclass

import torch
from snac import SNAC

from sharmill.models import ModelFamily
from sharmill.models.codec_backend import CodecBackend, CodecSpec
from sharmill.models.tensors import weights_checksum


@dataclass(frozen=True, kw_only=True)
class SnacCodec(ModelFamily):
    """Family of SNAC models, named on the hub or by directory."""

    packages = ("snac",)

    def load(self, device: str) -> CodecBackend:
        return _Snac(self.target, device)


class _Snac(CodecBackend):
    """SNAC with one frame per code of its slowest level.

    The levels have 1, 2, 4 (and 8) codes per frame, each of which becomes a row of the output. Row 0 is the slowest
    level, rows 1 and 2 are consecutive codes of the next level, and so on. All codebooks have the same size.
    """

    def __init__(self, target: str, device: str) -> None:
        self._model = SNAC.from_pretrained(target).eval().to(device)
        strides = self._model.vq_strides
        spec = CodecSpec(
            name=f"snac:{target}",
            sampling_rate=int(self._model.sampling_rate),
            samples_per_frame=int(self._model.hop_length) * strides[0],
            num_codebooks=sum(strides[0] // stride for stride in strides),
            codebook_size=int(self._model.codebook_size),
            checksum=weights_checksum(self._model.state_dict()),
            # SNAC's convolutions are not causal.
            equal_lengths_only=True,
        )
        super().__init__(spec, device)

    def encode_frames(self, audio: torch.Tensor, num_frames: torch.Tensor) -> torch.Tensor:
        """Return the codes (batch, rows, frames), without the frames that result from SNAC's own padding."""
        width = audio.shape[1] // self.samples_per_frame
        levels = self._model.encode(audio[:, None, :])
        per_frame = [self._model.vq_strides[0] // stride for stride in self._model.vq_strides]
        rows = [
            level[:, : width * count].unflatten(1, (width, count)).transpose(1, 2)
            for level, count in zip(levels, per_frame, strict=True)
        ]
        return torch.cat(rows, dim=1)
