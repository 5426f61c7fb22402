"""Bins: equal to lhotse's, equal to NeMo's, from the cuts alone, and what NeMo's loader makes of them."""

from __future__ import annotations

import shutil
from collections import Counter

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from lhotse import CutSet
from lhotse.dataset.sampling.dynamic_bucketing import estimate_duration_buckets
from support.errors import raises
from support.pipelines import run_sharmill, shar_fields
from support.properties import examples
from support.shar import ToyCodec, copy, lines, rewrite, voice

from sharmill.errors import ConfigError, DamagedShard
from sharmill.shar import open_shar
from sharmill.training.buckets.bins import (
    Bin,
    assign,
    estimate_bins,
    estimate_bins_2d,
    max_ratio_of,
    round_up,
)
from sharmill.training.buckets.lengths import Lengths, read_lengths
from sharmill.training.buckets.report import BinsOptions, estimate_report, report_bins


def lengths_of(seconds, tokens=None):
    seconds = np.array(seconds, dtype=np.float64)
    return Lengths(seconds, seconds, None if tokens is None else np.array(tokens))


def test_lengths_are_those_of_the_cuts(many):
    cuts = list(open_shar(many.dataset, []))
    found = read_lengths([many.dataset], tokenizer=["bytes"], workers=1)
    assert sorted(zip(found.lengths, found.tokens, strict=True)) == sorted(
        (cut.duration, len(cut.supervisions[0].text)) for cut in cuts
    )
    assert found.hours == pytest.approx(sum(cut.duration for cut in cuts) / 3600)
    assert found.tokens.dtype == np.int64


def test_many_workers_find_the_same(many):
    alone = read_lengths([many.dataset], tokenizer=["chars"], workers=1)
    together = read_lengths([many.dataset], tokenizer=["chars"], workers=3)
    np.testing.assert_array_equal(alone.lengths, together.lengths)
    np.testing.assert_array_equal(alone.tokens, together.tokens)


def test_no_file_but_those_of_the_cuts_is_opened(many, tmp_path):
    only_cuts = copy(many.dataset, tmp_path / "only_cuts")
    for folder in only_cuts.iterdir():
        if folder.is_dir() and folder.name != "cuts":
            shutil.rmtree(folder)
    np.testing.assert_array_equal(
        read_lengths([only_cuts], workers=1).lengths, read_lengths([many.dataset], workers=1).lengths
    )


def test_a_shar_of_another_tool_has_bins_too(many, tmp_path):
    (tmp_path / "cuts").mkdir()
    for path in (many.dataset / "cuts").iterdir():
        rewrite(tmp_path / "cuts" / path.name, [cut | {"custom": {}} for cut in lines(path)])
    foreign, own = (read_lengths([folder], tokenizer=["bytes"], workers=1) for folder in (tmp_path, many.dataset))
    np.testing.assert_array_equal(foreign.lengths, own.lengths)
    np.testing.assert_array_equal(foreign.tokens, own.tokens)
    with raises(ConfigError, "unknown_codec", "--token-equivalent-duration"):
        estimate_report([tmp_path], BinsOptions(), token_bins=True, workers=1)


def test_several_datasets_are_one(many, built):
    both = read_lengths([many.dataset, built.dataset], workers=2)
    assert len(both.lengths) == 67


def test_limits_leave_cuts_out_and_count_them(built):
    found = read_lengths([built.dataset], min_duration=0.5, max_duration=2.0, workers=1)
    assert sorted(found.lengths) == [0.5, 0.7, 1.0, 1.3]
    assert found.num_discarded == 3
    with raises(ConfigError, "too_few_cuts", "7", "5", "inf"):
        read_lengths([built.dataset], min_duration=5.0, workers=1)


def test_cuts_without_text_count_no_tokens_and_are_told(built, tmp_path):
    dataset = copy(built.dataset, tmp_path / "copy")
    path = dataset / "cuts/cuts.000000.jsonl.gz"
    cuts = lines(path)
    cuts[0]["supervisions"][0]["text"] = None
    rewrite(path, cuts)
    found = read_lengths([dataset], tokenizer=["bytes"], workers=1)
    assert sorted(found.tokens) == [0] + [len("text of spk/utt0.flac")] * 6
    assert found.without_text == 1
    assert "# without a text, counted as 0 tokens: 1\n" in estimate_report(
        [dataset], BinsOptions(num_buckets=2), tokenizer=["bytes"], workers=1
    )


