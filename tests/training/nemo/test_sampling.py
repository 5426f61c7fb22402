"""Batches and filters of NeMo's loader over our cuts, with values."""

from __future__ import annotations

from bisect import bisect_left

import pytest
from support.training import AsIs, Letters, flat, number, numbers, take

from sharmill.training import get_dataloader

# Seconds and letters of cut n of the large dataset; cut 23 failed a check, which NeMo leaves out unless told otherwise.
SECONDS = [round(0.5 + 0.1 * n, 1) for n in range(24)]
LETTERS = [n % 6 + 1 for n in range(24)]
ALL = list(range(23))


@pytest.fixture
def load(corpora):
    """Returns a function: settings -> the batches of one pass over the large dataset in its order."""

    def load(tokenizer=None, **settings):
        cfg = {"input_cfg": [corpora.entry("large")], "force_finite": True, "concurrent_bucketing": False} | settings
        return take(get_dataloader(cfg, 0, 1, tokenizer, dataset=AsIs()))

    return load


def greedy(lengths, limit):
    """Batches in order, each full when one more of its longest would not fit: the last one may have been too long."""
    batches, batch = [], []
    for index, _ in enumerate(lengths):
        batch.append(index)
        longest = max(lengths[i] for i in batch)
        if (len(batch) + 1) * longest > limit:
            batches.append(batch)
            batch = []
    return [*batches, batch] if batch else batches


def test_batch_size(load):
    assert numbers(load(batch_size=9)) == [ALL[:9], ALL[9:18], ALL[18:]]


def test_batch_duration_counts_padded_seconds(load):
    batches = numbers(load(batch_duration=5.05))
    assert batches == greedy(SECONDS[:23], 5.05)
    assert batches[:3] == [[0, 1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11]]


def test_quadratic_penalty_makes_batches_of_long_cuts_smaller(load):
    batches = numbers(load(batch_duration=5.05, quadratic_duration=2.0))
    assert batches == greedy([seconds + seconds**2 / 2.0 for seconds in SECONDS[:23]], 5.05)
    # 0.8 s count as 1.12, and 1.6 s as 2.88, of which one alone is full.
    assert batches[0] == [0, 1, 2, 3]
    assert batches[4:6] == [[11], [12]]


def test_bucketing_batches_cuts_of_one_bucket(load):
    bins = [1.05, 1.65, 2.25]
    batches = numbers(load(batch_duration=6.0, use_bucketing=True, bucket_duration_bins=bins, shuffle=True))
    buckets = [{bisect_left(bins, SECONDS[n]) for n in batch} for batch in batches]
    assert all(len(bucket) == 1 for bucket in buckets)
    assert {bucket for one in buckets for bucket in one} == {0, 1, 2, 3}
    assert sorted(flat(batches)) == ALL
    # Full, or one less than full where the last one drawn was the longest.
    assert all((len(batch) - 1) * max(SECONDS[n] for n in batch) <= 6.0 for batch in batches)


def test_bucketing_estimates_its_bins(load):
    batches = numbers(load(batch_duration=6.0, use_bucketing=True, num_buckets=3))
    assert sorted(flat(batches)) == ALL
    # Ascending durations: a bucket is a run of numbers.
    assert all(batch == list(range(batch[0], batch[-1] + 1)) for batch in batches)


def test_each_bucket_has_its_batch_size(load):
    batches = numbers(load(bucket_duration_bins=[1.05, 1.65, 2.85], bucket_batch_size=[4, 3, 2]))
    sizes = {0: [], 1: [], 2: []}
    for batch in batches:
        sizes[bisect_left([1.05, 1.65, 2.85], SECONDS[batch[0]])].append(len(batch))
    # 6, 6 and 11 cuts.
    assert {bucket: sorted(counts, reverse=True) for bucket, counts in sizes.items()} == {
        0: [4, 2],
        1: [3, 3],
        2: [2, 2, 2, 2, 2, 1],
    }


TWO_D = {"bucket_duration_bins": [[1.65, 2], [1.65, 4], [2.85, 3], [2.85, 6]], "bucket_batch_size": [4, 3, 2, 2]}


