"""The row of compiled codecs: what it compares, what it leaves out, and that it keeps to its time."""

from __future__ import annotations

import pytest
import torch

from bench_gpu.models import CODEC, load_codec_of_real_size
from bench_gpu.rows import Bench, compiled
from sharmill.models import compiled as compiling


@pytest.fixture
def make_bench(tmp_path, monkeypatch):
    """Returns a function: seconds that are left, each time that a row asks -> what rows work with.

    What torch has captured runs as it is.
    """
    monkeypatch.setattr(compiling, "_BACKEND", lambda graph, inputs: graph.forward)
    models = {CODEC: "python:bench_gpu.models:load_codec_of_real_size:small"}

    def make(*left):
        times = iter(left)
        return Bench("cpu", tmp_path, models, lambda: next(times))

    yield make
    torch.compiler.reset()


def test_a_compiled_codec_is_beside_the_plain_one_at_canonical_lengths(make_bench):
    codec = load_codec_of_real_size("small", "cpu")
    *measured, graphs = compiled(make_bench(1000.0, 1000.0, 1000.0), CODEC, 10.0)
    # 44 frames are canonical; 216 are, of the 215.3 in ten seconds.
    assert [line["row seconds"] for line in measured] == [round(n * 1024 / 22050, 2) for n in (44, 216)]
    assert [line["rows"] for line in measured] == [1, 1]
    assert [line["codes"] for line in measured] == [n * codec.num_codebooks for n in (44, 216)]
    assert [line["differ"] for line in measured] == [0, 0]
    assert all(line["times as fast as not compiled"] > 0 for line in measured)
    assert graphs == {"compile": "reduce-overhead", "left out": "CUDA graphs are a GPU's: not measured"}


@pytest.mark.parametrize(("left", "named"), [([1.0], {}), ([100.0, 1.0], {"rows": 1, "row seconds": 2.04})])
def test_what_no_time_is_left_for_is_named(make_bench, left, named):
    line, _ = compiled(make_bench(*left), CODEC, 10.0)
    assert line == {"compile": "default", "left out": "no time is left"} | named


def test_a_machine_that_cannot_compile_says_so(make_bench, monkeypatch):
    def refuse(graph, inputs):
        raise RuntimeError("no compiler works")

    monkeypatch.setattr(compiling, "_BACKEND", refuse)
    line, _ = compiled(make_bench(1000.0, 1000.0, 1000.0), CODEC, 10.0)
    assert line["compile"] == "default"
    assert "no compiler works" in line["left out"]
