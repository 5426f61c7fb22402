"""Bins of manifests, text, conversations and mixtures: lengths, shares, prompts, and the loader's batches."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml
from support.errors import raises
from support.pipelines import run_sharmill
from support.recognizers import save_canary_tokenizers
from support.training import AsIs, flat, take

from sharmill.errors import ConfigError
from sharmill.training import get_dataloader
from sharmill.training.buckets.inputs import open_inputs
from sharmill.training.buckets.mixture import read_mixture
from sharmill.training.buckets.prompts import load_nemo_tokenizer
from sharmill.training.buckets.report import BinsOptions, MixtureOptions, estimate_report


def manifest(path, durations, text="a b", **keys):
    """A manifest whose audio is not there: nothing but its lines is read."""
    lines = [
        {"audio_filepath": f"{path.stem}{n}.wav", "duration": seconds, "text": text * (1 + n % 5), "lang": "en",
         "sampling_rate": 16000, **keys}
        for n, seconds in enumerate(durations)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def read(sources, *, tokenizer=("bytes",), samples=100_000, limits=(0.0, float("inf")), **options):
    options = {"token_bins": False, "seconds_per_frame": None, "prompt_format": None, "prompt": None, "section": None,
               "samples": samples} | options  # fmt: skip
    return read_mixture(
        open_inputs([str(source) for source in sources], tokenizer, **options),
        min_duration=limits[0], max_duration=limits[1],
    )  # fmt: skip


def test_a_manifest_has_the_lengths_of_its_lines(tmp_path):
    path = manifest(tmp_path / "a.json", [1.0, 2.5, 0.5], text="äb")
    found = read([path])
    assert sorted(zip(found.seconds, found.lengths, found.tokens, strict=True)) == [
        (0.5, 0.5, 9), (1.0, 1.0, 3), (2.5, 2.5, 6)
    ]  # fmt: skip
    assert found.looked_at == "looked at 3 of 3 examples"
    assert read([path], tokenizer=()).tokens is None
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


def test_groups_multiply_their_weights_and_a_temperature_makes_them_alike(tmp_path):
    paths = [manifest(tmp_path / f"{n}.json", [float(n)] * 100) for n in (1, 2, 3)]
    one, two, three = ({"type": "nemo", "manifest_filepath": path} for path in paths)
    entries = [
        one | {"weight": 1},
        {"type": "group", "weight": 3, "input_cfg": [two | {"weight": 1}, three | {"weight": 4}]},
    ]
    config = tmp_path / "input_cfg.yaml"
    config.write_text(yaml.safe_dump(entries))
    assert Counter(read([config], samples=200).seconds) == {1.0: 50, 2.0: 30, 3.0: 120}
    config.write_text(yaml.safe_dump({"input_cfg": entries, "reweight_temperature": [0.0, 1.0]}))
    assert Counter(read([config], samples=200).seconds) == {1.0: 100, 2.0: 20, 3.0: 80}


def test_of_a_large_manifest_lines_from_everywhere_are_looked_at(tmp_path):
    path = manifest(tmp_path / "sorted.json", [n / 100 for n in range(1, 1001)])
    found = read([path], samples=20)
    assert sorted(found.seconds) == [pytest.approx((25 + 50 * n + 1) / 100) for n in range(20)]
    assert found.looked_at == "looked at 20 of 1,000 examples"
    again = read([path], samples=20)
    np.testing.assert_array_equal(found.seconds, again.seconds)


def test_pairs_stay_together_where_lines_are_left_out(tmp_path):
    source, target = tmp_path / "s.txt", tmp_path / "t.txt"
    source.write_text("".join("s" * n + "\n" for n in range(1, 101)))
    target.write_text("".join("t" * (2 * n) + "\n" for n in range(1, 101)))
    entry = {"type": "txt_pair", "source_path": str(source), "target_path": str(target)}
    config = tmp_path / "input_cfg.yaml"
    config.write_text(yaml.safe_dump([entry]))
    found = read([config], token_bins=True, samples=10)
    assert len(found.lengths) == 10
    np.testing.assert_array_equal(found.tokens, 2 * found.lengths)


def test_text_for_hybrid_asr_tts_is_measured_by_what_is_recognised(tmp_path):
    lines = [{"text": "a" * n, "tts_text": "A, spoken."} for n in range(1, 41)]
    (tmp_path / "text.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = tmp_path / "input_cfg.yaml"
    config.write_text(yaml.safe_dump([{"type": "tts_text", "manifest_filepath": str(tmp_path / "text.json")}]))
    assert sorted(read([config], token_bins=True, prompt_format="plain").tokens) == list(range(1, 41))
    assert read([config], token_bins=True, prompt_format="plain", samples=8).looked_at == "looked at 8 of 40 examples"


def test_tarred_manifests_need_no_tars(nemo_data):
    entry = {"type": "nemo_tarred", "manifest_filepath": str(nemo_data / "manifest__OP_0..2_CL_.json"),
             "tarred_audio_filepaths": "/nowhere/audio__OP_0..2_CL_.tar"}  # fmt: skip
    config = nemo_data / "input_cfg.yaml"
    config.write_text(yaml.safe_dump([entry]))
    for sources in ([config], [nemo_data / "manifest__OP_0..2_CL_.json"]):
        assert read(sources).seconds.tolist() == [0.5] * 9


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
    """Each batch is of one bucket, and nothing that the histogram counted is left out."""
    data, options, batching = PASTED[name]
    entries = request.getfixturevalue(data)
    options = dict(options)
    token_bins, total = options.pop("token_bins", False), options.pop("measure_total_length", None)
    training = {"train_ds": {"input_cfg": entries} | ({} if total is None else {"measure_total_length": total})}
    config = tmp_path / "train.yaml"
    config.write_text(yaml.safe_dump(training))
    report = estimate_report(
        [config], BinsOptions(num_buckets=3, seconds_per_frame=0.08 if token_bins else None, **options),
        tokenizer=["bytes"], token_bins=token_bins,
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
    if printed.get("measure_total_length"):
        length += (
            tokens if hasattr(example, "duration") is False else 0
        )  # NeMo's batch_tokens passes over prompted text
    return length, tokens


def bucket_of(length, bins, *, two):
    seconds, tokens = length
    if not two:
        return int(np.searchsorted(bins, seconds, side="left"))
    first = next(bound[0] for bound in bins if bound[0] >= seconds)
    return next((n for n, bound in enumerate(bins) if bound[0] == first and bound[1] >= tokens), -1)


def test_limits_of_tokens_are_proposed(mixed, speech, tmp_path):
    config = tmp_path / "input_cfg.yaml"
    config.write_text(yaml.safe_dump(mixed))
    options = {"tokenizer": ["bytes"], "token_bins": True}
    one = yaml.safe_load(estimate_report([config], BinsOptions(num_buckets=3, seconds_per_frame=0.08), **options))
    assert one["max_tpt"] == 11.0
    assert one["prompt_format"] == "plain"
    two = estimate_report([config], BinsOptions(num_buckets=3, sub_buckets=2, seconds_per_frame=0.08), **options)
    assert len(yaml.safe_load(two)["max_tpt"]) == len(yaml.safe_load(two)["bucket_duration_bins"])
    assert "# tokens per input token: least " in two
    assert "200 examples in" not in two
    config.write_text(yaml.safe_dump(speech))
    seconds = estimate_report([config], BinsOptions(num_buckets=3), tokenizer=["bytes"])
    assert yaml.safe_load(seconds)["max_tps"] > 10
    assert "# tokens per second: least " in seconds


@pytest.fixture(scope="module")
def canary(tmp_path_factory):
    """Names of the special tokenizer of Canary, and of one of English."""
    folders = save_canary_tokenizers(tmp_path_factory.mktemp("canary"))
    return [f"{language}={folder}/tokenizer.model" for language, folder in folders.items()]


PROMPT = "[{'role':'user','slots':{'source_lang':'en','target_lang':'en','task':'asr','pnc':'yes'}}]"


def test_special_tokens_of_a_prompt_count(tmp_path, canary):
    """Five before the text and one after it; as many as the loader counts from the data's own keys."""
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


