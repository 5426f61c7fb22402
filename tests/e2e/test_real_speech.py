"""The figures that the project promises on real human speech, which is not part of the repository."""

import numpy as np
import pytest
from support.audio import read
from support.project import DATA, REPOSITORY, lines, run_sharmill

from sharmill.models import find_speaker_encoder, load_speaker_encoder
from sharmill.models.batches import pad
from sharmill.shar import open_shar

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not DATA.is_dir(), reason="needs real speech in ../shared/data, which is not in the repository"),
]


@pytest.mark.slow
def test_resemblyzers_own_threshold_tells_speakers_apart():
    """The figures beside the number in sharmill.models.families; 0.6 lets a fifth of the wrong pairs through."""
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
def test_one_utterance_per_speaker_may_give_an_empty_dataset(tmp_path):
    speech = DATA / "librispeech_248x1"
    run_sharmill(
        "run", REPOSITORY / "configs/librispeech.yaml", "prepare", "match", "write", "encode.codecs=[]",
        f"sources.0.manifest={speech / 'manifest.json'}", f"sources.0.audio_root={speech / 'audio'}",
        f"run_dir={tmp_path / 'run'}", f"dataset_dir={tmp_path / 'dataset'}", "speaker_key=speaker",
        "prepare.require_text=false", "max_reject_fraction=1",
    )  # fmt: skip
    rejects = lines(tmp_path / "run/rejects.jsonl")
    assert [reject["reason"] for reject in rejects] == ["single_utterance_speaker"] * 248
    assert list(open_shar(tmp_path / "dataset")) == []
    run_sharmill("validate", tmp_path / "dataset", "--workers", 1)
