"""Untrusted checkpoints: code in the weights, in the configuration and in the names of members is not executed."""

import io
import json
import os
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from support.damage import STRANGE_FILES
from support.models import save_encodec, save_nemo_speaker
from support.project import raises

from sharmill.errors import ConfigError
from sharmill.models import find_codec, find_speaker_encoder, load_codec, load_speaker_encoder


class Bomb:
    """An object whose unpickling creates a folder."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def saved(weights: Any) -> bytes:
    stream = io.BytesIO()
    torch.save({"weight": weights}, stream)
    return stream.getvalue()


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path, monkeypatch):
    """Run a test in an empty folder, in which an attack would leave ``ran``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    yield
    assert not (tmp_path / "ran").exists()


@pytest.fixture(scope="module")
def good_nemo(tmp_path_factory):
    return save_nemo_speaker(tmp_path_factory.mktemp("models") / "good.nemo")


@pytest.fixture
def repack(good_nemo, tmp_path):
    """Return a function from member changes (by the end of the name) and added members to a .nemo file."""

    def make(*added: tarfile.TarInfo, data: bytes = b"hi", **changes: Callable[[bytes], bytes]) -> Path:
        path = tmp_path / "model.nemo"
        with tarfile.open(good_nemo) as old, tarfile.open(path, "w") as new:
            for info in filter(tarfile.TarInfo.isfile, old):
                content = changes.get(Path(info.name).stem, bytes)(old.extractfile(info).read())
                info.size = len(content)
                new.addfile(info, io.BytesIO(content))
            for info in added:
                info.size = len(data) if info.isfile() else 0
                new.addfile(info, io.BytesIO(data))
        return path

    return make


def with_values(values: dict[str, Any]) -> Callable[[bytes], bytes]:
    """Return a function that puts values into a configuration; mappings are merged with the existing part."""

    def change(data: bytes) -> bytes:
        config = yaml.safe_load(data)
        for key, value in values.items():
            config[key] = config[key] | value if isinstance(value, dict) else value
        return yaml.safe_dump(config).encode()

    return change


def resolve(name: str) -> None:
    find_speaker_encoder(name).resolve()


TTS = "nemo.collections.tts"
APP = "nemo.utils.app_state.AppState"
CODE = {
    "os.mkdir": {"path": "ran"}, "subprocess.check_output": {"args": ["mkdir", "ran"]},
    "builtins.eval": {"_args_": ["__import__('os').mkdir('ran')"]},
}  # fmt: skip
# Values to put into the configuration of a checkpoint, by its parts. All functions and classes except Python's own are
# on NeMo's list of what a configuration may name.
NOT_KNOWN: dict[str, dict[str, Any]] = {
    **{f"{target} as {part}": {part: {"_target_": target, **arguments}}
       for target, arguments in CODE.items() for part in ("preprocessor", "encoder", "decoder")},
    "a function that writes": {
        "encoder": {"_target_": "nemo.collections.asr.parts.utils.manifest_utils.write_manifest"}},
    "a function that unpacks": {"encoder": {"_target_": "nemo.collections.common.tokenizers.AutoTokenizer"}},
    "a model": {"encoder": {"_target_": "nemo.collections.asr.models.EncDecCTCModel"}},
    "a class that fetches a model": {"encoder": {"_target_": f"{TTS}.modules.audio_codec_modules.SLMEncoder"}},
    "what a module imports": {"decoder": {"_target_": "nemo.collections.asr.modules.conv_asr.torch.save"}},
    "a function of torch": {"decoder": {"_target_": "torch.nn.functional.relu"}},
    "a file outside that looks like a member": {"decoder": {"model_path": "nemo:${oc.env:HOME}"}},
    "a folder of a member": {"decoder": {"vocab_path": "nemo:sub/vocab.txt"}},
    "deep below": {"preprocessor": {"a": [{"b": {"_target_": APP}}]}},
    "a target that is no text": {"decoder": {"_target_": ["os.mkdir"]}},
    "an old spelling": {"decoder": {"cls": APP, "params": {}}},
    "code of a hub": {"encoder": {"trust_remote_code": True}},
    "other weights": {"encoder": {"init_from_nemo_model": {"other": {"path": "x.nemo"}}}},
    "a file of this machine": {"encoder": {"weights": "/etc/passwd"}},
    "a file beside the folder": {"encoder": {"weights": "nemo:../../x.ckpt"}},
    "a file in the current folder": {"decoder": {"semantic_codec_path": "x.nemo"}},
    "a URL": {"decoder": {"weights": "https://example.org/x.ckpt"}},
    "more bands than memory": {"preprocessor": {"features": 10**9}},
    "a spectrum larger than memory": {"preprocessor": {"n_fft": 10**9}},
    "a reference to the environment": {"decoder": {"weights": "${oc.env:HOME}"}},
}  # fmt: skip


