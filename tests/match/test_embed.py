"""Embeddings of segments: each in its row, at the encoder's rate, in bounded batches, whatever breaks among them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.errors import raises
from support.shar import put, voice

from sharmill.audio.roots import AudioRoots
from sharmill.audio.segments import SegmentReader
from sharmill.errors import FatalError, RejectRecord, UnitFailed
from sharmill.manifest import Segment
from sharmill.match.embed import Embedder
from sharmill.models import load_speaker_encoder


class LengthEncoder:
    """The embedding is the number of samples and the loudest of them."""

    sampling_rate = 16000
    embedding_size = 2
    checksum = "length"

    def __init__(self):
        self.batches = []

    def embed(self, audio, num_samples):
        self.batches.append(num_samples.tolist())
        peaks = [row[:n].abs().max() for row, n in zip(audio, num_samples.tolist(), strict=True)]
        return torch.stack([num_samples.float(), torch.stack(peaks)], dim=1)


def embedder(root, encoder, batch_seconds=3.0, threads=2):
    return Embedder(encoder, SegmentReader(AudioRoots.of([root])), batch_seconds, threads)


def rows_and_rejects(outcomes):
    """The embeddings of the segments that have one, in order, and the reasons of the others by position."""
    rows = [outcome.embedding for outcome in outcomes if not isinstance(outcome, RejectRecord)]
    rejects = {n: outcome.reason for n, outcome in enumerate(outcomes) if isinstance(outcome, RejectRecord)}
    return np.array(rows), rejects


def whole(name, seconds):
    return Segment(0, name, 0.0, seconds, whole_file=True)


def test_every_row_is_of_its_segment_at_the_encoders_rate(tmp_path):
    encoder = LengthEncoder()
    segments, expected = [], []
    for number, (seconds, rate) in enumerate([(0.5, 16000), (2.0, 8000), (1.0, 44100), (0.7, 16000)]):
        put(tmp_path / f"{number}.wav", voice(seconds, rate), rate)
        segments.append(whole(f"{number}.wav", seconds))
        expected.append(round(seconds * 16000))
    segments.append(Segment(0, "1.wav", 0.5, 0.25, whole_file=False))
    rows, rejects = rows_and_rejects(embedder(tmp_path, encoder)(segments))
    assert rows[:, 0].tolist() == [*expected, 4000]
    assert rows.dtype == np.float32
    assert rejects == {}


def test_batches_are_sorted_by_length_and_bounded(tmp_path):
    encoder = LengthEncoder()
    seconds = [0.5, 2.0, 1.0, 0.7, 1.1]
    for number, length in enumerate(seconds):
        put(tmp_path / f"{number}.wav", voice(length))
    embedder(tmp_path, encoder)([whole(f"{number}.wav", length) for number, length in enumerate(seconds)])
    assert encoder.batches == [[32000], [17600, 16000], [11200, 8000]]


def test_a_batch_of_broken_ones_only_is_not_embedded(tmp_path):
    encoder = LengthEncoder()
    _, rejects = rows_and_rejects(embedder(tmp_path, encoder)([whole("gone.wav", 0.5)] * 3))
    assert encoder.batches == []
    assert sorted(rejects) == [0, 1, 2]


def test_no_segments_give_no_rows(tmp_path):
    assert embedder(tmp_path, LengthEncoder())([]) == []


def test_progress_adds_up_to_the_seconds_of_the_segments(tmp_path):
    put(tmp_path / "a.wav", voice(0.5))
    done = []
    embedder(tmp_path, LengthEncoder(), batch_seconds=0.5)([whole("a.wav", 0.5), whole("gone.wav", 0.25)], done.append)
    assert done == [0.5, 0.25]


def test_an_error_of_the_encoder_comes_through(tmp_path):
    class Failing(LengthEncoder):
        def embed(self, audio, num_samples):
            raise RuntimeError("device-side assert triggered")

    put(tmp_path / "a.wav", voice(0.5))
    with pytest.raises(RuntimeError, match="device-side assert"):
        embedder(tmp_path, Failing())([whole("a.wav", 0.5)])


def test_the_batching_moves_resemblyzers_embeddings_by_float_noise_only(tmp_path):
    encoder = load_speaker_encoder("resemblyzer")
    segments = []
    for number in range(8):
        seconds = 1.0 + 0.37 * number
        put(tmp_path / f"{number}.wav", voice(seconds, pitch=110 + 25 * number, seed=number))
        segments.append(whole(f"{number}.wav", seconds))
    found = [
        rows_and_rejects(embedder(tmp_path, encoder, batch_seconds=seconds)(segments))[0]
        for seconds in (0.1, 6.0, 1000.0)
    ]
    for rows in found[1:]:
        np.testing.assert_allclose(rows, found[0], atol=2e-6)


class SmallDevice(LengthEncoder):
    """An encoder on a device with memory for so many samples, that says what torch says where they are more."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.samples = samples

    def embed(self, audio, num_samples):
        if audio.numel() > self.samples:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().embed(audio, num_samples)


def test_segments_longer_than_a_batch_that_do_not_fit_are_rejected_and_the_others_go_on(tmp_path):
    segments = []
    for number, seconds in enumerate([4.0, 0.5, 5.0, 0.75, 6.0]):
        put(tmp_path / f"{number}.wav", voice(seconds, seed=number))
        segments.append(whole(f"{number}.wav", seconds))
    outcomes = embedder(tmp_path, SmallDevice(2 * 16000), batch_seconds=1.5)(segments)
    assert [outcome.reason for outcome in outcomes if isinstance(outcome, RejectRecord)] == ["too_long_for_device"] * 3
    assert [isinstance(outcome, RejectRecord) for outcome in outcomes] == [True, False, True, False, True]


def test_a_batch_that_does_not_fit_ends_the_unit_and_a_second_one_the_stage(tmp_path):
    for number in range(3):
        put(tmp_path / f"{number}.wav", voice(1.0, seed=number))
    segments = [whole(f"{number}.wav", 1.0) for number in range(3)]
    embed = embedder(tmp_path, SmallDevice(2 * 16000), batch_seconds=10.0)
    with raises(UnitFailed, "out_of_memory", "lower match.batch_seconds below 3"):
        embed(segments)
    with raises(FatalError, "out_of_memory", "lower match.batch_seconds below 3"):
        embed(segments)


def test_where_units_were_done_a_batch_that_does_not_fit_never_ends_the_stage(tmp_path):
    for number in range(3):
        put(tmp_path / f"{number}.wav", voice(1.0, seed=number))
    segments = [whole(f"{number}.wav", 1.0) for number in range(3)]
    embed = embedder(tmp_path, SmallDevice(2 * 16000), batch_seconds=10.0)
    embed(segments[:2])
    for _ in range(3):
        with raises(UnitFailed, "out_of_memory"):
            embed(segments)
