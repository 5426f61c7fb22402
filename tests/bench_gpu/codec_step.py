"""Training step for ``sharmill tune-batch --step``: reconstruction by a NeMo codec, without discriminators."""

import os

import torch
from torch.nn.functional import l1_loss

# This variable names the .nemo file of the codec, because user steps are created without arguments.
CODEC_FILE = "BENCH_CODEC"


class CodecStep:
    """Training steps of the codec in the variable ``BENCH_CODEC``."""

    def __init__(self) -> None:
        from nemo.collections.tts.models import AudioCodecModel

        self._model = AudioCodecModel.restore_from(os.environ[CODEC_FILE], map_location="cpu").train()
        parts = (self._model.audio_encoder, self._model.vector_quantizer, self._model.audio_decoder)
        self._optimizer = torch.optim.AdamW([weight for part in parts for weight in part.parameters()], lr=1e-4)

    def __call__(self, batch_size: int, length: float, num_tokens: int | None, device: str) -> None:
        """Run one step on ``length`` seconds of noise, rounded to whole frames of the codec."""
        model, frame = self._model.to(device), self._model.samples_per_frame
        num_samples = max(1, round(length * self._model.sample_rate / frame)) * frame
        audio = torch.randn(batch_size, num_samples, device=device)
        encoded, lengths = model.audio_encoder(
            audio=audio, audio_len=torch.full((batch_size,), num_samples, device=device)
        )
        encoded, _ = model.vector_quantizer(inputs=encoded, input_len=lengths)
        decoded, _ = model.audio_decoder(inputs=encoded, input_len=lengths)
        self._optimizer.zero_grad(set_to_none=True)
        l1_loss(decoded[:, :num_samples], audio).backward()
        self._optimizer.step()
