"""Batches by padded length."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sharmill.models.protocols import pad, padded_batches

LENGTHS = st.lists(st.integers(0, 50) | st.floats(0, 50), max_size=60)


@given(LENGTHS, st.floats(0.1, 200), st.booleans())
def test_every_item_is_in_one_batch(lengths, max_padded, equal_only):
    batches = padded_batches(lengths, max_padded, equal_only=equal_only)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(batches)


@given(LENGTHS, st.floats(0.1, 200), st.booleans())
def test_a_batch_of_several_is_within_the_limit(lengths, max_padded, equal_only):
    for batch in padded_batches(lengths, max_padded, equal_only=equal_only):
        longest = max(lengths[index] for index in batch)
        assert len(batch) == 1 or len(batch) * longest <= max_padded
        assert not equal_only or len({lengths[index] for index in batch}) == 1


@given(LENGTHS, st.floats(0.1, 200), st.booleans())
def test_the_longest_come_first_and_ties_in_order(lengths, max_padded, equal_only):
    order = [index for batch in padded_batches(lengths, max_padded, equal_only=equal_only) for index in batch]
    assert order == sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))


@given(LENGTHS, st.floats(0.1, 200))
def test_no_batch_could_have_taken_the_first_of_the_next(lengths, max_padded):
    batches = padded_batches(lengths, max_padded)
    for batch in batches[:-1]:
        assert (len(batch) + 1) * lengths[batch[0]] > max_padded


def test_padding_keeps_the_items_and_adds_zeros():
    padded, lengths = pad([np.ones(3, np.float32), np.full(5, 2, np.float32), np.empty(0, np.float32)])
    assert lengths.tolist() == [3, 5, 0]
    assert padded.tolist() == [[1, 1, 1, 0, 0], [2] * 5, [0] * 5]
    assert str(padded.dtype) == "torch.float32"
