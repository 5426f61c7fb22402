"""Networks of codecs compiled by torch, anew for each shape that they meet.

A shape has its own kernels, whatever shapes came before it: torch would otherwise make kernels for any length at the
second one, so that codes depended on the order of a rank's batches.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Final

import torch
import torch._inductor.config
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

from sharmill.config import Compile
from sharmill.errors import ConfigError, is_device_error
from sharmill.models.codec_backend import CodecBackend
from sharmill.models.memory import is_out_of_memory
from sharmill.models.protocols import Codec

_BACKEND: Final = "inductor"
# A canonical length: what cannot be compiled at all is found before any work.
_TRIED_FRAMES: Final = 32
# There are sixteen lengths an octave, and a network that torch compiles in several parts counts each.
_MOST_SHAPES: Final = 4096
_MOST_WORDS: Final = 30


def require_compilable(kind: type, name: str) -> None:
    """Raise ConfigError unless codecs of a class can be compiled."""
    if not issubclass(kind, CodecBackend):
        raise ConfigError(
            f"the codec {name!r} cannot be compiled, since its class is no CodecBackend: set encode.compile=none",
            code="bad_config_value",
        )


def require_compiler(device: str) -> None:
    """Raise ConfigError where this machine lacks what torch compiles with: a C++ compiler, or Triton for a GPU.

    Args:
        device: ``cpu`` or ``cuda``.
    """
    if device == "cuda":
        if find_spec("triton") is None:
            raise ConfigError(
                "encode.compile needs the package triton for a GPU: install it, or set encode.compile=none",
                code="missing_package",
            )
        return
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ConfigError(
            "encode.compile needs a C++ compiler, and none works on this machine: install g++, name another by the "
            "variable CXX, or set encode.compile=none",
            code="unsupported_system",
        ) from error


def compile_codec(codec: Codec, name: str, mode: Compile) -> None:
    """Have the network of a codec compiled, for each shape when it first comes.

    Args:
        mode: ``default``, or ``reduce-overhead``, which also records a CUDA graph for each shape.

    Raises:
        ConfigError: it cannot be.
    """
    require_compilable(type(codec), name)
    assert isinstance(codec, CodecBackend)
    # Each rank has its own process; the compiler's own pool would be one more for each. torch reads the variable when
    # it is imported, as NeMo may have done already.
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        torch._inductor.config.compile_threads = 1
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = dynamo.accumulated_recompile_limit = _MOST_SHAPES
    # Beyond the limit torch would go on without compiling.
    dynamo.fail_on_recompile_limit_hit = True
    compiled = torch.compile(codec.encode_frames, dynamic=False, mode=mode, backend=_BACKEND)
    codec.encode_frames = compiled  # type: ignore[method-assign]
    samples = _TRIED_FRAMES * codec.samples_per_frame
    try:
        codec.encode(torch.zeros(1, samples), torch.tensor([samples]))
    except Exception as error:
        if is_out_of_memory(error) or is_device_error(error):
            raise
        # The first line of torch's names the backend that raised.
        reason = " ".join(str(error).split()[:_MOST_WORDS]) or type(error).__name__
        raise ConfigError(
            f"codec {name} cannot be compiled: {reason}; set encode.compile=none", code="bad_model"
        ) from error
