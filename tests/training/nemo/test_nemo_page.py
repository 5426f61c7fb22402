"""Every example of NeMo's page on Lhotse dataloading, a file each in ``page``, and what the page names beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.errors import raises
from support.training import AsIs, Letters, flat, number, take

from sharmill.errors import ConfigError
from sharmill.training import get_dataloader
from sharmill.training.nemo.doctor import examine
from sharmill.training.nemo.trial import read_train_settings

PAGE = sorted((Path(__file__).parent / "page").glob("*.yaml"))


@pytest.fixture
def example(nemo_data, corpora, tmp_path):
    """Returns a function: the name of a file in ``page`` -> its settings, on the data of the tests."""

    def read(name):
        text = (Path(__file__).parent / f"page/{name}.yaml").read_text().replace("FOLDER", str(nemo_data))
        path = tmp_path / f"{name}.yaml"
        path.write_text(text.replace("CONVERSATIONS", str(corpora.conversations)))
        return read_train_settings(path)

    return read


@pytest.mark.parametrize("name", [path.stem for path in PAGE])
def test_an_example_of_the_page_runs(example, name):
    settings = example(name) | {"shard_seed": 1}
    batches = take(get_dataloader(settings, 0, 1, Letters(), dataset=AsIs()), 3)
    assert [bool(batch) for batch in batches] == [True] * 3
    said = list(examine(settings, ranks=2, num_batches=3, tokenizer="bytes"))
    assert any("can be resumed exactly" in line for line in said) != any("map style" in line for line in said)


def test_tags_are_on_every_cut(example):
    settings = example("two_datasets_with_tags") | {"shard_seed": 1}
    cuts = flat(take(get_dataloader(settings, 0, 1, Letters(), dataset=AsIs()), 20))
    assert {(cut.lang, cut.pnc) for cut in cuts} == {("en", False), ("pl", True)}
    settings = example("groups_of_tasks") | {"shard_seed": 1}
    cuts = flat(take(get_dataloader(settings, 0, 1, Letters(), dataset=AsIs()), 60))
    assert {(cut.task, cut.source_lang, cut.target_lang) for cut in cuts} == {
        ("asr", "en", "en"), ("asr", "pl", "pl"), ("ast", "en", "pl"), ("ast", "pl", "en"),
    }  # fmt: skip


def test_a_batch_of_speech_and_text_has_both(example):
    settings = example("speech_and_text_together") | {"shard_seed": 1}
    for batch in take(get_dataloader(settings, 0, 1, Letters(), dataset=AsIs()), 3):
        assert {hasattr(one, "duration") for one in batch} == {True, False}
        assert {one.question for one in batch if hasattr(one, "source")} == {"Say it in Polish"}
        assert {one.context for one in batch if hasattr(one, "duration")} == {"Say it in English"}


def test_pairs_are_prompted_for_translation(example):
    settings = example("text_pairs") | {"shard_seed": 1, "seed": 1}
    (batch,) = take(get_dataloader(settings, 0, 1, Letters(), dataset=AsIs()), 1)
    asked = {Letters().ids_to_text(one.context_ids) for one in batch}
    assert asked == {f"{one.source.text}" for one in batch} or all("line" in text for text in asked)


@pytest.mark.parametrize("seed", ["trng", "randomized"])
def test_seeds_that_the_page_calls_exotic(nemo_data, seed):
    """A base seed that is drawn: alone it runs, and ranks that share one order are told to set a number."""
    tars = {
        "manifest_filepath": str(nemo_data / "manifest__OP_0..2_CL_.json"),
        "tarred_audio_filepaths": str(nemo_data / "audio__OP_0..2_CL_.tar"),
    }
    cfg = tars | {"batch_size": 3, "shuffle": True, "shuffle_buffer_size": 4, "seed": seed}
    assert len(flat(take(get_dataloader(cfg, 0, 2, dataset=AsIs()), 3))) == 9
    with raises(ConfigError, "split_wrong", "set seed to a number"):
        get_dataloader(cfg | {"shard_seed": "randomized"}, 0, 2, dataset=AsIs())


def load(settings, **further):
    cfg = {"batch_size": 4, "force_finite": True} | settings | further
    return flat(take(get_dataloader(cfg, 0, 1, Letters(), dataset=AsIs())))


@pytest.mark.parametrize("form", ["string", "list", "weights"])
def test_paths_of_shar(corpora, form):
    small = str(corpora.small)
    paths = {"string": small, "list": [small, str(corpora.large)], "weights": [[small, 0.7], [str(corpora.large), 0.3]]}
    found = {number(cut) for cut in load({"shar_path": paths[form]})}
    assert found == ({*range(100, 108)} if form == "string" else {*range(23), *range(100, 108)})


def test_a_manifest_of_lhotse(nemo_data, tmp_path):
    from lhotse import CutSet, Recording

    cuts = CutSet(Recording.from_file(nemo_data / f"{n}.wav").to_cut() for n in range(3))
    cuts.to_file(tmp_path / "cuts.jsonl.gz")
    assert len(load({"cuts_path": str(tmp_path / "cuts.jsonl.gz")})) == 3
    padded = load({"cuts_path": str(tmp_path / "cuts.jsonl.gz")}, pad_min_duration=3.0)
    assert [cut.duration for cut in padded] == [3.0] * 3


def test_fields_of_text_and_language(nemo_data):
    entry = {"type": "nemo", "manifest_filepath": str(nemo_data / "plain.json")}
    cuts = load({"input_cfg": [entry]}, text_field="duration", lang_field="text", pretokenize=False)
    assert [(cut.supervisions[0].text, cut.supervisions[0].language) for cut in cuts][:2] == [(None, "0"), (None, "1")]


def test_a_subset_of_tarred_entries(nemo_data, tmp_path):
    for n in range(3):
        lines = (nemo_data / f"manifest_{n}.json").read_text().splitlines(keepends=True)
        (tmp_path / f"manifest_{n}.json").write_text("".join(lines[:2]))
    entry = {"type": "nemo_tarred", "manifest_filepath": str(tmp_path / "manifest__OP_0..2_CL_.json"),
             "tarred_audio_filepaths": str(nemo_data / "audio__OP_0..2_CL_.tar")}  # fmt: skip
    assert len(load({"input_cfg": [entry]}, skip_missing_manifest_entries=True)) == 6


@pytest.mark.parametrize("skip", [True, 1, "low character-rate"])
def test_entries_that_are_skipped(nemo_data, tmp_path, skip):
    """The first line of each shard's manifest is skipped; its audio stays in the tar."""
    for n in range(3):
        lines = [json.loads(line) for line in (nemo_data / f"manifest_{n}.json").read_text().splitlines()]
        lines[0]["_skipme"] = skip
        (tmp_path / f"manifest_{n}.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    entry = {"type": "nemo_tarred", "manifest_filepath": str(tmp_path / "manifest__OP_0..2_CL_.json"),
             "tarred_audio_filepaths": str(nemo_data / "audio__OP_0..2_CL_.tar")}  # fmt: skip
    assert sorted(cut.supervisions[0].text for cut in load({"input_cfg": [entry]})) == list("345678")


