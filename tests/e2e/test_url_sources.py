"""Audio at URLs: the dataset of the same audio on disk, byte for byte."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from support.errors import raises
from support.manifests import config_for, make_record, run_prepare, speaker_tag, write_manifest
from support.shar import put, voice
from support.web import serving

from sharmill.audio.segments import SegmentReader
from sharmill.config import to_config
from sharmill.engine.listener import Listener
from sharmill.errors import ConfigError
from sharmill.executors.local import LocalExecutor
from sharmill.match.candidates import segment_roots
from sharmill.pipeline import run_dataset

STAGES = ["prepare", "match", "write", "validate"]


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder of audio, and a server of it."""
    folder = tmp_path_factory.mktemp("corpus")
    records = []
    for number in range(6):
        name = f"spk{number % 2}/{number}.{'wav' if number % 3 else 'flac'}"
        put(folder / "audio" / name, voice(1.0 + number / 4, pitch=150 + 60 * (number % 2), seed=number))
        records.append(make_record(audio_filepath=name, duration=1.0 + number / 4, speaker=speaker_tag(name[:4])))
    records.append(records[5] | {"offset": 0.5, "duration": 1.25, "text": "a segment"})
    records.append(make_record(audio_filepath="spk0/absent.wav"))
    write_manifest(folder / "relative.json", records)
    with serving(folder / "audio") as server:
        urls = [r | {"audio_filepath": f"{server.url}/{r['audio_filepath']}"} for r in records]
        write_manifest(folder / "urls.json", urls)
        yield folder, server


def dataset(folder, source, workers):
    """All files of the dataset of a source, and the reasons of its rejects."""
    values = {
        "name": "small", "run_dir": str(folder / "run"), "dataset_dir": str(folder / "dataset"), "sources": [source],
        "prepare": {"unit_records": 3}, "match": {"min_similarity": -1.0, "min_duration": 0.5},
        "write": {"shard_size": 4}, "executor": {"workers": 1},
        "validate": {"deep": True, "against_sources": True},
    }  # fmt: skip
    config = to_config(values, "test")
    assert run_dataset(config, Listener(), stages=["prepare"], executor=LocalExecutor(workers)).ok
    result = run_dataset(config, Listener(), stages=STAGES)
    assert result.ok
    assert result.num_errors == 0
    rejects = (folder / "run/prepare/rejects.jsonl").read_text().splitlines()
    files = {path.relative_to(folder / "dataset").as_posix(): path.read_bytes()
             for path in sorted((folder / "dataset").rglob("*")) if path.is_file()}  # fmt: skip
    return files, [json.loads(line)["reason"] for line in rejects]


@pytest.mark.e2e
@pytest.mark.slow
def test_the_dataset_is_that_of_the_files(corpus, tmp_path):
    folder, server = corpus
    plain = {"manifest": str(folder / "relative.json"), "audio_root": str(folder / "audio")}
    expected = dataset(tmp_path / "plain", plain, 1)
    assert expected[1] == ["missing_audio"]
    server.requests.clear()
    found = dataset(tmp_path / "urls", plain | {"audio_root": server.url}, 2)
    assert found == expected
    # Two ranks may want one file at the same moment.
    assert len(server.requests) == 7
    assert max(server.requests.values()) <= 2


def facts(prepared):
    return [(u.audio_filepath, u.cut_id, round(u.duration, 6), u.offset, u.text) for u in prepared.kept]


def forms(folder, url):
    """Sources that name the audio of the corpus by URL, each of another type, by the name of the form."""
    from lhotse import AudioSource, CutSet, Recording, SupervisionSegment

    records = [json.loads(line) for line in (folder / "urls.json").read_text().splitlines()][:6]
    cuts, scp, table = [], [], ["file,text"]
    for number, record in enumerate(records):
        name = record["audio_filepath"].removeprefix(f"{url}/")
        recording = Recording.from_file(folder / "audio" / name, recording_id=str(number))
        recording.sources = [AudioSource("url", [0], record["audio_filepath"])]
        cut = recording.to_cut()
        cut.supervisions = [SupervisionSegment(str(number), str(number), 0.0, cut.duration, text=record["text"])]
        cuts.append(cut)
        scp.append(f"{number} {record['audio_filepath']}\n")
        table.append(f"{record['audio_filepath']},{record['text']}")
    CutSet.from_cuts(cuts).to_file(folder / "cuts.jsonl")
    write_manifest(folder / "six.json", records)
    write_manifest(folder / "data.list", [{"key": "k", "wav": r["audio_filepath"], "txt": r["text"]} for r in records])
    (folder / "kaldi").mkdir()
    (folder / "kaldi/wav.scp").write_text("".join(scp))
    (folder / "kaldi/text").write_text("".join(f"{n} {r['text']}\n" for n, r in enumerate(records)))
    (folder / "table.csv").write_text("\n".join(table) + "\n")
    return {
        "nemo": {"type": "nemo", "manifest": f"{folder}/six.json"},
        "lhotse": {"type": "lhotse", "cuts": f"{folder}/cuts.jsonl"},
        "wenet": {"type": "wenet", "data_list": f"{folder}/data.list"},
        "kaldi": {"type": "kaldi", "data_dir": f"{folder}/kaldi"},
        "table": {"type": "table", "table": f"{folder}/table.csv", "columns": {"audio_filepath": "file"}},
    }


def test_every_source_that_names_files_may_name_urls(corpus, tmp_path):
    folder, server = corpus
    found = {}
    for name, source in forms(folder, server.url).items():
        own = {"audio_root": server.url, "speaker": "{path[0]}"}
        prepared = run_prepare(config_for(tmp_path / name, [source | own]))
        assert prepared.rejects == [], name
        found[name] = facts(prepared)
    assert [path for path, *_ in found["nemo"]] == [f"spk{n % 2}/{n}.{'wav' if n % 3 else 'flac'}" for n in range(6)]
    assert all(each == found["nemo"] for each in found.values())


def test_urls_are_rejected_unless_a_root_is_one(corpus, tmp_path):
    folder, server = corpus
    server.requests.clear()
    prepared = run_prepare(config_for(tmp_path, [(folder / "urls.json", folder / "audio")]))
    assert {reject["reason"] for reject in prepared.rejects} == {"outside_root"}
    assert len(prepared.rejects) == 8
    assert not server.requests


def test_a_copy_that_is_gone_is_fetched_again(corpus, tmp_path):
    folder, server = corpus
    source = {"manifest": str(folder / "six.json"), "audio_root": server.url}
    write_manifest(folder / "six.json", [make_record(audio_filepath="spk0/0.flac", duration=1.0)])
    prepared = run_prepare(config_for(tmp_path, [source]))
    reader = SegmentReader(segment_roots(prepared.config))
    before = reader.read(prepared.kept[0].segment).samples
    shutil.rmtree(tmp_path / "run/copies")
    np.testing.assert_array_equal(reader.read(prepared.kept[0].segment).samples, before)


@pytest.mark.parametrize("source", [
    {"type": "folder"}, {"type": "webdataset", "tars": "a.tar"}, {"type": "lhotse_shar", "shar": "a"},
    {"type": "nemo_tarred", "tars": "a.tar", "manifest": "a.json"}, {"type": "annotated", "annotations": "rttm"},
    {"type": "wenet", "data_list": "a", "data_type": "shard"},
])  # fmt: skip
def test_sources_that_look_into_their_root_take_none(source, tmp_path):
    with raises(ConfigError, "bad_config_value", "cannot be a URL"):
        config_for(tmp_path, [source | {"audio_root": "https://host/speech"}])
