"""Models of real size with random weights, made of torch and transformers alone, and small ones for a CPU.

NeMo's own cannot be had without NeMo. The speaker encoder has the layers and sizes of TitaNet-large, and the codec is
sharmill's encoder of NeMo's kind of codec, in the sizes of that for 22 kHz with 21.5 frames a second.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch
import torchaudio
import yaml
from torch import Tensor, nn

from sharmill.models.families import UNTRAINED_CONFIG
from sharmill.models.protocols import Codec
from sharmill.models.shipped_codecs import load_untrained_codec
from sharmill.models.tensors import check_batch, fit_length, unit_embeddings, weights_checksum

ENCODER = "speaker encoder in TitaNet-large's sizes"
CODEC = "codec of NeMo's kind and size"
# Filters of the convolutions, values of the last, and channels of the first layer of the codec.
REAL = {"filters": 1024, "last_filters": 3072, "channels": 48}
SMALL = {"filters": 64, "last_filters": 128, "channels": 2}


class _Squeeze(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(channels, channels // 8), nn.ReLU(), nn.Linear(channels // 8, channels), nn.Sigmoid()
        )

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        mean = values.sum(dim=2) / mask.sum(dim=2)
        return values * self.layers(mean)[:, :, None]


class _Block(nn.Module):
    """Separable convolutions, each masked, with squeeze and excitation at the end."""

    def __init__(self, inputs: int, outputs: int, kernel: int, repeat: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList()
        for number in range(repeat):
            channels = outputs if number else inputs
            depthwise = nn.Conv1d(channels, channels, kernel, padding=kernel // 2, groups=channels, bias=False)
            pointwise = nn.Conv1d(channels, outputs, 1, bias=False)
            self.convolutions.append(nn.ModuleList([depthwise, pointwise, nn.BatchNorm1d(outputs)]))
        self.squeeze = _Squeeze(outputs)
        self.residual = None
        if repeat > 1:
            self.residual = nn.Sequential(nn.Conv1d(inputs, outputs, 1, bias=False), nn.BatchNorm1d(outputs))

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        added = values
        for number, (depthwise, pointwise, norm) in enumerate(self.convolutions):
            added = torch.relu(added) if number else added
            added = norm(pointwise(depthwise(added * mask) * mask))
        added = self.squeeze(added * mask, mask)
        return torch.relu(added if self.residual is None else added + self.residual(values * mask))


class _TitanetLayers(nn.Module):
    def __init__(self, filters: int, last_filters: int) -> None:
        super().__init__()
        # Behind an item's end there is silence, alone as in a batch.
        self.mel = torchaudio.transforms.MelSpectrogram(
            16000, n_fft=512, win_length=400, hop_length=160, n_mels=80, pad_mode="constant"
        )
        shapes = [(80, filters, 3, 1), *((filters, filters, size, 3) for size in (7, 11, 15))]
        self.blocks = nn.ModuleList(_Block(*shape) for shape in [*shapes, (filters, last_filters, 1, 1)])
        self.attention = nn.Sequential(
            nn.Conv1d(3 * last_filters, 128, 1), nn.ReLU(), nn.BatchNorm1d(128), nn.Tanh(),
            nn.Conv1d(128, last_filters, 1),
        )  # fmt: skip
        self.embedding = nn.Sequential(nn.BatchNorm1d(2 * last_filters), nn.Linear(2 * last_filters, 192))

    def forward(self, audio: Tensor, num_samples: Tensor) -> Tensor:
        values = torch.log(self.mel(audio) + 2**-24)
        lengths = num_samples // 160 + 1
        mask = (torch.arange(values.shape[2], device=audio.device) < lengths[:, None])[:, None].float()
        mean, deviation = _moments(values, mask, mask.sum(dim=2))
        values = (values - mean[:, :, None]) / (deviation[:, :, None] + 1e-5)
        for block in self.blocks:
            values = block(values, mask)
        mean, deviation = _moments(values, mask, mask.sum(dim=2))
        context = torch.cat([values, *(one[:, :, None].expand_as(values) for one in (mean, deviation))], dim=1)
        weights = self.attention(context).masked_fill(mask == 0, -1e4).softmax(dim=2)
        return self.embedding(torch.cat(_moments(values, weights, torch.ones_like(mean)), dim=1))


def _moments(values: Tensor, weights: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted mean and deviation over time, (batch, channels) each."""
    mean = (values * weights).sum(dim=2) / total
    variance = ((values - mean[:, :, None]).square() * weights).sum(dim=2) / total
    return mean, variance.clamp(min=1e-8).sqrt()


class TitanetSized:
    """A speaker encoder of TitaNet-large's layers and sizes: 22 M parameters, its classes of speakers left out."""

    sampling_rate = 16000
    embedding_size = 192

    def __init__(self, target: str, device: str) -> None:
        sizes = _sizes(target)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            layers = _TitanetLayers(sizes["filters"], sizes["last_filters"])
        self.device = torch.device(device)
        self.layers = layers.eval().requires_grad_(False).to(self.device)
        self.checksum = weights_checksum(layers.state_dict())

    def embed(self, audio: Tensor, num_samples: Tensor) -> Tensor:
        check_batch(audio, num_samples)
        there = num_samples.to(self.device, non_blocking=True)
        audio = fit_length(audio.to(self.device, non_blocking=True), there, max(audio.shape[1], 1600))
        return unit_embeddings(self.layers(audio, there.clamp(min=1600)), audio)


def load_codec_of_real_size(target: str, device: str) -> Codec:
    """Load sharmill's untrained codec in the sizes of NeMo's: 22.05 kHz, 8 codebooks, 1,024 samples a frame."""
    config = yaml.safe_load(UNTRAINED_CONFIG.read_bytes())
    channels = _sizes(target)["channels"]
    config["model"]["audio_encoder"] |= {"down_sample_rates": [2, 2, 4, 8, 8], "base_channels": channels}
    changed = mock.Mock(read_bytes=lambda: yaml.safe_dump(config).encode())
    with mock.patch("sharmill.models.shipped_codecs.UNTRAINED_CONFIG", changed):
        return load_untrained_codec(device)


def _sizes(target: str) -> dict[str, int]:
    return {"real": REAL, "small": SMALL}[target]


def save_models(size: str, folder: Path) -> dict[str, str]:
    """Return the models' names for a configuration, by what the rows call them; Mimi is written below ``folder``.

    Mimi of real size has the defaults of its configuration, which are those of kyutai/mimi.
    """
    from support.models import save_mimi
    from transformers import MimiConfig

    mimi = save_mimi(folder / "mimi", MimiConfig() if size == "real" else None)
    return {
        ENCODER: f"python:bench_gpu.models:TitanetSized:{size}",
        CODEC: f"python:bench_gpu.models:load_codec_of_real_size:{size}",
        "Mimi": f"transformers:{mimi}",
    }
