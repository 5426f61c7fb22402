"""Add the codes of your own codec to a finished dataset.

python examples/own_codec.py CONFIG

This codec only measures loudness. Its codes are in ``codes_level`` of the dataset, beside the codes of other codecs.
"""

import sys
from dataclasses import dataclass

import torch

from sharmill.config import load_config
from sharmill.engine.executor import Listener
from sharmill.models import ModelFamily
from sharmill.models.codec_backend import CodecBackend, CodecSpec
from sharmill.pipeline import run_dataset


@dataclass(frozen=True, kw_only=True)
class LevelCodec(ModelFamily):
    """Family of the codec, with its options. A codec that needs packages besides torch lists them in ``packages``."""

    levels: int = 64
    """Number of levels; a configuration sets this key next to ``model``."""

    def load(self, device: str) -> CodecBackend:
        return _Level(self.levels, device)


class _Level(CodecBackend):
    """Codec with one code per 20 ms of audio: the level of its peak."""

    def __init__(self, levels: int, device: str) -> None:
        # A real codec loads its weights here and uses their checksum, because the codes depend on the weights.
        spec = CodecSpec(
            name="level",
            sampling_rate=16000,
            samples_per_frame=320,
            num_codebooks=1,
            codebook_size=levels,
            checksum=f"level-{levels}",
        )
        super().__init__(spec, device)

    def encode_frames(self, audio: torch.Tensor, num_frames: torch.Tensor) -> torch.Tensor:
        """Return the codes (batch, 1, frames) of samples (batch, frames * 320); the base class forms batches."""
        peaks = audio.unflatten(1, (-1, self.samples_per_frame)).abs().amax(dim=2)
        return (peaks.clamp(max=1.0) * (self.codebook_size - 1)).long().unsqueeze(1)


def main(path: str) -> int:
    # In a YAML file: codecs: [{name: level, model: "python:own_codec:LevelCodec"}], with this folder on PYTHONPATH.
    config = load_config(path, ["encode.codecs=[{name: level, model: 'python:own_codec:LevelCodec'}]"])
    return 0 if run_dataset(config, Listener(), stages=["encode"]).ok else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
