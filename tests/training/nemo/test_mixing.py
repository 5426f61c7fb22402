"""Our datasets beside other data: weights, groups, tags, token counts, fused samplers."""

from __future__ import annotations

import json
import math
import tarfile
from collections import Counter
from pathlib import Path

import pytest
from nemo.collections.common.data.lhotse.text_adapters import (
    NeMoMultimodalConversation,
    SourceTargetTextExample,
    TextExample,
)
from support.errors import raises
from support.shar import copy
from support.training import AsIs, Ids, Letters, flat, number, numbers, take

from sharmill.errors import DamagedShard
from sharmill.shar.cut_lines import read_lines
from sharmill.training import get_dataloader

TOKEN_SECONDS = 0.1
MULTIMODAL = {
    "use_multimodal_sampling": True,
    "token_equivalent_duration": TOKEN_SECONDS,
    "audio_locator_tag": "A",
    "prompt_format": "plain",
}


def shares(loader, batches=200):
    """Count how often examples come from the large dataset, the small one and text."""
    names = [
        "small" if "klein" in one else "large" if one.startswith("cut-") else "text"
        for one in flat(take(loader, batches))
    ]
    return {name: count / len(names) for name, count in Counter(names).items()}


def load_ids(entries, tokenizer=None, **settings):
    cfg = {"input_cfg": entries, "shard_seed": 1, "batch_size": 10} | settings
    return get_dataloader(cfg, 0, 1, tokenizer, dataset=Ids())


def test_weights(corpora):
    found = shares(load_ids([corpora.entry("large", weight=3), corpora.entry("small", weight=1)]))
    assert found == pytest.approx({"large": 0.75, "small": 0.25}, abs=0.03)


def test_nested_groups_multiply_their_weights(corpora):
    inner = {
        "type": "group",
        "weight": 0.8,
        "input_cfg": [corpora.entry("large", weight=0.25), corpora.entry("small", weight=0.75)],
    }
    text = {"type": "txt", "paths": str(corpora.text), "language": "en", "weight": 0.2}
    found = shares(load_ids([inner, text], Letters(), **MULTIMODAL))
    assert found == pytest.approx({"large": 0.2, "small": 0.6, "text": 0.2}, abs=0.03)


def test_a_temperature_of_0_makes_weights_equal(corpora):
    entries = [corpora.entry("large", weight=9), corpora.entry("small", weight=1)]
    found = shares(load_ids(entries, reweight_temperature=0))
    assert found == pytest.approx({"large": 0.5, "small": 0.5}, abs=0.04)


def test_tags_of_entry_and_group(corpora):
    entries = [
        {
            "type": "group",
            "tags": {"task": "tts", "lang": "xx"},
            "input_cfg": [corpora.entry("large", tags={"lang": "en"})],
        },
        corpora.entry("small", tags={"task": "german", "context": "Lies vor:"}),
    ]
    cfg = {"input_cfg": entries, "batch_size": 40, "force_finite": True, "shard_seed": 1}
    cuts = flat(take(get_dataloader(cfg, 0, 1, dataset=AsIs())))
    assert Counter((cut.task, cut.custom.get("lang"), cut.custom.get("context")) for cut in cuts) == {
        ("tts", "xx", None): 23,  # the group's win, which are attached last
        ("german", None, "Lies vor:"): 8,
    }


def test_tags_are_in_the_batch_of_the_dataset_that_the_loader_makes(corpora):
    group = {"type": "group", "tags": {"task": "tts"}, "input_cfg": [corpora.entry("large", tags={"lang": "en"})]}
    cfg = {
        "input_cfg": [group, corpora.entry("small", tags={"task": "german"})],
        "batch_size": 40,
        "force_finite": True,
        "shard_seed": 1,
    }
    batches = take(get_dataloader(cfg, 0, 1))
    found = [(len(batch["ids"]), Counter(json.dumps(tags) for tags in batch["tags"])) for batch in batches]
    assert sum((counts for _, counts in found), Counter()) == {
        '{"task": "tts", "lang": "en"}': 23,
        '{"task": "german"}': 8,
    }
    assert all(number == counts.total() for number, counts in found)
    assert "tags" not in take(get_dataloader(cfg | {"input_cfg": [corpora.entry("small")]}, 0, 1))[0]


