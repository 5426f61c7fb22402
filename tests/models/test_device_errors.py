"""Errors of a GPU stay what they are: no model is called bad for them."""

from __future__ import annotations

import pytest
import torch

from sharmill.errors import is_device_error

ASSERT = "CUDA error: device-side assert triggered"


@pytest.mark.parametrize(
    "message",
    [ASSERT, "CUDA error: an illegal memory access was encountered", "CUDA error: unspecified launch failure",
     "CUDA error: no kernel image is available for execution on the device",
     "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling x",
     "CUDA driver error: device kernel image is invalid", "HIP error: invalid device ordinal"],
)  # fmt: skip
def test_of_a_device(message):
    assert is_device_error(RuntimeError(message))
    assert is_device_error(torch.AcceleratorError(message))


@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("GET was unable to find an engine to execute this computation"),
        RuntimeError("cuFFT error: CUFFT_INTERNAL_ERROR"),
        RuntimeError("cuDNN error: Unable to find a valid cuDNN algorithm to run convolution"),
        RuntimeError("Padding size should be less than the corresponding input dimension"),
        ValueError("CUDA error of the text of a record"),
    ],
)
def test_of_memory_or_of_something_else(error):
    assert not is_device_error(error)


def test_an_error_that_came_from_one_of_a_device_is_one():
    error = ValueError("no codes")
    error.__cause__ = torch.AcceleratorError(ASSERT)
    assert is_device_error(error)
