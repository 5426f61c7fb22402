"""Planned batches: shapes that depend on lengths, configuration and kind of device, canonical ones and others."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.models import make_audio
from support.shar import ToyCodec

from sharmill.models import load_codec
from sharmill.models.shapes import Batch, canonical_batches, canonical_length, fill_batch, plan_batches

FRAMES = st.lists(st.integers(1, 3000), max_size=40)


@given(st.integers(1, 100_000))
def test_a_canonical_length_is_not_less_and_hardly_more(num_frames):
    length = canonical_length(num_frames)
    assert num_frames <= length <= num_frames * 17 / 16
    assert canonical_length(length) == length


def test_there_are_few_canonical_lengths():
    assert len({canonical_length(n) for n in range(16, 1025)}) == 6 * 16 + 1


@given(FRAMES, st.floats(0, 5000), st.booleans())
def test_canonical_batches_have_every_item_once_and_one_size_for_each_length(frames, max_frames, equal_only):
    batches = canonical_batches(frames, max_frames, equal_only=equal_only)
    assert sorted(index for batch in batches for index in batch.items) == list(range(len(frames)))
    sizes = defaultdict(set)
    for batch in batches:
        sizes[batch.num_frames].add(batch.num_rows)
        assert len(batch.items) <= batch.num_rows
        assert all(frames[index] <= batch.num_frames for index in batch.items)
        assert not equal_only or [batch.num_frames] == [frames[index] for index in batch.items]
    assert all(len(found) == 1 for found in sizes.values())


@given(FRAMES, st.floats(0, 5000), FRAMES)
def test_the_shape_of_an_item_does_not_depend_on_the_others(frames, max_frames, others):
    def shapes(items: list[int]) -> list[tuple[int, int]]:
        batches = canonical_batches(items, max_frames, equal_only=False)
        found = {index: (batch.num_frames, batch.num_rows) for batch in batches for index in batch.items}
        return [found[index] for index in range(len(items))]

    assert shapes([*frames, *others])[: len(frames)] == shapes(frames)


def test_batches_on_a_cpu_have_ten_seconds_and_on_a_gpu_what_is_asked_for():
    codec = ToyCodec(16000, 320)
    frames = [100] * 30  # two seconds each
    assert [batch.num_rows for batch in plan_batches(frames, 40.0, codec, "cpu")] == [5] * 6
    assert [batch.num_rows for batch in plan_batches(frames, 40.0, codec, "cuda")] == [20, 10]


def test_canonical_batches_are_full_on_a_gpu_and_of_one_row_on_a_cpu():
    codec = ToyCodec(16000, 320)
    batches = plan_batches([100] * 30, 40.0, codec, "cuda", canonical=True)
    assert [(len(batch.items), batch.num_rows) for batch in batches] == [(20, 20), (10, 20)]
    assert {batch.num_rows for batch in plan_batches([100] * 30, 40.0, codec, "cpu", canonical=True)} == {1}


def test_padding_of_speech_is_at_most_three_percent():
    """600 utterances as long as read speech: a gamma distribution with a mean of 6.5 s."""
    seconds = np.clip(np.random.default_rng(0).gamma(2.5, 2.6, 600), 0.6, 20)
    for codec in (ToyCodec(24000, 1920), ToyCodec(22050, 1024), ToyCodec(16000, 320)):
        frames = [int(np.ceil(s * codec.sampling_rate / codec.samples_per_frame)) for s in seconds]
        for canonical in (False, True):
            batches = plan_batches(frames, 30.0, codec, "cpu", canonical=canonical)
            padded = sum(batch.num_frames * batch.num_rows for batch in batches)
            assert 1 - sum(frames) / padded <= 0.03


def test_rows_beyond_the_items_are_silence_of_the_same_length():
    audio, lengths = fill_batch(Batch([0], 3, 2, as_one_length=True), [np.ones(5, np.float32)], 2)
    assert audio.tolist() == [[1, 1, 1, 1, 1, 0], [0] * 6]
    assert lengths.tolist() == [6, 6]


KINDS = {
    "nemo_codec": "nemo",
    "nemo_codec_noncausal": "nemo",
    "encodec": "transformers",
    "mimi": "transformers",
    "dac": "transformers",
}


@pytest.mark.parametrize("kind", KINDS)
def test_canonical_codes_are_those_beside_any_neighbours_bit_for_bit(checkpoints, kind):
    codec = load_codec(f"{KINDS[kind]}:{checkpoints[kind]}")
    lengths = [9000, 9010, 9100, 8960, 4000, 700, 60, 9005]
    audio, num_samples = make_audio(lengths)
    waves = [row[:n].numpy() for row, n in zip(audio, num_samples, strict=True)]

    def codes(chosen: list[int]) -> dict[int, np.ndarray]:
        frames = [-(-len(waves[index]) // codec.samples_per_frame) for index in chosen]
        found = {}
        for batch in canonical_batches(frames, 1200, equal_only=codec.equal_lengths_only):
            encoded = codec.encode(*fill_batch(batch, [waves[chosen[i]] for i in batch.items], codec.samples_per_frame))
            for index, row in zip(batch.items, encoded, strict=False):
                found[chosen[index]] = row[:, : frames[index]].numpy()
        return found

    together, backwards = codes(list(range(len(lengths)))), codes(list(reversed(range(len(lengths)))))
    for index in range(len(lengths)):
        np.testing.assert_array_equal(together[index], codes([index])[index])
        np.testing.assert_array_equal(together[index], backwards[index])
