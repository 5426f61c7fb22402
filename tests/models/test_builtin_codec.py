"""The codec that ships with sharmill."""

from __future__ import annotations

import tarfile

import numpy as np
import pytest
import torch
from support.models import make_audio

from sharmill.audio.resample import resample
from sharmill.demo.espeak import Espeak, VoiceSettings
from sharmill.models import load_codec
from sharmill.models.builtin import BUILTIN_FILE
from sharmill.models.nemo_checkpoint import quiet_nemo

MAX_BYTES = 6_000_000


@pytest.fixture(scope="module")
def builtin():
    return load_codec("builtin")


@pytest.fixture(scope="module")
def sentence():
    """A sentence of synthetic speech at 16 kHz, (samples,)."""
    espeak = Espeak()
    samples = espeak.synthesize("The codes of this sentence can be heard.", VoiceSettings("en-us+f5"))
    return resample(samples.astype(np.float32) / 32768, espeak.sampling_rate, 16000)


def bands(audio: np.ndarray) -> np.ndarray:
    """Logarithms of the energy in eight bands of frequency, in frames of 32 ms: (bands, frames)."""
    spectrum = torch.stft(torch.from_numpy(audio), 512, 256, window=torch.hann_window(512), return_complex=True).abs()
    return np.log(np.stack([part.mean(axis=0) for part in np.array_split(spectrum.numpy()[4:132], 8)]) + 1e-2)


def test_its_shape(builtin):
    assert (builtin.sampling_rate, builtin.samples_per_frame) == (16000, 640)
    assert (builtin.num_codebooks, builtin.codebook_size) == (8, 2016)
    assert (builtin.trained, builtin.equal_lengths_only) == (True, False)
    assert builtin.decoded_sampling_rate == 16000
    assert BUILTIN_FILE.stat().st_size <= MAX_BYTES


@pytest.mark.parametrize("num_samples", [1, 639, 640, 641, 12800])
def test_frames_are_the_ceiling(builtin, num_samples):
    assert builtin.encode(*make_audio([num_samples])).shape == (1, 8, -(-num_samples // 640))


def test_codes_follow_the_audio_and_not_the_batch(builtin):
    audio, num_samples = make_audio([66150, 500, 30000, 100000])
    together = builtin.encode(audio, num_samples)
    for item, length in enumerate(num_samples):
        alone = builtin.encode(audio[item : item + 1, :length], num_samples[item : item + 1])[0]
        assert (alone == together[item, :, : alone.shape[1]]).float().mean() >= 0.998


def test_codes_do_not_depend_on_what_comes_later(builtin, sentence):
    whole = torch.from_numpy(sentence)[None]
    begun = builtin.encode(whole[:, :16000], torch.tensor([16000]))
    assert (begun == builtin.encode(whole, torch.tensor([whole.shape[1]]))[:, :, :25]).float().mean() >= 0.998


def test_what_is_decoded_resembles_the_speech(builtin, sentence):
    codes = builtin.encode(torch.from_numpy(sentence)[None], torch.tensor([len(sentence)]))
    decoded = builtin.decode(codes, torch.tensor([codes.shape[2]]))[0].numpy()[: len(sentence)]
    original, made = bands(sentence), bands(decoded)
    likeness = np.corrcoef(original.ravel(), made.ravel())[0, 1]
    assert likeness > 0.6
    # Other speech would have the same bands on the average, but not at the same times.
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


def test_nemo_loads_it_with_a_python_that_knows_no_filters_of_archives(monkeypatch):
    """As Debian 12 has it, 3.11.2, where NeMo's way to unpack a checkpoint is a TypeError."""
    extract = tarfile.TarFile.extract

    def of_old(archive, member, path="", set_attrs=True, *, numeric_owner=False):
        extract(archive, member, path, set_attrs, numeric_owner=numeric_owner)

    monkeypatch.delattr(tarfile, "data_filter")
    monkeypatch.setattr(tarfile.TarFile, "extract", of_old)
    assert load_codec(f"nemo:{BUILTIN_FILE}").num_codebooks == 8
    assert tarfile.TarFile.extract is of_old
