"""Speaker encoders against the packages they come from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.errors import raises
from support.models import make_audio

from sharmill.errors import ConfigError
from sharmill.models import SpeakerEncoder, load_speaker_encoder
from sharmill.models.nemo_checkpoint import quiet_nemo
from sharmill.models.resemblyzer_encoder import mel_filters, partial_starts


@pytest.fixture(scope="module")
def resemblyzer():
    return load_speaker_encoder("resemblyzer")


@pytest.fixture(scope="module")
def voice_encoder():
    from resemblyzer import VoiceEncoder

    return VoiceEncoder("cpu", verbose=False)


@pytest.fixture(scope="module")
def nemo_speaker(checkpoints):
    return load_speaker_encoder(f"nemo:{checkpoints['nemo_speaker']}")


@pytest.fixture(scope="module")
def nemo_speaker_unmasked(checkpoints):
    return load_speaker_encoder(f"nemo:{checkpoints['nemo_speaker_unmasked']}")


def test_resemblyzer_meets_the_protocol(resemblyzer):
    assert isinstance(resemblyzer, SpeakerEncoder)
    assert (resemblyzer.sampling_rate, resemblyzer.embedding_size) == (16000, 256)
    assert resemblyzer.checksum == "4276b0160fc13d1b"


def test_resemblyzer_equals_embed_utterance_in_a_mixed_batch(resemblyzer, voice_encoder):
    seconds = [0.1, 0.37, 1.0, 1.5, 1.6, 1.61, 2.0, 2.37, 2.8, 4.444, 7.9, 20.0]
    audio, num_samples = make_audio([int(s * 16000) for s in seconds])
    embeddings = resemblyzer.embed(audio, num_samples)
    expected = np.stack([voice_encoder.embed_utterance(audio[i, :n].numpy()) for i, n in enumerate(num_samples)])
    assert embeddings.dtype == torch.float32
    cosines = (embeddings * torch.from_numpy(expected)).sum(dim=1)
    torch.testing.assert_close(cosines, torch.ones(len(seconds)), atol=1e-5, rtol=0)


def test_mel_filters_are_those_of_librosa():
    from librosa.filters import mel

    assert mel_filters().tobytes() == mel(sr=16000, n_fft=400, n_mels=40).tobytes()


def test_partial_utterances_are_those_of_resemblyzer(voice_encoder):
    for num_samples in [*range(0, 60000, 79), 320000]:
        _, slices = voice_encoder.compute_partial_slices(num_samples, 1.3, 0.75)
        assert partial_starts(num_samples) == [part.start for part in slices]


def test_what_lies_beyond_an_utterance_is_ignored(resemblyzer, nemo_speaker):
    audio, num_samples = make_audio([20000, 48000])
    dirty = audio.clone()
    dirty[0, 20000:] = 0.5
    for encoder in (resemblyzer, nemo_speaker):
        torch.testing.assert_close(encoder.embed(dirty, num_samples), encoder.embed(audio, num_samples))


@pytest.mark.parametrize("fixture", ["resemblyzer", "nemo_speaker", "nemo_speaker_unmasked"])
def test_silence_has_the_zero_vector_and_all_else_length_one(fixture, request):
    encoder = request.getfixturevalue(fixture)
    audio, num_samples = make_audio([16000, 24000, 800, 1, 0])
    audio[0] = 0.0
    embeddings = encoder.embed(audio, num_samples)
    norms = embeddings.norm(dim=1)
    torch.testing.assert_close(norms, torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0]), atol=1e-6, rtol=0)
    assert embeddings.device.type == "cpu"


def test_an_empty_batch_gives_no_embeddings(resemblyzer, nemo_speaker):
    for encoder in (resemblyzer, nemo_speaker):
        empty = encoder.embed(torch.zeros(0, 100), torch.zeros(0, dtype=torch.int64))
        assert empty.shape == (0, encoder.embedding_size)


@pytest.mark.parametrize("num_samples", [torch.tensor([5]), torch.tensor([5, 11]), torch.tensor([-1, 5])])
def test_lengths_that_do_not_fit_the_audio_are_refused(resemblyzer, num_samples):
    with pytest.raises(ValueError, match="num_samples"):
        resemblyzer.embed(torch.zeros(2, 10), num_samples)


def test_nemo_speaker_equals_the_model_itself(checkpoints, nemo_speaker):
    from nemo.collections.asr.models import EncDecSpeakerLabelModel

    with quiet_nemo():
        model = EncDecSpeakerLabelModel.restore_from(str(checkpoints["nemo_speaker"]), map_location="cpu").eval()
    audio, num_samples = make_audio([31000])
    with torch.no_grad():
        _, expected = model(input_signal=audio, input_signal_length=num_samples)
    assert (nemo_speaker.sampling_rate, nemo_speaker.embedding_size) == (16000, 24)
    torch.testing.assert_close(nemo_speaker.embed(audio, num_samples), torch.nn.functional.normalize(expected))


@pytest.mark.parametrize("fixture", ["resemblyzer", "nemo_speaker", "nemo_speaker_unmasked"])
def test_embeddings_do_not_depend_on_batch_neighbours(fixture, request):
    encoder = request.getfixturevalue(fixture)
    audio, num_samples = make_audio([1700, 16000, 47123, 80000])
    together = encoder.embed(audio, num_samples)
    for item, length in enumerate(num_samples):
        alone = encoder.embed(audio[item : item + 1, :length], num_samples[item : item + 1])
        torch.testing.assert_close(together[item], alone[0], atol=1e-5, rtol=0)


def test_loading_leaves_the_random_state_alone(checkpoints):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    load_speaker_encoder("resemblyzer")
    load_speaker_encoder(f"nemo:{checkpoints['nemo_speaker']}")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_codec_is_no_speaker_encoder(checkpoints):
    with raises(ConfigError, "bad_model", "AudioCodecModel", "EncDecSpeakerLabelModel"):
        load_speaker_encoder(f"nemo:{checkpoints['nemo_codec']}")


def test_an_unknown_pretrained_name_gets_the_nearest():
    with raises(ConfigError, "unknown_name", "'titanet_large'"):
        load_speaker_encoder("nemo:titanet_lage")
