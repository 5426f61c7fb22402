"""Names, identities and early checks, all without the heavy packages."""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import sys
import tarfile

import pytest
import xxhash
from support.errors import raises

from sharmill.errors import ConfigError
from sharmill.models import (
    find_codec,
    find_speaker_encoder,
    load_codec,
    load_speaker_encoder,
)


@pytest.fixture
def nemo_file(tmp_path):
    """An archive with the member names of a NeMo checkpoint, and an empty configuration."""
    path = tmp_path / "model.nemo"
    with tarfile.open(path, "w") as archive:
        for name, content in (("./model_config.yaml", b"{}"), ("./model_weights.ckpt", b"")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture
def encodec_directory(tmp_path):
    path = tmp_path / "encodec"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "encodec"}))
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def test_importing_and_describing_imports_nothing_heavy(nemo_file):
    code = f"""
import sys
from sharmill.models import find_codec, find_speaker_encoder
for name in ("builtin", "nemo:{nemo_file}", "transformers:a/b"):
    find_codec(name).identity()
for name in ("resemblyzer", "nemo:titanet_large"):
    find_speaker_encoder(name).identity()
print(sorted({{"torch", "nemo", "transformers", "librosa", "resemblyzer"}} & sys.modules.keys()))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def describe_codec(name):
    return find_codec(name).identity()


def describe_speaker_encoder(name):
    return find_speaker_encoder(name).identity()


def test_resemblyzer_is_identified_by_the_version_of_its_package():
    assert describe_speaker_encoder("resemblyzer") == {"backend": "resemblyzer", "name": "resemblyzer"}
    assert "resemblyzer" in find_speaker_encoder("resemblyzer").packages


@pytest.mark.parametrize("name", ["nemo:titanet_large", "nemo:nvidia/speakerverification_en_titanet_large"])
def test_a_pretrained_name_is_its_own_identity(name):
    assert describe_speaker_encoder(name) == {"backend": "nemo", "name": name}


def test_a_nemo_file_is_identified_by_its_bytes(nemo_file):
    expected = {
        "backend": "nemo",
        "name": f"nemo:{nemo_file}",
        "checksum": xxhash.xxh3_64_hexdigest(nemo_file.read_bytes()),
    }
    assert describe_codec(f"nemo:{nemo_file}") == expected
    assert describe_speaker_encoder(f"nemo:{nemo_file}") == expected


def test_a_directory_is_identified_by_its_visible_files(encodec_directory):
    name = f"transformers:{encodec_directory}"
    before = describe_codec(name)
    (encodec_directory / ".cache").mkdir()
    (encodec_directory / ".cache" / "downloaded").write_text("yesterday")
    assert describe_codec(name) == before
    (encodec_directory / "model.safetensors").write_bytes(b"weighty")
    assert describe_codec(name)["checksum"] != before["checksum"]


WRONG_ENCODERS = [
    ("resemblizer", "unknown_name", "did you mean 'resemblyzer'"),
    ("nmo:titanet_large", "unknown_name", "did you mean 'nemo'"),
    ("builtin", "unknown_name", "resemblyzer, nemo"),
    ("nemo", "bad_model", "nemo:<"),
    ("resemblyzer:large", "bad_model", "write resemblyzer"),
    ("nemo:/nowhere/model.nemo", "bad_model", "/nowhere/model.nemo"),
    ("nemo:./model.ckpt", "bad_model", "./model.ckpt"),
]


@pytest.mark.parametrize(("name", "code", "shown"), WRONG_ENCODERS)
@pytest.mark.parametrize("function", [describe_speaker_encoder, load_speaker_encoder])
def test_a_wrong_speaker_encoder_name_says_what_to_write(function, name, code, shown):
    with raises(ConfigError, code, shown) as raised:
        function(name)
    assert "\n" not in str(raised.value)


WRONG_CODECS = [
    ("transformer:facebook/encodec_24khz", "unknown_name", "did you mean 'transformers'"),
    ("built-in", "unknown_name", "did you mean 'builtin'"),
    ("encodec", "unknown_name", "builtin, nemo, transformers"),
    ("transformers", "bad_model", "transformers:<"),
    ("transformers:/nowhere/encodec", "bad_model", "/nowhere/encodec"),
]


@pytest.mark.parametrize(("name", "code", "shown"), WRONG_CODECS)
@pytest.mark.parametrize("function", [describe_codec, load_codec])
def test_a_wrong_codec_name_says_what_to_write(function, name, code, shown):
    with raises(ConfigError, code, shown) as raised:
        function(name)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"not an archive\n" * 100, b"\x1f\x8b\x08\x00 broken gzip"])
@pytest.mark.parametrize("function", [describe_codec, load_codec, describe_speaker_encoder, load_speaker_encoder])
def test_a_file_that_is_no_archive_is_no_nemo_checkpoint(function, tmp_path, content):
    path = tmp_path / "model.nemo"
    path.write_bytes(content)
    with raises(ConfigError, "bad_model", str(path)):
        function(f"nemo:{path}")


def test_an_archive_without_weights_is_no_nemo_checkpoint(tmp_path):
    path = tmp_path / "model.nemo"
    with tarfile.open(path, "w:gz") as archive:
        info = tarfile.TarInfo("model_config.yaml")
        info.size = 5
        archive.addfile(info, io.BytesIO(b"a: 1\n"))
    with raises(ConfigError, "bad_model", str(path), "model_weights.ckpt"):
        describe_codec(f"nemo:{path}")


@pytest.mark.parametrize("function", [describe_codec, load_codec])
def test_a_directory_without_config_is_no_transformers_model(function, tmp_path):
    with raises(ConfigError, "bad_model", str(tmp_path), "config.json"):
        function(f"transformers:{tmp_path}")


@pytest.mark.parametrize(
    ("text", "shown"),
    [("{", "config.json"), ('{"model_type": "bert"}', "'bert'"), ("[]", "dac, encodec, mimi")],
)
@pytest.mark.parametrize("function", [describe_codec, load_codec])
def test_a_directory_of_another_model_is_refused(function, encodec_directory, text, shown):
    (encodec_directory / "config.json").write_text(text)
    with raises(ConfigError, "bad_model", str(encodec_directory), shown):
        function(f"transformers:{encodec_directory}")


@pytest.mark.parametrize(
    ("function", "name", "package"),
    [
        (load_codec, "nemo:x", "nemo"),
        (load_speaker_encoder, "nemo:titanet_large", "nemo"),
        (load_codec, "transformers:facebook/encodec_24khz", "transformers"),
    ],
)
def test_a_missing_package_names_its_extra(monkeypatch, function, name, package):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda wanted, *rest: None if wanted == package else find_spec(wanted, *rest)
    )
    with raises(ConfigError, "missing_package", f"pip install 'sharmill[{package}]'"):
        function(name)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("builtin", "builtin"),
        ("nemo:audio_codec_16khz_small", "nemo:audio_codec_16khz_small"),
        ("transformers:facebook/encodec_24khz", "transformers:facebook/encodec_24khz"),
    ],
)
def test_the_published_name_is_the_name(name, published):
    assert find_codec(name).published_name == published


def test_the_published_name_of_a_local_model_has_no_folders(nemo_file, encodec_directory):
    assert find_codec(f"nemo:{nemo_file}").published_name == "nemo:model.nemo"
    assert find_codec(f"transformers:{encodec_directory}/").published_name == "transformers:encodec"
