"""A codec as a package of its own brings it: a family with an option, computed with a further package."""

from dataclasses import dataclass

from torch import Tensor

from sharmill.models import ModelFamily
from sharmill.models.codec_backend import CodecBackend, CodecSpec


@dataclass(frozen=True, kw_only=True)
class SteppedCodec(ModelFamily):
    """The peak of every 20 ms in steps."""

    packages = ("stepped-engine",)

    steps: int = 64
    """Number of steps from silence to full scale."""

    def load(self, device: str) -> CodecBackend:
        spec = CodecSpec(
            name=self.name, sampling_rate=16000, samples_per_frame=320, num_codebooks=1, codebook_size=self.steps,
            checksum=f"stepped-{self.steps}",
        )  # fmt: skip
        return _Stepped(spec, device)


class _Stepped(CodecBackend):
    def encode_frames(self, audio: Tensor, num_frames: Tensor) -> Tensor:
        peaks = audio.unflatten(1, (-1, self.samples_per_frame)).abs().amax(dim=2)
        return (peaks.clamp(0, 1) * (self.codebook_size - 1)).long()[:, None]
