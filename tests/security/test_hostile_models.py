"""Checkpoints from a stranger: code in the weights, in the configuration and in the names of members is not run."""

from __future__ import annotations

import io
import json
import os
import tarfile
import tracemalloc
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml
from support.errors import raises
from support.models import save_encodec, save_nemo_speaker

from sharmill.errors import ConfigError
from sharmill.models import find_codec, find_speaker_encoder, load_codec, load_speaker_encoder


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
    with raises(ConfigError, "untrusted_model"):
        load_speaker_encoder(f"nemo:{path}", "cpu")
    assert not (tmp_path / "ran").exists()


def test_the_class_of_a_nemo_checkpoint(repack, tmp_path):
    path = repack(model_config=with_config(lambda c: c.update(target="os.mkdir", path=str(tmp_path / "ran"))))
    with raises(ConfigError, "untrusted_model"):
        load_speaker_encoder(f"nemo:{path}", "cpu")
    assert not (tmp_path / "ran").exists()


TTS = "nemo.collections.tts"
NOT_KNOWN = {
    # Each is on NeMo's own list of what a configuration may name.
    "a function that writes": (
        "encoder",
        {"_target_": "nemo.collections.asr.parts.utils.manifest_utils.write_manifest"},
    ),
    "a function that unpacks": ("encoder", {"_target_": "nemo.collections.common.tokenizers.AutoTokenizer"}),
    "a model": ("encoder", {"_target_": "nemo.collections.asr.models.EncDecCTCModel"}),
    "a class that fetches a model": ("encoder", {"_target_": f"{TTS}.modules.audio_codec_modules.SLMEncoder"}),
    "what a module imports": ("decoder", {"_target_": "nemo.collections.asr.modules.conv_asr.torch.save"}),
    "a function of torch": ("decoder", {"_target_": "torch.nn.functional.relu"}),
    "deep below": ("preprocessor", {"a": [{"b": {"_target_": "nemo.utils.app_state.AppState"}}]}),
    "a target that is no text": ("decoder", {"_target_": ["os.mkdir"]}),
    "an old spelling": ("decoder", {"cls": "nemo.utils.app_state.AppState", "params": {}}),
    "code of a hub": ("encoder", {"trust_remote_code": True}),
    "other weights": ("encoder", {"init_from_nemo_model": {"other": {"path": "x.nemo"}}}),
    "a file of this machine": ("encoder", {"weights": "/etc/passwd"}),
    "a file beside the folder": ("encoder", {"weights": "nemo:../../x.ckpt"}),
    "a file in the current folder": ("decoder", {"semantic_codec_path": "x.nemo"}),
    "a URL": ("decoder", {"weights": "https://example.org/x.ckpt"}),
    "more bands than memory": ("preprocessor", {"features": 10**9}),
    "a spectrum larger than memory": ("preprocessor", {"n_fft": 10**9}),
    "a reference to the environment": ("decoder", {"weights": "${oc.env:HOME}"}),
}


@pytest.mark.parametrize(("part", "values"), NOT_KNOWN.values(), ids=NOT_KNOWN.keys())
def test_what_is_not_known_in_the_configuration_of_a_nemo_checkpoint(part, values, repack):
    path = repack(model_config=with_config(lambda c: c[part].update(values)))
    for use in (lambda name: find_speaker_encoder(name).resolve(), load_speaker_encoder):
        with raises(ConfigError, "untrusted_model", f"since {part}.", "allow_targets"):
            use(f"nemo:{path}")


def test_a_class_that_is_allowed_by_name(repack):
    sequence = {"_target_": "nemo.collections.asr.modules.conv_asr.ConvASRDecoderClassification"}
    path = repack(model_config=with_config(lambda c: c["encoder"].update(further=sequence)))
    with raises(ConfigError, "untrusted_model", "encoder.further._target_"):
        find_speaker_encoder(f"nemo:{path}").resolve()
    trusted = find_speaker_encoder(f"nemo:{path}", allow_targets=[sequence["_target_"]])
    assert trusted.identity().keys() == {"backend", "name", "checksum"}
    # It is NeMo that refuses now: its encoder takes no such argument.
    with raises(ConfigError, "bad_model", "ConvASRDecoderClassification"):
        load_speaker_encoder(f"nemo:{path}", "cpu", allow_targets=[sequence["_target_"]])


def test_only_checkpoints_of_nemo_are_allowed_more():
    with raises(ConfigError, "unknown_key", "allow_targets", "resemblyzer"):
        find_speaker_encoder("resemblyzer", allow_targets=["os.mkdir"])


def test_what_only_training_uses_is_neither_checked_nor_made(repack):
    """Checkpoints that are published name the data and the losses of those who trained them."""

    def change(config):
        config["train_ds"] = {"manifest_filepath": "/data/train.json", "augmentor": {"_target_": "os.mkdir"}}
        config["discriminator"] = {"_target_": f"{TTS}.modules.audio_codec_modules.SLMDiscriminator"}
        config["optim"] = {"_target_": "os.mkdir"}

    assert load_speaker_encoder(f"nemo:{repack(model_config=with_config(change))}", "cpu").embedding_size == 24


def test_the_last_configuration_of_several_in_an_archive_is_the_one_that_is_checked_and_used(repack):
    path = repack()
    evil = yaml.safe_dump({"target": "os.mkdir", "encoder": {"_target_": "os.mkdir"}}).encode()
    with tarfile.open(path, "a") as archive:
        info = tarfile.TarInfo("other/model_config.yaml")
        info.size = len(evil)
        archive.addfile(info, io.BytesIO(evil))
    with raises(ConfigError, "untrusted_model", "os.mkdir"):
        load_speaker_encoder(f"nemo:{path}", "cpu")