def test_damaged_cuts_are_left_out_on_request(corpora, tmp_path):
    entry = corpora.entry("small")
    dataset = copy(Path(entry["dataset"]), tmp_path / "damaged")
    codes = min((dataset / "codes_toy/target_codes").iterdir())
    codes.write_bytes(b"")
    lost = len(read_lines(min((dataset / "cuts").iterdir())))
    cfg = {"batch_size": 3, "force_finite": True}
    entry |= {"dataset": str(dataset)}
    with raises(DamagedShard, "damaged_shard", codes.name):
        take(get_dataloader(cfg | {"input_cfg": [entry]}, 0, 1, dataset=AsIs()))
    entry |= {"on_damage": "skip"}
    found = flat(take(get_dataloader(cfg | {"input_cfg": [entry]}, 0, 1, dataset=AsIs())))
    assert len(found) == 8 - lost > 0
    with raises(DamagedShard, "damaged_shard", "max_damaged=0"):
        take(get_dataloader(cfg | {"input_cfg": [entry | {"max_damaged": 0}]}, 0, 1, dataset=AsIs()))


def test_input_cfg_in_a_file(corpora, tmp_path):
    path = tmp_path / "input.yaml"
    path.write_text(json.dumps([{"type": "group", "input_cfg": [corpora.entry("small")]}]))
    cfg = {"input_cfg": str(path), "batch_size": 3, "force_finite": True}
    found = [flat(take(get_dataloader(cfg, rank, 2, dataset=AsIs()))) for rank in (0, 1)]
    assert [len(one) for one in found] == [4, 4]
    assert sorted(number(cut) for one in found for cut in one) == list(range(100, 108))


def nemo_tarred(corpora, folder):
    """The first conversation's questions as NeMo's tarred audio."""
    records = [
        {"audio_filepath": f"question{n}.wav", "duration": (n + 1) / 10, "text": "q", "shard_id": 0} for n in range(3)
    ]
    (folder / "tarred.json").write_text("".join(json.dumps(record) + "\n" for record in records))
    with tarfile.open(folder / "audio_0.tar", "w") as archive:
        for record in records:
            archive.add(corpora.conversations.parent / record["audio_filepath"], record["audio_filepath"])
    paths = {"manifest_filepath": str(folder / "tarred.json"), "tarred_audio_filepaths": str(folder / "audio_0.tar")}
    return {"type": "nemo_tarred", **paths}


@pytest.fixture
def everything(corpora, tmp_path):
    """An entry of every type."""
    cuts = sorted(str(path) for path in (corpora.small / "cuts").iterdir())
    codes = sorted(str(path) for path in (corpora.small / "codes_toy/target_codes").iterdir())
    return [
        corpora.entry("large", tags={"kind": "sharmill"}),
        {"type": "lhotse_shar", "shar_path": {"cuts": cuts, "target_codes": codes}, "tags": {"kind": "lhotse_shar"}},
        nemo_tarred(corpora, tmp_path) | {"tags": {"kind": "nemo_tarred"}},
        {"type": "txt", "paths": str(corpora.text), "language": "en", "tags": {"kind": "txt"}},
        {
            "type": "txt_pair",
            "source_paths": str(corpora.pairs[0]),
            "target_paths": str(corpora.pairs[1]),
            "tags": {"kind": "txt_pair"},
        },
        {
            "type": "multimodal_conversation",
            "manifest_filepath": str(corpora.conversations),
            "tags": {"kind": "multimodal_conversation"},
        },
        {
            "type": "lhotse_as_conversation",
            "audio_locator_tag": "A",
            "token_equivalent_duration": TOKEN_SECONDS,
            "input_cfg": [corpora.entry("small")],
            "tags": {"kind": "conversation of sharmill"},
        },
    ]


