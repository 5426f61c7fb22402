"""One odd thing among good ones: the others are not lost, and nobody else's files are touched."""

from __future__ import annotations

import json

import numpy as np
import pytest
import soundfile as sf
from support.pipelines import read_with_lhotse, run_sharmill

pytestmark = pytest.mark.e2e

STAGES = ("prepare", "match", "write", "validate")


@pytest.fixture
def small_corpus(tmp_path):
    """Returns a function: rates by file name -> manifest and audio root with one speaker; noise bursts of 4 s."""

    def make(rates, **further):
        root = tmp_path / "audio"
        root.mkdir()
        records = []
        for number, (name, rate) in enumerate(rates.items()):
            time = np.arange(4 * rate) / rate
            voice = np.sin(2 * np.pi * 140 * time) * (0.3 + 0.2 * np.sin(2 * np.pi * (3 + number) * time))
            sf.write(root / name, voice, rate)
            records.append({"audio_filepath": name, "duration": 4.0, "text": f"sentence {number}",
                            "speaker": "|Dataset:T Speaker:anna Language:en|", **further})  # fmt: skip
        manifest = tmp_path / "m.json"
        manifest.write_text("".join(json.dumps(record) + "\n" for record in records))
        return {"sources": [{"manifest": str(manifest), "audio_root": str(root)}], "encode": {"codecs": []}}

    return make


def rejects(folder):
    return [json.loads(line) for line in (folder / "run/rejects.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_tags_are_made_canonical_and_a_blank_normalized_text_is_not_kept(small_corpus, make_config, tmp_path):
    corpus = small_corpus({"a.wav": 16000, "b.wav": 16000}, normalized_text=" ")
    outcome = run_sharmill("run", make_config(tmp_path, **corpus), *STAGES)
    assert outcome.returncode == 0, outcome.stderr + outcome.stdout
    for cut in read_with_lhotse(tmp_path / "dataset"):
        (supervision,) = cut.supervisions
        assert supervision.speaker == "| Language:en Dataset:T Speaker:anna |"
        assert not supervision.has_custom("normalized_text")
        assert "context_audio_normalized_text" not in supervision.custom


@pytest.mark.slow
def test_an_utterance_under_another_name_is_not_its_context(small_corpus, make_config, tmp_path):
    corpus = small_corpus({"a.wav": 16000})
    (tmp_path / "audio/same.wav").symlink_to(tmp_path / "audio/a.wav")
    manifest = tmp_path / "m.json"
    manifest.write_text(manifest.read_text() + manifest.read_text().replace("a.wav", "same.wav"))
    outcome = run_sharmill("run", make_config(tmp_path, **corpus), *STAGES, "max_reject_fraction=1")
    assert outcome.returncode == 0, outcome.stderr + outcome.stdout
    assert [reject["reason"] for reject in rejects(tmp_path)] == ["no_long_context"] * 2


@pytest.mark.slow
def test_a_stage_in_which_nothing_is_done_takes_another_configuration(make_config, tmp_path):
    config = make_config(tmp_path, encode={"codecs": []}, max_reject_fraction=0.0)
    assert run_sharmill("run", config, "prepare").returncode == 1
    wrong = run_sharmill("run", config, "match", "max_reject_fraction=1", "match.encoder=nemo:no_such_model")
    assert wrong.returncode == 2
    assert run_sharmill("run", config, "prepare", "match", "max_reject_fraction=1").returncode == 0


def test_status_does_not_depend_on_the_working_folder(small_corpus, make_config, tmp_path):
    make_config(tmp_path, run_dir="run", dataset_dir="dataset", **small_corpus({"a.wav": 16000, "b.wav": 16000}))
    assert run_sharmill("run", "config.yaml", "prepare", cwd=tmp_path).returncode == 0
    output = run_sharmill("status", tmp_path / "run").stdout
    (row,) = [line for line in output.splitlines() if line.split()[:1] == ["prepare"]]
    assert "done" in row.split()


def test_an_override_with_a_number_sign_is_taken_whole(make_config, tmp_path):
    outcome = run_sharmill("run", make_config(tmp_path), "prepare", "sources.0.audio_root=/no/root #2")
    assert outcome.returncode == 2
    assert "/no/root #2" in outcome.stderr
