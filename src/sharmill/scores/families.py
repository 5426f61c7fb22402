"""The scorers that come with sharmill. This module imports neither torch nor the packages of the models."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from sharmill.errors import refuse
from sharmill.models.families import NemoModel
from sharmill.models.hub import packaged_file, require_reachable
from sharmill.scores.scorer import Score, Scorer
from sharmill.scores.signal import HIGHEST_SNR, LOWEST_SNR

_LEVELS: Final = (-120.0, 60.0)
_SHARE: Final = (0.0, 1.0)
_REPOSITORY: Final = re.compile(r"[\w.-]+/[\w.-]+(:[\w./-]+)?")


@dataclass(frozen=True, kw_only=True)
class Signal(Scorer):
    """``signal``: levels, clipping, silence, bandwidth and signal-to-noise ratio."""

    packages: ClassVar = ("numpy",)
    takes_target: ClassVar = False
    columns: ClassVar = {
        "loudness": _LEVELS, "speech_level": _LEVELS, "peak": _LEVELS, "clipped": _SHARE, "silence": _SHARE,
        "bandwidth": (0.0, 1000.0), "snr": (LOWEST_SNR, HIGHEST_SNR),
    }  # fmt: skip

    def load(self, device: str) -> Score:
        from sharmill.scores.signal import signal_scores

        return signal_scores


@dataclass(frozen=True, kw_only=True)
class Text(Scorer):
    """``text``: characters per second; the audio is not decoded."""

    takes_target: ClassVar = False
    columns: ClassVar = {"characters_per_second": None}

    def load(self, device: str) -> Score:
        from sharmill.scores.signal import text_scores

        return text_scores


@dataclass(frozen=True, kw_only=True)
class Speech(Scorer):
    """``speech``: the share of frames with speech, by silero-vad."""

    packages: ClassVar = ("silero-vad",)
    modules: ClassVar = ("sharmill.models.silero",)
    takes_target: ClassVar = False
    columns: ClassVar = {"speech_share": _SHARE}

    def resolve(self) -> None:
        super().resolve()
        packaged_file("silero-vad", "silero_vad/data/silero_vad.jit")

    def load(self, device: str) -> Score:
        from sharmill.models.silero import SAMPLING_RATE, SileroVad

        detector = SileroVad(device)
        return lambda clips: [
            [float((detector.speech_probabilities(clip.samples(SAMPLING_RATE)) > 0.5).mean())] for clip in clips
        ]


@dataclass(frozen=True, kw_only=True)
class Dnsmos(Scorer):
    """``dnsmos``: DNSMOS P.835 and P.808, with the weights of the package speechmos."""

    packages: ClassVar = ("speechmos", "onnxruntime")
    modules: ClassVar = ("sharmill.scores.quality", "onnxruntime")
    takes_target: ClassVar = False
    columns: ClassVar = dict.fromkeys(("dnsmos_sig", "dnsmos_bak", "dnsmos_ovrl", "dnsmos_p808"))

    def files(self) -> list[Path]:
        """Return the paths of the two models."""
        names = ("sig_bak_ovr.onnx", "model_v8.onnx")
        return [packaged_file("speechmos", f"speechmos/dnsmos_models/{name}") for name in names]

    def resolve(self) -> None:
        super().resolve()
        self.files()

    def load(self, device: str) -> Score:
        from sharmill.scores.quality import load_dnsmos

        return load_dnsmos(*self.files())


@dataclass(frozen=True, kw_only=True)
class Mos(Scorer):
    """``mos``: the quality that the package distillmos predicts, with its weights."""

    packages: ClassVar = ("distillmos", "xls-r-sqa")
    modules: ClassVar = ("sharmill.scores.quality", "distillmos")
    takes_target: ClassVar = False
    columns: ClassVar = {"mos": (1.0, 5.0)}
    uses_device: ClassVar = True

    def file(self) -> Path:
        """Return the path of the weights."""
        return packaged_file("distillmos", "distillmos/weights/distill_mos_v7.pt")

    def resolve(self) -> None:
        super().resolve()
        self.file()

    def load(self, device: str) -> Score:
        from sharmill.scores.quality import load_mos

        return load_mos(self.file(), device)


@dataclass(frozen=True, kw_only=True)
class Squim(Scorer):
    """``squim`` or ``squim:<file of weights>``: STOI, PESQ and SI-SDR that torchaudio's SQUIM predicts."""

    packages: ClassVar = ("torchaudio",)
    modules: ClassVar = ("sharmill.scores.quality", "torchaudio.pipelines")
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
            import torch

            if not (Path(torch.hub.get_dir()) / "torchaudio/models/squim_objective_dns2020.pth").is_file():
                require_reachable("https://download.pytorch.org", self.name)

    def load(self, device: str) -> Score:
        from sharmill.scores.quality import load_squim

        return load_squim(self.name, self.resolve(), device)


@dataclass(frozen=True, kw_only=True)
class Utmos(Scorer):
    """``utmos:<file, folder or GitHub repository>``: naturalness, by a TorchScript file or a model of torch.hub.

    The model maps audio (1, samples) and its sampling rate to one number, as the models of tarepan/SpeechMOS do.
    """

    modules: ClassVar = ("sharmill.scores.quality",)
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
            import torch

            repository, _, tag = self.target.partition(":")
            folder = f"{repository}_{tag}".replace("/", "_")
            if not tag or not (Path(torch.hub.get_dir()) / folder).is_dir():
                require_reachable("https://github.com", self.name)

    def load(self, device: str) -> Score:
        from sharmill.scores.quality import load_utmos

        return load_utmos(self.name, self.resolve(), self.entry, device)


@dataclass(frozen=True, kw_only=True)
class Cer(NemoModel, Scorer):
    """``cer:<pretrained name or .nemo file>``: character errors of a NeMo speech recogniser, per character of the text.

    Case and punctuation do not count. Clips without text have no score.
    """

    modules: ClassVar = ("sharmill.scores.recognition", "nemo.collections.asr.models")
    class_name: ClassVar = "nemo.collections.asr.models:ASRModel"
    columns: ClassVar = {"cer": (0.0, 1e6)}
    uses_device: ClassVar = True

    def load(self, device: str) -> Score:
        from sharmill.scores.recognition import load_cer

        return load_cer(self.restore(("preprocessor.", "encoder.", "decoder.", "joint.")), device)
