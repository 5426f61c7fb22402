"""Checkpoints from a stranger: code in the weights, in the configuration and in the names of members is not run."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path

import pytest
import torch
import yaml
from support.errors import raises
from support.models import save_encodec, save_nemo_speaker

from sharmill.errors import ConfigError
from sharmill.models import load_codec, load_speaker_encoder


class Bomb:
    """Leaves a folder where it is unpickled."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def bomb(marker: Path) -> bytes:
    stream = io.BytesIO()
    torch.save({"weight": Bomb(str(marker))}, stream)
    return stream.getvalue()


@pytest.fixture(scope="module")
def good_nemo(tmp_path_factory):
    return save_nemo_speaker(tmp_path_factory.mktemp("models") / "good.nemo")


@pytest.fixture
def repack(good_nemo, tmp_path):
    """Returns a function: changes by the end of a member's name -> the .nemo file with these members changed."""

    def make(**changes) -> Path:
        path = tmp_path / "model.nemo"
        with tarfile.open(good_nemo) as old, tarfile.open(path, "w") as new:
            for info in old:
                if not info.isfile():
                    continue
                data = old.extractfile(info).read()
                for end, change in changes.items():
                    if Path(info.name).stem == end:
                        data = change(data)
                info.size = len(data)
                new.addfile(info, io.BytesIO(data))
        return path

    return make


def with_config(change):
    def apply(data: bytes) -> bytes:
        config = yaml.safe_load(data)
        change(config)
        return yaml.safe_dump(config).encode()

    return apply


def test_the_good_checkpoint_is_loaded(repack):
    assert load_speaker_encoder(f"nemo:{repack()}", "cpu").sampling_rate == 16000


def test_code_in_the_weights_of_a_nemo_checkpoint(repack, tmp_path):
    path = repack(model_weights=lambda data: bomb(tmp_path / "ran"))
    with raises(ConfigError, "bad_model", "weights"):
        load_speaker_encoder(f"nemo:{path}", "cpu")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("part", ["preprocessor", "encoder", "decoder"])
@pytest.mark.parametrize("target", ["os.mkdir", "subprocess.check_output", "builtins.eval"])
def test_code_in_the_configuration_of_a_nemo_checkpoint(part, target, repack, tmp_path):
    marker = str(tmp_path / "ran")
    arguments = {"os.mkdir": {"path": marker}, "subprocess.check_output": {"args": ["mkdir", marker]},
                 "builtins.eval": {"_args_": [f"__import__('os').mkdir({marker!r})"]}}  # fmt: skip
    path = repack(model_config=with_config(lambda c: c.update({part: {"_target_": target, **arguments[target]}})))
    with pytest.raises(ConfigError):
        load_speaker_encoder(f"nemo:{path}", "cpu")
    assert not (tmp_path / "ran").exists()


def test_the_class_of_a_nemo_checkpoint(repack, tmp_path):
    path = repack(model_config=with_config(lambda c: c.update(target="os.mkdir", path=str(tmp_path / "ran"))))
    with pytest.raises(ConfigError):
        load_speaker_encoder(f"nemo:{path}", "cpu")
    assert not (tmp_path / "ran").exists()


def test_tags_in_the_configuration_of_a_nemo_checkpoint(repack, tmp_path):
    tag = f"!!python/object/apply:os.mkdir [{tmp_path / 'ran'}]"
    path = repack(model_config=lambda data: data + f"\nextra: {tag}\n".encode())
    with raises(ConfigError, "bad_model", str(path), "configuration"):
        load_speaker_encoder(f"nemo:{path}", "cpu")
    assert not (tmp_path / "ran").exists()


def test_members_of_a_nemo_checkpoint_stay_in_its_folder(repack, tmp_path):
    path = repack()
    escape = tmp_path / "escape.txt"
    with tarfile.open(path, "a") as archive:
        for name in (str(escape), f"../../../../../../../../../../..{escape}"):
            info = tarfile.TarInfo(name)
            info.size = 2
            archive.addfile(info, io.BytesIO(b"hi"))
    try:
        load_speaker_encoder(f"nemo:{path}", "cpu")
    except ConfigError:
        pass
    assert not escape.exists()


@pytest.fixture
def encodec(tmp_path):
    """The directory of a tiny EnCodec whose weights are a pickle."""
    folder = save_encodec(tmp_path / "encodec")
    (folder / "model.safetensors").unlink()
    return folder


def test_code_in_the_weights_of_a_transformers_directory(encodec, tmp_path):
    (encodec / "pytorch_model.bin").write_bytes(bomb(tmp_path / "ran"))
    with raises(ConfigError, "bad_model", "weights"):
        load_codec(f"transformers:{encodec}", "cpu")
    assert not (tmp_path / "ran").exists()


def test_code_beside_the_weights_of_a_transformers_directory(encodec, tmp_path):
    """A model may bring its own classes; they are not asked for."""
    save_encodec(encodec)
    config = json.loads((encodec / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    (encodec / "config.json").write_text(json.dumps(config))
    (encodec / "own.py").write_text(f"import os; os.mkdir({str(tmp_path / 'ran')!r})\n")
    load_codec(f"transformers:{encodec}", "cpu")
    assert not (tmp_path / "ran").exists()
