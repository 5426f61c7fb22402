"""Tests of ``get_dataloader``: its default dataset class, epochs, and datasets mixed with other data."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from nemo.collections.common.data.lhotse import get_lhotse_dataloader_from_config
from support.fields import add_fields, score_of
from support.project import Project, ToyCodec, copy, raises, voice
from support.stores import AIStoreStandIn
from support.training import AsIs, Ids, Letters, flat, number, take

import sharmill.training.nemo.input_type  # noqa: F401 - registers the type, as a script of NeMo's does
from sharmill.errors import ConfigError, DamagedShard
from sharmill.shar import open_shar
from sharmill.shar.json_lines import read_json_lines
from sharmill.training import ContextSpeechDataset, get_dataloader
from sharmill.training.codes import CodecForm


def test_batches_of_our_own_dataset_class(corpora):
    cfg = {"input_cfg": [corpora.entry("large")], "force_finite": True, "batch_size": 4}
    batch = take(get_dataloader(cfg, 0, 1, Letters()), 2)[1]
    cuts = {cut.id: cut for cut in open_shar(corpora.large)}
    assert [cuts[one].supervisions[0].custom["number"] for one in batch["ids"]] == [4, 5, 6, 7]
    for row, cut_id in enumerate(batch["ids"]):
        codes = batch["target_codes"][row, :, 1 : int(batch["target_code_lens"][row]) - 1]
        assert np.array_equal(codes, cuts[cut_id].load_target_codes())
        text = "x" * len(cuts[cut_id].supervisions[0].text)
        assert Letters().ids_to_text(batch["text_tokens"][row, : batch["text_lens"][row]]) == text


def test_context_slices_change_with_the_epoch(corpora):
    cfg = {"input_cfg": [corpora.entry("small")], "batch_size": 8}
    form = CodecForm.of_dataset(corpora.small)
    dataset = ContextSpeechDataset(form, context_duration_min=0.2, context_duration_max=0.6)
    first, second = take(get_dataloader(cfg, 0, 1, dataset=dataset), 2)
    assert first["ids"] == second["ids"]
    assert first["context_durations"].tolist() != second["context_durations"].tolist()


def test_audio_has_the_codecs_rate(tmp_path):
    project = Project(tmp_path)
    for name in ("a.flac", "b.flac"):
        project.add(name, voice(1.0, rate=24000), rate=24000)
    project.encode(project.write(match={"min_duration": 0.0}), codec=ToyCodec(sampling_rate=24000))
    entry = {"type": "sharmill", "dataset": str(project.dataset), "fields": ["target_audio", "context_audio"]}
    (batch,) = take(get_dataloader({"input_cfg": [entry], "force_finite": True, "batch_size": 2}, 0, 1))
    assert batch["target_audio_lens"].tolist() == [24000, 24000]
    assert torch.equal(batch["target_audio"][0], torch.from_numpy(voice(1.0, rate=24000)))


def audio_entry(dataset, **options):
    return {"type": "sharmill", "dataset": str(dataset)} | options


def test_a_dataset_in_a_store_gives_the_same_batches(corpora, tmp_path):
    with AIStoreStandIn() as store:
        store.upload(corpora.large, "large")
        entry = corpora.entry("large") | {"dataset": store.url("large"), "cache_dir": str(tmp_path), "cache_gib": 1}
        settings = {"batch_size": 4, "shuffle": True, "shard_seed": 7, "num_workers": 1, "shuffle_buffer_size": 4}
        there, here = (
            take(get_dataloader({"input_cfg": [one]} | settings, 0, 1, Letters()), 9)
            for one in (entry, corpora.entry("large"))
        )
    assert [batch["ids"] for batch in there] == [batch["ids"] for batch in here]
    assert all(torch.equal(a["target_codes"], b["target_codes"]) for a, b in zip(there, here, strict=True))
    assert any(tmp_path.iterdir())


def test_data_without_codes_come_as_audio(many):
    cfg = {"input_cfg": [audio_entry(many.dataset)], "force_finite": True, "batch_size": 4}
    batch = take(get_dataloader(cfg, 0, 1, Letters()), 2)[1]
    assert not [name for name in batch if "codes" in name]
    cuts = {cut.id: cut for cut in open_shar(many.dataset)}
    lengths = [cuts[cut_id].target_audio.num_samples for cut_id in batch["ids"]]
    assert batch["target_audio_lens"].tolist() == lengths
    assert batch["context_audio"].shape[0] == 4
    assert batch["context_durations"].tolist() == [3.0] * 4


def test_a_dataset_without_contexts_makes_batches_of_targets(without_contexts):
    entry = audio_entry(without_contexts.dataset, fields=["target_codes"])
    batches = take(get_dataloader({"input_cfg": [entry], "force_finite": True, "batch_size": 4}, 0, 1, Letters()))
    assert [len(batch["ids"]) for batch in batches] == [4, 3]
    assert not [name for batch in batches for name in batch if name.startswith("context")]
    with raises(ConfigError, "unknown_field", "'context_codes': it has no contexts"):
        entry["fields"] = ["target_codes", "context_codes"]
        get_dataloader({"input_cfg": [entry], "force_finite": True, "batch_size": 4}, 0, 1, Letters())


ALL = list(range(23))


def read(corpora, rank, world_size, batches=None, name="large", **settings):
    """Return the numbers of the cuts of one rank."""
    cfg = {"input_cfg": [corpora.entry(name)], "batch_size": 4} | settings
    return [number(cut) for cut in flat(take(get_dataloader(cfg, rank, world_size, dataset=AsIs()), batches))]


@pytest.mark.parametrize(("name", "world_size", "batch_size", "num_batches"), [("small", 3, 7, 1), ("large", 2, 11, 2)])
def test_map_style_ranks_have_as_many_batches_each(corpora, name, world_size, batch_size, num_batches):
    """A rank without a last batch gets a copy, whose id shows that scores must exclude it."""
    cfg = {"input_cfg": [corpora.entry(name)], "batch_size": batch_size, "force_finite": True}
    cfg["force_map_dataset"] = True
    found = [take(get_dataloader(cfg, rank, world_size, dataset=Ids())) for rank in range(world_size)]
    assert [len(one) for one in found] == [num_batches] * world_size
    ids = flat(flat(found))
    copies = [one for one in ids if one.endswith("_dup0")]
    assert len(copies) == (name == "large")
    assert all(one.removesuffix("_dup0") in ids for one in copies)
    assert len(ids) == len(set(ids)) == {"small": 8, "large": 24}[name]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_estimating_buckets_leaves_all_ranks_in_the_first_epoch(corpora, num_workers):
    """Each of five ranks has 4 or 5 of 24 cuts, and reads 100 of them first."""
    settings = {"use_bucketing": True, "num_buckets": 2, "num_cuts_for_bins_estimate": 100, "bucket_buffer_size": 1}
    settings |= {"shuffle": True, "shuffle_buffer_size": 1, "shard_seed": "randomized", "num_workers": num_workers}
    cfg = {"input_cfg": [corpora.entry("large")], "batch_size": 2, "keep": "fail"} | settings
    ranks = [flat(take(get_dataloader(cfg, rank, 5, dataset=AsIs()), 9)) for rank in range(5)]
    first = [number(cut) for cut in flat(ranks) if cut.shar_position[0] == 0]
    assert len(first) > 20
    assert len(first) == len(set(first))


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_finite_epochs_are_whole_and_follow_each_other(corpora, num_workers):
    settings = {"shuffle": True, "shard_seed": "randomized", "shuffle_buffer_size": 1, "num_workers": num_workers}
    cfg = {"input_cfg": [corpora.entry("large")], "batch_size": 2, "force_finite": True, "keep": "fail"} | settings
    loader = get_dataloader(cfg, 0, 1, dataset=Ids())
    epochs = [flat(take(loader)) for _ in range(3)]
    assert [len(set(epoch)) for epoch in epochs] == [len(epoch) for epoch in epochs] == [24] * 3
    assert len(set(map(tuple, epochs))) == 3


def test_trng_gives_each_rank_an_order_of_its_own(corpora):
    settings = {"shuffle": True, "shard_seed": "trng", "num_workers": 2, "batch_size": 1, "shuffle_buffer_size": 1}
    found = [read(corpora, rank, 2, batches=24, keep="fail", **settings) for rank in (0, 1, 0)]
    # The rank reads all data, each worker a part of it.
    assert [sorted(one) for one in found] == [list(range(24))] * 3
    assert len(set(map(tuple, found))) == 3


@pytest.mark.parametrize(
    "settings",
    [
        {"min_duration": 100},
        {"max_cer": -1, "max_duration": 2.0, "num_workers": 1, "shuffle": True, "shard_seed": "randomized"},
        {"bucket_duration_bins": [0.1], "bucket_batch_size": [2]},
        {"force_map_dataset": True, "min_context_speaker_similarity": 2},
    ],
)
def test_filters_that_nothing_passes_are_an_error(corpora, settings):
    """The loader must fail rather than search endlessly."""
    # torch recreates errors of worker processes from their messages, so the code is lost.
    with pytest.raises(ConfigError, match="min_duration, max_duration"):
        read(corpora, 0, 1, batches=1, **settings)


def test_nemos_own_loader_with_workers(corpora):
    """Like NeMo's training scripts, pass rank and seed to the workers by the environment."""
    cfg = {"input_cfg": [corpora.entry("large")], "force_finite": True, "batch_size": 2, "num_workers": 2}
    settings = {"shuffle": True, "shard_seed": "randomized", "seed": 4, "concurrent_bucketing": False}
    found = [flat(take(get_lhotse_dataloader_from_config(cfg | settings, rank, 2, AsIs()))) for rank in (0, 1)]
    assert Counter(number(cut) for cut in flat(found)) == Counter(ALL)
    ours = [read(corpora, rank, 2, force_finite=True, num_workers=2, shuffle=True, seed=4) for rank in (0, 1)]
    assert [{number(cut) for cut in one} for one in found] == [set(one) for one in ours]


