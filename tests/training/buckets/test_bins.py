"""Tests of bins of datasets, manifests, text, conversations and mixtures against lhotse, NeMo and loader batches."""

import json
import os
from collections import Counter

import numpy as np
import pytest
import yaml
from hypothesis import given, settings, strategies as st
from lhotse import CutSet
from lhotse.dataset.sampling.dynamic_bucketing import estimate_duration_buckets
from support.models import save_canary_tokenizers
from support.project import copy, examples, lines, raises, run_sharmill, shar_fields, write_lines
from support.training import AsIs, flat, take

from sharmill.errors import ConfigError, DamagedShard
from sharmill.shar import open_shar
from sharmill.training import get_dataloader
from sharmill.training.buckets.bins import assign, estimate_bins, estimate_bins_2d, estimate_report, round_up
from sharmill.training.buckets.lengths import BinsOptions, Lengths, read_lengths
from sharmill.training.buckets.mixture import load_nemo_tokenizer, read_mixture


def report_of(sources, **options):
    return estimate_report(sources, BinsOptions(**options))


def lengths_of(seconds, tokens=None):
    seconds = np.array(seconds, dtype=np.float64)
    return Lengths(seconds, seconds, None if tokens is None else np.array(tokens))


def test_lengths_are_those_of_the_cuts(many):
    cuts = list(open_shar(many.dataset, []))
    found = read_lengths([many.dataset], tokenizer=["bytes"], workers=1)
    assert sorted(zip(found.lengths, found.tokens, strict=True)) == sorted(
        (cut.duration, len(cut.supervisions[0].text)) for cut in cuts
    )
    assert sum(found.seconds) == pytest.approx(sum(cut.duration for cut in cuts))
    assert found.tokens.dtype == np.int64


def test_a_shar_of_another_tool_has_bins_too(many, tmp_path):
    (tmp_path / "cuts").mkdir()
    for path in (many.dataset / "cuts").iterdir():
        write_lines(tmp_path / "cuts" / path.name, [cut | {"custom": {}} for cut in lines(path)])
    foreign, own = (read_lengths([folder], tokenizer=["bytes"], workers=1) for folder in (tmp_path, many.dataset))
    np.testing.assert_array_equal(foreign.lengths, own.lengths)
    np.testing.assert_array_equal(foreign.tokens, own.tokens)
    with raises(ConfigError, "unknown_codec", "--token-equivalent-duration"):
        report_of([tmp_path], token_bins=True, workers=1)


@pytest.mark.parametrize(
    ("options", "code", "names"),
    [
        ({"num_buckets": 1}, "bad_config_value", ["the number of buckets is 1"]),
        ({"num_buckets": 9}, "too_few_cuts", ["9 buckets", "7 cuts"]),
        ({"num_buckets": 2, "sub_buckets": 0}, "bad_config_value", ["the number of sub-buckets is 0"]),
        ({"num_buckets": 2, "sub_buckets": 2, "tokenizer": ()}, "bad_config_value", ["--tokenizer"]),
        ({"prompt": "[]"}, "bad_usage", ["--prompt-format"]),
        ({"prompt_format": "plain", "tokenizer": ()}, "bad_usage", ["--tokenizer"]),
    ],
)
def test_invalid_options_are_refused(built, options, code, names):
    with raises(ConfigError, code, *names):
        report_of([built.dataset], **{"tokenizer": ["bytes"], "workers": 1} | options)


def change_cuts(dataset, change):
    """Rewrite the cuts of the first shard with a function; return its path and the original cuts."""
    path = dataset / "cuts/cuts.000000.jsonl.gz"
    cuts = lines(path)
    write_lines(path, change(cuts))
    return path, cuts


def without_text(cut):
    return cut | {"supervisions": [cut["supervisions"][0] | {"text": None}]}


def test_damaged_cuts_are_named(built, tmp_path):
    dataset = copy(built.dataset, tmp_path / "copy")
    path, cuts = change_cuts(dataset, lambda cuts: [cut | {"duration": -1.0} for cut in cuts])
    with raises(DamagedShard, "damaged_shard", "cuts.000000", cuts[0]["id"]):
        read_lengths([dataset], workers=2)
    write_lines(path, cuts[1:])
    with raises(DamagedShard, "damaged_shard", "cuts.000000", "instead of"):
        read_lengths([dataset], workers=1)


