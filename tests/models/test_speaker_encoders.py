"""Speaker encoders compared with the packages from which they come."""

import numpy as np
import pytest
import torch
from support.models import make_audio

from sharmill.models import load_speaker_encoder
from sharmill.models.nemo_models import quiet_nemo


@pytest.fixture(scope="module", params=["resemblyzer", "nemo_speaker", "nemo_speaker_unmasked"])
def encoder(request, checkpoints):
    return load_speaker_encoder(f"nemo:{checkpoints[request.param]}" if "nemo" in request.param else request.param)


def test_resemblyzer_equals_embed_utterance_in_a_mixed_batch():
    from resemblyzer import VoiceEncoder

    before = torch.get_rng_state()
    resemblyzer = load_speaker_encoder("resemblyzer")
    assert torch.equal(torch.get_rng_state(), before)
    assert (resemblyzer.sampling_rate, resemblyzer.embedding_size) == (16000, 256)
    assert resemblyzer.checksum == "4276b0160fc13d1b"
    voice_encoder = VoiceEncoder("cpu", verbose=False)
    seconds = [0.1, 0.37, 1.0, 1.5, 1.6, 1.61, 2.0, 2.37, 2.8, 4.444, 7.9, 20.0]
    audio, num_samples = make_audio([int(s * 16000) for s in seconds])
    embeddings = resemblyzer.embed(audio, num_samples)
    expected = np.stack([voice_encoder.embed_utterance(audio[i, :n].numpy()) for i, n in enumerate(num_samples)])
    assert embeddings.dtype == torch.float32
    cosines = (embeddings * torch.from_numpy(expected)).sum(dim=1)
    torch.testing.assert_close(cosines, torch.ones(len(seconds)), atol=1e-5, rtol=0)


def test_silence_gives_the_zero_vector_and_speech_length_one(encoder):
    audio, num_samples = make_audio([16000, 24000, 800, 1, 0])
    audio[0] = 0.0
    embeddings = encoder.embed(audio, num_samples)
    norms = embeddings.norm(dim=1)
    torch.testing.assert_close(norms, torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0]), atol=1e-6, rtol=0)
    assert embeddings.device.type == "cpu"
    dirty = audio.clone()
    dirty[2, 800:] = 0.5
    torch.testing.assert_close(encoder.embed(dirty, num_samples), embeddings)
    assert encoder.embed(audio[:0], num_samples[:0]).shape == (0, encoder.embedding_size)
    for wrong in ([5], [5, 11], [-1, 5]):
        with pytest.raises(ValueError, match="num_samples"):
            encoder.embed(torch.zeros(2, 10), torch.tensor(wrong))


def test_nemo_speaker_encoder_equals_the_model(checkpoints):
    from nemo.collections.asr.models import EncDecSpeakerLabelModel

    with quiet_nemo():
        model = EncDecSpeakerLabelModel.restore_from(str(checkpoints["nemo_speaker"]), map_location="cpu").eval()
    nemo_speaker = load_speaker_encoder(f"nemo:{checkpoints['nemo_speaker']}")
    audio, num_samples = make_audio([31000])
    with torch.no_grad():
        _, expected = model(input_signal=audio, input_signal_length=num_samples)
    assert (nemo_speaker.sampling_rate, nemo_speaker.embedding_size) == (16000, 24)
    torch.testing.assert_close(nemo_speaker.embed(audio, num_samples), torch.nn.functional.normalize(expected))


def test_embeddings_do_not_depend_on_batch_neighbours(encoder):
    audio, num_samples = make_audio([1700, 16000, 47123, 80000])
    together = encoder.embed(audio, num_samples)
    for item, length in enumerate(num_samples):
        alone = encoder.embed(audio[item : item + 1, :length], num_samples[item : item + 1])
        torch.testing.assert_close(together[item], alone[0], atol=1e-5, rtol=0)
