"""Precision of models, batches that fit a CPU, and the switches that make a rank's arithmetic the same in every run."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from support.errors import raises
from support.models import make_audio

from sharmill.errors import ConfigError
from sharmill.models import load_codec, load_speaker_encoder, make_deterministic
from sharmill.models.arithmetic import fit_batch_seconds, with_precision


def test_bf16_changes_some_codes_and_keeps_their_form(checkpoints):
    name = f"transformers:{checkpoints['mimi']}"
    audio = make_audio([16000, 9000])
    full, reduced = load_codec(name).encode(*audio), load_codec(name, precision="bf16").encode(*audio)
    assert full.shape == reduced.shape
    assert full.dtype == reduced.dtype
    # A small random model; of a trained one fewer codes change.
    assert 0.0 < float((full != reduced).float().mean()) < 0.9


def test_bf16_embeddings_are_near_those_of_fp32():
    audio = make_audio([32000, 20000])
    full = load_speaker_encoder("resemblyzer").embed(*audio)
    reduced = load_speaker_encoder("resemblyzer", precision="bf16").embed(*audio)
    assert reduced.dtype == torch.float32
    assert not torch.equal(full, reduced)
    assert float((full * reduced).sum(dim=1).min()) > 0.999


@pytest.mark.parametrize("load", [lambda: load_codec("builtin", precision="tf32"),
                                  lambda: load_speaker_encoder("resemblyzer", precision="tf32")])  # fmt: skip
def test_a_cpu_has_no_tf32(load):
    with raises(ConfigError, "bad_config_value", "use fp32 or bf16"):
        load()


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_an_old_gpu_has_neither_tf32_nor_bf16(precision):
    with (
        mock.patch("torch.cuda.get_device_capability", return_value=(7, 5)),
        mock.patch("torch.cuda.get_device_name", return_value="Tesla T4"),
        raises(ConfigError, "bad_config_value", "Tesla T4 has 7.5: use fp32"),
    ):
        with_precision(len, "cuda", precision)


def test_tf32_is_allowed_while_the_model_works_and_not_beside():
    make_deterministic("cpu")

    def allowed() -> tuple[bool, bool]:
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32

    with mock.patch("torch.cuda.get_device_capability", return_value=(8, 0)):
        encode = with_precision(allowed, "cuda", "tf32")
    assert encode() == (True, True)
    assert allowed() == (False, False)


def test_kernels_are_not_fused_after_a_while_and_cublas_has_a_fixed_workspace(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch._C._jit_set_texpr_fuser_enabled(True)
    make_deterministic("cuda")
    assert not torch._C._jit_texpr_fuser_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_a_workspace_of_the_users_own_is_kept(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    make_deterministic("cuda")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.parametrize(("wanted", "device", "fitting"), [(600, "cpu", 10), (4, "cpu", 4), (600, "cuda", 600)])
def test_batches_on_a_cpu_are_small_whatever_the_configuration_says(wanted, device, fitting):
    assert fit_batch_seconds(wanted, device) == fitting
