"""Functions on tensors that the backends share: padding of batches, unit embeddings, checksums of weights."""

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

# Limits of the tensors that loading a model makes: its layers, the weights, and copies of them.
_NUMBERS_PER_BYTE: Final = 4
_FREE_NUMBERS: Final = 1 << 27
# Some seconds of most codecs; a dependence on more than half of them counts as not bounded.
_REACH_FRAMES: Final = 64


class _SizeLimit(TorchDispatchMode):
    """Refuses to make tensors of more than so many numbers in all, before they are there."""

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
    """Raise ConfigError where the model of this name cannot be loaded, but not for what is the fault of the device.

    ``errors`` are those that damaged files and failed downloads raise; anything else is a fault of ours and is shown as
    it is.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (pickle.UnpicklingError, yaml.YAMLError) as error:
        are_weights = isinstance(error, pickle.UnpicklingError)
        damage = "weights are damaged, or more than tensors" if are_weights else "configuration is more than values"
        raise ConfigError(f"cannot load {name}: its {damage}", code="bad_model") from error
    except errors as error:
        if is_device_error(error):
            raise
        raise ConfigError(f"cannot load {name}: {one_line(error)}", code="bad_model") from error


@contextmanager
def limited_layers(name: str, path: Path) -> Iterator[None]:
    """Raise ConfigError where a model, while it is made, asks for much more memory than its weights' bytes explain.

    The sizes of layers are numbers of its configuration, which cost nothing to write.

    Args:
        path: its file, or the folder of its files.
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
            f"cannot load {name}: its configuration asks for layers of far more numbers than its {num_bytes:,} bytes "
            "can hold; it is damaged, or not to be trusted",
            code="bad_model",
        ) from error


def require_whole(name: str, missing: Iterable[str]) -> None:
    """Raise ConfigError if weights of the model of this name are missing from its checkpoint."""
    if names := sorted(missing):
        raise ConfigError(
            f"{name} lacks {len(names)} weights, the first is {names[0]}: it is not whole", code="bad_model"
        )


def move_batch(audio: Tensor, num_samples: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the audio of a batch and the lengths of its items on a device, and these as int64 on the CPU.

    What decides about shapes stays on the CPU, so that nothing waits for the device.

    Raises:
        ValueError: audio is not (batch, samples), or num_samples not (batch,) within it.
    """
    if audio.ndim != 2 or num_samples.shape != audio.shape[:1]:
        raise ValueError(
            f"expected audio (batch, samples) and num_samples (batch,), got {tuple(audio.shape)} "
            f"and {tuple(num_samples.shape)}"
        )
    if num_samples.numel() and not 0 <= int(num_samples.min()) <= int(num_samples.max()) <= audio.shape[1]:
        raise ValueError(f"num_samples must be within 0 and {audio.shape[1]}, the length of the padded audio")
    num_samples = num_samples.to("cpu", torch.int64)
    return audio.to(device, non_blocking=True), num_samples.to(device, non_blocking=True), num_samples


def fit_length(audio: Tensor, num_samples: Tensor, length: int) -> Tensor:
    """Cut or zero-pad a batch to a length and zero what lies beyond each item's end.

    Args:
        audio: (batch, samples) float32.
        num_samples: (batch,) int64.
        length: samples wanted.

    Returns:
        (batch, length) float32, a copy.
    """
    audio = functional.pad(audio, (0, length - audio.shape[1])) if length > audio.shape[1] else audio[:, :length]
    beyond = torch.arange(length, device=audio.device)[None, :] >= num_samples[:, None]
    return audio.masked_fill(beyond, 0.0)


@torch.no_grad()
def find_reach(encode: Callable[[Tensor], Tensor], samples_per_frame: int) -> tuple[int, int] | None:
    """Return how many frames before a frame and behind it what is encoded depends on; None where that is not bounded.

    One frame is no number. Sums and products with it are none either, whatever the weights: so the frames that become
    none are all that the layers connect with it, on any audio.

    Args:
        encode: audio (1, samples) -> (1, channels, frames).
    """
    middle = _REACH_FRAMES // 2
    audio = torch.zeros(1, _REACH_FRAMES * samples_per_frame)
    audio[:, middle * samples_per_frame : (middle + 1) * samples_per_frame] = torch.nan
    connected = encode(audio)[0].isnan().any(dim=0).nonzero().flatten().tolist()
    if not connected or connected[0] == 0 or connected[-1] == _REACH_FRAMES - 1:
        return None
    # A frame that the middle one changes has it behind itself, or before.
    return max(0, connected[-1] - middle), max(0, middle - connected[0])


def unit_embeddings(embeddings: Tensor, audio: Tensor) -> Tensor:
    """Scale embeddings to length 1 and replace those of silence by zeros.

    A network gives digital silence a vector like any other, the same for every silent utterance, so that silence
    would be the best match for silence. A zero vector is similar to nothing.

    Args:
        embeddings: (batch, embedding_size); a row with NaN, as from a division by a zero norm, counts as silence.
        audio: (batch, samples), zero beyond each item's end.

    Returns:
        (batch, embedding_size) float32, where ``embeddings`` are.
    """
    embeddings = functional.normalize(embeddings.float(), dim=1)
    voiced = (audio != 0).any(dim=1).to(embeddings.device) & embeddings.isfinite().all(dim=1)
    return torch.where(voiced[:, None], embeddings, 0.0)


def weights_checksum(state: Mapping[str, Tensor]) -> str:
    """Return the xxh3 (16 hex digits) of a state dict: names, types, shapes and bytes, in the order of the names.

    A state dict has the parameters and the saved buffers; buffers that are not saved, such as caches which grow with
    the longest input so far, say nothing about the model.
    """
    digest = xxhash.xxh3_64()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
