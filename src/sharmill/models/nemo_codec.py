"""Codes of NeMo's AudioCodecModel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from sharmill.errors import ConfigError, first_line, is_device_error
from sharmill.models.codec_backend import CodecBackend, CodecSpec
from sharmill.models.cpu_hifigan import fit_hifigan_to_cpu
from sharmill.models.nemo import ENCODING_PARTS
from sharmill.models.tensors import find_reach, right_padding_matters, weights_checksum

if TYPE_CHECKING:
    from nemo.collections.tts.models import AudioCodecModel
    from torch import Tensor

_TRIED_FRAMES: Final = (1, 2, 4, 8, 16, 32)


class NemoCodecBackend(CodecBackend):
    """Codec made of an AudioCodecModel: its encoder, its quantizer and, where its weights are there, its decoder.

    The model's own ``encode`` pads again what is whole already and may resample; so its parts are called as they are.
    Causal encoders do not see the padding of a batch, the others do: this is found out when the model is loaded.
    """

    def __init__(self, model: AudioCodecModel, name: str, device: str) -> None:
        if model.vector_quantizer is None:
            raise ConfigError(f"{name} has no quantizer, so it has no codes: use another codec", code="bad_model")
        if model.semantic_codec is not None:
            raise ConfigError(
                f"{name} adds a second, semantic codec, which is not supported: use another codec", code="bad_model"
            )
        encoder = model.audio_encoder.eval().to(device)
        self._encoder = fit_hifigan_to_cpu(encoder) if device == "cpu" else encoder
        self._quantize = model.quantize
        self._dequantize = model.dequantize
        self._decoder = None if model.audio_decoder is None else model.audio_decoder.eval().to(device)
        model.vector_quantizer.eval().to(device)
        self.device = torch.device(device)
        frame = int(model.samples_per_frame)
        min_frames = self._find_min_frames(frame, name)
        short = max(4, min_frames) * frame
        weights = {key: value for key, value in model.state_dict().items() if key.startswith(ENCODING_PARTS)}
        spec = CodecSpec(
            name=name,
            sampling_rate=int(model.sample_rate),
            samples_per_frame=frame,
            num_codebooks=int(model.num_codebooks),
            codebook_size=int(model.codebook_size),
            checksum=weights_checksum(weights),
            equal_lengths_only=right_padding_matters(self._encoded, short, 3 * short),
            min_frames=min_frames,
            decoded_sampling_rate=None if self._decoder is None else int(model.output_sample_rate),
        )
        super().__init__(spec, device)

    def _find_min_frames(self, samples_per_frame: int, name: str) -> int:
        """Return the fewest frames, a power of two, that the encoder takes: mirror padding refuses shorter audio."""
        for num_frames in _TRIED_FRAMES:
            samples = num_frames * samples_per_frame
            try:
                self._encoded(torch.zeros(1, samples), torch.tensor([samples]))
            except RuntimeError as error:
                if is_device_error(error) or isinstance(error, torch.OutOfMemoryError):
                    raise
                refusal = error
            else:
                return num_frames
        raise ConfigError(
            f"{name} cannot encode {samples} samples: {first_line(refusal)}; use another codec", code="bad_model"
        )

    def find_reach(self) -> tuple[int, int] | None:
        return find_reach(lambda audio: self._encoded(audio, torch.tensor([audio.shape[1]])), self.samples_per_frame)

    def encode_frames(self, audio: Tensor, num_frames: Tensor) -> Tensor:
        encoded, encoded_len = self._encoder(audio=audio, audio_len=num_frames * self.samples_per_frame)
        return self._quantize(encoded=encoded, encoded_len=encoded_len)

    def decode_frames(self, codes: Tensor) -> Tensor:
        assert self._decoder is not None
        num_frames = torch.tensor([codes.shape[2]], device=codes.device)
        audio, _ = self._decoder(inputs=self._dequantize(tokens=codes, tokens_len=num_frames), input_len=num_frames)
        return audio

    @torch.no_grad()
    def _encoded(self, audio: Tensor, num_samples: Tensor) -> Tensor:
        encoded, _ = self._encoder(audio=audio.to(self.device), audio_len=num_samples.to(self.device))
        return encoded.float().cpu()
