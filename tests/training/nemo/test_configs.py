"""The configurations in ``configs/training`` on our datasets."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from lhotse.dataset import AudioSamples
from omegaconf import OmegaConf
from support.corpora import link_data
from support.paths import REPOSITORY
from support.training import AsIs, Letters, flat, number, numbers, take

from sharmill.training import get_dataloader

CONFIGS = REPOSITORY / "configs/training"


@pytest.fixture
def config(corpora, tmp_path, monkeypatch):
    """Returns a function: name -> the configuration, whose paths lead to the test data; buffers are small."""
    link_data(corpora, tmp_path / "data")
    monkeypatch.chdir(tmp_path)

    def load(name):
        settings = OmegaConf.load(CONFIGS / f"{name}.yaml")
        sections = (value for value in settings.values() if OmegaConf.is_dict(value) and "input_cfg" in value)
        for section in sections:
            for key in section.keys() & {"bucket_buffer_size", "shuffle_buffer_size"}:
                section[key] = 50
        return settings

    return load


def test_tts(config):
    settings = config("tts")
    batches = flat([take(get_dataloader(settings.train_ds, rank, 2, dataset=AsIs()), 15) for rank in (0, 1)])
    found = Counter(number(cut) for cut in flat(batches))
    # The similarity of 5 is the first that is high enough, the CER of 10 the last that is low enough; 20 to 22 have
    # none, and 23 failed a check. The small dataset has no CER, and is similar enough.
    assert {n for n in found if n < 100} == {5, 6, 7, 8, 9, 10, 20, 21, 22}
    assert {n for n in found if n >= 100} == set(range(100, 108))
    assert {cut.task for cut in flat(batches)} == {"tts"}
    assert flat(batches)[0].load_target_codes().shape[0] == 3


def test_tts_validation(config):
    settings = config("tts")
    ranks = [numbers(take(get_dataloader(settings.validation_ds, rank, 2, dataset=AsIs()))) for rank in (0, 1)]
    assert sorted(flat(flat(ranks))) == list(range(23))
    assert len(ranks[0]) == len(ranks[1])


def test_speech_and_text(config):
    settings = config("speech_text")
    batches = take(get_dataloader(settings.train_ds, 0, 1, Letters(), dataset=AsIs()), 20)
    tasks = Counter(example.task for example in flat(batches))
    total = tasks.total()
    assert {task: count / total for task, count in tasks.items()} == pytest.approx(
        {"tts": 0.5, "lm": 0.3, "qa": 0.2}, abs=0.06
    )
    for example in flat(batches):
        assert torch.equal(example.input_ids, torch.cat([example.context_ids, example.answer_ids]))
        if example.task == "tts":
            assert Letters().ids_to_text(example.input_ids) == "Say it in this voice:" + example.supervisions[0].text
            assert example.load_context_codes().shape[0] == 3


def test_conversations(config):
    from nemo.collections.common.data.lhotse.text_adapters import collate_conversation_audio_fault_tolerant

    settings = config("conversation")
    batches = take(get_dataloader(settings, 0, 1, Letters(), dataset=AsIs()), 40)
    tasks = Counter(batch[0].task for batch in batches)
    assert all(len({example.task for example in batch}) == 1 for batch in batches)
    assert tasks["asr"] / 40 == pytest.approx(0.6, abs=0.2)
    for task in ("dialog", "asr"):
        batch = next(batch for batch in batches if batch[0].task == task)
        audio, lengths, kept = collate_conversation_audio_fault_tolerant(batch, AudioSamples(fault_tolerant=True))
        durations = [conversation.list_cuts()[0].duration for conversation in batch]
        assert lengths.tolist() == [round(16000 * seconds) for seconds in durations]
        assert audio.shape == (len(batch), max(lengths))
        assert len(kept) == len(batch)
        assert all("<audio>" in Letters().ids_to_text(example.context_ids) for example in batch)