TOKEN_SECONDS = 0.1
MULTIMODAL = {
    "use_multimodal_sampling": True,
    "token_equivalent_duration": TOKEN_SECONDS,
    "audio_locator_tag": "A",
    "prompt_format": "plain",
}


def test_tags_are_in_batches_of_the_default_dataset(corpora):
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
    lost = len(read_json_lines(min((dataset / "cuts").iterdir())))
    cfg = {"batch_size": 3, "force_finite": True}
    entry |= {"dataset": str(dataset)}
    with raises(DamagedShard, "damaged_shard", codes.name):
        take(get_dataloader(cfg | {"input_cfg": [entry]}, 0, 1, dataset=AsIs()))
    entry |= {"on_damage": "skip"}
    found = flat(take(get_dataloader(cfg | {"input_cfg": [entry]}, 0, 1, dataset=AsIs())))
    assert len(found) == 8 - lost > 0
    with raises(DamagedShard, "damaged_shard", "max_damaged=0"):
        take(get_dataloader(cfg | {"input_cfg": [entry | {"max_damaged": 0}]}, 0, 1, dataset=AsIs()))


@pytest.mark.parametrize("ranks", [1, 2])
def test_only_cuts_that_meet_a_condition_are_read(corpora, tmp_path, ranks):
    dataset = add_fields(copy(corpora.large, tmp_path / "scored"))
    wanted = sorted(cut.id for cut in open_shar(dataset) if (score_of(cut.id) or 0.0) > 0.4)
    assert len(wanted) > 5
    entry = corpora.entry("large", dataset=str(dataset), where="score > 0.4")
    cfg = {"input_cfg": [entry], "batch_size": 3, "force_finite": True}
    found = [id for rank in range(ranks) for id in flat(take(get_dataloader(cfg, rank, ranks, dataset=Ids())))]
    assert sorted(found) == wanted
    with raises(ConfigError, "unknown_field", "did you mean 'score'"):
        get_dataloader({"input_cfg": [entry | {"where": "scores > 0"}], "batch_size": 3}, 0, 1, dataset=Ids())