@pytest.mark.parametrize("values", NOT_KNOWN.values(), ids=NOT_KNOWN.keys())
def test_unknown_values_in_the_configuration_of_a_nemo_file(values, repack):
    path = repack(model_config=with_values(values))
    for use in (resolve, load_speaker_encoder):
        with raises(ConfigError, "untrusted_model", f"because {next(iter(values))}.", "allow_targets"):
            use(f"nemo:{path}")


def packed(data: bytes) -> bytes:
    """Return the same weights in a form that torch does not write: compressed."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
        new.writestr("zeros", bytes(8 << 20))
    return stream.getvalue()


def with_line(line: str) -> Callable[[bytes], bytes]:
    return lambda data: data + f"\n{line}\n".encode()


# Changes to a checkpoint, the step that refuses it, and code and word of the refusal.
BAD_MEMBERS = {
    "code in the weights": (
        {"model_weights": lambda data: saved(Bomb())}, load_speaker_encoder, "bad_model", "weights"),
    "weights that unpack to more than their file": ({"model_weights": packed}, resolve, "untrusted_model", "unpack"),
    "a class that is none": (
        {"model_config": with_values({"target": "os.mkdir", "path": "ran"})}, load_speaker_encoder, "untrusted_model",
        "target"),
    "a tag": (
        {"model_config": with_line("extra: !!python/object/apply:os.mkdir [ran]")}, load_speaker_encoder, "bad_model",
        "configuration"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "use", "code", "word"), BAD_MEMBERS.values(), ids=BAD_MEMBERS.keys())
def test_bad_members_of_a_nemo_checkpoint(changes, use, code, word, repack):
    path = repack(**changes)
    with raises(ConfigError, code, str(path), word):
        use(f"nemo:{path}")


def test_a_class_that_is_allowed_by_name(repack):
    sequence = {"_target_": "nemo.collections.asr.modules.conv_asr.ConvASRDecoderClassification"}
    path = repack(model_config=with_values({"encoder": {"further": sequence}}))
    with raises(ConfigError, "untrusted_model", "encoder.further._target_"):
        resolve(f"nemo:{path}")
    trusted = find_speaker_encoder(f"nemo:{path}", allow_targets=[sequence["_target_"]])
    assert trusted.identity().keys() == {"backend", "name", "checksum"}
    # The refusal now comes from NeMo, whose encoder does not accept such an argument.
    with raises(ConfigError, "bad_model", "ConvASRDecoderClassification"):
        load_speaker_encoder(f"nemo:{path}", "cpu", allow_targets=[sequence["_target_"]])


def test_the_last_of_several_configurations_is_checked_and_used(repack):
    evil = yaml.safe_dump({"target": "os.mkdir", "encoder": {"_target_": "os.mkdir"}}).encode()
    path = repack(tarfile.TarInfo("other/model_config.yaml"), data=evil)
    with raises(ConfigError, "untrusted_model", "os.mkdir"):
        load_speaker_encoder(f"nemo:{path}", "cpu")


def test_a_configuration_that_unpacks_to_much_is_not_read_whole(repack, tmp_path):
    path = repack(model_config=with_line("#" * (48 << 20)))
    with tarfile.open(tmp_path / "packed.nemo", "w:gz", compresslevel=1) as small, tarfile.open(path) as plain:
        for member in plain:
            small.addfile(member, plain.extractfile(member))
    path.unlink()
    tracemalloc.start()
    try:
        with raises(ConfigError, "bad_config_file", "larger than 1 MiB"):
            resolve(f"nemo:{tmp_path / 'packed.nemo'}")
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def link(name: str, kind: bytes, to: Path) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, str(to)
    return info


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE], ids=["a symlink", "a hard link"])
def test_members_of_a_nemo_checkpoint_stay_in_its_folder(repack, tmp_path, kind):
    """The members have names that lead out, are links to a file or folder outside, or would be written through one."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "mine.txt").write_text("mine")
    names = (f"{outside}/new.txt", f"{'../' * 11}..{outside}/new.txt", "./one", "./two/new.txt")
    links = (link("./one", kind, outside / "mine.txt"), link("./two", kind, outside))
    path = repack(*links, *map(tarfile.TarInfo, names))
    with suppress(ConfigError):
        load_speaker_encoder(f"nemo:{path}", "cpu")
    assert {file.name: file.read_text() for file in outside.iterdir()} == {"mine.txt": "mine"}