@pytest.mark.parametrize("tarred", [False, True])
def test_conversations_as_share_gpt_has_them(nemo_data, tmp_path, tarred):
    """A sound and its question in each of three conversations, divided like the other types."""
    lines = [
        {"id": str(n), "sound": f"{n}.wav", "duration": 0.5, "conversations": [
            {"from": "human", "value": "Listen: <sound>"}, {"from": "gpt", "value": f"{n}."}]}
        for n in (0, 3, 6)
    ]  # fmt: skip
    (tmp_path / "chat_0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    entry = {"type": "share_gpt", "manifest_filepath": str(tmp_path / "chat_0.jsonl"), "audio_locator_tag": "[audio]",
             "audio_placeholders": ["<sound>"]}  # fmt: skip
    entry |= {"tarred_audio_filepaths": str(nemo_data / "audio_0.tar")} if tarred else {"audio_root": str(nemo_data)}
    tokens = {"use_multimodal_sampling": True, "prompt_format": "llama2", "token_equivalent_duration": 0.08}
    found = []
    for rank in range(2):
        cfg = {"input_cfg": [entry], "batch_size": 2, "force_finite": True} | tokens
        found += flat(take(get_dataloader(cfg, rank, 2, Letters(), dataset=AsIs())))
    assert sorted(one.id for one in found) == ["0", "3", "6"]
    assert {cut.load_audio().shape for one in found for cut in one.list_cuts()} == {(1, 8000)}
    assert all("[audio]" in Letters().ids_to_text(one.context_ids) for one in found)


@pytest.mark.parametrize("kind", ["txt", "nemo_tarred"])
def test_shards_of_text_and_tars_are_divided_as_files(nemo_data, kind):
    """Three files on two ranks: every example once, in another order of files each epoch."""
    entry = {"type": "txt", "paths": str(nemo_data / "text__OP_0..2_CL_.txt"), "language": "en"} if kind == "txt" else {
        "type": "nemo_tarred", "manifest_filepath": str(nemo_data / "manifest__OP_0..2_CL_.json"),
        "tarred_audio_filepaths": str(nemo_data / "audio__OP_0..2_CL_.tar")}  # fmt: skip
    tokens = {"use_multimodal_sampling": True, "prompt_format": "plain", "token_equivalent_duration": 0.08}
    order = {"shuffle": True, "shuffle_buffer_size": 1, "shard_seed": "randomized", "seed": 1, "batch_size": 1}
    size = 12 if kind == "txt" else 9
    cfg = {"input_cfg": [entry]} | tokens | order
    seen = [flat(take(get_dataloader(cfg, rank, 2, Letters(), dataset=AsIs()), 2 * size)) for rank in range(2)]
    names = [(one.custom["shar_position"][0], getattr(one, "text", None) or one.id) for part in seen for one in part]
    for epoch in range(2):
        assert len({name for found, name in names if found == epoch}) == size
    assert len(set(names)) == len(names)