def test_a_folder_with_a_prompt(corpora):
    plain = read([corpora.small], prompt_format="plain").tokens
    assert plain.tolist() == [5] * 8
    turns = "[{'role': 'user', 'slots': {'message': 'Say'}}]"
    assert read([corpora.small, corpora.large], prompt_format="plain", prompt=turns).tokens.max() == 3 + 6
    assert read([corpora.small, corpora.large], prompt_format="plain").seconds.sum() == pytest.approx(
        8 + 39.6, rel=0.03
    )


def test_each_language_has_its_tokenizer(tmp_path):
    manifest(tmp_path / "en.json", [1.0], text="ä")
    (tmp_path / "de.json").write_text((tmp_path / "en.json").read_text().replace('"en"', '"de"'))
    sources = [tmp_path / "en.json", tmp_path / "de.json"]
    assert sorted(read(sources, tokenizer=["en=bytes", "de=chars"]).tokens) == [1, 2]
    with raises(ConfigError, "bad_tokenizer", "'de'", "en, fr"):
        read(sources, tokenizer=["en=bytes", "fr=chars"])


def test_a_sampler_of_several_is_chosen(tmp_path, speech):
    config = tmp_path / "train.yaml"
    text = {"input_cfg": [{"type": "txt", "paths": str(tmp_path / "a.txt")}], "use_multimodal_sampling": True,
            "prompt_format": "plain"}  # fmt: skip
    (tmp_path / "a.txt").write_text("abc\nab\n")
    both = {"multi_config": True, "audio": {"input_cfg": speech, "batch_duration": 9}, "text": text}
    config.write_text(yaml.safe_dump({"model": {"train_ds": both}}))
    assert len(read([config], section="audio").seconds) == 120
    assert sorted(read([config], section="text").tokens) == [3, 4]
    for section in (None, "video"):
        with raises(ConfigError, "bad_usage", "audio, text", "--section"):
            read([config], section=section)


