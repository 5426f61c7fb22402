"""Fixtures for tests of models and stages on a GPU, compared with the CPU: ``make test-gpu``.

Most tests have the parameter ``device``. With ``cuda``, they are skipped if there is no GPU; with ``cpu``, they are
ordinary tests, so all of this code also runs without a GPU. Tests with ``gpu`` only run on GPUs, because other tests
cover the same functions on the CPU. With GPU_REPORT=FILE, the figures that tests record are written to this file as
JSON, and printed at the end.
"""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

_REPORT = "GPU_REPORT"
_figures: dict[str, dict[str, Any]] = {}
_outcomes: dict[str, str] = {}


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        devices = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
        metafunc.parametrize("device", devices, indirect=True, scope="session")
    elif "gpu" in metafunc.fixturenames:
        metafunc.parametrize("gpu", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True, scope="session")


@cache
def _why_no_gpu() -> str:
    from sharmill.errors import DeviceError
    from sharmill.models.device import check_device

    try:
        check_device("cuda")
    except DeviceError as error:
        return str(error)
    return ""


@pytest.fixture(scope="session")
def device(request):
    """``cpu`` or ``cuda``."""
    return _skip_without_gpu(request.param)


@pytest.fixture(scope="session")
def gpu(request):
    """``cuda``."""
    return _skip_without_gpu(request.param)


def _skip_without_gpu(device):
    if device == "cuda" and (reason := _why_no_gpu()):
        pytest.skip(reason)
    return device


@pytest.fixture
def record(request):
    """Return a function that adds figures to the report by name."""
    return lambda **figures: _figures.setdefault(request.node.nodeid, {}).update(figures)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Names of models by kind: the models that come with sharmill, and small random models of every other family."""
    from support.models import nemo_codec_config, save_dac, save_encodec, save_mimi, save_nemo_codec, save_nemo_speaker

    from sharmill.models.nemo_models import quiet_nemo

    root = tmp_path_factory.mktemp("gpu-models")
    with quiet_nemo():
        return {
            "resemblyzer": "resemblyzer",
            "nemo_speaker": f"nemo:{save_nemo_speaker(root / 'speaker.nemo')}",
            "nemo_speaker_unmasked": f"nemo:{save_nemo_speaker(root / 'unmasked.nemo', masked=False)}",
            "builtin": "builtin",
            "nemo_codec": f"nemo:{save_nemo_codec(root / 'codec.nemo')}",
            "nemo_codec_noncausal": f"nemo:{save_nemo_codec(root / 'both.nemo', nemo_codec_config(causal=False))}",
            "encodec": f"transformers:{save_encodec(root / 'encodec')}",
            "mimi": f"transformers:{save_mimi(root / 'mimi')}",
            "dac": f"transformers:{save_dac(root / 'dac')}",
        }


def pytest_runtest_logreport(report):
    if report.when == "call" or report.skipped or report.failed:
        _outcomes[report.nodeid] = report.outcome
        # A missing package skips all of these tests.
        if not report.skipped:
            _figures.setdefault(report.nodeid, {})["seconds"] = round(report.duration, 1)


def pytest_terminal_summary(terminalreporter):
    path = os.environ.get(_REPORT)
    if path is None:
        return
    import torch

    from sharmill.models.device import check_device, driver_version

    reason = _why_no_gpu()
    gpus = [] if reason else [check_device(f"cuda:{index}") for index in range(torch.cuda.device_count())]
    tests = {name: {"outcome": outcome} | _figures.get(name, {}) for name, outcome in sorted(_outcomes.items())}
    found = {"gpus": gpus, "no_gpu": reason, "driver": driver_version(), "torch": torch.__version__, "tests": tests}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(found, indent=2) + "\n")
    terminalreporter.section(f"GPUs: {', '.join(gpus) or reason}")
    for name, values in tests.items():
        shown = "  ".join(f"{key} {value}" for key, value in values.items())
        terminalreporter.line(f"{name.partition('::')[2]}: {shown}")
    terminalreporter.line(f"this report as JSON: {path}")
