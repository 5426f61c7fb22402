"""The figures that the project promises on real human speech, which is not part of the repository."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from support.audio import read
from support.paths import DATA, REPOSITORY
from support.pipelines import run_sharmill

from sharmill.models import find_speaker_encoder, load_speaker_encoder
from sharmill.models.protocols import pad
from sharmill.shar import open_shar

CONFIG = REPOSITORY / "configs/librispeech.yaml"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not DATA.is_dir(), reason="needs real speech in ../shared/data, which is not in the repository"),
]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def build(tmp_path):
    """Returns a function: name of a data set, overrides -> the finished process and the folder of run and dataset."""

    def run(name, *overrides, stages=("prepare", "match", "write")):
        return run_sharmill(
            "run", CONFIG, *stages, "encode.codecs=[]",
            f"sources.0.manifest={DATA / name / 'manifest.json'}", f"sources.0.audio_root={DATA / name / 'audio'}",
            f"run_dir={tmp_path / 'run'}", f"dataset_dir={tmp_path / 'dataset'}", *overrides,
        )  # fmt: skip

    return run


def speaker(custom):
    return custom["speaker"].split("Speaker:")[1].split()[0]


@pytest.mark.slow
def test_librispeech_accounts_add_up(build, tmp_path):
    outcome = build("librispeech_10x10", stages=("prepare", "match", "write", "validate"))
    assert outcome.returncode == 0, outcome.stderr
    count = json.loads((tmp_path / "dataset/dataset.json").read_text())["num_cuts"]
    assert count + len(lines(tmp_path / "run/rejects.jsonl")) == 100
    assert count >= 95


@pytest.mark.slow
def test_resemblyzers_own_threshold_tells_speakers_apart():
    """The figures beside the number in sharmill.models.resemblyzer; 0.6 lets a fifth of the wrong pairs through."""
    encoder = load_speaker_encoder("resemblyzer")
    records = lines(DATA / "librispeech_10x10/manifest.json")
    audio = [read(DATA / "librispeech_10x10/audio" / record["audio_filepath"])[0] for record in records]
    rows = np.concatenate([encoder.embed(*pad([samples])).numpy() for samples in audio])
    speakers = np.array([record["speaker"] for record in records])
    pairs = np.triu_indices(len(rows), 1)
    similarity, same = (rows @ rows.T)[pairs], (speakers[:, None] == speakers)[pairs]
    least = find_speaker_encoder("resemblyzer").min_similarity
    assert (similarity[same] >= least).mean() > 0.99
    assert (similarity[~same] >= least).mean() < 0.01
    assert (similarity[~same] >= 0.6).mean() > 0.2


@pytest.mark.slow
def test_one_group_for_all_still_finds_the_same_speaker(build, tmp_path):
    outcome = build("librispeech_10x10", "speaker_key=all")
    assert outcome.returncode == 0, outcome.stderr
    speakers = {}
    customs = [cut.supervisions[0].custom for cut in open_shar(tmp_path / "dataset", [])]
    for line in lines(DATA / "librispeech_10x10/manifest.json"):
        speakers[line["audio_filepath"]] = speaker(line)
    same = [speakers[custom["context_audio_filepath"]] == speaker(custom) for custom in customs]
    assert len(same) == 100
    assert np.mean(same) >= 0.97


@pytest.mark.slow
def test_one_utterance_per_speaker_gives_an_empty_dataset_where_that_is_allowed(build, tmp_path):
    outcome = build("librispeech_248x1", "speaker_key=speaker", "prepare.require_text=false", "max_reject_fraction=1")
    assert outcome.returncode == 0, outcome.stderr
    rejects = lines(tmp_path / "run/rejects.jsonl")
    assert [reject["reason"] for reject in rejects] == ["single_utterance_speaker"] * 248
    assert list(open_shar(tmp_path / "dataset")) == []
    assert run_sharmill("validate", tmp_path / "dataset", "--workers", 1).returncode == 0


@pytest.mark.slow
def test_three_formats_give_the_same_durations_and_other_texts_as_context(build, tmp_path):
    outcome = build("ljspeech_formats", "speaker_key=speaker", "match.exclude_same_text=true", "match.min_duration=1")
    assert outcome.returncode == 0, outcome.stderr
    durations = defaultdict(list)
    for cut in open_shar(tmp_path / "dataset", []):
        custom = cut.supervisions[0].custom
        durations[Path(custom["audio_filepath"]).stem].append(cut.duration)
        assert custom["context_audio_text"] != custom["text"]
    assert [len(found) for found in durations.values()] == [3] * 8
    assert max(max(found) - min(found) for found in durations.values()) <= 0.05


@pytest.mark.slow
def test_offsets_are_honoured_to_the_sample(build, tmp_path):
    outcome = build("ami_segments", "speaker_key=speaker", "prepare.require_text=false", "match.min_duration=2",
                    "match.min_similarity=0.6")  # fmt: skip
    assert outcome.returncode == 0, outcome.stderr
    checked = 0
    for cut in open_shar(tmp_path / "dataset"):
        custom = cut.supervisions[0].custom
        for prefix, audio in (("", cut.load_target_audio()), ("context_audio_", cut.load_context_audio())):
            path = DATA / "ami_segments/audio" / custom[f"{prefix or 'audio_'}filepath"]
            samples, rate = sf.read(path, dtype="float32")
            start = round(custom[f"{prefix}offset"] * rate)
            expected = samples[start : start + round(custom[f"{prefix}duration"] * rate)]
            assert audio.shape == (1, len(expected))
            # The source is float, the dataset's FLAC has 16 bits.
            assert np.abs(audio[0] - expected).max() <= 2**-15
            checked += 1
    assert checked == 2 * 43
