"""The speaker encoder of the resemblyzer package, with batches.

resemblyzer's ``VoiceEncoder.embed_utterance`` takes one utterance at a time. Here the partial utterances of a whole
batch pass through the network together. The weights come from the package, but its code is not imported, because that
would also import webrtcvad and pkg_resources for a voice detector that is not needed.

The method (partial utterances of 1.6 s, a mel spectrogram, a three-layer LSTM, the mean of the normalised partial
embeddings) was published by Wan et al., Generalized End-to-End Loss for Speaker Verification, https://arxiv.org/abs/1710.10467.
"""

import math
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from sharmill.models.hub import packaged_file
from sharmill.models.tensors import fit_length, move_batch, unit_embeddings, weights_checksum

# Values of resemblyzer.hparams, and defaults of embed_utterance.
_SAMPLING_RATE: Final = 16000
_WINDOW: Final = 400
_HOP: Final = 160
_NUM_MELS: Final = 40
_HIDDEN_SIZE: Final = 256
_NUM_LAYERS: Final = 3
_PARTIAL_FRAMES: Final = 160
_PARTIALS_PER_SECOND: Final = 1.3
_MIN_COVERAGE: Final = 0.75

# Number of partial utterances in each pass of the network. On a CPU, 32 is the fastest of 1 to 1024; on a GPU, larger
# numbers are faster.
_CPU_PARTIALS: Final = 32
_GPU_PARTIALS: Final = 1024


class _Network(nn.Module):
    """The layers of resemblyzer's VoiceEncoder, with the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(_NUM_MELS, _HIDDEN_SIZE, _NUM_LAYERS, batch_first=True)
        self.linear = nn.Linear(_HIDDEN_SIZE, _HIDDEN_SIZE)

    def forward(self, mels: Tensor) -> Tensor:
        """Map (partials, frames, mels) to (partials, embedding_size); each row has length 1, or is zero."""
        _, (hidden, _) = self.lstm(mels)
        return functional.normalize(torch.relu(self.linear(hidden[-1])), dim=1)


class ResemblyzerEncoder:
    """The speaker encoder of resemblyzer, with the results of ``VoiceEncoder.embed_utterance`` except for silence."""

    def __init__(self, device: str = "cpu") -> None:
        self.sampling_rate = _SAMPLING_RATE
        self.embedding_size = _HIDDEN_SIZE
        self.device = torch.device(device)
        with torch.random.fork_rng(devices=[]):
            network = _Network()
        network.load_state_dict(_read_weights())
        self.checksum = weights_checksum(network.state_dict())
        self._network = network.eval().to(self.device)
        self._window = torch.hann_window(_WINDOW, device=self.device)
        self._filters = torch.from_numpy(mel_filters()).to(self.device)

    def embed(self, audio: Tensor, num_samples: Tensor) -> Tensor:
        """Embed a batch of utterances; see ``SpeakerEncoder.embed``."""
        audio, there, num_samples = move_batch(audio, num_samples, self.device)
        if not len(audio):
            return torch.zeros(0, self.embedding_size, device=self.device)
        starts = [partial_starts(n) for n in num_samples.tolist()]
        length = (max(s[-1] for s in starts) + _PARTIAL_FRAMES) * _HOP
        audio = fit_length(audio, there, max(length, audio.shape[1]))
        with torch.inference_mode():
            partials = self._partials(self._mels(audio), starts)
            size = _CPU_PARTIALS if self.device.type == "cpu" else _GPU_PARTIALS
            embedded = torch.cat([self._network(part) for part in partials.split(size)])
            means = [part.mean(dim=0) for part in embedded.split([len(s) for s in starts])]
            embeddings = unit_embeddings(torch.stack(means), audio)
        return embeddings.clone()

    def _mels(self, audio: Tensor) -> Tensor:
        """Return the mel spectrogram (batch, frames, mels) of audio (batch, samples), as librosa computes it."""
        spectra = torch.stft(
            audio, _WINDOW, _HOP, window=self._window, center=True, pad_mode="constant", return_complex=True
        )
        power = spectra.real.square() + spectra.imag.square()
        return (self._filters @ power).transpose(1, 2)

    def _partials(self, mels: Tensor, starts: list[list[int]]) -> Tensor:
        """Return the partial utterances of all items: (partials, _PARTIAL_FRAMES, mels)."""
        items = torch.tensor([item for item, own in enumerate(starts) for _ in own], device=mels.device)
        first = torch.tensor([start for own in starts for start in own], device=mels.device)
        frames = first[:, None] + torch.arange(_PARTIAL_FRAMES, device=mels.device)
        return mels[items[:, None], frames]


def mel_filters(num_mels: int = _NUM_MELS, size: int = _WINDOW) -> NDArray[np.float32]:
    """Return mel filters (mels, frequencies) for audio at 16 kHz, bit-identical to ``librosa.filters.mel``.

    By default, they are those of resemblyzer; ``size`` is the length of the FFT. Importing librosa would open two
    thousand files. The scale is Slaney's: linear below 1 kHz, and logarithmic above it with 27 steps for each factor
    of 6.4.
    """
    linear, step, above = 200.0 / 3, np.log(6.4) / 27.0, 1000.0
    last = above / linear + np.log(_SAMPLING_RATE / 2 / above) / step
    mels = np.linspace(0.0, last, num_mels + 2)
    edges = linear * mels
    is_above = mels >= above / linear
    edges[is_above] = above * np.exp(step * (mels[is_above] - above / linear))
    ramps = np.subtract.outer(edges, np.fft.rfftfreq(size, 1.0 / _SAMPLING_RATE))
    widths = np.diff(edges)[:, None]
    filters = np.maximum(0, np.minimum(-ramps[:-2] / widths[:-1], ramps[2:] / widths[1:])).astype(np.float32)
    filters *= (2.0 / (edges[2:] - edges[:-2]))[:, None]
    return filters


def partial_starts(num_samples: int) -> list[int]:
    """Return the first mel frame of each partial utterance, as resemblyzer's ``compute_partial_slices`` does.

    The last partial utterance is dropped if the utterance covers less than ``_MIN_COVERAGE`` of it, unless it is the
    only one.
    """
    num_frames = math.ceil((num_samples + 1) / _HOP)
    step = round(_SAMPLING_RATE / _PARTIALS_PER_SECOND / _HOP)
    starts = list(range(0, max(1, num_frames - _PARTIAL_FRAMES + step + 1), step))
    coverage = (num_samples - starts[-1] * _HOP) / (_PARTIAL_FRAMES * _HOP)
    if coverage < _MIN_COVERAGE and len(starts) > 1:
        starts.pop()
    return starts


def _read_weights() -> dict[str, Tensor]:
    path = packaged_file("resemblyzer", "resemblyzer/pretrained.pt")
    state = torch.load(path, map_location="cpu", weights_only=True)["model_state"]
    # The checkpoint also contains two scalars that belong to the training loss.
    return {name: tensor for name, tensor in state.items() if name.startswith(("lstm.", "linear."))}
