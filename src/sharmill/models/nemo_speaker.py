"""Speaker embeddings of NeMo's EncDecSpeakerLabelModel: TitaNet, SpeakerNet, ECAPA and their kin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from sharmill.models.cpu_titanet import fit_titanet_to_cpu
from sharmill.models.tensors import check_batch, fit_length, right_padding_matters, unit_embeddings, weights_checksum

if TYPE_CHECKING:
    from nemo.collections.asr.models import EncDecSpeakerLabelModel
    from torch import Tensor

# The features are normalised by their standard deviation over time, which needs some frames: what is shorter is
# filled up with zeros.
_MIN_SECONDS: Final = 0.1

# NeMo fills up the features of a batch to a multiple of 16 frames, which hides the batch's padding from most layers.
# This length gives 1 + 159 frames of 10 ms, so that there is nothing to fill up.
_TRIED_SECONDS: Final = 1.59


class NemoSpeakerEncoder:
    """Speaker encoder made of a NeMo speaker model.

    Models with masked convolutions (TitaNet) do not see the padding of a batch. Others (ECAPA) do: this is found out
    when the model is loaded, and then only utterances of equal length share a batch, which is slower.
    """

    def __init__(self, model: EncDecSpeakerLabelModel, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.sampling_rate = int(model.cfg.preprocessor.sample_rate)
        self.checksum = weights_checksum(model.state_dict())
        self._model = model.eval().to(self.device)
        if self.device.type == "cpu":
            fit_titanet_to_cpu(model)
        self._min_samples = int(_MIN_SECONDS * self.sampling_rate)
        tried = int(_TRIED_SECONDS * self.sampling_rate)
        self._equal_lengths_only = right_padding_matters(self._forward, tried, 2 * tried)
        self.embedding_size = self._forward(torch.zeros(1, tried), torch.tensor([tried])).shape[1]

    def embed(self, audio: Tensor, num_samples: Tensor) -> Tensor:
        """Embed a batch of utterances; see ``SpeakerEncoder.embed``."""
        check_batch(audio, num_samples)
        # What decides about shapes stays on the CPU, so that nothing waits for the device. The mask is made there.
        num_samples = num_samples.to("cpu", torch.int64)
        there = num_samples.to(self.device, non_blocking=True)
        length = max(audio.shape[1], self._min_samples)
        audio = fit_length(audio.to(self.device, non_blocking=True), there, length)
        lengths = num_samples.clamp(min=self._min_samples)
        if not self._equal_lengths_only:
            return self._embed(audio, lengths)
        embeddings = torch.zeros(len(audio), self.embedding_size, device=self.device)
        for same in lengths.unique().tolist():
            rows = (lengths == same).nonzero()[:, 0]
            embeddings[rows] = self._embed(audio[rows], lengths[rows])
        return embeddings

    def _embed(self, audio: Tensor, lengths: Tensor) -> Tensor:
        if not len(lengths):
            return torch.zeros(0, self.embedding_size, device=self.device)
        audio = audio[:, : int(lengths.max())]
        return unit_embeddings(self._forward(audio, lengths), audio)

    @torch.no_grad()
    def _forward(self, audio: Tensor, num_samples: Tensor) -> Tensor:
        audio, num_samples = (one.to(self.device, non_blocking=True) for one in (audio, num_samples))
        _, embeddings = self._model(input_signal=audio, input_signal_length=num_samples)
        return embeddings.float()
