"""The codec that comes with sharmill."""

import tarfile

import numpy as np
import pytest
import torch

from sharmill.audio.resample import resample
from sharmill.demo.espeak import Espeak, VoiceSettings
from sharmill.models import load_codec
from sharmill.models.families import BUILTIN_FILE
from sharmill.models.nemo_models import quiet_nemo


@pytest.fixture(scope="module")
def builtin():
    return load_codec("builtin")


@pytest.fixture(scope="module")
def sentence():
    """A sentence of synthetic speech (samples,) at 16 kHz."""
    espeak = Espeak()
    samples = espeak.synthesize("The codes of this sentence can be heard.", VoiceSettings("en-us+f5"))
    return resample(samples.astype(np.float32) / 32768, espeak.sampling_rate, 16000)


def bands(audio: np.ndarray) -> np.ndarray:
    """Return the log energy (bands, frames) in eight frequency bands and frames of 32 ms."""
    spectrum = torch.stft(torch.from_numpy(audio), 512, 256, window=torch.hann_window(512), return_complex=True).abs()
    return np.log(np.stack([part.mean(axis=0) for part in np.array_split(spectrum.numpy()[4:132], 8)]) + 1e-2)


def test_decoded_audio_resembles_the_speech(builtin, sentence):
    codes = builtin.encode(torch.from_numpy(sentence)[None], torch.tensor([len(sentence)]))
    decoded = builtin.decode(codes, torch.tensor([codes.shape[2]]))[0].numpy()[: len(sentence)]
    original, made = bands(sentence), bands(decoded)
    likeness = np.corrcoef(original.ravel(), made.ravel())[0, 1]
    assert likeness > 0.6
    # Other speech would have the same average spectrum, but not the same course over time.
    assert np.corrcoef(original.ravel(), np.roll(made, 20, axis=1).ravel())[0, 1] < likeness - 0.1


def test_plain_nemo_loads_it(builtin, sentence):
    from nemo.collections.tts.models import AudioCodecModel

    with quiet_nemo():
        model = AudioCodecModel.restore_from(str(BUILTIN_FILE), map_location="cpu").eval()
    audio, num_samples = torch.from_numpy(sentence)[None], torch.tensor([len(sentence)])
    with torch.inference_mode():
        codes, _ = model.encode(audio=audio, audio_len=num_samples)
    assert torch.equal(codes, builtin.encode(audio, num_samples))
    assert builtin.checksum == load_codec(f"nemo:{BUILTIN_FILE}").checksum


def test_nemo_loads_it_on_a_python_without_tar_filters(monkeypatch):
    """On Python 3.11.2, as in Debian 12, unpacking by NeMo alone would raise TypeError."""
    extract = tarfile.TarFile.extract

    def of_old(archive, member, path="", set_attrs=True, *, numeric_owner=False):
        extract(archive, member, path, set_attrs, numeric_owner=numeric_owner)

    monkeypatch.delattr(tarfile, "data_filter")
    monkeypatch.setattr(tarfile.TarFile, "extract", of_old)
    assert load_codec(f"nemo:{BUILTIN_FILE}").num_codebooks == 8
    assert tarfile.TarFile.extract is of_old
