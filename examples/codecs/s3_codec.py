"""S3 tokenizers, the speech tokens of CosyVoice: pip install s3tokenizer

    encode:
      codecs: [{name: s3, model: "python:s3_codec:S3Codec:speech_tokenizer_v2_25hz"}]

This needs the folder of this file on PYTHONPATH. The class name is followed by speech_tokenizer_v1 (50 Hz),
speech_tokenizer_v1_25hz (CosyVoice) or speech_tokenizer_v2_25hz (CosyVoice 2). The package downloads the model from
ModelScope to ~/.cache/s3tokenizer, or $XDG_CACHE_HOME/s3tokenizer, and verifies its checksum on later use.
"""

from dataclasses import dataclass
from pathlib import Path

import s3tokenizer
import torch

from sharmill.errors import ConfigError, UnitFailed, one_line
from sharmill.models import ModelFamily
from sharmill.models.codec_backend import CodecBackend, CodecSpec
from sharmill.models.tensors import weights_checksum

# Samples per frame, for audio at 16 kHz.
_MODELS = {"speech_tokenizer_v1": 320, "speech_tokenizer_v1_25hz": 640, "speech_tokenizer_v2_25hz": 640}
# The package splits longer audio into overlapping windows, and loses codes if the last window is shorter than 4 s.
_MOST_SECONDS = 30


@dataclass(frozen=True, kw_only=True)
class S3Codec(ModelFamily):
    """Family of S3 tokenizers, named as in the package."""

    packages = ("s3tokenizer",)

    def resolve(self) -> Path | None:
        if self.target not in _MODELS:
            # The package also accepts paths, but would read speech_tokenizer_v1_25hz by path as a 50 Hz model.
            raise ConfigError(
                f"there is no S3 tokenizer {self.target!r}; use one of {', '.join(_MODELS)}", code="unknown_name"
            )
        return super().resolve()

    def load(self, device: str) -> CodecBackend:
        self.resolve()
        return _S3(self.target, device)


class _S3(CodecBackend):
    """S3 tokenizer with one codebook for the spoken content. It has no decoder, and accepts at most 30 s of audio."""

    def __init__(self, target: str, device: str) -> None:
        try:
            model = s3tokenizer.load_model(target)
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"cannot load {target}: {one_line(error)}", code="bad_model") from error
        self._model = model.eval().to(device)
        spec = CodecSpec(
            name=f"s3:{target}",
            sampling_rate=16000,
            samples_per_frame=_MODELS[target],
            num_codebooks=1,
            codebook_size=self._model.config.n_codebook_size,
            checksum=weights_checksum(self._model.state_dict()),
        )
        super().__init__(spec, device)

    def encode_frames(self, audio: torch.Tensor, num_frames: torch.Tensor) -> torch.Tensor:
        """Return the codes (batch, 1, frames); each item has its own spectrogram, and the model masks padding."""
        lengths = (num_frames * self.samples_per_frame).tolist()
        if max(lengths) > _MOST_SECONDS * self.sampling_rate:
            raise UnitFailed(
                f"{self.spec.name} takes at most {_MOST_SECONDS} s, but a segment has "
                f"{max(lengths) / self.sampling_rate:.2f} s; set prepare.max_duration={_MOST_SECONDS}",
                code="bad_config_value",
            )
        # The spectrogram would differ in bfloat16.
        with torch.autocast(self.device.type, enabled=False):
            mels = [
                s3tokenizer.log_mel_spectrogram(item[:length], self._model.config.n_mels)
                for item, length in zip(audio, lengths, strict=True)
            ]
            padded, mel_lengths = s3tokenizer.padding(mels)
        return self._model(padded, mel_lengths.to(self.device))[0][:, None]
