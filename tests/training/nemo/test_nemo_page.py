"""Every example of NeMo's page on Lhotse dataloading runs as it is printed, and what the page names beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from support.training import AsIs, Letters, flat, number, take

from sharmill.training import get_dataloader

EXAMPLES = yaml.safe_load((Path(__file__).parent / "nemo_page.yaml").read_text())


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_the_page(name, nemo_data, corpora):
    text = yaml.safe_dump(EXAMPLES[name]).replace("FOLDER", str(nemo_data))
    cfg = yaml.safe_load(text.replace("CONVERSATIONS", str(corpora.conversations))) | {"shard_seed": 1}
    for section in (cfg["audio"], cfg["text"]) if "audio" in cfg else (cfg,):
        section.update(bucket_buffer_size=9, shuffle_buffer_size=4)
    batches = take(get_dataloader(cfg, 0, 1, Letters(), dataset=AsIs()), 3)
    assert [bool(batch) for batch in batches] == [True] * 3
    if name == "two datasets with tags":
        assert {(cut.lang, cut.pnc) for batch in batches for cut in batch} <= {("en", False), ("pl", True)}
    if name == "speech and text together":
        assert all({hasattr(example, "duration") for example in batch} == {True, False} for batch in batches)


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
