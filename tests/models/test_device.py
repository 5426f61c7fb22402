"""What is said of a device that torch cannot use."""

from __future__ import annotations

import pytest
import torch
from support.errors import raises

from sharmill.errors import DeviceError
from sharmill.models import device as devices
from sharmill.models.device import check_device, driver_version

OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 12020). Please update"
NO_KERNEL = "CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors might be"


def test_the_cpu_is_always_usable():
    assert check_device("cpu") == "cpu"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(OLD_DRIVER),
        torch.AcceleratorError(NO_KERNEL),
        AssertionError("Torch not compiled with CUDA enabled"),
    ],
)
def test_the_error_has_torchs_reason_and_what_this_torch_needs(error, monkeypatch):
    def arange(*arguments, **options):
        raise error

    monkeypatch.setattr(torch, "arange", arange)
    reason = str(error).partition("\n")[0]
    with raises(DeviceError, "device_failed", reason, torch.__version__, "docs/gpus.md"):
        check_device("cuda")


def test_a_gpu_that_is_too_old_is_told_with_its_capability(monkeypatch):
    def arange(*arguments, **options):
        raise torch.AcceleratorError(NO_KERNEL)

    monkeypatch.setattr(torch, "arange", arange)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with raises(DeviceError, "device_failed", "GPU 0 has capability 7.0", "compute capability 7.5 or higher", "580"):
        check_device("cuda")


def test_a_torch_for_cpus_says_so(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is built for CPUs alone" in devices.describe_torch()


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n", "580.65.06"),
        ("something else", "of an unknown version"),
        (None, "not there"),
    ],
)
def test_the_driver(text, version, tmp_path, monkeypatch):
    path = tmp_path / "version"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(devices, "_DRIVER_FILE", path)
    assert driver_version() == version
