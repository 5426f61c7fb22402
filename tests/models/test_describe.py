"""Names, identities and early checks of models, without heavy imports."""

import gzip
import importlib.util
import json
import subprocess
import sys

import pytest
import xxhash
from support.project import raises
from support.sources import tar_bytes, write_tar

from sharmill.errors import ConfigError
from sharmill.models import find_codec, find_speaker_encoder


@pytest.fixture
def nemo_file(tmp_path):
    """An archive with the members of a NeMo checkpoint and an empty configuration."""
    return write_tar(tmp_path / "model.nemo", [("./model_config.yaml", b"{}"), ("./model_weights.ckpt", b"")])


@pytest.fixture
def encodec_directory(tmp_path):
    path = tmp_path / "encodec"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "encodec"}))
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def test_describing_models_imports_no_heavy_package(nemo_file):
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


def test_a_nemo_file_is_identified_by_its_bytes(nemo_file):
    expected = {
        "backend": "nemo",
        "name": f"nemo:{nemo_file}",
        "checksum": xxhash.xxh3_64_hexdigest(nemo_file.read_bytes()),
    }
    for find in (find_codec, find_speaker_encoder):
        assert find(f"nemo:{nemo_file}").identity() == expected


def test_a_directory_is_identified_by_its_visible_files(encodec_directory):
    name = f"transformers:{encodec_directory}"
    before = find_codec(name).identity()
    (encodec_directory / ".cache").mkdir()
    (encodec_directory / ".cache" / "downloaded").write_text("yesterday")
    assert find_codec(name).identity() == before
    (encodec_directory / "model.safetensors").write_bytes(b"weighty")
    assert find_codec(name).identity()["checksum"] != before["checksum"]


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("builtin", "builtin"),
        ("nemo:audio_codec_16khz_small", "nemo:audio_codec_16khz_small"),
        ("transformers:facebook/encodec_24khz", "transformers:facebook/encodec_24khz"),
        ("nemo:{nemo_file}", "nemo:model.nemo"),
        ("transformers:{encodec_directory}/", "transformers:encodec"),
    ],
)
def test_the_published_name_has_no_folders(name, published, nemo_file, encodec_directory):
    name = name.format(nemo_file=nemo_file, encodec_directory=encodec_directory)
    assert find_codec(name).published_name == published


# Names of codecs and encoders, with FOLDER for a folder with the files; code and words of the error.
WRONG_NAMES = [
    (find_speaker_encoder, "resemblizer", "unknown_name", "did you mean 'resemblyzer'"),
    (find_speaker_encoder, "nmo:titanet_large", "unknown_name", "did you mean 'nemo'"),
    (find_speaker_encoder, "builtin", "unknown_name", "resemblyzer, nemo"),
    (find_speaker_encoder, "nemo", "bad_model", "nemo:<"),
    (find_speaker_encoder, "resemblyzer:large", "bad_model", "write resemblyzer"),
    (find_speaker_encoder, "nemo:/nowhere/model.nemo", "bad_model", "/nowhere/model.nemo"),
    (find_speaker_encoder, "nemo:./model.ckpt", "bad_model", "./model.ckpt"),
    (find_speaker_encoder, "nemo:titanet_lage", "unknown_name", "did you mean 'titanet_large'"),
    (find_codec, "transformer:facebook/encodec_24khz", "unknown_name", "did you mean 'transformers'"),
    (find_codec, "built-in", "unknown_name", "did you mean 'builtin'"),
    (find_codec, "encodec", "unknown_name", "builtin, nemo, transformers"),
    (find_codec, "transformers", "bad_model", "transformers:<"),
    (find_codec, "transformers:/nowhere/encodec", "bad_model", "/nowhere/encodec"),
    (find_codec, "transformers:FOLDER", "bad_model", "config.json"),
    (find_codec, "nemo:FOLDER/empty.nemo", "bad_model", "empty.nemo is not a NeMo checkpoint"),
    (find_codec, "nemo:FOLDER/text.nemo", "bad_model", "text.nemo is not a NeMo checkpoint"),
    (find_codec, "nemo:FOLDER/gzip.nemo", "bad_model", "gzip.nemo is not a NeMo checkpoint"),
    (find_codec, "nemo:FOLDER/model.nemo", "bad_model", "model_weights.ckpt"),
    (find_codec, "transformers:FOLDER/json", "bad_model", "config.json"),
    (find_codec, "transformers:FOLDER/bert", "bad_model", "'bert'"),
    (find_codec, "transformers:FOLDER/list", "bad_model", "dac, encodec, mimi"),
]


@pytest.mark.parametrize(("find", "name", "code", "shown"), WRONG_NAMES)
def test_errors_of_names_and_files_state_the_remedy(find, name, code, shown, tmp_path):
    for file, content in (("empty", b""), ("text", b"not an archive\n" * 100), ("gzip", b"\x1f\x8b\x08\x00 broken")):
        (tmp_path / f"{file}.nemo").write_bytes(content)
    (tmp_path / "model.nemo").write_bytes(gzip.compress(tar_bytes([("model_config.yaml", b"a: 1\n")])))
    for folder, text in (("json", "{"), ("bert", '{"model_type": "bert"}'), ("list", "[]")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(text)
    with raises(ConfigError, code, shown):
        find(name.replace("FOLDER", str(tmp_path))).check()


@pytest.mark.parametrize(
    ("function", "name", "package"),
    [
        (find_codec, "nemo:x", "nemo"),
        (find_speaker_encoder, "nemo:titanet_large", "nemo"),
        (find_codec, "transformers:facebook/encodec_24khz", "transformers"),
    ],
)
def test_a_missing_package_names_its_extra(monkeypatch, function, name, package):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda wanted, *rest: None if wanted == package else find_spec(wanted, *rest)
    )
    with raises(ConfigError, "missing_package", f"pip install 'sharmill[{package}]'"):
        function(name).check()
