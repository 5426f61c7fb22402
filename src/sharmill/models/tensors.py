"""Shared functions of the backends: padding of batches, unit embeddings, checksums of weights, safe loading."""

import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import xxhash
import yaml
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from sharmill.errors import ConfigError, is_device_error, one_line

# Limits on the total size of tensors that are created while a model is loaded: layers, weights, and copies of them.
_NUMBERS_PER_BYTE: Final = 4
_FREE_NUMBERS: Final = 1 << 27
# Number of frames in the trial, a few seconds for most codecs. A dependence on more than half of them counts as
# unbounded.
_REACH_FRAMES: Final = 64


class _SizeLimit(TorchDispatchMode):
    """Limits the total number of elements of new tensors, before they are allocated."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.left = most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        size = args[0] if args and isinstance(args[0], (list, tuple)) else args[:2]
        if size and all(isinstance(length, (int, float)) for length in size):
            self.left -= math.prod(size) if isinstance(args[0], (list, tuple)) else max(size)
            if self.left < 0:
                raise ValueError("its layers are too large")
        return func(*args, **(kwargs or {}))


@contextmanager
def loading(name: str, *errors: type[Exception]) -> Iterator[None]:
    """Convert errors that occur while a model is loaded to ConfigError, except errors of the device.

    Args:
        name: the name of the model, for messages.
        errors: errors of damaged files and failed downloads. Any other error is a bug, and is raised unchanged.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (pickle.UnpicklingError, yaml.YAMLError) as error:
        are_weights = isinstance(error, pickle.UnpicklingError)
        damage = (
            "weights are damaged, or contain more than tensors"
            if are_weights
            else "configuration contains more than plain values"
        )
        raise ConfigError(f"cannot load {name}: its {damage}", code="bad_model") from error
    except errors as error:
        if is_device_error(error):
            raise
        raise ConfigError(f"cannot load {name}: {one_line(error)}", code="bad_model") from error


@contextmanager
def limited_layers(name: str, path: Path) -> Iterator[None]:
    """Raise ConfigError if the creation of a model takes much more memory than the size of its weights explains.

    The sizes of layers are just numbers in the model's configuration, where a huge number takes no more space than a
    small one.

    Args:
        name: the name of the model, for messages.
        path: the file of the model, or the folder of its files.
    """
    files = path.rglob("*") if path.is_dir() else [path]
    num_bytes = sum(file.stat().st_size for file in files if file.is_file())
    limit = _SizeLimit(_NUMBERS_PER_BYTE * num_bytes + _FREE_NUMBERS)
    try:
        with limit:
            yield
    except Exception as error:
        if limit.left >= 0:
            raise
        raise ConfigError(
            f"cannot load {name}: its configuration demands layers that are far larger than its {num_bytes:,} bytes "
            "can hold; it is damaged or malicious, so use another copy or model",
            code="bad_model",
        ) from error


def require_whole(name: str, missing: Iterable[str]) -> None:
    """Raise ConfigError if weights of a model are missing from its checkpoint."""
    if names := sorted(missing):
        raise ConfigError(
            f"{name} is incomplete: {len(names)} weights are missing, such as {names[0]}", code="bad_model"
        )


def move_batch(audio: Tensor, num_samples: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the audio of a batch and the lengths of its items on a device, and the lengths as int64 on the CPU.

    Lengths determine shapes, and reading them on the CPU does not wait for the device.

    Raises:
        ValueError: audio is not (batch, samples), num_samples is not (batch,), or a length is not within the audio.
    """
    if audio.ndim != 2 or num_samples.shape != audio.shape[:1]:
        raise ValueError(
            f"expected audio (batch, samples) and num_samples (batch,), got {tuple(audio.shape)} "
            f"and {tuple(num_samples.shape)}"
        )
    if num_samples.numel() and not 0 <= int(num_samples.min()) <= int(num_samples.max()) <= audio.shape[1]:
        raise ValueError(f"num_samples must be between 0 and {audio.shape[1]}, the length of the padded audio")
    num_samples = num_samples.to("cpu", torch.int64)
    return audio.to(device, non_blocking=True), num_samples.to(device, non_blocking=True), num_samples


def fit_length(audio: Tensor, num_samples: Tensor, length: int) -> Tensor:
    """Cut or zero-pad a batch to a length, and set samples beyond each item's end to zero.

    Args:
        audio: (batch, samples) float32.
        num_samples: (batch,) int64.
        length: the number of samples in the result.

    Returns:
        (batch, length) float32, a copy.
    """
    audio = functional.pad(audio, (0, length - audio.shape[1])) if length > audio.shape[1] else audio[:, :length]
    beyond = torch.arange(length, device=audio.device)[None, :] >= num_samples[:, None]
    return audio.masked_fill(beyond, 0.0)


@torch.no_grad()
def find_reach(encode: Callable[[Tensor], Tensor], samples_per_frame: int) -> tuple[int, int] | None:
    """Return how many preceding and following frames an encoded frame depends on; None if the number is unbounded.

    One frame of the input is set to NaN. Sums and products with NaN are NaN, whatever the weights are. The frames of
    the output that are NaN are therefore those that the layers connect with this input frame, for any audio.

    Args:
        encode: audio (1, samples) -> (1, channels, frames).
    """
    middle = _REACH_FRAMES // 2
    audio = torch.zeros(1, _REACH_FRAMES * samples_per_frame)
    audio[:, middle * samples_per_frame : (middle + 1) * samples_per_frame] = torch.nan
    connected = encode(audio)[0].isnan().any(dim=0).nonzero().flatten().tolist()
    if not connected or connected[0] == 0 or connected[-1] == _REACH_FRAMES - 1:
        return None
    # The frames that depend on the middle frame are now NaN. The last of them shows how many preceding frames a frame
    # depends on, and the first of them shows how many following frames.
    return max(0, connected[-1] - middle), max(0, middle - connected[0])


def unit_embeddings(embeddings: Tensor, audio: Tensor) -> Tensor:
    """Scale embeddings to length 1, and replace the embeddings of silence with zeros.

    A network maps all silent utterances to the same vector, so that silence would be the best match for silence. A
    zero vector is similar to nothing.

    Args:
        embeddings: (batch, embedding_size); rows with NaN, for example after division by a zero norm, count as silence.
        audio: (batch, samples), zero beyond each item's end.

    Returns:
        (batch, embedding_size) float32, on the device of ``embeddings``.
    """
    embeddings = functional.normalize(embeddings.float(), dim=1)
    voiced = (audio != 0).any(dim=1).to(embeddings.device) & embeddings.isfinite().all(dim=1)
    return torch.where(voiced[:, None], embeddings, 0.0)


def weights_checksum(state: Mapping[str, Tensor]) -> str:
    """Return the xxh3 (16 hex digits) of the names, types, shapes and bytes in a state dict, in the order of names.

    A state dict contains parameters and saved buffers. Other buffers, such as caches that grow with the longest input
    so far, do not belong to the identity of a model.
    """
    digest = xxhash.xxh3_64()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