def test_limits_exclude_cuts_and_count_them(built):
    found = read_lengths([built.dataset], min_duration=0.5, max_duration=2.0, workers=1)
    assert sorted(found.lengths) == [0.5, 0.7, 1.0, 1.3]
    assert found.num_discarded == 3
    with raises(ConfigError, "too_few_cuts", "7", "5", "inf"):
        read_lengths([built.dataset], min_duration=5.0, workers=1)


def test_cuts_without_text_have_no_tokens_and_are_counted(built, tmp_path):
    dataset = copy(built.dataset, tmp_path / "copy")
    change_cuts(dataset, lambda cuts: [without_text(cuts[0]), *cuts[1:]])
    found = read_lengths([dataset], tokenizer=["bytes"], workers=1)
    assert sorted(found.tokens) == [0] + [len("text of spk/utt0.flac")] * 6
    assert found.without_text == 1
    assert "# without text, counted as 0 tokens: 1\n" in report_of(
        [dataset], num_buckets=2, tokenizer=["bytes"], workers=1
    )


@pytest.mark.parametrize("token_bins", [False, True])
def test_data_without_text_have_no_limits_of_tokens(built, tmp_path, token_bins):
    dataset = copy(built.dataset, tmp_path / "untranscribed")
    for path in (dataset / "cuts").iterdir():
        write_lines(path, map(without_text, lines(path)))
    report = report_of([dataset], num_buckets=2, token_bins=token_bins, tokenizer=["bytes"], workers=1)
    (said,) = [line for line in report.splitlines() if "token" in line and line.startswith("# ")]
    assert said == "# no cut has text, so tokens are not limited"
    values = yaml.safe_load(report)
    assert not {"max_tps", "max_tpt"} & values.keys()
    assert values.get("measure_total_length", False) is False
    assert values["bucket_duration_bins"]


@pytest.mark.parametrize("num_buckets", [2, 3, 7, 30])
def test_one_dimension_is_that_of_lhotse(many, num_buckets):
    theirs = estimate_duration_buckets(CutSet.from_shar(fields=shar_fields(many.dataset)), num_buckets)
    ours = estimate_bins(read_lengths([many.dataset], workers=2).lengths, num_buckets)
    assert ours == theirs
    report = yaml.safe_load(report_of([many.dataset], num_buckets=num_buckets, workers=1))
    assert report["bucket_duration_bins"] == theirs
    assert report["num_buckets"] == len(theirs) + 1


def formula(name):
    """Return durations and token counts of 2,000 cuts; ``skewed`` has a third at 20 s, and some overlong texts."""
    i = np.arange(2000)
    durations = 1 + ((i * 7919) % 1999) / 100
    if name == "skewed":
        durations = np.where(i % 3 == 0, 20.0, 1 + ((i * 7919) % 1999) / 100 / 1.06)
    tokens = (durations * (8 + ((i * 104729) % 97) / 20)).astype(int)
    return durations, np.where(i % 200 == 7, tokens * 5, tokens) if name == "skewed" else tokens


# Return the bins of NeMo's scripts/speech_recognition/estimate_duration_bins_2d.py for these data.
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
    # NeMo's script puts a cut that is as long as a bound into the upper bucket, unlike its loader.
    np.testing.assert_allclose([bound.num_tokens for bound in ours], [tokens for _, tokens in bins], atol=1, rtol=0)
    # NeMo rounds to the nearest value with three decimals, which may be below the longest cut.
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
        fitting = [n for n in same if bins[n].num_tokens >= count and count / length <= round_up(bins[n].max_ratio, 2)]
        assert bucket == (fitting[0] if fitting else -1)


def test_audio_counted_in_frames(built):
    report = yaml.safe_load(report_of([built.dataset], num_buckets=3, token_bins=True, workers=1))
    assert report["token_equivalent_duration"] == 0.02
    frames = [50, 101, 25, 155, 35, 65, 13]
    assert report["bucket_duration_bins"] == estimate_bins(np.array(frames), 3)
    assert (report["use_multimodal_sampling"], report["measure_total_length"]) == (True, False)
    texts = yaml.safe_load(report_of([built.dataset], num_buckets=3, tokenizer=["bytes"], token_bins=True, workers=1))
    assert texts["bucket_duration_bins"] == estimate_bins(np.array(frames) + len("text of spk/utt0.flac"), 3)
    assert texts["measure_total_length"] is True
    half = {"num_buckets": 3, "sub_buckets": 1, "seconds_per_frame": 0.5, "tokenizer": ["bytes"]}
    two = yaml.safe_load(report_of([built.dataset], **half, token_bins=True))
    # The cuts have 1 1 2 2 3 5 7 frames and 21 tokens each.
    assert (two["bucket_duration_bins"], two["max_tpt"]) == ([[5, 21], [7, 21]], [21.0, 3.0])
    assert "max_tps" not in two


