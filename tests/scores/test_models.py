"""Scorers with models: results equal to the packages', loading of files, and errors about missing parts."""

import io
from importlib import metadata
from importlib.metadata import PathDistribution

import numpy as np
import pytest
import soundfile as sf
import torch
from support.models import save_nemo_ctc
from support.project import raises, voice

from sharmill.errors import ConfigError
from sharmill.models import find_model
from sharmill.models.nemo_models import quiet_nemo
from sharmill.registry import SCORERS
from sharmill.scores.recognition import error_rate, normalize
from sharmill.scores.scorer import Clip


def clip(samples, text="", rate=16000):
    stream = io.BytesIO()
    sf.write(stream, samples, rate, format="WAV", subtype="FLOAT")
    return Clip({"id": "a", "duration": len(samples) / rate, "supervisions": [{"text": text}]}, stream.getvalue())


# One clip that is repeated to fill a window of DNSMOS, one with a single window, and one with several windows.
VOICES = [voice(seconds, seed=number) for number, seconds in enumerate((0.7, 9.5, 12.3))]


def score(name, clips, **options):
    return find_model(SCORERS, name, options).load("cpu")(clips)


@pytest.mark.slow
def test_dnsmos_equals_the_package():
    from speechmos import dnsmos

    theirs = [dnsmos.run(samples, 16000) for samples in VOICES]
    keys = ("sig_mos", "bak_mos", "ovrl_mos", "p808_mos")
    found = score("dnsmos", [clip(samples) for samples in VOICES])
    np.testing.assert_allclose(found, [[one[key] for key in keys] for one in theirs], atol=1e-3)
    assert np.ptp(found, axis=0).min() > 0.01


@pytest.mark.slow
def test_mos_equals_the_package():
    from distillmos import ConvTransformerSQAModel

    model = ConvTransformerSQAModel().eval()
    with torch.no_grad():
        theirs = [[model(torch.from_numpy(samples)[None]).item()] for samples in VOICES]
    np.testing.assert_allclose(score("mos", [clip(samples) for samples in VOICES]), theirs, atol=1e-4)


@pytest.mark.slow
def test_squim_loads_a_file_of_weights(tmp_path):
    import torchaudio

    torch.manual_seed(0)
    model = torchaudio.models.squim_objective_base().eval()
    torch.save(model.state_dict(), tmp_path / "squim.pth")
    with torch.no_grad():
        theirs = [[one.item() for one in model(torch.from_numpy(samples)[None])] for samples in VOICES[:2]]
    found = score(f"squim:{tmp_path / 'squim.pth'}", [clip(samples) for samples in VOICES[:2]])
    np.testing.assert_allclose(found, theirs, atol=1e-4)
    (tmp_path / "squim.pth").write_bytes(b"damaged")
    with raises(ConfigError, "bad_model", "squim.pth"):
        score(f"squim:{tmp_path / 'squim.pth'}", [])


class Loudest(torch.nn.Module):
    """A model with the signature of UTMOS."""

    def forward(self, wave: torch.Tensor, sr: int) -> torch.Tensor:
        return wave.abs().amax(dim=1) * sr


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_utmos_loads_torchscript_and_repositories(kind, tmp_path):
    torch.jit.script(Loudest()).save(str(tmp_path / "model.pt"))
    code = "import torch\ndef tiny():\n    return torch.jit.load({!r})\n"
    (tmp_path / "hubconf.py").write_text(code.format(str(tmp_path / "model.pt")))
    name, options = (tmp_path / "model.pt", {}) if kind == "file" else (tmp_path, {"entry": "tiny"})
    found = score(f"utmos:{name}", [clip(samples) for samples in VOICES], **options)
    assert found == [[pytest.approx(16000 * np.abs(samples).max())] for samples in VOICES]


@pytest.mark.slow
def test_cer_transcribes_with_a_nemo_model(tmp_path):
    from nemo.collections.asr.models import EncDecCTCModel

    with quiet_nemo():
        path = save_nemo_ctc(tmp_path / "asr.nemo")
        heard = EncDecCTCModel.restore_from(str(path)).transcribe([VOICES[0]], verbose=False)[0].text
    scorer = find_model(SCORERS, f"cer:{path}", {})
    scorer.check()
    found = scorer.load("cpu")([clip(VOICES[0], heard), clip(VOICES[1], "?"), clip(VOICES[0], "good day")])
    assert found == [[0.0], [None], [error_rate("good day", normalize(heard))]]
    assert found[2][0] > 0


def test_case_and_punctuation_are_no_errors():
    assert error_rate(normalize("Grüße, Anna!"), normalize("grüsse anna")) == 0
    assert error_rate("abcde", "abxd") == pytest.approx(2 / 5)


@pytest.mark.parametrize(
    ("name", "absent", "words"),
    [("dnsmos", "onnxruntime", "sharmill[scores]"), ("mos", "distillmos", "sharmill[scores]"),
     ("speech", "silero-vad", "sharmill[vad]"), ("cer:a.nemo", None, "a.nemo does not exist"),
     ("squim:none.pth", None, "none.pth is not a file"), ("utmos", None, "utmos:FILE"),
     ("dnsmos", "weights", "pip install --force-reinstall speechmos"),
     ("speech", "weights", "pip install --force-reinstall silero-vad")],
)  # fmt: skip
def test_what_is_missing_is_one_line_before_any_work(name, absent, words, monkeypatch, tmp_path):
    if absent == "weights":
        monkeypatch.setattr(PathDistribution, "locate_file", lambda self, path: tmp_path / path)
    find = metadata.distribution
    monkeypatch.setattr(metadata, "distribution", lambda package: find("absent" if package == absent else package))
    with raises(ConfigError, "missing_package" if absent not in (None, "weights") else "bad_model", words):
        find_model(SCORERS, name, {}).resolve()
