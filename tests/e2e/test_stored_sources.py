"""Audio that is stored in containers, through the real stages: the bytes in the dataset are those of the files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.paths import DATA
from support.pipelines import read_with_lhotse
from support.shar import lines, members_of

from sharmill.config import to_config
from sharmill.engine.listener import Listener
from sharmill.pipeline import run_dataset
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
    result = run_dataset(config, Listener(), stages=[stage for stage in config.stages if stage != "encode"])
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
def test_a_shar_that_lhotse_wrote(plain, tmp_path):
    from lhotse import CutSet, Recording, SupervisionSegment

    cuts = []
    for number, line in enumerate((SPEECH / "manifest.json").read_text().splitlines()):
        record = json.loads(line)
        recording = Recording.from_file(AUDIO / record["audio_filepath"])
        said = SupervisionSegment(
            f"sup-{number}", recording.id, 0.0, recording.duration, text=record["text"], speaker=record["speaker"]
        )
        cut = recording.to_cut()
        cut.supervisions = [said]
        cuts.append(cut)
    (tmp_path / "shar").mkdir()
    CutSet.from_cuts(cuts).to_shar(tmp_path / "shar", {"recording": "flac"}, shard_size=40)
    found = build(tmp_path / "found", {"type": "lhotse_shar", "shar": str(tmp_path / "shar")}, speaker_key="speaker")
    assert rejects(found) == rejects(plain)
    assert texts(found) == texts(plain)
    own = stored(tmp_path / "shar", ".")
    assert [data for data in stored(found, "target_audio") if data not in own] == []
    for cut, other in zip(open_shar(found), open_shar(plain), strict=True):
        assert cut.load_target_audio().tobytes() == other.load_target_audio().tobytes()
        assert cut.load_context_audio().tobytes() == other.load_context_audio().tobytes()


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


@real_speech
def test_a_dataset_that_says_what_became_of_records_without_a_context(plain, tmp_path):
    """A Shar whose last speakers have one utterance each, as a source of a dataset with contexts."""
    from lhotse import CutSet

    shar = tmp_path / "shar"
    cuts = list(read_with_lhotse(plain))
    few = [cut for cut in cuts if "Speaker:1688" in cut.supervisions[0].speaker]
    lone = {cut.supervisions[0].speaker: cut for cut in cuts if "Speaker:1688" not in cut.supervisions[0].speaker}
    shar.mkdir()
    chosen = [*few, *lone.values()]
    for cut in chosen:
        cut.custom = {"target_audio": cut.target_audio}
    CutSet.from_cuts(chosen).to_shar(shar, {"target_audio": "flac"}, shard_size=7)
    made = build(
        tmp_path / "made", {"type": "lhotse_shar", "shar": str(shar)}, speaker_key="speaker", max_reject_fraction=1.0
    )
    assert rejects(made) == ["single_utterance_speaker"] * len(lone)
    assert len(list(open_shar(made, []))) == len(few)
    told = lines(made.parent / "run/rejects.jsonl")
    assert [reject["record"]["utterance_id"] for reject in told] == [cut.id for cut in lone.values()]


@real_speech
@pytest.mark.parametrize("form", ["parquet", "stream"])
def test_a_hugging_face_dataset(form, plain, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = [json.loads(line) for line in (SPEECH / "manifest.json").read_text().splitlines()]
    rows = [{"bytes": (AUDIO / r["audio_filepath"]).read_bytes(), "path": r["audio_filepath"]} for r in records]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    keys = {"sentence": "text", "duration": "duration", "reader": "speaker"}
    table = pa.table({"audio": pa.array(rows, kind)} | {name: [r[key] for r in records] for name, key in keys.items()})
    for shard in range(2):
        path, part = tmp_path / f"train-{shard:05d}-of-00002.{form}", table.slice(50 * shard, 50)
        if form == "parquet":
            pq.write_table(part, path, row_group_size=15)
        else:
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, part.schema) as writer:
                writer.write_table(part, max_chunksize=15)
    source = {"type": "parquet", "parquet": str(tmp_path / f"train-*.{form}"),
              "columns": {"text": "sentence", "speaker": "reader"}}  # fmt: skip
    found = build(tmp_path / "found", source, speaker_key="speaker")
    assert rejects(found) == rejects(plain)
    for field in ("target_audio", "context_audio"):
        assert stored(found, field) == stored(plain, field)
    assert texts(found) == texts(plain)
    for cut, other in zip(open_shar(found, []), open_shar(plain, []), strict=True):
        assert cut.supervisions[0].custom["audio_name"] == other.supervisions[0].custom["audio_filepath"]
    names = [cut.supervisions[0].custom["audio_filepath"] for cut in read_with_lhotse(found)]
    assert names[:2] == [f"train-00000-of-00002.{form}#0", f"train-00000-of-00002.{form}#1"]
