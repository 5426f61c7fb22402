"""Training steps for batch sizes: some take a known amount of memory, some end in every other way."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import numpy as np

from support.paths import REPOSITORY

MIB = 2**20


def arrays(batch_size: int, length: float, num_tokens: int | None, device: str) -> None:
    """Takes 1 MiB for each second, and 100 KiB for each token, of each item."""
    np.ones(int(batch_size * (length * MIB + (num_tokens or 0) * 100 * 1024)), dtype=np.uint8)


class Optimizer:
    """As ``arrays``, but has 200 MiB of state from the first step on, as optimizers do."""

    def __init__(self) -> None:
        self.state: Any = None

    def __call__(self, batch_size: int, length: float, num_tokens: int | None, device: str) -> None:
        arrays(batch_size, length, num_tokens, device)
        if self.state is None:
            self.state = np.ones(200 * MIB, dtype=np.uint8)


def killed(batch_size: int, length: float, num_tokens: int | None, device: str) -> None:
    """As the kernel does where there is no memory left: from 6 items on."""
    if batch_size > 5:
        os.kill(os.getpid(), signal.SIGKILL)


def aborts_for_memory(batch_size: int, length: float, num_tokens: int | None, device: str) -> None:
    """As a C++ library does that nobody catches: from 7 items on."""
    if batch_size > 6:
        os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n")
        os.abort()


class SpeechStep:
    """Training of the model of the training example, small, on text and codes of 50 frames a second."""

    def __init__(self) -> None:
        import sys

        import torch

        sys.path.insert(0, str(REPOSITORY / "jobs"))
        from speech_lm import SpeechLM
        from train_config import ModelConfig

        self.model = SpeechLM(ModelConfig(dim=64, num_layers=2, num_heads=4), 300, 4, 1026, 320)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def __call__(self, batch_size: int, length: float, num_tokens: int | None, device: str) -> None:
        import torch

        from sharmill.training.speech_text import Kind

        kinds = torch.full((batch_size, 20 + 2 * int(50 * length)), Kind.CODES)
        kinds[:, :20] = Kind.TEXT
        batch = {"kinds": kinds, "spans": kinds, "text_tokens": kinds, "predicted": torch.ones_like(kinds).bool()}
        batch |= {"codes": kinds[:, None].repeat(1, 4, 1), "audio": torch.zeros(0, 320)}
        batch = {name: value.to(device) for name, value in batch.items()}
        self.model.to(device)(batch).total.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def hangs(batch_size: int, length: float, num_tokens: int | None, device: str) -> None:
    if batch_size > 1:
        time.sleep(600)


def short_of_cuda(batch_size: int, length: float, num_tokens: int | None, device: str) -> None:
    """As torch does on a GPU: from 100 items on."""
    import torch

    if batch_size >= 100:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate")


def aborts(batch_size: int, length: float, num_tokens: int | None, device: str) -> None:
    print("the assertion that failed", flush=True)
    os.abort()


def gets_a_real_time_signal(batch_size: int, length: float, num_tokens: int | None, device: str) -> None:
    """``signal.Signals`` has no member for it."""
    os.kill(os.getpid(), signal.SIGRTMIN + 3)


def exits(batch_size: int, length: float, num_tokens: int | None, device: str) -> None:
    sys.exit(3)


def is_wrong(batch_size: int, length: float, num_tokens: int | None, device: str) -> None:
    if batch_size > 3:
        raise ValueError("the shapes do not match")


def wraps(batch_size: int, length: float, num_tokens: int | None, device: str) -> None:
    """As training frameworks do: an error of their own, caused by one of memory."""
    if batch_size > 9:
        try:
            raise MemoryError("no more")
        except MemoryError as error:
            raise RuntimeError("training failed") from error


def tells_its_device(batch_size: int, length: float, num_tokens: int | None, device: str) -> None:
    raise ValueError(f"called with {batch_size} {length} {num_tokens} {device}")


class Tiny:
    """A real model with a real optimizer: two convolutions over 100 frames a second."""

    def __init__(self) -> None:
        import torch

        torch.manual_seed(0)
        convolutions = [torch.nn.Conv1d(16, 64, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv1d(64, 16, 3, padding=1)]
        self.model = torch.nn.Sequential(*convolutions)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def __call__(self, batch_size: int, length: float, num_tokens: int | None, device: str) -> None:
        import torch

        self.model.to(device)
        self.optimizer.zero_grad(set_to_none=True)
        frames = torch.randn(batch_size, 16, round(100 * length), device=device)
        (self.model(frames) - frames).square().mean().backward()
        self.optimizer.step()
