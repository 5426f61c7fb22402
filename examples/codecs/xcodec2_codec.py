"""X-Codec-2 and NeuCodec from transformers: pip install 'sharmill[transformers]'

    encode:
      codecs:
        - {name: xcodec2, model: "python:xcodec2_codec:XCodec2:HKUSTAudio/xcodec2-hf"}
        - {name: neucodec, model: "python:xcodec2_codec:NeuCodec:neuphonic/neucodec"}

This needs the folder of this file on PYTHONPATH. The class name is followed by a name on the hub, or by a directory
with config.json, preprocessor_config.json and model.safetensors.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers import AutoFeatureExtractor, NeuCodecModel, Xcodec2Model

from sharmill.errors import ConfigError, one_line
from sharmill.models import ModelFamily
from sharmill.models.codec_backend import CodecBackend, CodecSpec
from sharmill.models.tensors import weights_checksum


@dataclass(frozen=True, kw_only=True)
class XCodec2(ModelFamily):
    """Family of X-Codec-2 models, named on the hub or by directory."""

    packages = ("transformers",)

    def load(self, device: str) -> CodecBackend:
        return _XCodec2(self.target, device)


@dataclass(frozen=True, kw_only=True)
class NeuCodec(XCodec2):
    """Family of NeuCodec models, named on the hub or by directory."""

    def load(self, device: str) -> CodecBackend:
        return _NeuCodec(self.target, device)


class _XCodec2(CodecBackend):
    """X-Codec-2 with one codebook for acoustic and semantic features. It decodes to the sampling rate of its input."""

    _model_class: ClassVar = Xcodec2Model
    # The feature extractor adds a sample of silence and then pads the audio to whole frames. Audio that already
    # consists of whole frames would get an extra frame, so its last sample is dropped first.
    _samples_left_out: ClassVar = 1

    def __init__(self, target: str, device: str) -> None:
        try:
            self._extractor = AutoFeatureExtractor.from_pretrained(target)
            model, report = self._model_class.from_pretrained(target, dtype=torch.float32, output_loading_info=True)
        except OSError as error:
            raise ConfigError(f"cannot load {target}: {one_line(error)}", code="bad_model") from error
        if missing := sorted(report["missing_keys"]):
            raise ConfigError(
                f"{target} lacks {len(missing)} weights of {self._model_class.__name__}, such as {missing[0]}; "
                "use a model that was saved by transformers",
                code="bad_model",
            )
        self._model = model.eval().to(device)
        rate, samples_per_frame = int(self._extractor.sampling_rate), int(self._extractor.hop_length)
        spec = CodecSpec(
            name=f"{model.config.model_type}:{target}",
            sampling_rate=rate,
            samples_per_frame=samples_per_frame,
            num_codebooks=1,
            codebook_size=len(model.quantizer.quantizer.codebook),
            checksum=weights_checksum(model.state_dict()),
            # The convolutions are not causal.
            equal_lengths_only=True,
            decoded_sampling_rate=rate * model.config.hop_length // samples_per_frame,
        )
        super().__init__(spec, device)

    def encode_frames(self, audio: torch.Tensor, num_frames: torch.Tensor) -> torch.Tensor:
        """Return the codes (batch, 1, frames)."""
        items = list(audio[:, : audio.shape[1] - self._samples_left_out].cpu())
        # The extractor makes numpy arrays on the CPU, and numpy has no bfloat16.
        with torch.autocast("cpu", enabled=False):
            features = self._extractor(items, sampling_rate=self.sampling_rate, return_tensors="pt")
        return self._model.encode(**features.to(self.device)).audio_codes

    def decode_frames(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the audio (1, samples) of the codes (1, 1, frames)."""
        return self._model.decode(codes).audio_values[:, 0]


class _NeuCodec(_XCodec2):
    """NeuCodec: X-Codec-2's layers with a decoder whose output has a rate of 24 kHz.

    Its semantic features have one frame fewer than the audio, so it needs the extra frame of silence that the extractor
    adds.
    """

    _model_class: ClassVar = NeuCodecModel
    _samples_left_out: ClassVar = 0
