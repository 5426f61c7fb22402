"""The device of a model: its errors, reproducible arithmetic, and memory."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from support.models import make_audio
from support.project import raises

from sharmill.errors import ConfigError, DeviceError, is_device_error
from sharmill.models import load_codec, load_speaker_encoder, make_deterministic
from sharmill.models.device import check_device, with_precision
from sharmill.models.memory import measure_model, require_room

OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 12020). Please update"
NO_KERNEL = "CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors might be"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(OLD_DRIVER),
        torch.AcceleratorError(NO_KERNEL),
        AssertionError("Torch not compiled with CUDA enabled"),
    ],
)
def test_the_error_states_torchs_reason_and_requirements(error, monkeypatch):
    monkeypatch.setattr(torch, "arange", mock.Mock(side_effect=error))
    reason = str(error).partition("\n")[0]
    with raises(DeviceError, "device_failed", reason, torch.__version__, "docs/models.md"):
        check_device("cuda")


def test_an_old_gpu_is_reported_with_its_capability(monkeypatch):
    monkeypatch.setattr(torch, "arange", mock.Mock(side_effect=torch.AcceleratorError(NO_KERNEL)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with raises(DeviceError, "device_failed", "GPU 0 has capability 7.0", "compute capability 7.5 or higher", "580"):
        check_device("cuda")


def caused(error, cause):
    error.__cause__ = cause
    return error


ASSERT = "CUDA error: device-side assert triggered"
OF_A_DEVICE = [
    *(kind(message) for kind in (RuntimeError, torch.AcceleratorError) for message in (
        ASSERT, "CUDA error: an illegal memory access was encountered", "CUDA error: unspecified launch failure",
        "CUDA error: no kernel image is available for execution on the device",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling x",
        "CUDA driver error: device kernel image is invalid", "HIP error: invalid device ordinal",
    )),
    caused(ValueError("no codes"), torch.AcceleratorError(ASSERT)),
]  # fmt: skip
OF_MEMORY_OR_OF_SOMETHING_ELSE = [
    torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("GET was unable to find an engine to execute this computation"),
    RuntimeError("cuFFT error: CUFFT_INTERNAL_ERROR"),
    RuntimeError("cuDNN error: Unable to find a valid cuDNN algorithm to run convolution"),
    RuntimeError("Padding size should be less than the corresponding input dimension"),
    ValueError("CUDA error of the text of a record"),
]


@pytest.mark.parametrize("error", [*OF_A_DEVICE, *OF_MEMORY_OR_OF_SOMETHING_ELSE], ids=repr)
def test_device_errors_are_distinguished_from_others(error):
    assert is_device_error(error) == (error in OF_A_DEVICE)


def test_bf16_changes_some_codes_but_not_their_shape(checkpoints):
    name = f"transformers:{checkpoints['mimi']}"
    audio = make_audio([16000, 9000])
    full, reduced = load_codec(name).encode(*audio), load_codec(name, precision="bf16").encode(*audio)
    assert (full.shape, full.dtype) == (reduced.shape, reduced.dtype)
    # With a trained model fewer codes would change than with this small random one.
    assert 0.0 < float((full != reduced).float().mean()) < 0.9


def test_bf16_embeddings_are_close_to_fp32():
    audio = make_audio([32000, 20000])
    full = load_speaker_encoder("resemblyzer").embed(*audio)
    reduced = load_speaker_encoder("resemblyzer", precision="bf16").embed(*audio)
    assert reduced.dtype == torch.float32
    assert not torch.equal(full, reduced)
    # CPUs with bf16 instructions reach 0.999. Others round each step of the LSTM, and reach 0.995.
    assert float((full * reduced).sum(dim=1).min()) > 0.99


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


def test_tf32_is_allowed_only_while_the_model_works():
    make_deterministic()

    def allowed() -> tuple[bool, bool]:
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32

    with mock.patch("torch.cuda.get_device_capability", return_value=(8, 0)):
        encode = with_precision(allowed, "cuda", "tf32")
    assert encode() == (True, True)
    assert allowed() == (False, False)


def test_a_codec_is_measured_and_a_size_chosen(checkpoints):
    codec = load_codec(f"transformers:{checkpoints['encodec']}")
    found = measure_model(codec, "cpu", 1 << 33)
    assert list(found.speeds) == [5.0, 10.0]
    assert found.best_size in found.speeds
    # At least the audio and the four channels of the first layer.
    assert 16000 * 4 * 4 < found.bytes_per_second < 16000 * 4 * 1000


@pytest.fixture
def gpu(monkeypatch):
    """Simulate a GPU with 8 GiB, where each second of a batch takes 20 MiB; return a function that runs a batch."""
    seconds = [0.0]
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(cuda, "memory_allocated", lambda device: 1000)
    monkeypatch.setattr(cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(cuda, "max_memory_allocated", lambda device: 5000 + int(seconds[0] * 20 * 2**20))
    monkeypatch.setattr(cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=8 << 30))

    def run(num_samples, sampling_rate):
        seconds[0] = float(num_samples.sum()) / sampling_rate

    return run


def test_a_batch_too_large_for_the_gpu_is_refused_early(gpu):
    class Model:
        sampling_rate = 16000

        def encode(self, audio, num_samples):
            gpu(num_samples, 16000)

    require_room(Model(), "cuda", 400.0, "encode.batch_seconds")
    with raises(ConfigError, "out_of_memory", "encode.batch_seconds is 600", "11.7 GiB", "has 8.0", "to 287 or less"):
        require_room(Model(), "cuda", 600.0, "encode.batch_seconds")
