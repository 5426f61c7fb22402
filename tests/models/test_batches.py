"""Batches by padded length, canonical batches, and the division of long segments."""

from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from support.models import make_audio
from support.project import ToyCodec, voice

from sharmill.models import load_codec
from sharmill.models.batches import (
    Batch,
    Pieces,
    canonical_batches,
    canonical_length,
    find_pieces,
    padded_batches,
)
from sharmill.models.codec_backend import CodecBackend

LENGTHS = st.lists(st.integers(0, 50) | st.floats(0, 50), max_size=60)


@given(LENGTHS, st.floats(0.1, 200), st.just(0.0) | st.floats(0, 60))
def test_batches_contain_every_item_once_and_are_full(lengths, max_padded, equal_below):
    batches = padded_batches(lengths, max_padded, equal_below=equal_below)
    order = [index for batch in batches for index in batch]
    assert order == sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * lengths[batch[0]] <= max_padded
        assert lengths[batch[-1]] >= equal_below or len({lengths[index] for index in batch}) == 1
    for batch in padded_batches(lengths, max_padded)[:-1]:
        assert (len(batch) + 1) * lengths[batch[0]] > max_padded


FRAMES = st.lists(st.integers(1, 3000), max_size=40)


@given(st.integers(1, 100_000))
def test_a_canonical_length_is_slightly_greater_or_equal(num_frames):
    length = canonical_length(num_frames)
    assert num_frames <= length <= num_frames * 17 / 16
    assert canonical_length(length) == length


@given(FRAMES, st.floats(0, 5000), st.booleans())
def test_canonical_batches_contain_every_item_once_at_one_size(frames, max_frames, equal_only):
    batches = canonical_batches(frames, max_frames, equal_only=equal_only)
    assert sorted(index for batch in batches for index in batch.items) == list(range(len(frames)))
    sizes = defaultdict(set)
    for batch in batches:
        sizes[batch.num_frames].add(batch.num_rows)
        assert len(batch.items) <= batch.num_rows
        assert all(frames[index] <= batch.num_frames for index in batch.items)
        assert not equal_only or [batch.num_frames] == [frames[index] for index in batch.items]
    assert all(len(found) == 1 for found in sizes.values())


def test_rows_beyond_the_items_are_silence_of_equal_length():
    audio, lengths = Batch([0], 3, 2, as_one_length=True).fill([np.ones(5, np.float32)], 2)
    assert audio.tolist() == [[1, 1, 1, 1, 1, 0], [0] * 6]
    assert lengths.tolist() == [6, 6]


# The part of a model name after the colon, or the kind of a checkpoint.
BOUNDED = {"builtin": (4, 0), "nemo_codec": (4, 0), "nemo_codec_noncausal": (2, 2), "dac": (8, 8)}


UNBOUNDED = ["encodec", "mimi"]


def named(kind, checkpoints):
    family = "nemo" if kind.startswith("nemo") else "transformers"
    return f"{family}:{checkpoints[kind]}" if kind in checkpoints else kind


@pytest.mark.parametrize("kind", [*BOUNDED, *UNBOUNDED])
def test_canonical_codes_are_bit_identical_beside_any_items(checkpoints, kind):
    codec = load_codec(named(kind, checkpoints))
    lengths = [9000, 9010, 9100, 8960, 4000, 700, 60, 9005]
    audio, num_samples = make_audio(lengths)
    waves = [row[:n].numpy() for row, n in zip(audio, num_samples, strict=True)]

    def codes(chosen: list[int]) -> dict[int, np.ndarray]:
        frames = [-(-len(waves[index]) // codec.samples_per_frame) for index in chosen]
        found = {}
        for batch in canonical_batches(frames, 1200, equal_only=codec.equal_lengths_only):
            encoded = codec.encode(*batch.fill([waves[chosen[i]] for i in batch.items], codec.samples_per_frame))
            for index, row in zip(batch.items, encoded, strict=False):
                found[chosen[index]] = row[:, : frames[index]].numpy()
        return found

    together, backwards = codes(list(range(len(lengths)))), codes(list(reversed(range(len(lengths)))))
    for index in range(len(lengths)):
        np.testing.assert_array_equal(together[index], codes([index])[index])
        np.testing.assert_array_equal(together[index], backwards[index])


@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 50), st.integers(1, 500))
def test_pieces_include_all_frames_with_their_dependencies(before, after, own, more):
    pieces = Pieces(length=before + after + own, before=before, after=after)
    num_frames = pieces.length + more
    divided = pieces.divide(num_frames)
    kept = [range(start + part.start, start + part.stop) for start, part in divided]
    assert [frame for frames in kept for frame in frames] == list(range(num_frames))
    for start, part in divided:
        assert start == 0 or part.start >= before
        assert start + pieces.length == num_frames or pieces.length - part.stop >= after


@pytest.mark.parametrize("kind", BOUNDED)
def test_the_codes_of_pieces_equal_those_of_the_segment(kind, checkpoints):
    codec = load_codec(named(kind, checkpoints))
    assert isinstance(codec, CodecBackend)
    assert codec.find_reach() == BOUNDED[kind]
    before, after = BOUNDED[kind]
    # Shorter pieces than in a run give more boundaries.
    pieces = Pieces(length=before + after + 40, before=before, after=after)
    samples = voice(400.4 * codec.samples_per_frame / codec.sampling_rate, codec.sampling_rate)
    whole = codec.encode(torch.from_numpy(samples)[None], torch.tensor([len(samples)]))[0].numpy()
    assert len(np.unique(whole)) > 2
    for max_frames in (1, 3 * pieces.length):
        np.testing.assert_array_equal(pieces.encode(codec, samples, max_frames), whole)


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_codecs_without_a_known_reach_have_no_pieces(kind, checkpoints):
    assert find_pieces(load_codec(named(kind, checkpoints))) is None
    assert find_pieces(ToyCodec()) is None