@pytest.fixture
def everything(corpora, nemo_data):
    """Return an entry of every type."""
    cuts = sorted(str(path) for path in (corpora.small / "cuts").iterdir())
    codes = sorted(str(path) for path in (corpora.small / "codes_toy/target_codes").iterdir())
    return [
        corpora.entry("large", tags={"kind": "sharmill"}),
        {"type": "lhotse_shar", "shar_path": {"cuts": cuts, "target_codes": codes}, "tags": {"kind": "lhotse_shar"}},
        {
            "type": "nemo_tarred",
            "manifest_filepath": str(nemo_data / "manifest__OP_0..2_CL_.json"),
            "tarred_audio_filepaths": str(nemo_data / "audio__OP_0..2_CL_.tar"),
            "tags": {"kind": "nemo_tarred"},
        },
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


def test_all_types_in_one_loader_counted_in_tokens(everything):
    cfg = {"input_cfg": everything, "shard_seed": 2, "batch_tokens": 120} | MULTIMODAL
    batches = take(get_dataloader(cfg, 0, 1, Letters(), dataset=AsIs()), 60)
    kinds = Counter(example.kind for example in flat(batches))
    assert set(kinds) == {entry["tags"]["kind"] for entry in everything}
    for batch in batches:
        lengths = [example.num_tokens for example in batch]
        # A batch is full if one more of its longest example would not fit; it was not full before its last example.
        assert (len(batch) + 1) * max(lengths) > 120
        assert len(batch) * max(lengths[:-1], default=0) <= 120


def fused(corpora, fusion, rank, world_size, **settings):
    speech = {"input_cfg": [corpora.entry("large")], "batch_size": 4}
    german = {"input_cfg": [corpora.entry("small")], "batch_size": 2}
    top = {"multi_config": True, "sampler_fusion": fusion, "force_finite": True, "seed": 3}
    cfg = top | settings | {"speech": speech, "german": german}
    return [[number(cut) for cut in batch] for batch in take(get_dataloader(cfg, rank, world_size, dataset=AsIs()))]


@pytest.mark.parametrize("fusion", ["round_robin", "randomized_round_robin"])
def test_fused_samplers_give_every_cut_once_to_workers_of_ranks(corpora, fusion):
    settings = {"num_workers": 2, "shuffle": True, "shard_seed": "randomized"}
    found = [flat(fused(corpora, fusion, rank, 2, **settings)) for rank in (0, 1)]
    assert sorted(flat(found)) == [*range(23), *range(100, 108)]
    assert len(found[0]) > 5
    assert len(found[1]) > 5
