"""Audio that is stored in containers, through the real stages: the bytes in the dataset are those of the files."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.paths import DATA
from support.pipelines import read_with_lhotse
from support.shar import lines, members_of

from sharmill.config import to_config
from sharmill.engine.listener import Listener
from sharmill.pipeline import run_dataset, stages_of
from sharmill.shar import open_shar

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
real_speech = pytest.mark.skipif(
    not DATA.is_dir(), reason="needs real speech in ../shared/data, which is not in the repository"
)
SPEECH = DATA / "librispeech_10x10"
AUDIO = SPEECH / "audio"


def build(folder: Path, source, **changes) -> Path:
    """The folder of the validated dataset of one source, whose records are all accounted for."""
    values = {
        "name": "stored",
        "run_dir": str(folder / "run"),
        "dataset_dir": str(folder / "dataset"),
        "sources": [source],
        "prepare": {"unit_records": 30},
        "match": {"min_duration": 1.0},
        "write": {"shard_size": 30, "order": "manifest"},
        "encode": {"codecs": []},
        "validate": {"deep": True, "against_sources": True},
        "executor": {"workers": 1},
    }
    config = to_config(values | changes, "test")
    result = run_dataset(config, Listener(), stages=[stage for stage in stages_of(config) if stage != "encode"])
    assert result.ok
    assert result.num_errors == 0
    return folder / "dataset"


def rejects(dataset: Path) -> list[str]:
    return [reject["reason"] for reject in lines(dataset.parent / "run/rejects.jsonl")]


def stored(dataset: Path, field: str) -> list[bytes]:
    """The audio files of a field, in the order of the shards."""
    tars = sorted((dataset / field).glob("*.tar"))
    return [data for tar in tars for name, data in members_of(tar) if not name.endswith(".json")]


def texts(dataset: Path) -> list[tuple]:
    cuts = list(open_shar(dataset, []))
    keys = ("context_audio_text", "context_speaker_similarity")
    return [(c.supervisions[0].text, c.supervisions[0].speaker, *map(c.supervisions[0].custom.get, keys)) for c in cuts]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The dataset of the plain manifest."""
    folder = tmp_path_factory.mktemp("plain")
    return build(folder, {"manifest": str(SPEECH / "manifest.json"), "audio_root": str(AUDIO)})


@real_speech
def test_a_finished_dataset_is_made_again_from_itself(plain, tmp_path):
    source = {"type": "lhotse_shar", "shar": str(plain)}
    again = build(tmp_path / "again", source, speaker_key="speaker")
    assert len(stored(again, "target_audio")) == 100 - len(rejects(plain))
    assert rejects(again) == []
    for field in ("target_audio", "context_audio"):
        assert stored(again, field) == stored(plain, field)
    assert texts(again) == texts(plain)
    for cut, before in zip(open_shar(again, []), open_shar(plain, []), strict=True):
        said, said_before = cut.supervisions[0].custom, before.supervisions[0].custom
        assert said["source_audio_filepath"] == said_before["audio_filepath"]
        assert said["utterance_id"] == before.id
    assert [cut.id for cut in read_with_lhotse(again)] == [cut.id for cut in open_shar(again, [])]


@real_speech
def test_contexts_are_added_to_a_dataset_without(plain, tmp_path):
    manifest = {"manifest": str(SPEECH / "manifest.json"), "audio_root": str(AUDIO)}
    bare = build(tmp_path / "bare", manifest, match=None)
    assert not (bare / "context_audio").exists()
    made = build(tmp_path / "made", {"type": "lhotse_shar", "shar": str(bare)}, speaker_key="speaker")
    assert rejects(made) == rejects(plain)
    for field in ("target_audio", "context_audio"):
        assert stored(made, field) == stored(plain, field)
    assert texts(made) == texts(plain)
