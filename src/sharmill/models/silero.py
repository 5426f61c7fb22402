"""The voice activity detector of the package silero-vad, with many frames in one pass of its network.

The package's own model takes one frame per call. Only its weights are used: the package is not imported, because the
import changes the number of torch's threads. The network follows the package's ``tinygrad_model.py``: a spectrum, four
convolutions and an LSTM (https://github.com/snakers4/silero-vad). The weights are read from ``silero_vad.jit``, because
the wheel's safetensors file contains another version, which gives other probabilities.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from sharmill.models.hub import packaged_file
from sharmill.models.tensors import loading, weights_checksum
from sharmill.registry import require_package

SAMPLING_RATE: Final = 16000
FRAME_SAMPLES: Final = 512
# Number of samples of the previous frame before each frame, and of mirrored samples after it.
_CONTEXT: Final = 64
# Frames in one pass, about a minute; longer audio takes several passes, which bounds the memory.
_MAX_FRAMES: Final = 2048


class _Network(nn.Module):
    """The layers of the model at 16 kHz."""

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 258, 256, stride=128, bias=False)
        self.conv1 = nn.Conv1d(129, 128, 3, padding=1)
        self.conv2 = nn.Conv1d(128, 64, 3, stride=2, padding=1)
        self.conv3 = nn.Conv1d(64, 64, 3, stride=2, padding=1)
        self.conv4 = nn.Conv1d(64, 128, 3, padding=1)
        self.lstm = nn.LSTM(128, 128)
        self.final_conv = nn.Conv1d(128, 1, 1)

    def forward(self, frames: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Map frames (frames, context + samples) and the LSTM's state to probabilities (frames,) and the next state."""
        spectra = self.stft_conv(functional.pad(frames, (0, _CONTEXT), mode="reflect")[:, None])
        values = (spectra[:, :129].square() + spectra[:, 129:].square()).sqrt()
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            values = conv(values).relu()
        hidden, state = self.lstm(values.transpose(1, 2), state)
        return self.final_conv(hidden.relu().transpose(1, 2)).sigmoid().flatten(), state


@dataclass
class VadState:
    """The state of the detector after a part of the audio.

    Attributes:
        context: the last samples of the part, (64,) float32.
        hidden: the state of the LSTM; None before the first frame.
    """

    context: np.ndarray = field(default_factory=lambda: np.zeros(_CONTEXT, np.float32))
    hidden: tuple[Tensor, Tensor] | None = None


class SileroVad:
    """The detector for audio at 16 kHz, with the same probabilities as the package's model.

    Args:
        device: the torch device of the model.

    Attributes:
        checksum: the xxh3 (hex) of the weights.

    Raises:
        ConfigError: the package is missing (the message names the extra ``vad``), or its weights are missing or
            damaged.
    """

    def __init__(self, device: str = "cpu") -> None:
        require_package("silero_vad")
        path = packaged_file("silero-vad", "silero_vad/data/silero_vad.jit")
        with torch.random.fork_rng(devices=[]):
            network = _Network()
        with loading("silero-vad", OSError, RuntimeError, ValueError):
            stored = torch.jit.load(str(path), map_location="cpu").state_dict()
            # In this file, the layers have other names, but the same order.
            weights = [tensor for name, tensor in stored.items() if name.startswith("_model.")]
            network.load_state_dict(dict(zip(network.state_dict(), weights, strict=True)))
        self.checksum = weights_checksum(network.state_dict())
        self._network = network.eval().to(device)
        self._device = device

    @torch.inference_mode()
    def speech_probabilities(self, samples: np.ndarray, state: VadState | None = None) -> np.ndarray:
        """Return the probability of speech in each frame of 512 samples (32 ms).

        Args:
            samples: (samples,) float32 at 16 kHz, of any length; the last frame is padded with zeros.
            state: the state after the previous part of the audio; it is updated. By default, the audio begins here.

        Returns:
            (ceil(samples / 512),) float32.
        """
        state = state or VadState()
        filled = np.pad(samples.astype(np.float32, copy=False), (0, -len(samples) % FRAME_SAMPLES))
        audio = np.concatenate((state.context, filled))
        found = [np.zeros(0, np.float32)]
        if len(filled):
            frames = torch.from_numpy(audio).unfold(0, _CONTEXT + FRAME_SAMPLES, FRAME_SAMPLES)
            for part in frames.split(_MAX_FRAMES):
                values, state.hidden = self._network(part.to(self._device), state.hidden)
                found.append(values.cpu().numpy())
        state.context = audio[-_CONTEXT:].copy()
        return np.concatenate(found)
