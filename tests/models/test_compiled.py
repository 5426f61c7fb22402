"""Codecs compiled by torch: the codes, the shapes, and what cannot be compiled."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner
from support.errors import raises
from support.models import make_audio
from support.shar import voice
from torch._inductor import cpp_builder

from sharmill.cli.main import cli
from sharmill.config import to_yaml
from sharmill.engine.listener import Listener
from sharmill.errors import ConfigError
from sharmill.models import compiled, load_codec, require_codec
from sharmill.models.certificate import certify_codec
from sharmill.models.compiled import compile_codec, require_compiler
from sharmill.pipeline import run_dataset


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that are compiled, by a backend that runs what torch has captured as it is."""
    captured = []

    def backend(graph, inputs):
        captured.append(graph)
        return graph.forward

    monkeypatch.setattr(compiled, "_BACKEND", backend)
    yield captured
    torch.compiler.reset()


@pytest.mark.parametrize("model", ["builtin", pytest.param("transformers:mimi", marks=pytest.mark.slow)])
def test_each_shape_is_compiled_once_for_itself_and_the_codes_are_the_same(request, graphs, model):
    backend, _, kind = model.partition(":")
    name = f"{backend}:{request.getfixturevalue('checkpoints')[kind]}" if kind else model
    plain, codec = load_codec(name), load_codec(name, compile_mode="default")
    is_compiled = []
    for frames in (34, 40, 34):
        audio, before = make_audio([frames * codec.samples_per_frame]), len(graphs)
        torch.testing.assert_close(codec.encode(*audio), plain.encode(*audio), rtol=0, atol=0)
        is_compiled.append(len(graphs) > before)
    assert is_compiled == [True, True, False]


@pytest.mark.slow
def test_the_certificate_compares_the_compiled_codec_with_the_codec(checkpoints, graphs):
    name = f"transformers:{checkpoints['mimi']}"
    found = {one.way: one for one in certify_codec(name, compile_mode="default")}
    way = found["canonical shapes, compiled (default) beside not, cpu, fp32"]
    assert way.compared == found["batches of 4 s beside alone, cpu, fp32"].compared
    assert way.different == 0


@pytest.mark.parametrize(("variable", "threads"), [(None, 1), ("3", 5)])
def test_the_compiler_has_no_processes_unless_the_user_asks_for_them(graphs, monkeypatch, variable, threads):
    if variable is None:
        monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    else:
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", variable)
    with torch._inductor.config.patch(compile_threads=5):
        load_codec("builtin", compile_mode="default")
        assert torch._inductor.config.compile_threads == threads


@pytest.mark.parametrize(("mode", "is_compiled"), [("none", False), ("default", True)])
def test_plan_measures_the_codec_as_it_will_run(graphs, project, mode, is_compiled):
    project.add("a.flac", voice(0.5))
    encode = {"codecs": [{"name": "small", "model": "builtin"}], "canonical_shapes": True, "compile": mode}
    path = project.folder / "small.yaml"
    path.write_bytes(to_yaml(project.configure(match=None, encode=encode)))
    result = CliRunner().invoke(cli, ["plan", str(path), "--measure"])
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "measured at canonical lengths, in batches of canonical size" in said
    assert bool(graphs) == is_compiled


def test_what_cannot_be_compiled_is_one_line(monkeypatch):
    def refuse(graph, inputs):
        raise RuntimeError("No working C++ compiler found in ('g++',)\nfurther lines")

    monkeypatch.setattr(compiled, "_BACKEND", refuse)
    with raises(ConfigError, "bad_model", "No working C++ compiler found", "; set encode.compile=none"):
        load_codec("builtin", compile_mode="default")
    torch.compiler.reset()


def test_a_codec_of_another_class_is_refused():
    with raises(ConfigError, "bad_config_value", "'mine' cannot be compiled, since its class is no CodecBackend"):
        compile_codec(object(), "mine", "default")


class OfNoBackend:
    """A codec as another package may have it."""

    def __init__(self, target, device):
        raise AssertionError("it is not loaded")


def test_a_codec_of_another_class_is_refused_before_it_is_loaded():
    name = f"python:{__name__}:OfNoBackend"
    require_codec(name)
    require_codec("builtin", "default")
    with raises(ConfigError, "bad_config_value", "cannot be compiled, since its class is no CodecBackend"):
        require_codec(name, "default")


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    """No program is found; torch keeps the compiler that it has found for the rest of the process."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("TORCH_INDUCTOR_INSTALL_GXX", raising=False)
    cpp_builder.cpp_compiler_search.cache_clear()
    yield
    cpp_builder.cpp_compiler_search.cache_clear()


def test_a_missing_compiler_is_found_before_any_work(no_compiler, project):
    project.add("a.flac", voice(0.5))
    config = project.configure(encode={"canonical_shapes": True, "compile": "default"}, executor={"device": "cpu"})
    with raises(ConfigError, "unsupported_system", "needs a C++ compiler", "set encode.compile=none"):
        run_dataset(config, Listener())
    assert not project.dataset.exists()
    assert not list(project.run_dir.rglob("units.jsonl"))


def test_a_gpu_needs_triton(monkeypatch):
    monkeypatch.setattr(compiled, "find_spec", lambda name: None)
    with raises(ConfigError, "missing_package", "the package triton"):
        require_compiler("cuda")


def test_a_compiler_that_works_is_enough():
    require_compiler("cpu")