@pytest.fixture
def untranscribed(built, tmp_path):
    """A dataset of which no cut has a text."""
    dataset = copy(built.dataset, tmp_path / "untranscribed")
    for path in (dataset / "cuts").iterdir():
        cuts = lines(path)
        for cut in cuts:
            cut["supervisions"][0]["text"] = None
        rewrite(path, cuts)
    return dataset


@pytest.mark.parametrize("token_bins", [False, True])
def test_data_without_text_have_no_tokens_and_no_limits_of_them(untranscribed, token_bins):
    options = {"token_bins": token_bins, "tokenizer": ["bytes"], "workers": 1}
    report = estimate_report([untranscribed], BinsOptions(num_buckets=2), **options)
    (said,) = [line for line in report.splitlines() if "token" in line and line.startswith("# ")]
    assert said == "# no cut has a text: there are no limits of tokens"
    values = yaml.safe_load(report)
    assert not {"max_tps", "max_tpt"} & values.keys()
    assert values.get("measure_total_length", False) is False
    assert values["bucket_duration_bins"]


def test_sub_buckets_need_text(untranscribed):
    options = BinsOptions(num_buckets=2, sub_buckets=2)
    with raises(ConfigError, "too_few_cuts", "text"):
        estimate_report([untranscribed], options, tokenizer=["bytes"], workers=1)


def test_lengths_alone_need_no_column_of_tokens(built):
    report = estimate_report([built.dataset], BinsOptions(num_buckets=2), workers=1)
    (header,) = [line for line in report.splitlines() if "up to" in line]
    assert header.split() == ["#", "up", "to", "cuts", "hours"]


@pytest.mark.parametrize("duration", [0, -1.0, float("nan"), float("inf"), "long", None])
def test_a_duration_that_is_none_is_named(built, tmp_path, duration):
    dataset = copy(built.dataset, tmp_path / "copy")
    path = dataset / "cuts/cuts.000001.jsonl.gz"
    cuts = lines(path)
    cuts[1]["duration"] = duration
    rewrite(path, cuts)
    with raises(DamagedShard, "damaged_shard", path.name, f"'{cuts[1]['id']}'"):
        read_lengths([dataset], workers=1)


@pytest.mark.parametrize("options", [{}, {"closed": True}, {"sub_buckets": 3}], ids=["open", "closed", "two"])
def test_buckets_that_nothing_can_be_in_are_not_there(options):
    lengths = lengths_of([2.0] * 10 + [3.0] * 10, [5] * 20)
    values = yaml.safe_load(report_bins(lengths, BinsOptions(num_buckets=9, **options)))
    expected = {"closed": [2.0, 3.0], "sub_buckets": [[2.0, 5], [3.0, 5]]}.get(next(iter(options), ""), [2.0, 3.0])
    assert values["bucket_duration_bins"] == expected
    assert values["num_buckets"] == (2 if options else 3)


@pytest.mark.parametrize("workers", [1, 2])
def test_damaged_cuts_raise(built, tmp_path, workers):
    dataset = copy(built.dataset, tmp_path / "copy")
    path = dataset / "cuts/cuts.000001.jsonl.gz"
    rewrite(path, lines(path)[:-1])
    with raises(DamagedShard, "damaged_shard", path.name, "2", "3"):
        read_lengths([dataset], workers=workers)


def test_what_is_no_dataset_is_named(tmp_path):
    with raises(ConfigError, "no_dataset"):
        read_lengths([tmp_path])


@pytest.mark.parametrize("num_buckets", [2, 3, 7, 30])
def test_one_dimension_is_that_of_lhotse(many, num_buckets):
    theirs = estimate_duration_buckets(CutSet.from_shar(fields=shar_fields(many.dataset)), num_buckets)
    ours = estimate_bins(read_lengths([many.dataset], workers=2).lengths, num_buckets)
    assert ours == theirs
    report = yaml.safe_load(estimate_report([many.dataset], BinsOptions(num_buckets=num_buckets), workers=1))
    assert report["bucket_duration_bins"] == theirs
    assert report["num_buckets"] == len(theirs) + 1


