"""Sources, speaker encoders and codecs of other packages, by entry points and by ``python:package.module:Class``."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.errors import raises
from support.paths import REPOSITORY
from support.shar import put, voice

from sharmill.config import load_config, to_yaml
from sharmill.errors import ConfigError
from sharmill.models import (
    Codec,
    ModelFamily,
    SpeakerEncoder,
    find_codec,
    find_speaker_encoder,
    load_codec,
    load_speaker_encoder,
)
from sharmill.registry import CODECS, ENCODERS, SOURCES, Registry

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
    """The package can be imported, and Python sees what it declares."""
    monkeypatch.syspath_prepend(str(installed))
    yield importlib.metadata.distribution("tiny-speech")
    sys.modules.pop("tiny_speech", None)


@pytest.fixture
def write(tmp_path):
    """Returns a function: an entry of ``sources`` as YAML -> path of a configuration."""

    def to_file(source: str) -> Path:
        path = tmp_path / "c.yaml"
        path.write_text(f"name: n\nrun_dir: {tmp_path}/run\ndataset_dir: {tmp_path}/dataset\nsources: [{source}]\n")
        return path

    return to_file


@pytest.mark.parametrize("registry", [SOURCES, ENCODERS, CODECS], ids=lambda registry: registry.kind)
def test_all_of_sharmills_own_can_be_imported(registry):
    for name in registry.own:
        assert callable(registry.load(name))


@pytest.mark.parametrize("registry", [SOURCES, ENCODERS, CODECS], ids=lambda registry: registry.kind)
def test_names_of_other_packages_come_after_sharmills_own(registry, tiny):
    own = list(registry.own)
    names = registry.names()
    assert names[: len(own)] == own
    assert "tiny" in names[len(own) :]


def test_another_package_does_not_replace_sharmills_own(tiny):
    assert CODECS.load("nemo").__module__ == "sharmill.models.nemo"


def test_a_removed_codec_says_what_to_use():
    with raises(ConfigError, "unknown_name", "'untrained' was removed", "use builtin"):
        find_codec("untrained")


@pytest.mark.parametrize("registry", [SOURCES, ENCODERS, CODECS], ids=lambda registry: registry.kind)
def test_an_unknown_name_gets_the_nearest(registry, tiny):
    with raises(ConfigError, "unknown_name", registry.kind, "'tinny'", "'tiny'"):
        registry.load("tinny")


def test_two_packages_with_one_name_are_told_apart_by_neither(tiny, tmp_path, monkeypatch):
    other = tmp_path / "other-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[sharmill.codecs]\ntiny = other:Codec\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with raises(ConfigError, "bad_plugin", "other:Codec", "tiny_speech:TinyCodec"):
        CODECS.find("tiny")


def test_what_cannot_be_imported_says_what_is_missing(tiny):
    with raises(ConfigError, "missing_package", "'absent'", "tiny_speech_extra"):
        CODECS.load("absent")
    with raises(ConfigError, "missing_package", "nowhere.to"):
        CODECS.load("python:nowhere.to:Be")
    with raises(ConfigError, "bad_plugin", "NoSuchClass"):
        CODECS.load("python:tiny_speech:NoSuchClass")
    with raises(ConfigError, "unknown_name", "python:package.module:Class"):
        CODECS.load("python:tiny_speech")


def test_nothing_is_imported_to_find_a_name(tiny):
    assert CODECS.find("tiny").value == "tiny_speech:TinyCodec"
    assert "tiny" in CODECS.names()
    assert "tiny_speech" not in sys.modules


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("resemblyzer", ("resemblyzer", "")),
        ("nemo:/a/b:c.nemo", ("nemo", "/a/b:c.nemo")),
        ("python:a.b:C", ("python:a.b:C", "")),
        ("python:a.b:C:/d:e", ("python:a.b:C", "/d:e")),
    ],
)
def test_a_name_is_an_implementation_and_a_target(text, parts):
    assert Registry.split(text) == parts


@pytest.mark.parametrize("name", ["tiny", "python:tiny_speech:TinyCodec"])
def test_a_codec_of_another_package(name, tiny):
    codec = load_codec(f"{name}:50")
    assert isinstance(codec, Codec)
    codes = codec.encode(torch.full((1, 400), 1.0), torch.tensor([400]))
    assert codes.tolist() == [[[49, 49, 49]]]


@pytest.mark.parametrize("name", ["tiny", "python:tiny_speech:TinyEncoder"])
def test_a_speaker_encoder_of_another_package(name, tiny):
    encoder = load_speaker_encoder(name)
    assert isinstance(encoder, SpeakerEncoder)
    assert encoder.embed(torch.ones(2, 16000), torch.tensor([16000, 8000])).shape == (2, 4)
    assert load_speaker_encoder(f"{name}:large").target == "large"


def test_a_model_of_another_package_is_identified_by_its_version_and_its_files(tiny, installed, tmp_path):
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


def test_what_is_no_model_is_refused(tiny):
    with raises(ConfigError, "bad_plugin", "'broken'", "samples_per_frame", "encode"):
        load_codec("broken")
    with raises(ConfigError, "bad_plugin", "sharmill.models.ModelFamily"):
        find_codec("python:tiny_speech:no_family")
    with raises(ConfigError, "bad_model", "python:tiny_speech:WrongCodec"):
        load_codec("python:tiny_speech:WrongCodec")


@pytest.mark.parametrize("kind", ["tiny", "python:tiny_speech:TinySource"])
def test_a_source_of_another_package_has_keys_of_its_own(kind, tiny, write):
    path = write(f"{{type: '{kind}', audio_root: a, table: t.csv}}")
    (source,) = load_config(path, ["sources.0.language=0123", "sources.0.skip_lines=2"]).sources
    assert type(source).__name__ == "TinySource"
    assert (source.type, source.audio_root, source.table) == (kind, "a", "t.csv")
    assert (source.language, source.skip_lines) == ("0123", 2)


def test_keys_of_a_source_of_another_package_are_checked(tiny, write):
    path = write("{type: tiny, audio_root: a, tabel: t.csv}")
    with raises(ConfigError, "unknown_key", "sources[0].tabel", "'table'"):
        load_config(path)
    with raises(ConfigError, "missing_key", "sources[0]", "'table'"):
        load_config(write("{type: tiny, audio_root: a}"))
    with raises(ConfigError, "bad_config_value", "sources[0].skip_lines"):
        load_config(write("{type: tiny, audio_root: a, table: t, skip_lines: many}"))
    with raises(ConfigError, "unknown_key", "sources[0].manifest"):
        load_config(write("{type: tiny, audio_root: a, table: t, manifest: m}"))


def test_a_type_that_is_no_source_is_refused(tiny, write):
    with raises(ConfigError, "unknown_name", "sources[0].type", "'tinny'", "'tiny'"):
        load_config(write("{type: tinny, audio_root: a}"))
    with raises(ConfigError, "bad_plugin", "sources[0].type", "TinyCodec"):
        load_config(write("{type: 'python:tiny_speech:TinyCodec', audio_root: a}"))


def test_a_configuration_with_a_source_of_another_package_reads_back_equal(tiny, write, tmp_path):
    config = load_config(write("{type: tiny, audio_root: a, table: t.csv}, {manifest: m, audio_root: b}"))
    (tmp_path / "again.yaml").write_bytes(to_yaml(config))
    assert load_config(tmp_path / "again.yaml") == config


@pytest.mark.parametrize("codec", ["tiny:50", "python:tiny_speech:TinyCodec:50"])
def test_a_dataset_made_with_another_packages_source_encoder_and_codec(codec, installed, write, tmp_path):
    lines = []
    for number in range(6):
        put(tmp_path / "audio" / f"{number}.wav", voice(1.0, seed=number), 16000)
        lines.append(f"{number}.wav,1.0,ada,text {number}\n")
    (tmp_path / "table.csv").write_text("".join(lines))
    config = write(f"{{type: tiny, audio_root: '{tmp_path}/audio', table: '{tmp_path}/table.csv'}}")
    overrides = [
        "match.encoder=tiny",
        "match.min_similarity=0.1",
        "match.min_duration=0",
        f"encode.codecs=[{{name: tiny, model: '{codec}'}}]",
        "validate.recheck_codes=1.0",
        "validate.against_sources=true",
    ]
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "sharmill", "run", str(config), *overrides],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    dataset = json.loads((tmp_path / "dataset" / "dataset.json").read_text())
    assert [(record["name"], record["model"]) for record in dataset["codecs"]] == [("tiny", codec)]
    assert dataset["codecs"][0]["checksum"] == f"{50:016x}"