@pytest.fixture
def encodec(tmp_path):
    """The directory of a tiny EnCodec."""
    return save_encodec(tmp_path / "encodec")


@pytest.mark.parametrize(
    ("name", "weights", "code", "words"),
    [("pytorch_model.bin", lambda: saved(Bomb()), "bad_model", "weights"),
     ("pytorch_model.bin", lambda: packed(saved(torch.zeros(10))), "untrusted_model", "unpack"),
     ("model.safetensors", lambda: b"version https://git-lfs.github.com/spec/v1", "bad_model", "cannot load")],
)  # fmt: skip
def test_weights_of_a_transformers_directory(encodec, name, weights, code, words):
    (encodec / "model.safetensors").unlink()
    (encodec / name).write_bytes(weights())
    with raises(ConfigError, code, words):
        load_codec(f"transformers:{encodec}", "cpu")


def test_code_beside_the_weights_of_a_transformers_directory(encodec):
    """A model may bring its own classes, but they are not loaded."""
    config = json.loads((encodec / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    (encodec / "config.json").write_text(json.dumps(config))
    (encodec / "own.py").write_text("import os; os.mkdir('ran')\n")
    load_codec(f"transformers:{encodec}", "cpu")


# Files of a transformers model. If PEFT is installed, transformers loads the model that an adapter names.
FETCHING = [
    ("adapter_config.json", {"base_model_name_or_path": "someone/else"}),
    ("config.json", {"model_type": "encodec", "quantization_config": {"load_in_4bit": True}}),
    ("config.json", {"model_type": "encodec", "transformers_weights": ".other/model.safetensors"}),
    ("config.json", {"model_type": "encodec", "attn_implementation": "someone/kernel"}),
    ("config.json", {"model_type": "encodec", "sub": {"_attn_implementation": "kernels-community/flash-attn"}}),
]


@pytest.mark.parametrize(("name", "values"), FETCHING)
def test_code_that_the_files_of_a_transformers_model_would_fetch(encodec, name, values):
    (encodec / name).write_text(json.dumps(values))
    with raises(ConfigError, "untrusted_model", name):
        find_codec(f"transformers:{encodec}").resolve()


INDEX = "model.safetensors.index.json"
# Weight files named in an index, whether such a file is packed, and a word of the message.
INDEXED: dict[str, tuple[Any, bool, str]] = {
    "in the folder above": ("../other.safetensors", False, "'../other.safetensors'"),
    "anywhere": ("/other.safetensors", False, "'/other.safetensors'"),
    "hidden, where no checksum looks": (".other.safetensors", False, "'.other.safetensors'"),
    "in a folder below": ("sub/other.bin", False, "'sub/other.bin'"),
    "no name": (None, False, "'None'"),
    "packed, under any name": ("other.data", True, "other.data"),
    "packed, in a folder below": ("model.safetensors", True, "sub/other.bin"),
}


@pytest.mark.parametrize(("named", "is_packed", "said"), INDEXED.values(), ids=INDEXED.keys())
def test_an_index_of_a_model_names_whole_files_beside_it(encodec, named, is_packed, said):
    if is_packed:
        (encodec / "sub").mkdir()
        (encodec / said).write_bytes(packed(saved(torch.zeros(10))))
    (encodec / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"a": named}}))
    with raises(ConfigError, "untrusted_model", said):
        find_codec(f"transformers:{encodec}").resolve()


def test_a_model_in_several_files_is_loaded(encodec):
    (encodec / "model.safetensors").rename(encodec / "model-00001-of-00001.safetensors")
    with safe_open(encodec / "model-00001-of-00001.safetensors", "pt") as weights:
        files = dict.fromkeys(weights.keys(), "model-00001-of-00001.safetensors")
    (encodec / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    load_codec(f"transformers:{encodec}", "cpu")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", sorted(STRANGE_FILES.keys() - {"a link", "a list"}))
def test_a_strange_configuration_of_a_model_is_refused(encodec, name):
    STRANGE_FILES[name](encodec / "config.json")
    with raises(ConfigError, "bad_model", "config.json"):
        find_codec(f"transformers:{encodec}").resolve()
