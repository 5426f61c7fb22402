"""Models by name on a hub: taken from the cache without asking, and soon refused where the hub is out of reach."""

from __future__ import annotations

import hashlib
import shutil
import socket
import threading
from contextlib import closing, nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from support.errors import raises
from support.manifests import config_for, make_record, write_manifest

from sharmill.engine.listener import Listener
from sharmill.engine.rundir import RunDir
from sharmill.errors import ConfigError
from sharmill.models import find_codec, find_speaker_encoder, hub, load_codec, load_speaker_encoder
from sharmill.pipeline import check_config, run_dataset


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


@pytest.mark.slow
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


@pytest.mark.parametrize("find", [find_codec, find_speaker_encoder])
def test_nemos_own_names_are_required_to_be_known_or_cached(find, tmp_path, monkeypatch):
    monkeypatch.setenv("NEMO_CACHE_DIR", str(tmp_path))
    with raises(ConfigError, "unknown_name", "'no_such_model'"):
        find("nemo:no_such_model").check()


@pytest.mark.parametrize("name", ["transformers:nobody/encodec", "nemo:nobody/codec"])
def test_a_model_that_is_required_while_offline_must_be_in_the_cache(name, hub_cache, monkeypatch, checkpoints):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with raises(ConfigError, "unreachable_model", name, "HF_HUB_OFFLINE"):
        find_codec(name).check()
    files = {"transformers:nobody/encodec": [*checkpoints["encodec"].iterdir()],
             "nemo:nobody/codec": [checkpoints["nemo_codec"]]}[name]  # fmt: skip
    put_in_cache(hub_cache, name.partition(":")[2], *files)
    find_codec(name).check()


@pytest.mark.parametrize(("status", "known"), [(200, True), (302, True), (500, True), (401, False), (404, False)])
def test_a_model_that_the_hub_has_not_is_refused(status, known, hub_cache, monkeypatch):
    from huggingface_hub import constants

    asked = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self):
            asked.append(self.path)
            self.send_response(status)
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            self.end_headers()

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        with nullcontext() if known else raises(ConfigError, "unreachable_model", "nobody/encodec", str(status)):
            find_codec("transformers:nobody/encodec").check()
        server.shutdown()
    assert asked == ["/nobody/encodec/resolve/main/config.json"]


def test_a_model_that_cannot_be_had_is_refused_before_any_work_and_only_where_its_stage_runs(
    hub_cache, tmp_path, audio_root
):
    manifest = write_manifest(tmp_path / "m.json", [make_record()])
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


def test_a_server_that_never_answers_is_out_of_reach(monkeypatch):
    monkeypatch.setattr(hub, "_ANSWER_SECONDS", 0.2)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with raises(ConfigError, "unreachable_model", "a model", address, "do this"):
            hub.require_reachable(f"{address}/a/path", "a model", "do this")


def test_a_server_that_answers_with_an_error_is_in_reach():
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:  # which knows no HEAD: 501
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        hub.require_reachable(f"http://127.0.0.1:{server.server_address[1]}", "a model", "do this")
        thread.join()