def formula(name):
    """Durations and token counts of 2,000 cuts; ``skewed`` has a third at 20 s, and some texts that are too long."""
    i = np.arange(2000)
    durations = 1 + ((i * 7919) % 1999) / 100
    if name == "skewed":
        durations = np.where(i % 3 == 0, 20.0, 1 + ((i * 7919) % 1999) / 100 / 1.06)
    tokens = (durations * (8 + ((i * 104729) % 97) / 20)).astype(int)
    return durations, np.where(i % 200 == 7, tokens * 5, tokens) if name == "skewed" else tokens


# What NeMo's scripts/speech_recognition/estimate_duration_bins_2d.py gives for these data.
BY_NEMO = {
    ("smooth", 4, 2): (
        [(10.54, 77), (10.54, 132), (14.87, 135), (14.87, 185), (18.2, 176), (18.2, 226), (20.98, 209), (20.98, 266)],
        [12.785] * 2 + [12.793] * 2 + [12.797] * 2 + [12.775] * 2,
    ),
    ("skewed", 6, 3): (
        [(11.406, 68), (11.406, 97), (11.406, 144), (16.094, 135), (16.094, 157), (16.094, 201), (19.66, 175),
         (19.66, 203), (19.66, 248), (20.0, 173), (20.0, 185), (20.0, 197), (20.0, 208), (20.0, 219), (20.0, 229),
         (20.0, 239), (20.0, 248), (20.0, 256)],
        [12.786] * 3 + [12.753] * 3 + [12.794] * 3 + [12.8] * 9,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "buckets", "sub_buckets"), BY_NEMO)
def test_two_dimensions_are_those_of_nemo(name, buckets, sub_buckets):
    bins, ratios = BY_NEMO[name, buckets, sub_buckets]
    ours = estimate_bins_2d(*formula(name), buckets, sub_buckets)
    # NeMo counts what is as long as a bound in the bucket above it, where its loader does not put it.
    np.testing.assert_allclose([bound.tokens for bound in ours], [tokens for _, tokens in bins], atol=1, rtol=0)
    # NeMo rounds to the nearest of three decimals, which may be below the longest cut.
    np.testing.assert_allclose([bound.length for bound in ours], [length for length, _ in bins], atol=0.00101, rtol=0)
    np.testing.assert_allclose([bound.max_ratio for bound in ours], ratios, atol=0.0006, rtol=0)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.05, 40.0), st.integers(0, 500)), min_size=3, max_size=200),
    st.integers(2, 12),
    st.integers(1, 4),
)
def test_every_cut_has_a_bucket_or_too_many_tokens(cuts, buckets, sub_buckets):
    seconds, tokens = (np.array(column) for column in zip(*cuts, strict=True))
    buckets = min(buckets, len(cuts))
    bins = estimate_bins_2d(seconds, tokens, buckets, sub_buckets)
    assert [bound.length for bound in bins] == sorted(bound.length for bound in bins)
    assert bins[-1].length >= seconds.max()
    found = assign(lengths_of(seconds, tokens), bins, closed=True)
    for length, count, bucket in zip(seconds, tokens, found, strict=True):
        candidates = [n for n, bound in enumerate(bins) if bound.length >= length]
        same = [n for n in candidates if bins[n].length == bins[candidates[0]].length]
        fitting = [n for n in same if bins[n].tokens >= count and count / length <= round_up(bins[n].max_ratio, 2)]
        assert bucket == (fitting[0] if fitting else -1)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 40)), min_size=3, max_size=200),
    st.integers(2, 12),
    st.integers(1, 4),
)
def test_no_cut_is_left_out_but_for_an_outlying_number_of_tokens(cuts, buckets, sub_buckets):
    """Frames are few and whole: many cuts are as long as the bound of a bucket, which takes all of them."""
    frames, tokens = (np.array(column) for column in zip(*cuts, strict=True))
    bins = estimate_bins_2d(frames, tokens, min(buckets, len(cuts)), sub_buckets, outlier_threshold=1e9)
    counted = Lengths(frames / 10, frames, tokens)
    assert (assign(counted, bins, closed=True) >= 0).all()


def test_one_dimension_is_open_or_closed():
    lengths = lengths_of([1, 2, 3, 4, 5])
    assert assign(lengths, [2.0, 4.0], closed=False).tolist() == [0, 0, 1, 1, 2]
    assert assign(lengths, [2.0, 4.0], closed=True).tolist() == [0, 0, 1, 1, -1]


