"""Sources, speaker encoders and codecs of other packages, by entry points and by ``python:package.module:Class``."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.project import REPOSITORY, add_distribution, put, raises, run_sharmill, voice

from sharmill.errors import ConfigError
from sharmill.models import (
    ModelFamily,
    find_codec,
    find_speaker_encoder,
    load_codec,
)
from sharmill.registry import CODECS, ENCODERS, SOURCES

PLUGIN = REPOSITORY / "tests" / "support" / "plugin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with the package ``tiny-speech``, installed as pip installs a wheel."""
    folder = tmp_path_factory.mktemp("site")
    # pip builds in the source's folder.
    source = shutil.copytree(PLUGIN, tmp_path_factory.mktemp("source") / "plugin")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation",
         "--target", str(folder), str(source)],
        check=True, capture_output=True,
    )  # fmt: skip
    return folder


@pytest.fixture
def tiny(installed, monkeypatch):
    """The package is importable, and Python sees its entry points."""
    monkeypatch.syspath_prepend(str(installed))
    yield importlib.metadata.distribution("tiny-speech")
    sys.modules.pop("tiny_speech", None)


@pytest.mark.parametrize("registry", [SOURCES, ENCODERS, CODECS], ids=lambda registry: registry.kind)
def test_all_of_sharmills_own_can_be_imported(registry):
    for name in registry.own:
        assert callable(registry.load(name))


REFUSED = [
    (SOURCES.load, "tinny", "unknown_name", ["source", "'tinny'", "'tiny'"]),
    (ENCODERS.load, "tinny", "unknown_name", ["speaker encoder", "'tinny'", "'tiny'"]),
    (CODECS.load, "tinny", "unknown_name", ["codec", "'tinny'", "'tiny'"]),
    (CODECS.load, "absent", "missing_package", ["'absent'", "tiny_speech_extra"]),
    (CODECS.load, "python:nowhere.to:Be", "missing_package", ["nowhere.to"]),
    (CODECS.load, "python:tiny_speech:NoSuchClass", "bad_plugin", ["NoSuchClass"]),
    (CODECS.load, "python:tiny_speech", "unknown_name", ["python:package.module:Class"]),
    (SOURCES.load_class, "python:tiny_speech:TinyCodec", "bad_plugin", ["TinyCodec"]),
    (load_codec, "broken", "bad_plugin", ["'broken'", "samples_per_frame", "encode"]),
    (find_codec, "python:tiny_speech:no_family", "bad_plugin", ["sharmill.models.ModelFamily"]),
    (load_codec, "python:tiny_speech:WrongCodec", "bad_model", ["python:tiny_speech:WrongCodec"]),
]


@pytest.mark.parametrize(("load", "name", "code", "words"), REFUSED)
def test_what_cannot_be_used_is_refused(load, name, code, words, tiny):
    with raises(ConfigError, code, *words):
        load(name)


def test_two_packages_with_one_name_are_told_apart_by_neither(tiny, tmp_path, monkeypatch):
    add_distribution(tmp_path, "other", "1.0", "[sharmill.codecs]\ntiny = other:Codec\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with raises(ConfigError, "bad_plugin", "other:Codec", "tiny_speech:TinyCodec"):
        CODECS.find("tiny")


def test_an_external_model_is_identified_by_version_and_files(tiny, installed, tmp_path):
    assert find_codec("tiny:50").identity() == {"backend": "tiny", "name": "tiny:50", "version": "tiny-speech 1.5"}
    by_path = find_speaker_encoder("python:tiny_speech:TinyEncoder").identity()
    assert by_path["backend"] == by_path["name"] == "python:tiny_speech:TinyEncoder"
    source = installed / "tiny_speech.py"
    text = source.read_text()
    try:
        source.write_text(text + "\n")
        assert find_speaker_encoder("python:tiny_speech:TinyEncoder").identity()["version"] != by_path["version"]
    finally:
        source.write_text(text)
    weights = tmp_path / "weights.bin"
    weights.write_bytes(b"one")
    before = find_codec(f"tiny:{weights}").identity()
    weights.write_bytes(b"two")
    assert find_codec(f"tiny:{weights}").identity()["checksum"] != before["checksum"]
    assert find_codec(f"tiny:{weights}").published_name == "tiny:weights.bin"


def test_options_are_checked_where_python_gives_them():
    with raises(ConfigError, "unknown_key", "'builtin'", "'steps'"):
        find_codec("builtin", steps=3)
    with raises(ConfigError, "unknown_key", "'allow_target'", "did you mean 'allow_targets'"):
        load_codec("nemo:x", allow_target=["a"])
    with raises(ConfigError, "bad_config_value", "'nemo:x'", "allow_targets"):
        find_speaker_encoder("nemo:x", allow_targets=3)
    with raises(ConfigError, "bad_config_value", "needs the option `level`"):
        find_codec(f"python:{__name__}:Level")


@dataclass(frozen=True, kw_only=True)
class Level(ModelFamily):
    level: int

    def load(self, device):
        raise NotImplementedError


def test_a_dataset_with_external_source_encoder_and_codec(installed, tmp_path):
    lines = []
    for number in range(6):
        put(tmp_path / "audio" / f"{number}.wav", voice(1.0, seed=number), 16000)
        lines.append(f"{number}.wav,1.0,ada,text {number}\n")
    (tmp_path / "table.csv").write_text("".join(lines))
    source = {"type": "tiny", "audio_root": str(tmp_path / "audio"), "table": str(tmp_path / "table.csv")}
    values = {"name": "n", "run_dir": str(tmp_path / "run"), "dataset_dir": str(tmp_path / "dataset")}
    (tmp_path / "c.yaml").write_text(json.dumps(values | {"sources": [source]}))
    overrides = [
        "match.encoder=tiny",
        "match.min_similarity=0.1",
        "match.min_duration=0",
        "encode.codecs=[{name: tiny, model: 'tiny:50'}]",
        "validate.recheck_codes=1.0",
        "validate.against_sources=true",
    ]
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    run_sharmill("run", tmp_path / "c.yaml", *overrides, env=os.environ | {"PYTHONPATH": path})
    dataset = json.loads((tmp_path / "dataset" / "dataset.json").read_text())
    assert [(record["name"], record["model"]) for record in dataset["codecs"]] == [("tiny", "tiny:50")]
    assert dataset["codecs"][0]["checksum"] == f"{50:016x}"