def test_an_archive_that_unpacks_to_much_more_than_its_file(repack, tmp_path):
    path = repack()
    with tarfile.open(path) as old, tarfile.open(tmp_path / "big.nemo", "w") as new:
        for member in old:
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
        zeros = tarfile.TarInfo("zeros")
        zeros.size = 1 << 40
        # A header alone: the data are not there, as in a sparse member.
        new.fileobj.write(zeros.tobuf())
    with raises(ConfigError, "untrusted_model", "would unpack"):
        find_speaker_encoder(f"nemo:{tmp_path / 'big.nemo'}").resolve()


@pytest.mark.parametrize("compression", ["xz", "gz", "bz2"])
def test_a_damaged_archive(good_nemo, tmp_path, compression):
    path = tmp_path / "damaged.nemo"
    with tarfile.open(path, f"w:{compression}") as archive:
        archive.add(good_nemo, "x")
    data = bytearray(path.read_bytes())
    for part in (data[: len(data) // 2], data[:200] + bytes(50) + data[250:]):
        path.write_bytes(part)
        with raises(ConfigError, "bad_model", str(path)):
            find_speaker_encoder(f"nemo:{path}").resolve()


@pytest.mark.xdist_group("memory, threads, descriptors")
def test_a_configuration_that_unpacks_to_much_is_not_read_whole(repack, tmp_path):
    path = repack(model_config=lambda data: data + b"#" * (48 << 20))
    with tarfile.open(tmp_path / "packed.nemo", "w:gz", compresslevel=1) as packed, tarfile.open(path) as plain:
        for member in plain:
            packed.addfile(member, plain.extractfile(member))
    path.unlink()
    tracemalloc.start()
    try:
        with raises(ConfigError, "bad_config_file", "larger than 1 MiB"):
            find_speaker_encoder(f"nemo:{tmp_path / 'packed.nemo'}").resolve()
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("filters", [10**7, 10**9])
def test_layers_of_a_nemo_checkpoint_that_its_weights_cannot_fill(repack, filters):
    path = repack(model_config=with_config(lambda c: c["encoder"]["jasper"][1].update(filters=filters, kernel=[999])))
    with raises(ConfigError, "bad_model", "layers of far more numbers") as error:
        load_speaker_encoder(f"nemo:{path}", "cpu")
    assert "\n" not in str(error.value)


def packed(data: bytes) -> bytes:
    """The same weights as torch does not store them: compressed."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
        new.writestr("zeros", bytes(8 << 20))
    return stream.getvalue()


def test_weights_that_unpack_to_more_than_their_file(repack, encodec):
    path = repack(model_weights=packed)
    for use in (lambda name: find_speaker_encoder(name).resolve(), load_speaker_encoder):
        with raises(ConfigError, "untrusted_model", str(path), "unpack"):
            use(f"nemo:{path}")
    weights = io.BytesIO()
    torch.save({"a": torch.zeros(10)}, weights)
    (encodec / "pytorch_model.bin").write_bytes(packed(weights.getvalue()))
    with raises(ConfigError, "untrusted_model", "pytorch_model.bin", "unpack"):
        load_codec(f"transformers:{encodec}", "cpu")


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


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE], ids=["a symlink", "a hard link"])
def test_links_in_a_nemo_checkpoint_lead_nowhere(repack, tmp_path, kind):
    """A link to a file outside, and a member that would be written through it; and one to a folder."""
    path, outside = repack(), tmp_path / "outside"
    outside.mkdir()
    (outside / "mine.txt").write_text("mine")
    with tarfile.open(path, "a") as archive:
        for name, target in (("./one", outside / "mine.txt"), ("./two", outside)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, str(target)
            archive.addfile(info)
        for name in ("./one", "./two/new.txt"):
            info = tarfile.TarInfo(name)
            info.size = 2
            archive.addfile(info, io.BytesIO(b"hi"))
    with suppress(ConfigError):
        load_speaker_encoder(f"nemo:{path}", "cpu")
    assert {file.name: file.read_text() for file in outside.iterdir()} == {"mine.txt": "mine"}


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


@pytest.mark.parametrize("key", ["num_filters", "hidden_size"])
def test_layers_of_a_transformers_directory_that_its_weights_cannot_fill(tmp_path, key):
    folder = save_encodec(tmp_path / "encodec")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: 10**6}))
    with raises(ConfigError, "bad_model", "layers of far more numbers"):
        load_codec(f"transformers:{folder}", "cpu")


def test_a_model_named_by_an_adapter_beside_a_transformers_model(tmp_path):
    """Where PEFT is installed, transformers loads the model that the adapter names."""
    folder = save_encodec(tmp_path / "encodec")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "someone/else"}))
    with raises(ConfigError, "untrusted_model", "adapter_config.json"):
        load_codec(f"transformers:{folder}", "cpu")


@pytest.mark.parametrize(
    "values",
    [{"quantization_config": {"load_in_4bit": True}}, {"attn_implementation": "someone/kernel"},
     {"sub_config": {"_attn_implementation": "kernels-community/flash-attn"}}],
)  # fmt: skip
def test_code_that_the_configuration_of_a_transformers_model_would_fetch(tmp_path, values):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "encodec", **values}))
    with raises(ConfigError, "untrusted_model", "config.json"):
        find_codec(f"transformers:{tmp_path}").resolve()
