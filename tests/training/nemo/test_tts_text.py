"""Text for hybrid ASR-TTS as an entry of the loader: checked, divided, resumed, and read by NeMo's own dataset."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from support.errors import raises
from support.manifests import write_manifest
from support.training import AsIs, Letters, flat, take

from sharmill.errors import ConfigError
from sharmill.training import get_dataloader, merge_data_states

SETTINGS = {
    "use_multimodal_sampling": True,
    "token_equivalent_duration": 0.1,
    "prompt_format": "plain",
    "batch_size": 2,
    "shuffle": True,
    "shard_seed": "randomized",
    "shuffle_buffer_size": 4,
    "seed": 3,
}
GOOD = {"text": "one hundred", "tts_text": "100", "tts_text_normalized": "one hundred"}


@pytest.fixture
def entry(tmp_path):
    """Twelve lines in two manifests; every third has no normalized text, every fourth its own language."""
    for file in (0, 1):
        lines = []
        for n in range(6 * file, 6 * file + 6):
            spoken = {"tts_text": f"Line {n}."} | ({} if n % 3 == 0 else {"tts_text_normalized": f"line number {n}"})
            lines.append({"text": f"line {n}"} | spoken | ({"lang": "de"} if n % 4 == 0 else {}))
        write_manifest(tmp_path / f"text_{file}.json", lines)
    return {"type": "tts_text", "manifest_filepath": str(tmp_path / "text__OP_0..1_CL_.json"), "language": "en"}


def load(entry, rank=0, world_size=1, *, resumable=False, state=None, **settings):
    cfg = {"input_cfg": [entry]} | SETTINGS | settings
    return get_dataloader(cfg, rank, world_size, Letters(), dataset=AsIs(), resumable=resumable, state=state)


def test_examples_have_both_texts(entry):
    found = {example.text: example for example in flat(take(load(entry, force_finite=True)))}
    assert set(found) == {f"line {n}" for n in range(12)}
    assert found["line 1"].tts_text == "Line 1."
    assert found["line 1"].tts_text_normalized == "line number 1"
    assert not found["line 3"].has_custom("tts_text_normalized")
    assert [found[f"line {n}"].language for n in (3, 4)] == ["en", "de"]


def test_each_line_once_over_ranks_and_after_a_resume(entry):
    used, states = [], []
    for rank in (0, 1):
        loader = load(entry, rank, 2, resumable=True)
        used += flat(take(loader, 2))
        states.append(loader.state_dict())
    state = json.loads(json.dumps(merge_data_states(states)))
    used += flat(take(load(entry, resumable=True, state=state), 6))
    seen = Counter((example.shar_position[0], example.text) for example in used)
    assert set(seen.values()) == {1}
    assert {text for epoch, text in seen if epoch == 0} == {f"line {n}" for n in range(12)}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "one"', "not JSON"),
        (b'["one"]', "not a JSON object"),
        ({"tts_text": "1"}, "has no text"),
        ({"text": "one"}, "neither tts_text_normalized nor tts_text"),
        (GOOD | {"text": " "}, "text is ' '"),
        (GOOD | {"tts_text": 100}, "tts_text is 100"),
        (GOOD | {"audio_filepath": "a.wav"}, "type nemo"),
    ],
)
def test_a_bad_line_is_named(line, words, tmp_path):
    write_manifest(tmp_path / "text.json", [GOOD, line])
    with raises(ConfigError, "bad_manifest", "text.json, record 2", words):
        take(load({"type": "tts_text", "manifest_filepath": str(tmp_path / "text.json")}, force_finite=True))


def test_keys_of_the_entry_are_checked(entry):
    with raises(ConfigError, "unknown_key", "paths"):
        load(entry | {"paths": "a.txt"})
    with raises(ConfigError, "missing_key", "manifest_filepath"):
        load({"type": "tts_text"})
    with raises(ConfigError, "missing_input", "gone.json"):
        load({"type": "tts_text", "manifest_filepath": "gone.json"})


def test_nemos_own_dataset_reads_the_same_texts(entry, tmp_path):
    text_to_text = pytest.importorskip("nemo.collections.asr.data.text_to_text")
    (tmp_path / "speakers.txt").write_text("1 2")
    records = [json.loads(line) for file in (0, 1) for line in (tmp_path / f"text_{file}.json").open()]
    for record in records:
        record.setdefault("tts_text_normalized", record["tts_text"])
    path = write_manifest(tmp_path / "normalized.json", records)
    theirs = text_to_text.TextToTextDataset(
        path, tmp_path / "speakers.txt", Letters(), False, Letters().text_to_ids, 0, None, {}
    )
    entry = {"type": "tts_text", "manifest_filepath": str(path)}
    ours = {example.text: example.tts_text_normalized for example in flat(take(load(entry, force_finite=True)))}
    text_of = Letters().ids_to_text
    found = {text_of(item["asr_text_tokens"]): text_of(item["tts_text_tokens"]) for item in theirs.data}
    assert found == ours
