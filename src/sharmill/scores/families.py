"""The scorers that come with sharmill. This module imports neither torch nor the packages of the models."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from sharmill.errors import refuse
from sharmill.models.families import NemoModel
from sharmill.models.hub import require_in_torch_hub
from sharmill.scores.scorer import Scorer
from sharmill.scores.signal import HIGHEST_SNR, LOWEST_SNR

# The peak of digital silence is -240 dB.
_LEVELS: Final = (-240.0, 60.0)
_SHARE: Final = (0.0, 1.0)
_REPOSITORY: Final = re.compile(r"[\w.-]+/[\w.-]+(:[\w./-]+)?")


@dataclass(frozen=True, kw_only=True)
class Signal(Scorer):
    """``signal``: levels, clipping, silence, bandwidth and signal-to-noise ratio."""

    packages: ClassVar = ("numpy",)
    loader: ClassVar = "sharmill.scores.signal:load_signal"
    columns: ClassVar = {
        "loudness": _LEVELS, "speech_level": _LEVELS, "peak": _LEVELS, "clipped": _SHARE, "silence": _SHARE,
        "bandwidth": (0.0, 1000.0), "snr": (LOWEST_SNR, HIGHEST_SNR),
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Text(Scorer):
    """``text``: characters per second; the audio is not decoded."""

    loader: ClassVar = "sharmill.scores.signal:load_text"
    columns: ClassVar = {"characters_per_second": None}


@dataclass(frozen=True, kw_only=True)
class Speech(Scorer):
    """``speech``: the share of frames with speech, by silero-vad."""

    packages: ClassVar = ("silero-vad",)
    weights: ClassVar = ("silero-vad", "silero_vad/data/silero_vad.jit")
    loader: ClassVar = "sharmill.scores.quality:load_speech"
    columns: ClassVar = {"speech_share": _SHARE}


@dataclass(frozen=True, kw_only=True)
class Dnsmos(Scorer):
    """``dnsmos``: DNSMOS P.835 and P.808, with the weights of the package speechmos."""

    packages: ClassVar = ("speechmos", "onnxruntime")
    weights: ClassVar = (
        "speechmos",
        "speechmos/dnsmos_models/sig_bak_ovr.onnx",
        "speechmos/dnsmos_models/model_v8.onnx",
    )
    loader: ClassVar = "sharmill.scores.quality:load_dnsmos"
    columns: ClassVar = dict.fromkeys(("dnsmos_sig", "dnsmos_bak", "dnsmos_ovrl", "dnsmos_p808"))


@dataclass(frozen=True, kw_only=True)
class Mos(Scorer):
    """``mos``: the overall quality, predicted by DistillMOS with the weights of the package distillmos."""

    packages: ClassVar = ("distillmos", "xls-r-sqa")
    weights: ClassVar = ("distillmos", "distillmos/weights/distill_mos_v7.pt")
    loader: ClassVar = "sharmill.scores.quality:load_mos"
    columns: ClassVar = {"mos": (1.0, 5.0)}
    uses_device: ClassVar = True


@dataclass(frozen=True, kw_only=True)
class Squim(Scorer):
    """``squim`` or ``squim:<file of weights>``: STOI, PESQ and SI-SDR that torchaudio's SQUIM predicts."""

    packages: ClassVar = ("torchaudio",)
    takes_target: ClassVar = True
    loader: ClassVar = "sharmill.scores.quality:load_squim"
    columns: ClassVar = dict.fromkeys(("squim_stoi", "squim_pesq", "squim_si_sdr"))
    uses_device: ClassVar = True

    def resolve(self) -> Path | None:
        path = super().resolve()
        refuse(
            (self.target and (path is None or not path.is_file()),
             f"{self.target} is not a file: give the file of SQUIM's weights, or write squim alone to download them"),
            code="bad_model",
        )  # fmt: skip
        return path

    def check(self) -> None:
        if self.resolve() is None:
            cached = "torchaudio/models/squim_objective_dns2020.pth"
            require_in_torch_hub(self.name, cached, "https://download.pytorch.org")


@dataclass(frozen=True, kw_only=True)
class Utmos(Scorer):
    """``utmos:<file, folder or GitHub repository>``: naturalness, by a TorchScript file or a model of torch.hub.

    The model maps audio (1, samples) and its sampling rate to one number, as the models of tarepan/SpeechMOS do.
    """

    takes_target: ClassVar = True
    loader: ClassVar = "sharmill.scores.quality:load_utmos"
    columns: ClassVar = {"utmos": None}
    uses_device: ClassVar = True

    entry: str = "utmos22_strong"
    """Name of the model in a folder or repository. Loading it from there runs code of the repository."""

    def resolve(self) -> Path | None:
        path = super().resolve()
        refuse(
            (path is None and not _REPOSITORY.fullmatch(self.target),
             f"'{self.name}' names no model: write utmos:FILE for a TorchScript file, or utmos:OWNER/REPOSITORY:TAG "
             "for one of torch.hub, such as utmos:tarepan/SpeechMOS:v1.2.0"),
            code="bad_model",
        )  # fmt: skip
        return path

    def check(self) -> None:
        if self.resolve() is None:
            require_in_torch_hub(self.name, self.target.replace("/", "_").replace(":", "_"), "https://github.com")


@dataclass(frozen=True, kw_only=True)
class Cer(NemoModel, Scorer):
    """``cer:<pretrained name or .nemo file>``: character error rate of a NeMo ASR model, relative to the text.

    Case, punctuation and symbols are ignored. Clips without text have no score.
    """

    takes_target: ClassVar = True
    modules: ClassVar = ("nemo.collections.asr.models",)
    class_name: ClassVar = "nemo.collections.asr.models:ASRModel"
    loader: ClassVar = "sharmill.scores.recognition:load_cer"
    columns: ClassVar = {"cer": (0.0, 1e6)}
    uses_device: ClassVar = True