def test_the_command_prints_yaml(many, tmp_path):
    result = run_sharmill("bins", many.dataset, "-b", "5", "--closed", "-t", "bytes")
    assert result.stderr == "reading lengths\n"
    values = yaml.safe_load(result.stdout)
    durations = [cut.duration for cut in open_shar(many.dataset, [])]
    assert values["bucket_duration_bins"][-1] == max(durations)
    assert values["num_buckets"] == len(values["bucket_duration_bins"]) == 5
    assert values["max_tps"] > 8.0
    wrong = run_sharmill("bins", many.dataset, "-t", "nothing", status=2)
    assert wrong.stdout == ""
    assert wrong.stderr.splitlines()[-1].startswith("Error: ")
    assert "'nothing'" in wrong.stderr
    assert "'bytes'" in wrong.stderr


def test_languages_as_the_script_of_nemo_takes_them(many):
    """The options have the order and spelling of NeMo's page."""
    languages = ["--tokenizer", "bytes", "chars", "--langs", "en", "de"]
    further = ["--buckets", "2", "--sub-buckets", "2", "--token_outlier_threshold", "3"]
    result = run_sharmill("bins", *languages, *further, many.dataset)
    assert len(yaml.safe_load(result.stdout)["bucket_duration_bins"]) == 4


def test_languages_without_as_many_tokenizers_are_refused(many):
    told = run_sharmill("bins", "--tokenizer", "bytes", "--langs", "en", many.dataset, status=2).stderr
    assert "--langs has 2 values, but --tokenizer has 1: use the same number of values for both." in told


def manifest(path, durations, text="a b", **keys):
    """A manifest whose audio is missing, since only its lines are read."""
    lines = [
        {"audio_filepath": f"{path.stem}{n}.wav", "duration": seconds, "text": text * (1 + n % 5), "lang": "en",
         "sampling_rate": 16000, **keys}
        for n, seconds in enumerate(durations)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def read(sources, *, limits=(0.0, float("inf")), **options):
    options = {"tokenizer": ("bytes",), "min_duration": limits[0], "max_duration": limits[1]} | options
    lengths, _ = read_mixture([str(source) for source in sources], BinsOptions(**options))
    return lengths


def test_a_manifest_has_the_lengths_of_its_lines(tmp_path):
    path = manifest(tmp_path / "a.json", [1.0, 2.5, 0.5], text="äb")
    found = read([path])
    assert sorted(zip(found.seconds, found.lengths, found.tokens, strict=True)) == [
        (0.5, 0.5, 9), (1.0, 1.0, 3), (2.5, 2.5, 6)
    ]  # fmt: skip
    assert found.looked_at == "looked at 3 of 3 examples"
    assert read([path], tokenizer=(), section="audio").tokens is None
    frames = read([path], token_bins=True, seconds_per_frame=0.2)
    assert sorted(frames.lengths) == [3, 5, 13]
    assert frames.lengths.dtype == np.int64
    assert read([path], limits=(0.6, 2.0)).num_discarded == 2


def test_shares_are_those_of_the_weights(tmp_path):
    long, short = manifest(tmp_path / "a.json", [10.0] * 40), manifest(tmp_path / "b.json", [2.0] * 10)
    found = read([f"[[{long},0.3],[{short},0.7]]"])
    assert Counter(found.seconds) == {10.0: 40, 2.0: 93}
    assert found.looked_at == "looked at 50 of 50 examples, in 133 draws by weight"
    by_size = read([long, short])
    assert Counter(by_size.seconds) == {10.0: 40, 2.0: 10}


def conversations(corpora):
    return {"type": "multimodal_conversation", "manifest_filepath": str(corpora.conversations),
            "audio_locator_tag": "@", "token_equivalent_duration": 0.1}  # fmt: skip


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (lambda c, n: {"type": "txt", "paths": str(c.text)}, (40, [0], [8])),
        (lambda c, n: {"type": "txt_pair", "source_paths": str(c.pairs[0]), "target_paths": str(c.pairs[1])},
         (10, range(1, 11), range(1, 11))),
        (lambda c, n: {"type": "nemo_tarred", "manifest_filepath": str(n / "manifest__OP_0..2_CL_.json"),
                       "tarred_audio_filepaths": str(n / "audio__OP_0..2_CL_.tar")}, (9, [5], [1])),
        (lambda c, n: {"type": "sharmill", "dataset": str(c.small)}, (8, [10], [5])),
        (lambda c, n: {"type": "lhotse_shar", "shar_path": str(c.small)}, (8, [10], [5])),
        (lambda c, n: conversations(c), (6, range(1, 7), [8])),
        (lambda c, n: {"type": "lhotse_as_conversation", "audio_locator_tag": "@", "token_equivalent_duration": 0.1,
                       "input_cfg": [{"type": "sharmill", "dataset": str(c.small)}]}, (8, [10], [5])),
    ],
    ids=["txt", "txt_pair", "nemo_tarred", "sharmill", "lhotse_shar", "multimodal_conversation", "as_conversation"],
)  # fmt: skip
def test_every_type_of_entry_is_measured_in_tokens(corpora, nemo_data, tmp_path, entry, expected):
    config = tmp_path / "input_cfg.yaml"
    config.write_text(yaml.safe_dump([entry(corpora, nemo_data)]))
    found = read([config], token_bins=True, seconds_per_frame=0.1)
    count, inputs, outputs = expected
    assert len(found.lengths) == count
    assert set(found.lengths.tolist()) == set(inputs)
    assert found.tokens is not None
    assert set(found.tokens.tolist()) == set(outputs)