def expected_length(example):
    """Tokens of one example: its text, and a token for each 0.1 s of audio."""
    if isinstance(example, TextExample):
        return len(example.text)
    if isinstance(example, SourceTargetTextExample):
        return len(example.source.text) + len(example.target.text)
    if isinstance(example, NeMoMultimodalConversation):
        (cut,) = example.list_cuts()
        # A locator is one character, and gives way to the audio.
        text = sum(len(turn.value) for turn in example.turns if hasattr(turn, "value"))
        return text + math.ceil(cut.duration / TOKEN_SECONDS)
    return math.ceil(example.duration / TOKEN_SECONDS)


def test_all_types_in_one_loader_counted_in_tokens(everything):
    cfg = {"input_cfg": everything, "shard_seed": 2, "batch_tokens": 120} | MULTIMODAL
    batches = take(get_dataloader(cfg, 0, 1, Letters(), dataset=AsIs()), 60)
    kinds = Counter(example.kind for example in flat(batches))
    assert set(kinds) == {entry["tags"]["kind"] for entry in everything}
    for batch in batches:
        lengths = [expected_length(example) for example in batch]
        assert [example.num_tokens for example in batch] == lengths
        # Full when one more of the longest would not fit; before the last one it was not.
        assert (len(batch) + 1) * max(lengths) > 120
        assert len(batch) * max(lengths[:-1], default=0) <= 120


def test_quadratic_factor_counts_long_examples_as_longer(corpora):
    """Ten tokens count as 10 + 10 * 10 / 20 = 15, of which four fill 60 up; six without the penalty."""
    settings = {"use_multimodal_sampling": True, "token_equivalent_duration": 0.1, "batch_tokens": 60}
    cfg = {"input_cfg": [corpora.entry("small")], "force_finite": True, "measure_total_length": False} | settings
    for penalty, sizes in (({}, [6, 2]), ({"quadratic_factor": 20.0}, [4, 4])):
        batches = take(get_dataloader(cfg | penalty, 0, 1, Letters(), dataset=AsIs()))
        assert [len(batch) for batch in batches] == sizes


def test_all_types_in_a_worker_and_shuffled(everything):
    settings = {"shuffle": True, "shuffle_buffer_size": 20, "num_workers": 1, "seed": 5, "shard_seed": "randomized"}
    cfg = {"input_cfg": everything, "batch_tokens": 120} | MULTIMODAL | settings
    loader = get_dataloader(cfg, 0, 1, Letters(), dataset=AsIs())
    kinds = Counter(example.kind for example in flat(take(loader, 60)))
    assert set(kinds) == {entry["tags"]["kind"] for entry in everything}


def test_our_cuts_as_conversations(everything):
    cfg = {"input_cfg": everything[-1:], "force_finite": True, "batch_tokens": 120} | MULTIMODAL
    batches = take(get_dataloader(cfg, 0, 1, Letters(), dataset=AsIs()))
    assert sorted(number(example) for example in flat(batches)) == list(range(100, 108))
    for example in flat(batches):
        # The locator stands for the audio, "yyyyy" is the transcript.
        assert example.context_ids.tolist() == [ord("A")]
        assert example.answer_ids.tolist() == [ord("y")] * 5
        assert (example.input_length, example.output_length, example.total_length) == (10, 5, 15)


def test_a_prompt_format_with_a_context(corpora):
    entries = [corpora.entry("small", tags={"context": "Say:"})]
    settings = {"use_multimodal_sampling": True, "token_equivalent_duration": 0.1, "prompt_format": "llama2"}
    cfg = {"input_cfg": entries, "force_finite": True, "batch_tokens": 1000} | settings
    (batch,) = take(get_dataloader(cfg, 0, 1, Letters(), dataset=AsIs()))
    for cut in batch:
        assert Letters().ids_to_text(cut.context_ids.tolist()) == "\x01[INST] Say: [/INST]"
        assert Letters().ids_to_text(cut.answer_ids.tolist()) == "yyyyy \x02"


def test_cuts_without_a_prompt_format_are_counted_with_their_text(corpora):
    settings = {"use_multimodal_sampling": True, "token_equivalent_duration": 0.1, "batch_tokens": 1000}
    cfg = {"input_cfg": [corpora.entry("small")], "force_finite": True} | settings
    (batch,) = take(get_dataloader(cfg, 0, 1, Letters(), dataset=AsIs()))
    assert {cut.num_tokens for cut in batch} == {10 + 5}
    (batch,) = take(get_dataloader(cfg | {"measure_total_length": False}, 0, 1, Letters(), dataset=AsIs()))
    assert {cut.num_tokens for cut in batch} == {10}


