"""Models from a hub: loaded from the cache without requests, and soon refused if the hub is unreachable."""

import hashlib
import shutil
import socket
from contextlib import closing, nullcontext
from pathlib import Path

import pytest
from support.project import config_for, make_record, raises, write_lines
from support.web import serving

from sharmill.engine.executor import Listener
from sharmill.engine.run_dir import RunDir
from sharmill.errors import ConfigError
from sharmill.models import find_codec, load_codec, load_speaker_encoder
from sharmill.pipeline import check_config, run_dataset


@pytest.fixture
def closed_port():
    """The address of a local port on which nothing listens."""
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))  # bound without listening, so that no other process takes it
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def hub_cache(tmp_path, monkeypatch, closed_port) -> Path:
    """The empty cache of an unreachable hub."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", closed_port)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def put_in_cache(cache: Path, model: str, *files: Path, name: str = "") -> None:
    """Put files of a model into the cache of the hub's client."""
    folder = cache / f"models--{model.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    for file in files:
        shutil.copy(file, folder / "snapshots" / ("0" * 40) / (name or file.name))


@pytest.mark.parametrize("name", ["transformers:nobody/encodec", "nemo:nobody/codec"])
def test_a_codec_of_an_unreachable_hub_is_refused(name, hub_cache, closed_port):
    with raises(ConfigError, "unreachable_model", name, closed_port):
        load_codec(name)


@pytest.mark.parametrize("kind", ["nemo_codec", pytest.param("encodec", marks=pytest.mark.slow)])
def test_a_codec_in_the_cache_is_loaded_without_the_hub(kind, hub_cache, checkpoints):
    family, path = "nemo" if kind == "nemo_codec" else "transformers", checkpoints[kind]
    put_in_cache(hub_cache, "nobody/codec", *([path] if path.is_file() else path.iterdir()))
    assert load_codec(f"{family}:nobody/codec").checksum == load_codec(f"{family}:{path}").checksum


def test_nemos_models_come_from_its_cache_or_are_refused(tmp_path, monkeypatch, closed_port, checkpoints):
    from nemo.collections.asr.models import EncDecSpeakerLabelModel
    from nemo.core.classes.common import PretrainedModelInfo

    known = PretrainedModelInfo("tiny_speaker", "tiny", f"{closed_port}/tiny.nemo")
    monkeypatch.setattr(EncDecSpeakerLabelModel, "list_available_models", lambda: [known])
    monkeypatch.setenv("NEMO_CACHE_DIR", str(tmp_path))
    with raises(ConfigError, "unreachable_model", "nemo:tiny_speaker", closed_port):
        load_speaker_encoder("nemo:tiny_speaker")
    folder = hashlib.md5((known.location + known.description).encode()).hexdigest()
    (tmp_path / "tiny" / folder).mkdir(parents=True)
    shutil.copy(checkpoints["nemo_speaker"], tmp_path / "tiny" / folder / "tiny.nemo")
    assert load_speaker_encoder("nemo:tiny_speaker").embedding_size == 24


@pytest.mark.parametrize(("status", "known"), [(200, True), (302, True), (500, True), (401, False), (404, False)])
def test_a_model_missing_from_the_hub_is_refused(status, known, hub_cache, monkeypatch):
    from huggingface_hub import constants

    with serving(hub_cache) as web:
        monkeypatch.setattr(constants, "ENDPOINT", f"{web.url}/{status}")
        with nullcontext() if known else raises(ConfigError, "unreachable_model", "nobody/encodec", str(status)):
            find_codec("transformers:nobody/encodec").check()
    assert web.requests == {f"/{status}/nobody/encodec/resolve/main/config.json": 1}


def test_an_unreachable_model_matters_only_if_its_stage_runs(hub_cache, tmp_path, audio_root):
    manifest = write_lines(tmp_path / "m.json", [make_record()])
    config = config_for(
        tmp_path, [(manifest, audio_root)], encode={"codecs": [{"name": "a", "model": "transformers:nobody/encodec"}]}
    )
    with raises(ConfigError, "unreachable_model", "transformers:nobody/encodec"):
        run_dataset(config, Listener())
    assert not RunDir(Path(config.run_dir)).stage("prepare").path.exists()
    for stages in (["prepare", "match", "write", "validate"], []):
        check_config(config, stages)
    done = RunDir(Path(config.run_dir)).stage("encode/a").done
    done.parent.mkdir(parents=True)
    done.touch()
    check_config(config, ["encode"])
    with raises(ConfigError, "unreachable_model"):
        check_config(config, ["encode"], restart=True)


@pytest.mark.parametrize("name", ["transformers:nobody/encodec", "nemo:nobody/codec"])
def test_an_offline_model_must_be_in_the_cache(name, hub_cache, monkeypatch, checkpoints):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with raises(ConfigError, "unreachable_model", name, "HF_HUB_OFFLINE"):
        find_codec(name).check()
    files = {"transformers:nobody/encodec": [*checkpoints["encodec"].iterdir()],
             "nemo:nobody/codec": [checkpoints["nemo_codec"]]}[name]  # fmt: skip
    put_in_cache(hub_cache, name.partition(":")[2], *files)
    find_codec(name).check()
