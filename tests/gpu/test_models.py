"""Tests of every encoder and codec on a device, compared with the CPU, with itself, and before and after a warm-up."""

import numpy as np
import pytest
import torch
from support.project import voice

from sharmill.match.select import select_context
from sharmill.models import load_codec, load_speaker_encoder, make_deterministic
from sharmill.models.batches import find_pieces, pad
from sharmill.models.memory import estimate_bytes_per_second, measure_peak, run_noise
from sharmill.validate.shard import MAX_DIFFERENT_CODES

ENCODERS = ["resemblyzer", "nemo_speaker", "nemo_speaker_unmasked"]
CODECS = ["builtin", "nemo_codec", "nemo_codec_noncausal", "encodec", "mimi", "dac"]
SECONDS = [0.4, 0.9, 0.9, 1.3, 1.7, 2.2]
LEAST_COSINE = 0.9999


def make_batch(rate, seconds=SECONDS, seed=0, *, pinned=False):
    """Return padded audio (batch, samples) and lengths (batch,) of pairs of voices."""
    items = [voice(length, rate, pitch=110 + 35 * (n // 2), seed=seed + n) for n, length in enumerate(seconds)]
    return pad(items, pinned=pinned)


@pytest.fixture(autouse=True)
def _as_in_a_rank(device):
    threads = torch.get_num_threads()
    make_deterministic()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", ENCODERS)
def test_embeddings_and_contexts_match_the_cpu(device, kind, models, record):
    found = {}
    for where in ("cpu", device):
        encoder = load_speaker_encoder(models[kind], where)
        found[where] = encoder.embed(*make_batch(encoder.sampling_rate)).cpu()
    lowest = float((found["cpu"] * found[device]).sum(dim=1).min())
    record(lowest_cosine=round(lowest, 7))
    # As in a stage, contexts are chosen on the device of the embeddings.
    contexts = [np.asarray(select_context(rows, np.array(SECONDS), min_similarity=-1.0, min_duration=0.0)[0])
                for rows in (found["cpu"].numpy(), found[device].to(device))]  # fmt: skip
    record(contexts_that_differ=int((contexts[0] != contexts[1]).sum()))
    assert lowest > LEAST_COSINE
    assert contexts[0].tolist() == contexts[1].tolist()


def test_select_context_among_many_matches_the_cpu(device, record):
    rows = torch.nn.functional.normalize(torch.randn(3000, 192, generator=torch.Generator().manual_seed(0)), dim=1)
    limits = {"min_similarity": 0.1, "min_duration": 3.0}
    durations = np.random.default_rng(0).uniform(1.0, 9.0, len(rows))
    expected, similarities = select_context(rows.numpy(), durations, **limits)
    index, found = map(np.asarray, select_context(rows.to(device), durations, **limits))
    record(contexts_that_differ=int((index != expected).sum()), of=len(rows))
    assert (expected >= 0).sum() > 2000
    np.testing.assert_array_equal(index, expected)
    np.testing.assert_allclose(found, similarities, atol=1e-6)


@pytest.mark.parametrize("kind", ["builtin", "nemo_codec", "nemo_codec_noncausal", "dac"])
def test_codes_of_pieces_are_those_of_the_whole_but_for_a_few(device, kind, models, record):
    codec = load_codec(models[kind], device)
    pieces = find_pieces(codec, 1.0)
    assert pieces is not None
    samples = voice(4.7, codec.sampling_rate)
    whole = codec.encode(torch.from_numpy(samples)[None], torch.tensor([len(samples)]))[0].numpy()
    equal = float((pieces.encode(codec, samples, 2 * pieces.length) == whole).mean())
    record(equal_codes=round(equal, 6), looks_back=pieces.before, looks_ahead=pieces.after)
    assert equal >= 1 - MAX_DIFFERENT_CODES


@pytest.mark.parametrize("kind", CODECS)
def test_codes_are_those_of_the_cpu_but_for_a_few(device, kind, models, record):
    codes = {}
    for where in ("cpu", device):
        codec = load_codec(models[kind], where)
        codes[where] = codec.encode(*make_batch(codec.sampling_rate))
    equal = float((codes["cpu"] == codes[device]).double().mean())
    record(equal_codes=round(equal, 6))
    assert codes["cpu"].unique().numel() > 2
    assert equal >= 1 - MAX_DIFFERENT_CODES


@pytest.mark.parametrize("kind", ["builtin", "nemo_codec"])
def test_batches_from_pinned_memory_have_the_same_codes(device, kind, models):
    codec = load_codec(models[kind], device)
    for seed in range(4):
        expected = codec.encode(*make_batch(codec.sampling_rate, seed=seed))
        found = codec.encode(*make_batch(codec.sampling_rate, seed=seed, pinned=device == "cuda"))
        assert torch.equal(expected, found)


@pytest.mark.parametrize("kind", ["resemblyzer", "builtin"])
def test_the_memory_estimate_against_the_peak_of_a_batch(device, kind, models, record):
    load = load_speaker_encoder if kind in ENCODERS else load_codec
    model = load(models[kind], device)
    estimated = estimate_bytes_per_second(model, device)
    measured = measure_peak(lambda: run_noise(model, device, (6, 5 * model.sampling_rate)), device)
    record(estimated_mib_per_second=round(estimated / 2**20, 2), measured=round(measured / 30 / 2**20, 2))
    # The peak is at least the audio itself, and at most 1.5 times the estimate plus workspaces of libraries.
    assert model.sampling_rate * 4 < estimated
    assert measured < 1.5 * 30 * estimated + (64 << 20)


@pytest.mark.parametrize("kind", ENCODERS + CODECS)
def test_the_same_bytes_twice_and_from_a_fresh_model(device, kind, models, record):
    def load():
        if kind in ENCODERS:
            model = load_speaker_encoder(models[kind], device)
            return model.embed, model.sampling_rate
        model = load_codec(models[kind], device)
        return model.encode, model.sampling_rate

    run, rate = load()
    fresh = run(*make_batch(rate))
    twice = run(*make_batch(rate))
    # Batches of other shapes let caches grow and compilers settle.
    for count in (1, 2, 3):
        run(*make_batch(rate, seconds=[0.3 * count] * count, seed=count))
    warm = run(*make_batch(rate))
    other = load()[0](*make_batch(rate))
    same = {
        "twice": torch.equal(fresh, twice),
        "warm": torch.equal(fresh, warm),
        "loaded_again": torch.equal(fresh, other),
    }
    record(**same)
    assert same == dict.fromkeys(same, True)
