"""Audio at URLs: the dataset of the same audio on disk, byte for byte."""

import dataclasses
import os
import signal
import subprocess

import pytest
from support.project import (
    command,
    config_for,
    lines,
    make_record,
    put,
    run_prepare,
    run_sharmill,
    snapshot,
    speaker_tag,
    voice,
    write_config,
    write_lines,
)
from support.stores import Fault, S3Store
from support.web import serving

from sharmill.engine.executor import Listener
from sharmill.executors.local import LocalExecutor
from sharmill.manifest import Utterance
from sharmill.pipeline import run_dataset


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder of audio, and a server for it."""
    folder = tmp_path_factory.mktemp("corpus")
    records = []
    for number in range(6):
        name = f"spk{number % 2}/{number}.{'wav' if number % 3 else 'flac'}"
        put(folder / "audio" / name, voice(1.0 + number / 4, pitch=150 + 60 * (number % 2), seed=number))
        records.append(make_record(audio_filepath=name, duration=1.0 + number / 4, speaker=speaker_tag(name[:4])))
    records.append(records[5] | {"offset": 0.5, "duration": 1.25, "text": "a segment"})
    records.append(make_record(audio_filepath="spk0/absent.wav"))
    write_lines(folder / "relative.json", records)
    with serving(folder / "audio") as server:
        urls = [r | {"audio_filepath": f"{server.url}/{r['audio_filepath']}"} for r in records]
        write_lines(folder / "urls.json", urls)
        yield folder, server


def dataset(folder, source, workers):
    """All files of the dataset of a source, and the reasons of its rejects."""
    config = config_for(
        folder, [source], prepare={"unit_records": 3}, match={"min_similarity": -1.0, "min_duration": 0.5},
        write={"shard_size": 4}, executor={"workers": 1}, validate={"deep": True, "against_sources": True},
    )  # fmt: skip
    assert run_dataset(config, Listener(), stages=["prepare"], executor=LocalExecutor(workers)).ok
    assert run_dataset(config, Listener(), stages=["prepare", "match", "write", "validate"]).num_errors == 0
    return snapshot(folder / "dataset"), [row["reason"] for row in lines(folder / "run/prepare/rejects.jsonl")]


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


def test_urls_are_rejected_unless_a_root_is_one(corpus, tmp_path):
    folder, server = corpus
    server.requests.clear()
    prepared = run_prepare(config_for(tmp_path, [(folder / "urls.json", folder / "audio")]))
    assert {reject["reason"] for reject in prepared.rejects} == {"outside_root"}
    assert len(prepared.rejects) == 8
    assert not server.requests


@pytest.fixture
def stored(corpus, tmp_path):
    """A store with a manifest and audio, and a run's configuration with a separate cache folder."""
    folder, _ = corpus
    with S3Store() as store:
        store.upload(folder / "audio", "audio")
        store.put("relative.json", (folder / "relative.json").read_bytes())
        source = (store.url("relative.json"), store.url("audio"))
        yield store, write_config(tmp_path / "run", *source, cache_dir=str(tmp_path / "cache"))


def prepared(config):
    manifest = config.parent / "run/manifests/relative_prepared.json"
    return [Utterance.from_json(line) for line in manifest.read_bytes().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("key", ["relative.json", "spk1/3.flac"])
def test_a_run_killed_in_mid_copy_goes_on(key, stored, corpus, tmp_path):
    store, config = stored
    plain = write_config(tmp_path / "plain", corpus[0] / "relative.json", corpus[0] / "audio")
    run_sharmill("run", plain, "prepare")
    started = []
    kill = Fault(key, methods="GET", times=1, call=lambda: os.killpg(started[0].pid, signal.SIGKILL))
    store.faults.append(kill)
    started.append(subprocess.Popen(command("run", config, "prepare"), start_new_session=True))
    assert started[0].wait(100) == -signal.SIGKILL
    assert kill.seen
    for path in (tmp_path / "cache").rglob("*.tmp"):
        os.utime(path, (0, 0))  # one that was just made may have no lock yet
    run_sharmill("run", config, "prepare")
    assert prepared(config) == prepared(plain) != []
    assert not list((tmp_path / "cache").rglob("*.tmp"))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault("relative.json", status=403), "credentials do not allow access"),
        (Fault("relative.json", status=404), "relative.json does not exist"),
        (Fault("relative.json", status=503), "cannot fetch s3://bucket/relative.json"),
    ],
)
def test_an_unavailable_remote_manifest_ends_the_run_in_one_line(fault, said, stored):
    store, config = stored
    store.faults.append(dataclasses.replace(fault))
    done = run_sharmill("run", config, "prepare", status=None)
    assert done.returncode in (1, 2)
    (line,) = done.stderr.strip().splitlines()
    assert said in line


def test_a_changed_manifest_is_another_input(stored):
    store, config = stored
    run_sharmill("run", config, "prepare")
    store.put("relative.json", store.get("relative.json").replace(b"a segment", b"other"))
    assert "--restart" in run_sharmill("run", config, "prepare", status=2).stderr
    run_sharmill("run", config, "prepare", "--restart")
    assert "other" in [one.text for one in prepared(config)]


def test_a_full_disk_of_the_cache_is_named(stored, small_disk):
    _, config = stored
    folder = small_disk("100k")
    done = run_sharmill("run", config, "prepare", f"cache_dir={folder}", status=1)
    assert f"cannot write {folder}" in done.stderr
    assert "No space left on device" in done.stderr
