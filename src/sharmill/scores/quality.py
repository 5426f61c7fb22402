"""Models that predict the quality of speech: DNSMOS, DistillMOS, SQUIM and UTMOS."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
import torchaudio

from sharmill.models.resemblyzer_encoder import mel_filters
from sharmill.models.silero import SileroVad
from sharmill.models.tensors import loading
from sharmill.scores.scorer import Clip, Score, Scorer, mean_over_windows

_SAMPLING_RATE: Final = 16000
_P808_FFT: Final = 321
_DNSMOS_SECONDS: Final = 9.01
_DNSMOS_SAMPLES: Final = 144160
_MOS_SAMPLES: Final = 122880
# Coefficients, from the square to the constant, that map raw values to the scale of ratings (speechmos.dnsmos).
_DNSMOS_SCALE: Final = np.array([
    (-0.08397278, 1.22083953, 0.0052439), (-0.13166888, 1.60915514, -0.39604546), (-0.06766283, 1.11546468, 0.04602535),
])  # fmt: skip
_LOADING_ERRORS: Final = (OSError, RuntimeError, KeyError, TypeError, AttributeError, pickle.UnpicklingError)


def load_speech(scorer: Scorer, device: str) -> Score:
    """Load silero-vad."""
    detector = SileroVad(device)
    return lambda clips: [[(detector.speech_probabilities(one) > 0.5).mean()] for one in _samples(clips)]


def load_dnsmos(scorer: Scorer, device: str) -> Score:
    """Load DNSMOS. It gives the results of the package speechmos, but does not import librosa.

    Samples beyond full scale, which the package refuses, are clipped. Sources: Reddy et al., DNSMOS P.835,
    https://arxiv.org/abs/2110.01763, and the module ``speechmos.dnsmos``.
    """
    import onnxruntime

    # With one thread, sums do not depend on the number of cores.
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    with loading("dnsmos", *_LOADING_ERRORS):
        rated, p808 = (
            onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            for path in scorer.weight_files()
        )
    filters, window = torch.from_numpy(mel_filters(120, _P808_FFT)), torch.hann_window(_P808_FFT)

    def model(windows: np.ndarray) -> np.ndarray:
        spectra = torch.stft(
            torch.from_numpy(windows[:, :-160]), _P808_FFT, 160, window=window, pad_mode="constant", return_complex=True
        )
        levels = (filters @ spectra.abs().square()).clamp(min=1e-10).log10() * 10
        features = ((levels - levels.amax(dim=(1, 2), keepdim=True)).clamp(min=-80.0) + 40) / 40
        raw = rated.run(None, {"input_1": windows})[0].astype(np.float64)
        ratings = sum(_DNSMOS_SCALE[:, power] * raw ** (2 - power) for power in range(3))
        return np.hstack([ratings, p808.run(None, {"input_1": features.transpose(1, 2).numpy()})[0]])

    return lambda clips: mean_over_windows(_samples(clips), _dnsmos_windows, model).tolist()


def _dnsmos_windows(samples: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the package's windows of 9.01 s, which begin at whole seconds; shorter audio is repeated."""
    whole = samples.clip(-1, 1)
    while len(whole) < _DNSMOS_SAMPLES:
        whole = np.concatenate([whole, whole])
    for number in range(max(1, len(whole) // _SAMPLING_RATE - 9)):
        start, end = number * _SAMPLING_RATE, int((number + _DNSMOS_SECONDS) * _SAMPLING_RATE)
        # The package leaves out windows that are a sample too short, because their end was rounded down.
        if end - start == _DNSMOS_SAMPLES:
            yield whole[start:end]


def load_mos(scorer: Scorer, device: str) -> Score:
    """Load DistillMOS, which gives the results of its package (Stahl and Gamper, https://arxiv.org/abs/2502.05356)."""
    from distillmos import ConvTransformerSQAModel

    with loading("mos", *_LOADING_ERRORS), torch.random.fork_rng(devices=[]):
        network = ConvTransformerSQAModel(load_weights=False, segmenting_in_forward=False)
        (weights,) = scorer.weight_files()
        network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True)["model"])
    network.eval().to(device)

    @torch.inference_mode()
    def model(windows: np.ndarray) -> np.ndarray:
        found: np.ndarray = network(torch.from_numpy(windows).to(device)).cpu().numpy()
        return found.reshape(-1, 1)

    return lambda clips: mean_over_windows(_samples(clips), _mos_windows, model).tolist()


def _mos_windows(samples: np.ndarray) -> Iterator[np.ndarray]:
    """Yield windows of 7.68 s, which begin at most a second apart; shorter audio is padded with zeros."""
    whole = np.pad(samples, (0, max(0, _MOS_SAMPLES - len(samples))))
    beyond = len(whole) - _MOS_SAMPLES
    for place in np.linspace(0, 1, -(-beyond // _SAMPLING_RATE) + 1):
        start = int(place * beyond)
        yield whole[start : start + _MOS_SAMPLES]


def load_squim(scorer: Scorer, device: str) -> Score:
    """Load torchaudio's SQUIM (Kumar et al., https://arxiv.org/abs/2304.01448), by default with its own weights."""
    weights = scorer.resolve()
    with loading(scorer.name, *_LOADING_ERRORS), torch.random.fork_rng(devices=[]):
        if weights is None:
            network = torchaudio.pipelines.SQUIM_OBJECTIVE.get_model()
        else:
            network = torchaudio.models.squim_objective_base()
            network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    network.eval().to(device)
    return _one_by_one(lambda audio: [float(value) for value in network(audio)], device)


def load_utmos(scorer: Any, device: str) -> Score:
    """Load a TorchScript file or a model of torch.hub that maps audio (1, samples) and its rate to one number."""
    path = scorer.resolve()
    with loading(scorer.name, *_LOADING_ERRORS, ValueError), torch.random.fork_rng(devices=[]):
        if path is not None and path.is_file():
            network = torch.jit.load(str(path), map_location="cpu")
        else:
            place, source = (scorer.target, "github") if path is None else (str(path), "local")
            network = torch.hub.load(place, scorer.entry, source=source, trust_repo=True, skip_validation=True)
    network.eval().to(device)
    return _one_by_one(lambda audio: network(audio, _SAMPLING_RATE).flatten().tolist(), device)


def _one_by_one(model: Callable[[torch.Tensor], list[float]], device: str) -> Score:
    """Return a scorer that gives a model one clip at a time, because padding would change its results."""
    guarded = torch.inference_mode()(model)
    return lambda clips: [guarded(torch.from_numpy(samples)[None].to(device)) for samples in _samples(clips)]


def _samples(clips: Sequence[Clip]) -> list[np.ndarray]:
    return [clip.samples(_SAMPLING_RATE) for clip in clips]