def wrong(name, folder):
    """Sources and options of something that a user may give."""
    good = manifest(folder / "good.json", [1.0, 2.0])
    empty, text, config = folder / "empty.json", folder / "a.txt", folder / "input_cfg.yaml"
    empty.write_text("\n")
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
        "broken line": [entry | {"manifest_filepath": str(broken(folder / "broken.json"))}],
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


def broken(path):
    path.write_text('{"audio_filepath": "a.wav", "duration": 1.0, "text": "a"}\n{"audio_filepath": "b.wav"}\n')
    return path


PLAIN_PROMPT = {"prompt_format": "plain", "prompt": "[{'role': 'user', 'slots': {'message': 'Say'}}]"}


@pytest.mark.parametrize(
    ("name", "options", "code", "told"),
    [
        ("weight is text", {}, "bad_config_value", ["'much'", "number above 0"]),
        ("weight is 0", {}, "bad_config_value", ["weight is 0"]),
        ("half weighted", {}, "missing_key", ["some entries have a weight"]),
        ("unknown type", {}, "unknown_name", ["'nemmo'"]),
        ("unknown key", {}, "unknown_key", ["'wieght'"]),
        ("tags unread", {}, "missing_input", ["gone.json"]),
        ("unmeasured", {}, "bad_usage", ["txt", "--tokens"]),
        ("prompt for text", PLAIN_PROMPT | {"token_bins": True}, "bad_usage", ["--prompt is for speech"]),
        ("broken line", {}, "bad_manifest", ["type nemo cannot be read", "duration"]),
        ("no keys of a prompt", {"prompt_format": "canary"}, "bad_tokenizer", ["spl_tokens="]),
        ("no file", {}, "no_dataset", ["gone.json", "input_cfg.yaml"]),
        ("folder", PLAIN_PROMPT, "no_dataset", []),
        ("weight of a list", {}, "bad_config_value", ["'x'", "weight above 0"]),
        ("negative weight", {}, "bad_config_value", ["-1", "weight above 0"]),
        ("missing in a list", {}, "no_dataset", ["gone.json"]),
        ("half of a list", {}, "bad_config_value", ["others have none"]),
        ("no list", {}, "bad_usage", ["is not a list of manifests"]),
        ("empty list", {}, "bad_usage", ["is not a list of manifests", "[[a.json,0.7]"]),
        ("fifo", {}, "bad_config_file", ["not a regular file"]),
        ("command", {"token_bins": True, "tokenizer": ("bytes",)}, "bad_config_value", ["is a command"]),
        ("empty", {}, "bad_manifest", ["empty.json", "line of JSON"]),
        ("several kinds", {}, "bad_usage", ["good.json (nemo)", "a.txt (txt)"]),
        ("beside a yaml", {}, "bad_usage", ["nothing else beside it"]),
        ("no yaml", {}, "bad_config_file", ["not.yaml"]),
        ("no settings", {}, "bad_config_file", ["other.yaml"]),
        ("unknown format", {"prompt_format": "canry"}, "unknown_name", ["canry", "canary"]),
        ("no turns", {"prompt_format": "plain", "prompt": "hello"}, "bad_config_value", ["'hello'", "list of turns"]),
        ("no role", {"prompt_format": "plain", "prompt": "[{'role': 'x', 'slots': {}}]"}, "bad_config_value",
         ["no role 'x'", "user, assistant"]),
        ("no slot", {"prompt_format": "plain", "prompt": "[{'role': 'user', 'slots': {}}]"}, "bad_config_value",
         ["lacks message"]),
        ("no length of a frame", {"token_bins": True}, "unknown_codec", ["--token-equivalent-duration"]),
        ("no tokenizer", {"token_bins": True, "tokenizer": ()}, "bad_usage", ["--tokenizer"]),
        ("nothing left", {"limits": (5.0, 9.0)}, "too_few_cuts", ["5 to 9 seconds"]),
        ("not several", {"section": "audio"}, None, []),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_in_one_line(tmp_path, name, options, code, told):
    os.mkfifo(tmp_path / "fifo.yaml")
    sources = wrong(name, tmp_path)
    if code is None:
        assert len(read(sources, **options).seconds) == 2
        return
    with raises(ConfigError, code, *told) as caught:
        read(sources, **options)
    assert "\n" not in str(caught.value)


def test_options_that_do_not_go_together(tmp_path):
    path = Path(manifest(tmp_path / "a.json", [1.0, 2.0]))
    with raises(ConfigError, "bad_usage", "--prompt-format"):
        estimate_report([path], BinsOptions(), mixture=MixtureOptions(prompt="[]"), tokenizer=["bytes"])
    with raises(ConfigError, "bad_usage", "--tokenizer"):
        estimate_report([path], BinsOptions(), mixture=MixtureOptions(prompt_format="plain"))


@pytest.mark.slow
def test_the_command_prints_nothing_but_yaml(tmp_path):
    path = manifest(tmp_path / "a.json", SECONDS)
    result = run_sharmill("bins", f"[[{path},0.7],[{path},0.3]]", "-b", "3", "-t", "bytes", "--samples", "50")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("# looked at 50 of 240 examples, in 50 draws by weight\n")
    assert len(yaml.safe_load(result.stdout)["bucket_duration_bins"]) == 2