SECONDS = [0.5 + n % 37 / 4 for n in range(120)]


@pytest.fixture
def speech(tmp_path):
    return [{"type": "nemo", "manifest_filepath": manifest(tmp_path / "speech.json", SECONDS, text="ab cd")}]


@pytest.fixture
def mixed(tmp_path, speech):
    source, target = tmp_path / "s.txt", tmp_path / "t.txt"
    source.write_text("".join("s" * (1 + n % 9) + "\n" for n in range(80)))
    target.write_text("".join("t" * (1 + n % 13) + "\n" for n in range(80)))
    pairs = {"type": "txt_pair", "source_path": str(source), "target_path": str(target), "weight": 0.5}
    return [speech[0] | {"weight": 0.5}, pairs]


PASTED = {
    "seconds": ("speech", {}, {"batch_duration": 40}),
    "seconds, closed": ("speech", {"closed": True}, {"bucket_batch_size": [8, 4, 2]}),
    "seconds and tokens": ("speech", {"sub_buckets": 2}, {"batch_duration": 40}),
    "tokens": ("mixed", {"token_bins": True}, {"batch_tokens": 400}),
    "input tokens": ("mixed", {"token_bins": True, "measure_total_length": False}, {"batch_tokens": 400}),
    "input and output tokens": ("mixed", {"token_bins": True, "sub_buckets": 2}, {"batch_tokens": 400}),
}


@pytest.mark.parametrize("name", PASTED)
def test_what_is_printed_can_be_pasted_and_runs(request, tmp_path, name):
    """Each batch has one bucket, and all examples that the histogram counted are delivered."""
    data, options, batching = PASTED[name]
    entries = request.getfixturevalue(data)
    options = dict(options)
    token_bins, total = options.pop("token_bins", False), options.pop("measure_total_length", None)
    training = {"train_ds": {"input_cfg": entries} | ({} if total is None else {"measure_total_length": total})}
    config = tmp_path / "train.yaml"
    config.write_text(yaml.safe_dump(training))
    report = estimate_report(
        [config],
        BinsOptions(
            num_buckets=3, seconds_per_frame=0.08 if token_bins else None, tokenizer=["bytes"], token_bins=token_bins,
            **options,
        ),
    )  # fmt: skip
    printed = yaml.safe_load(report)
    settings = {"input_cfg": entries, "shuffle": True, "shard_seed": 1, "force_iterable_dataset": True,
                "bucket_buffer_size": 100, "shuffle_buffer_size": 10} | batching  # fmt: skip
    loader = get_dataloader(settings | printed, 0, 1, load_nemo_tokenizer(["bytes"], None), dataset=AsIs())
    batches = take(loader, 30)
    bins = printed["bucket_duration_bins"]
    two = isinstance(bins[0], list)
    for batch in batches:
        lengths = [measure(example, printed) for example in batch]
        found = {bucket_of(length, bins, two=two) for length in lengths}
        assert len(found) == 1
        assert -1 not in found
    assert len({bucket_of(measure(example, printed), bins, two=two) for example in flat(batches)}) > 1
    if data == "mixed":
        assert {hasattr(example, "duration") for example in flat(batches)} == {True, False}