def test_open_bins_are_the_buckets_of_the_sampler_of_lhotse(many):
    from lhotse.dataset import DynamicBucketingSampler

    lengths = read_lengths([many.dataset], workers=1)
    bins = estimate_bins(lengths.lengths, 4)
    ids = [cut.id for cut in open_shar(many.dataset, [])]
    bucket_of = dict(zip(ids, assign(lengths, bins, closed=False).tolist(), strict=True))
    sampler = DynamicBucketingSampler(open_shar(many.dataset, []), max_cuts=4, duration_bins=bins)
    batches = [{bucket_of[cut.id] for cut in batch} for batch in sampler]
    assert {len(buckets) for buckets in batches} == {1}
    assert set.union(*batches) == {0, 1, 2, 3}


def test_equal_texts_are_no_outliers():
    assert max_ratio_of(np.full(50, 2.0), np.full(50, 10)) == 5.0
    tokens = np.full(100, 10)
    tokens[7] = 1000
    assert max_ratio_of(np.full(100, 2.0), tokens) == 5.0
    assert max_ratio_of(np.full(100, 2.0), tokens, outlier_threshold=20.0) == 500.0


def test_audio_counted_in_frames(built):
    report = yaml.safe_load(estimate_report([built.dataset], BinsOptions(num_buckets=3), token_bins=True, workers=1))
    assert report["token_equivalent_duration"] == 0.02
    frames = [50, 101, 25, 155, 35, 65, 13]
    assert report["bucket_duration_bins"] == estimate_bins(np.array(frames), 3)
    assert (report["use_multimodal_sampling"], report["measure_total_length"]) == (True, False)
    texts = yaml.safe_load(
        estimate_report([built.dataset], BinsOptions(num_buckets=3), tokenizer=["bytes"], token_bins=True, workers=1)
    )
    assert texts["bucket_duration_bins"] == estimate_bins(np.array(frames) + len("text of spk/utt0.flac"), 3)
    assert texts["measure_total_length"] is True
    half = BinsOptions(num_buckets=3, sub_buckets=1, seconds_per_frame=0.5)
    two = yaml.safe_load(estimate_report([built.dataset], half, tokenizer=["bytes"], token_bins=True, workers=1))
    # Frames are 1 1 2 2 3 5 7 with 21 tokens each.
    assert two["bucket_duration_bins"] == [[5, 21], [7, 21]]
    assert two["max_tpt"] == [21.0, 3.0]
    assert "max_tps" not in two


def test_of_several_codecs_the_frame_must_be_said(project):
    for number in range(3):
        project.add(f"{number}.wav", voice(1.0, seed=number))
    config = project.write()
    options = BinsOptions(num_buckets=2)
    with raises(ConfigError, "unknown_codec", "--token-equivalent-duration"):
        estimate_report([project.dataset], options, token_bins=True, workers=1)
    project.encode(config, "fine", ToyCodec(samples_per_frame=160))
    project.encode(config, "coarse", ToyCodec(samples_per_frame=640))
    with raises(ConfigError, "unknown_codec", "coarse, fine", "--token-equivalent-duration"):
        estimate_report([project.dataset], options, token_bins=True, workers=1)


@pytest.mark.parametrize(
    ("options", "code", "names"),
    [
        ({"num_buckets": 1}, "bad_config_value", ["1 buckets", "at least 2"]),
        ({"num_buckets": 8}, "too_few_cuts", ["8 buckets", "7 cuts", "-b"]),
        ({"num_buckets": 2, "sub_buckets": 0}, "bad_config_value", ["at least 1"]),
    ],
)
def test_what_cannot_be_is_refused(built, options, code, names):
    with raises(ConfigError, code, *names):
        estimate_report([built.dataset], BinsOptions(**options), tokenizer=["bytes"], workers=1)


def test_sub_buckets_need_a_tokenizer(built):
    with raises(ConfigError, "bad_config_value", "--tokenizer"):
        estimate_report([built.dataset], BinsOptions(num_buckets=2, sub_buckets=2), workers=1)


