"""Models by name on a hub: taken from the cache without asking, and soon refused where the hub is out of reach."""

from __future__ import annotations

import hashlib
import shutil
import socket
from contextlib import closing
from pathlib import Path

import pytest
from support.errors import raises

from sharmill.errors import ConfigError
from sharmill.models import hub, load_codec, load_speaker_encoder


@pytest.fixture
def closed_port():
    """The address of a port of this machine at which nothing listens."""
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody else can take it meanwhile
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def hub_cache(tmp_path, monkeypatch, closed_port) -> Path:
    """The empty cache of a hub that is out of reach."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", closed_port)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def put_in_cache(cache: Path, model: str, *files: Path, name: str = "") -> None:
    """Lay files of a model where the hub's client would have left them."""
    folder = cache / f"models--{model.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    for file in files:
        shutil.copy(file, folder / "snapshots" / ("0" * 40) / (name or file.name))


@pytest.mark.parametrize("name", ["transformers:nobody/encodec", "nemo:nobody/codec"])
def test_a_codec_of_a_hub_out_of_reach_is_refused(name, hub_cache, closed_port):
    with raises(ConfigError, "unreachable_model", name, closed_port) as refused:
        load_codec(name)
    assert "\n" not in str(refused.value)


def test_a_transformers_codec_in_the_cache_is_loaded_without_the_hub(hub_cache, checkpoints):
    put_in_cache(hub_cache, "nobody/encodec", *checkpoints["encodec"].iterdir())
    found = load_codec("transformers:nobody/encodec")
    assert found.checksum == load_codec(f"transformers:{checkpoints['encodec']}").checksum


def test_a_nemo_codec_in_the_cache_is_loaded_without_the_hub(hub_cache, checkpoints):
    put_in_cache(hub_cache, "nobody/codec", checkpoints["nemo_codec"])
    assert load_codec("nemo:nobody/codec").checksum == load_codec(f"nemo:{checkpoints['nemo_codec']}").checksum


def test_nemos_own_models_are_taken_from_its_cache_or_soon_refused(tmp_path, monkeypatch, closed_port, checkpoints):
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


def test_a_server_that_never_answers_is_out_of_reach(monkeypatch):
    monkeypatch.setattr(hub, "_ANSWER_SECONDS", 0.2)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with raises(ConfigError, "unreachable_model", "a model", address, "timed out", "do this"):
            hub.require_reachable(f"{address}/a/path", "a model", "do this")


def test_a_server_that_answers_with_an_error_is_in_reach():
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:  # which knows no HEAD: 501
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        hub.require_reachable(f"http://127.0.0.1:{server.server_address[1]}", "a model", "do this")
        thread.join()
