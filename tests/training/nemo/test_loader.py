"""``get_dataloader`` with the dataset class that it makes itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.errors import raises
from support.shar import Project, ToyCodec, copy, voice
from support.training import Letters, take

from sharmill.errors import ConfigError
from sharmill.shar import open_shar
from sharmill.training import ContextSpeechDataset, get_dataloader
from sharmill.training.codes import CodecForm


def test_batches_of_our_own_dataset_class(corpora):
    cfg = {"input_cfg": [corpora.entry("large")], "force_finite": True, "batch_size": 4}
    batch = take(get_dataloader(cfg, 0, 1, Letters()), 2)[1]
    cuts = {cut.id: cut for cut in open_shar(corpora.large)}
    assert [cuts[one].supervisions[0].custom["number"] for one in batch["ids"]] == [4, 5, 6, 7]
    for row, cut_id in enumerate(batch["ids"]):
        cut = cuts[cut_id]
        length = int(batch["target_code_lens"][row])
        codes = batch["target_codes"][row, :, 1 : length - 1]
        assert np.array_equal(codes, cut.load_target_codes())
        assert batch["target_codes"][row, :, 0].tolist() == [64] * 3  # BOS: the first id that is no code
        assert batch["text_tokens"][row, : batch["text_lens"][row]].tolist() == [ord("x")] * len(
            cut.supervisions[0].text
        )
        assert batch["similarity"][row].item() == pytest.approx(cut.supervisions[0].context_speaker_similarity)


def test_context_slices_change_with_the_epoch(corpora):
    cfg = {"input_cfg": [corpora.entry("small")], "batch_size": 8}
    form = CodecForm.of_dataset(corpora.small)
    dataset = ContextSpeechDataset(form, context_duration_min=0.2, context_duration_max=0.6)
    first, second = take(get_dataloader(cfg, 0, 1, dataset=dataset), 2)
    assert first["ids"] == second["ids"]
    assert first["context_durations"].tolist() != second["context_durations"].tolist()


def test_padding_to_a_length_makes_tensors_of_it(corpora):
    """Of cuts of 1 s with 50 frames a second; BOS and EOS come on top."""
    cfg = {"input_cfg": [corpora.entry("small")], "force_finite": True, "batch_size": 8, "pad_min_duration": 4.0}
    (batch,) = take(get_dataloader(cfg, 0, 1))
    assert batch["target_codes"].shape == (8, 3, 202)
    assert batch["target_code_lens"].tolist() == [52] * 8
    with pytest.raises(ValueError, match="may be padded at their end"):
        take(get_dataloader(cfg | {"pad_direction": "both"}, 0, 1))


def test_audio_has_the_codecs_rate(tmp_path):
    project = Project(tmp_path)
    for name in ("a.flac", "b.flac"):
        project.add(name, voice(1.0, rate=24000), rate=24000)
    config = project.write(match={"min_duration": 0.0})
    project.encode(config, codec=ToyCodec(sampling_rate=24000))
    entry = {"type": "sharmill", "dataset": str(project.dataset), "fields": ["target_audio", "context_audio"]}
    (batch,) = take(get_dataloader({"input_cfg": [entry], "force_finite": True, "batch_size": 2}, 0, 1))
    assert batch["target_audio_lens"].tolist() == [24000, 24000]
    assert torch.equal(batch["target_audio"][0], torch.from_numpy(voice(1.0, rate=24000)))


def audio_entry(dataset, **options):
    return {"type": "sharmill", "dataset": str(dataset)} | options


def test_data_without_codes_come_as_audio(many):
    cfg = {"input_cfg": [audio_entry(many.dataset)], "force_finite": True, "batch_size": 4}
    batch = take(get_dataloader(cfg, 0, 1, Letters()), 2)[1]
    cuts = {cut.id: cut for cut in open_shar(many.dataset)}
    assert not [name for name in batch if "codes" in name]
    for row, cut_id in enumerate(batch["ids"]):
        samples = cuts[cut_id].target_audio.load_audio()[0]
        assert batch["target_audio_lens"][row] == len(samples)
        assert np.array_equal(batch["target_audio"][row, : len(samples)], samples)
    assert batch["context_audio"].shape[0] == 4
    assert batch["context_durations"].tolist() == [3.0] * 4


def test_audio_without_a_codec_has_the_rate_that_is_asked_for(many):
    cfg = {"input_cfg": [audio_entry(many.dataset)], "force_finite": True, "batch_size": 1, "sample_rate": 8000}
    (batch,) = take(get_dataloader(cfg, 0, 1), 1)
    (cut,) = open_shar(many.dataset, ["target_audio"]).subset(first=1)
    assert batch["target_audio_lens"].item() == cut.resample(8000).num_samples
    assert batch["context_audio_lens"].item() == 3 * 8000


def test_contexts_that_are_not_read_are_not_asked_for(many):
    cfg = {"input_cfg": [audio_entry(many.dataset, fields=["target_audio"])], "force_finite": True, "batch_size": 2}
    (batch,) = take(get_dataloader(cfg, 0, 1), 1)
    assert batch["target_audio"].shape[0] == 2
    assert not [name for name in batch if name.startswith("context")]


def test_a_dataset_without_contexts_makes_batches_of_targets(without_contexts):
    entry = audio_entry(without_contexts.dataset, fields=["target_codes"])
    batches = take(get_dataloader({"input_cfg": [entry], "force_finite": True, "batch_size": 4}, 0, 1, Letters()))
    assert [len(batch["ids"]) for batch in batches] == [4, 3]
    assert not [name for batch in batches for name in batch if name.startswith("context")]
    with raises(ConfigError, "unknown_field", "'context_codes': it has no contexts"):
        entry["fields"] = ["target_codes", "context_codes"]
        get_dataloader({"input_cfg": [entry], "force_finite": True, "batch_size": 4}, 0, 1, Letters())


def test_datasets_with_and_without_contexts_need_a_dataset_of_their_own(many, without_contexts):
    entries = [audio_entry(many.dataset), audio_entry(without_contexts.dataset, fields=["target_audio"])]
    with raises(ConfigError, "needs_dataset"):
        get_dataloader({"input_cfg": entries, "batch_size": 1}, 0, 1)


def test_shards_of_another_tool_need_an_index(many, tmp_path):
    folder = copy(many.dataset, tmp_path / "others")
    (folder / "dataset.json").unlink()
    with raises(ConfigError, "no_dataset", f"sharmill index {folder}"):
        get_dataloader({"input_cfg": [audio_entry(folder)], "batch_size": 1}, 0, 1)


def test_data_with_and_without_codes_need_a_dataset_of_their_own(corpora, many):
    entries = [corpora.entry("large"), audio_entry(many.dataset)]
    with raises(ConfigError, "needs_dataset", "dataset="):
        get_dataloader({"input_cfg": entries, "batch_size": 1}, 0, 1)
    entries = [audio_entry(many.dataset), audio_entry(many.dataset, fields=["target_audio"])]
    with raises(ConfigError, "needs_dataset", "contexts"):
        get_dataloader({"input_cfg": entries, "batch_size": 1}, 0, 1)


def test_a_codec_that_a_dataset_does_not_have_is_an_error(many):
    with raises(ConfigError, "unknown_codec", "mimi"):
        get_dataloader({"input_cfg": [audio_entry(many.dataset, codec="mimi")], "batch_size": 1}, 0, 1)


def test_other_data_need_a_dataset_of_their_own(corpora):
    other = {"type": "lhotse_shar", "shar_path": str(corpora.small)}
    with raises(ConfigError, "needs_dataset", "lhotse_shar", "dataset="):
        get_dataloader({"input_cfg": [corpora.entry("large"), other], "batch_size": 1}, 0, 1)


def test_datasets_of_two_codecs_need_a_dataset_of_their_own(corpora, tmp_path):
    project = Project(tmp_path)
    for name in ("a.flac", "b.flac"):
        project.add(name, voice(1.0))
    project.encode(project.write(match={"min_duration": 0.0}), codec=ToyCodec(samples_per_frame=160))
    entries = [corpora.entry("large"), {"type": "sharmill", "dataset": str(project.dataset)}]
    with raises(ConfigError, "needs_dataset"):
        get_dataloader({"input_cfg": entries, "batch_size": 1}, 0, 1)