def bucket_2d(n, bins=TWO_D["bucket_duration_bins"]):
    """The first sub-bucket of the cut's duration that has room for its letters."""
    end = next(seconds for seconds, _ in bins if SECONDS[n] <= seconds)
    return next((i for i, (s, letters) in enumerate(bins) if s == end and LETTERS[n] <= letters), None)


def test_2d_bucketing_is_strict(load):
    batches = numbers(load(Letters(), **TWO_D))
    assert sorted(flat(batches)) == [n for n in ALL if bucket_2d(n) is not None]
    assert 4 not in flat(batches)  # 0.9 s with 5 letters
    for batch in batches:
        (bucket,) = {bucket_2d(n) for n in batch}
        assert len(batch) <= TWO_D["bucket_batch_size"][bucket]


def test_lenient_2d_bucketing_promotes_instead_of_dropping(load):
    batches = numbers(load(Letters(), bucketing_2d_strict_mode=False, **TWO_D))
    assert sorted(flat(batches)) == ALL
    # 4, 5, 10 and 11 have too many letters for their duration and join those of up to 2.85 s and 6 letters.
    (with_4,) = [batch for batch in batches if 4 in batch]
    assert all(bucket_2d(n) in (None, 3) for n in with_4)


def test_2d_bucketing_with_a_limit_of_tokens_per_second(load):
    batches = numbers(load(Letters(), max_tps=[2.0, 3.0, 1.0, 2.0], **TWO_D))
    limits = [2.0, 3.0, 1.0, 2.0]
    expected = [n for n in ALL if (b := bucket_2d(n)) is not None and LETTERS[n] / SECONDS[n] <= limits[b]]
    assert sorted(flat(batches)) == expected
    assert 0 < len(expected) < 20


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"min_duration": 2.05}, list(range(16, 23))),
        ({"max_duration": 0.75}, [0, 1, 2]),
        ({"min_duration": 1.0, "max_duration": 1.2}, [5, 6, 7]),
        # 20 and 21 have no CER, and 22 has null.
        ({"max_cer": 0.03}, [0, 1, 2, 3, 20, 21, 22]),
        ({"min_context_speaker_similarity": 0.9}, [20, 21, 22]),
        ({"max_cer": 0.15, "min_context_speaker_similarity": 0.76}, [13, 14, 15, 20, 21, 22]),
        ({"keep": "fail"}, list(range(24))),
        ({}, ALL),
    ],
)
def test_filters(load, settings, expected):
    assert flat(numbers(load(batch_size=10, **settings))) == expected


def test_limits_of_tokens_per_second(load):
    kept = flat(numbers(load(Letters(), batch_size=10, min_tps=2, max_tps=4.0)))
    assert kept == [n for n in ALL if 2 <= LETTERS[n] / SECONDS[n] <= 4.0]
    assert 0 < len(kept) < 15


def test_the_batch_has_codes_audio_and_text_of_its_cuts(corpora):
    entry = corpora.entry("large") | {"fields": None}
    settings = {"input_cfg": [entry], "force_finite": True, "batch_size": 30, "sample_rate": 16000}
    (batch,) = take(get_dataloader(settings, 0, 1, Letters(), dataset=AsIs()))
    for cut in batch:
        n = number(cut)
        assert cut.load_audio().shape == (1, round(16000 * SECONDS[n]))
        assert cut.load_target_codes().shape == (3, round(50 * SECONDS[n]))
        assert cut.load_context_codes().shape == (3, round(50 * SECONDS[n + 1]))
        assert cut.supervisions[0].tokens.tolist() == [ord("x")] * LETTERS[n]


def test_the_audio_is_resampled(corpora):
    entry = corpora.entry("large") | {"fields": ["target_audio"]}
    settings = {"input_cfg": [entry], "force_finite": True, "batch_size": 1, "sample_rate": 8000}
    first = take(get_dataloader(settings, 0, 1, dataset=AsIs()), 1)[0][0]
    assert first.load_audio().shape == (1, 4000)


def test_metadata_only_opens_no_field(load):
    cut = flat(load(batch_size=30, metadata_only=True))[0]
    assert not cut.has_custom("target_codes")