def test_the_histogram_counts_every_cut(many):
    report = estimate_report([many.dataset], BinsOptions(num_buckets=4, sub_buckets=2), tokenizer=["bytes"], workers=1)
    assert report.startswith("# 60 cuts, 0.01 hours\n# seconds: shortest 0.")
    rows = [line.split() for line in report.splitlines() if line.startswith("#  ") and line.split()[1][0].isdigit()]
    values = yaml.safe_load(report)
    assert len(rows) == values["num_buckets"] == len(values["bucket_duration_bins"]) == len(values["max_tps"])
    left_out = [int(line.split()[-1]) for line in report.splitlines() if "too many tokens" in line]
    assert sum(int(row[3]) for row in rows) + sum(left_out) == 60


def test_the_command_prints_yaml(many, tmp_path):
    result = run_sharmill("bins", many.dataset, "-b", "5", "--closed", "-t", "bytes")
    assert (result.returncode, result.stderr) == (0, "")
    values = yaml.safe_load(result.stdout)
    durations = [cut.duration for cut in open_shar(many.dataset, [])]
    assert values["bucket_duration_bins"][-1] == max(durations)
    assert values["num_buckets"] == len(values["bucket_duration_bins"]) == 5
    assert values["max_tps"] > 8.0
    wrong = run_sharmill("bins", many.dataset, "-t", "nothing")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("Error: ")
    assert "'nothing'" in wrong.stderr
    assert "'bytes'" in wrong.stderr


@pytest.mark.parametrize(
    "options",
    [
        {"num_buckets": 4, "closed": True},
        {"num_buckets": 3, "sub_buckets": 2},
        {"num_buckets": 3, "sub_buckets": 2, "seconds_per_frame": 0.05},
        {"num_buckets": 4, "closed": True, "seconds_per_frame": 0.05},
    ],
    ids=["seconds", "seconds-2d", "frames-2d", "frames"],
)
def test_the_loader_of_nemo_makes_these_buckets(many, options):
    """Pasted into its configuration, each batch is of one bucket, and what it takes is what the histogram counted."""
    from nemo.collections.common.data.lhotse import get_lhotse_dataloader_from_config
    from omegaconf import OmegaConf

    frames = options.get("seconds_per_frame")
    report = estimate_report(
        [many.dataset], BinsOptions(**options), tokenizer=["bytes"], token_bins=frames is not None, workers=1
    )
    values = yaml.safe_load(report)
    num_buckets = len(values["bucket_duration_bins"])
    config = {
        "shar_path": shar_fields(many.dataset),
        "bucket_batch_size": [4] * num_buckets,
        "num_workers": 0,
        "force_finite": True,
        "sample_rate": 16000,
        "shuffle": False,
    }
    loader = get_lhotse_dataloader_from_config(
        OmegaConf.create(config | values), global_rank=0, world_size=1, dataset=_Ids(), tokenizer=_Bytes()
    )
    batches = list(loader)

    lengths = read_lengths([many.dataset], tokenizer=["bytes"], workers=1)
    counted = lengths if frames is None else lengths.in_frames(frames)
    if frames is not None and "sub_buckets" not in options:
        counted = counted.in_total()
    bins = [
        Bin(bound[0], bound[1], (values.get("max_tps") or values["max_tpt"])[number])
        if isinstance(bound, list)
        else bound
        for number, bound in enumerate(values["bucket_duration_bins"])
    ]
    expected = assign(counted, bins, closed=True)
    ids = [cut.id for cut in open_shar(many.dataset, [])]
    bucket_of = dict(zip(ids, expected.tolist(), strict=True))
    if isinstance(values.get("max_tps"), float):
        seconds_tokens = zip(ids, lengths.tokens / lengths.seconds, strict=True)
        bucket_of |= {cut_id: -1 for cut_id, tps in seconds_tokens if tps > values["max_tps"]}
    assert Counter(cut_id for batch in batches for cut_id in batch) == Counter(
        cut_id for cut_id, bucket in bucket_of.items() if bucket >= 0
    )
    for batch in batches:
        assert len(batch) <= 4
        assert len({bucket_of[cut_id] for cut_id in batch}) == 1


class _Ids:
    """A dataset whose batches are the ids of the cuts."""

    def __getitem__(self, cuts):
        return [cut.id for cut in cuts]


class _Bytes:
    """The two methods that NeMo asks of a tokenizer."""

    def text_to_ids(self, text, language=None):
        return list(text.encode())

    def __call__(self, text, language=None):
        return self.text_to_ids(text)