def measure(example, printed):
    if not hasattr(example, "duration"):
        length, tokens = len(example.context_ids), len(example.answer_ids)
    else:
        frame = printed.get("token_equivalent_duration")
        length = example.duration if frame is None else -(-example.duration // frame)
        tokens = len(example.input_ids) if "prompt_format" in printed else len(example.supervisions[0].tokens)
    # NeMo's batch_tokens ignores prompted text.
    if printed.get("measure_total_length") and not hasattr(example, "duration"):
        length += tokens
    return length, tokens


def bucket_of(length, bins, *, two):
    seconds, tokens = length
    if not two:
        return int(np.searchsorted(bins, seconds, side="left"))
    first = next(bound[0] for bound in bins if bound[0] >= seconds)
    return next((n for n, bound in enumerate(bins) if bound[0] == first and bound[1] >= tokens), -1)


@pytest.fixture(scope="module")
def canary(tmp_path_factory):
    """Return the names of Canary's special tokenizer and of an English one."""
    folders = save_canary_tokenizers(tmp_path_factory.mktemp("canary"))
    return [f"{language}={folder}/tokenizer.model" for language, folder in folders.items()]


PROMPT = "[{'role':'user','slots':{'source_lang':'en','target_lang':'en','task':'asr','pnc':'yes'}}]"


def test_special_tokens_of_a_prompt_count(tmp_path, canary):
    """There are five tokens before the text and one after it, as the loader counts from the data's keys."""
    path = manifest(tmp_path / "a.json", [1.0, 2.0, 3.0], text="ab")
    texts = read([path], tokenizer=canary).tokens
    prompted = read([path], tokenizer=canary, prompt_format="canary", prompt=PROMPT).tokens
    np.testing.assert_array_equal(np.sort(prompted), np.sort(texts) + 6)
    keys = {"source_lang": "en", "target_lang": "en", "task": "asr", "pnc": "yes"}
    path = manifest(tmp_path / "b.json", [1.0, 2.0, 3.0], text="ab", **keys)
    own = read([path], tokenizer=canary, prompt_format="canary").tokens
    np.testing.assert_array_equal(np.sort(own), np.sort(prompted))
    settings = {"manifest_filepath": path, "prompt_format": "canary", "batch_size": 3}
    (batch,) = take(get_dataloader(settings, 0, 1, load_nemo_tokenizer(canary, "canary"), dataset=AsIs()), 1)
    assert sorted(len(cut.input_ids) for cut in batch) == sorted(own)


def wrong(name, folder):
    """Return sources with one problem, and their options."""
    good = manifest(folder / "good.json", [1.0, 2.0])
    empty, broken = folder / "empty.json", folder / "broken.json"
    text, config = folder / "a.txt", folder / "input_cfg.yaml"
    empty.write_text("\n")
    broken.write_text('{"audio_filepath": "a.wav", "duration": 1.0, "text": "a"}\n{"audio_filepath": "b.wav"}\n')
    text.write_text("line\n")
    entry = {"type": "nemo", "manifest_filepath": good}
    entries = {
        "weight is text": [entry | {"weight": "much"}],
        "weight is 0": [entry | {"weight": 0}],
        "half weighted": [entry | {"weight": 1}, entry],
        "unknown type": [entry | {"type": "nemmo"}],
        "unknown key": [entry | {"wieght": 1}],
        "tags unread": [entry | {"manifest_filepath": str(folder / "gone.json")}],
        "unmeasured": [{"type": "txt", "paths": str(text)}],
        "command": [{"type": "txt", "paths": "pipe:cat a.txt"}],
        "prompt for text": [{"type": "txt", "paths": str(text)}],
        "broken line": [entry | {"manifest_filepath": str(broken)}],
        "no keys of a prompt": [entry],
    }.get(name)
    if entries is not None:
        config.write_text(yaml.safe_dump(entries))
        return [config]
    (folder / "not.yaml").write_text("a: [")
    (folder / "other.yaml").write_text("a: 1")
    return {
        "no file": ["gone.json"],
        "folder": [folder],
        "weight of a list": [f"[[{good},0.7],[{good},x]]"],
        "negative weight": [f"[[{good},-1]]"],
        "missing in a list": ["[[gone.json,1]]"],
        "half of a list": [f"[[{good},0.7],[{good}]]"],
        "no list": ["[[a"],
        "empty list": ["[]"],
        "empty": [empty],
        "several kinds": [good, text],
        "beside a yaml": [folder / "other.yaml", good],
        "no yaml": [folder / "not.yaml"],
        "no settings": [folder / "other.yaml"],
        "fifo": [folder / "fifo.yaml"],
    }.get(name, [good])


PLAIN_PROMPT = {"prompt_format": "plain", "prompt": "[{'role': 'user', 'slots': {'message': 'Say'}}]"}


@pytest.mark.parametrize(
    ("name", "options", "code", "told"),
    [
        ("weight is text", {}, "bad_config_value", ["'much'", "positive number"]),
        ("weight is 0", {}, "bad_config_value", ["weight is 0"]),
        ("half weighted", {}, "missing_key", ["some entries have a weight"]),
        ("unknown type", {}, "unknown_name", ["'nemmo'"]),
        ("unknown key", {}, "unknown_key", ["'wieght'"]),
        ("tags unread", {}, "missing_input", ["gone.json"]),
        ("unmeasured", {}, "bad_usage", ["txt", "--tokens"]),
        ("prompt for text", PLAIN_PROMPT | {"token_bins": True}, "bad_usage", ["--prompt is only for speech"]),
        ("broken line", {}, "bad_manifest", ["type nemo cannot be read", "duration"]),
        ("no keys of a prompt", {"prompt_format": "canary"}, "bad_tokenizer", ["spl_tokens="]),
        ("no file", {}, "no_dataset", ["gone.json", "input_cfg.yaml"]),
        ("folder", PLAIN_PROMPT, "no_dataset", []),
        ("weight of a list", {}, "bad_config_value", ["'x'", "positive weight"]),
        ("negative weight", {}, "bad_config_value", ["-1", "positive weight"]),
        ("missing in a list", {}, "no_dataset", ["gone.json"]),
        ("half of a list", {}, "bad_config_value", ["others have none"]),
        ("no list", {}, "bad_usage", ["is not a list of manifests"]),
        ("empty list", {}, "bad_usage", ["is not a list of manifests", "[[a.json,0.7]"]),
        ("fifo", {}, "bad_config_file", ["not a regular file"]),
        ("command", {"token_bins": True, "tokenizer": ("bytes",)}, "bad_config_value", ["is a command"]),
        ("empty", {}, "bad_manifest", ["empty.json", "line of JSON"]),
        ("several kinds", {}, "bad_usage", ["good.json (nemo)", "a.txt (txt)"]),
        ("beside a yaml", {}, "bad_usage", ["remove the other sources"]),
        ("no yaml", {}, "bad_config_file", ["not.yaml"]),
        ("no settings", {}, "bad_config_file", ["other.yaml"]),
        ("unknown format", {"prompt_format": "canry"}, "unknown_name", ["canry", "canary"]),
        ("no turns", {"prompt_format": "plain", "prompt": "hello"}, "bad_config_value", ["'hello'", "list of turns"]),
        ("no role", {"prompt_format": "plain", "prompt": "[{'role': 'x', 'slots': {}}]"}, "bad_config_value",
         ["='x'", "'user', 'assistant'"]),
        ("no slot", {"prompt_format": "plain", "prompt": "[{'role': 'user', 'slots': {}}]"}, "bad_config_value",
         ["role user", "'slots'"]),
        ("no length of a frame", {"token_bins": True}, "unknown_codec", ["--token-equivalent-duration"]),
        ("no tokenizer", {"token_bins": True, "tokenizer": ()}, "bad_usage", ["--tokenizer"]),
        ("nothing left", {"limits": (5.0, 9.0)}, "too_few_cuts", ["5 to 9 seconds"]),
    ],
)  # fmt: skip
def test_wrong_sources_are_refused_in_one_line(tmp_path, name, options, code, told):
    os.mkfifo(tmp_path / "fifo.yaml")
    sources = wrong(name, tmp_path)
    with raises(ConfigError, code, *told):
        read(sources, **options)