def test_multimodal_2d_buckets(everything):
    """Inputs of up to 12 or 40 tokens by outputs of up to 6 or 20; what fits none is left out."""
    bins, sizes = [[12, 6], [12, 20], [40, 6], [40, 20]], [5, 4, 3, 2]
    settings = {
        "bucket_duration_bins": bins,
        "bucket_batch_size": sizes,
        "bucket_buffer_size": 50,
        "shuffle_buffer_size": 1,
    }
    settings["shard_seed"] = 2
    conversations = everything[4:]
    cfg = {"input_cfg": conversations} | MULTIMODAL | settings
    buckets = set()
    for batch in take(get_dataloader(cfg, 0, 1, Letters(), dataset=AsIs()), 40):
        lengths = [(example.input_length, example.output_length) for example in batch]
        (bucket,) = {2 * (inputs > 12) + (outputs > 6) for inputs, outputs in lengths}
        assert len(batch) == sizes[bucket]
        buckets.add(bucket)
    assert len(buckets) >= 2


def test_token_limits_leave_cuts_alone(everything):
    cfg = {"input_cfg": everything, "shard_seed": 2, "batch_size": 20, "min_tokens": 8, "max_tokens": 8} | MULTIMODAL
    examples = flat(take(get_dataloader(cfg, 0, 1, Letters(), dataset=AsIs()), 30))
    assert {expected_length(e) for e in examples if not hasattr(e, "duration")} == {8}
    assert len({expected_length(e) for e in examples if hasattr(e, "duration")}) > 5


def fused(corpora, fusion, batches=None, rank=0, world_size=1, **settings):
    speech = {"input_cfg": [corpora.entry("large")], "batch_size": 4}
    german = {"input_cfg": [corpora.entry("small")], "batch_size": 2}
    top = {"multi_config": True, "sampler_fusion": fusion, "force_finite": True, "seed": 3, "shard_seed": 3}
    cfg = top | settings | {"speech": speech, "german": german}
    return numbers(take(get_dataloader(cfg, rank, world_size, dataset=AsIs()), batches))


def test_round_robin(corpora):
    batches = fused(corpora, "round_robin")
    assert ["german" if batch[0] >= 100 else "speech" for batch in batches] == ["speech", "german"] * 4 + ["speech"] * 2
    assert [len(batch) for batch in batches] == [4, 2, 4, 2, 4, 2, 4, 2, 4, 3]
    assert sorted(flat(batches)) == [*range(23), *range(100, 108)]


def test_zip_puts_one_batch_of_each_together_until_one_ends(corpora):
    batches = fused(corpora, "zip")
    assert batches == [[4 * n, 4 * n + 1, 4 * n + 2, 4 * n + 3, 100 + 2 * n, 101 + 2 * n] for n in range(4)]


def test_randomized_round_robin_draws_by_weight(corpora):
    uniform = fused(corpora, "randomized_round_robin")
    assert sorted(flat(uniform)) == [*range(23), *range(100, 108)]
    weights = {"speech": 0.2, "german": 0.8}
    endless = fused(corpora, "randomized_round_robin", batches=300, force_finite=False, sampler_weights=weights)
    assert sum(batch[0] >= 100 for batch in endless) / 300 == pytest.approx(0.8, abs=0.05)


@pytest.mark.parametrize("fusion", ["round_robin", "randomized_round_robin"])
def test_fused_samplers_give_every_cut_once_to_workers_of_ranks(corpora, fusion):
    settings = {"num_workers": 2, "shuffle": True, "shard_seed": "randomized"}
    found = [flat(fused(corpora, fusion, rank=rank, world_size=2, **settings)) for rank in (0, 1)]
    assert sorted(flat(found)) == [*range(23), *range(100, 108)]
    assert len(found[0]) > 5
    assert len(found[1]) > 5
