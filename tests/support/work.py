"""Functions for processes that import them by name: feeders, workers of ``parallel_map``, training steps."""

import ctypes
import errno
import os
import signal
import sys
import time

import numpy as np


def half(number):
    return number / 2


def inverse(number):
    return 1 / number


def family(number):
    return os.getpid(), os.getppid()


def slow(number):
    time.sleep(0.02)
    return number


def end(number):
    os._exit(3)


def killed_at_2(number):
    """As the kernel does where there is no memory left."""
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


class Decoder:
    """Task of a feeder: a word selects the behaviour, a number is the size of the returned array."""

    def __call__(self, task):
        if task[0] == "parts":
            yield from (np.full(1 << 20, number, np.int32) for number in range(task[1]))
        else:
            yield self.do(*task)

    def do(self, kind, value):
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "segfault":
            ctypes.string_at(0)
        elif kind == "hang":
            time.sleep(1000)
        elif kind == "exit":
            os._exit(value)
        elif kind == "no memory":
            raise MemoryError
        elif kind == "fail":
            raise OSError(errno.EIO, "a bad disk", value)
        elif kind == "odd error":
            raise OddError(1, 2)
        elif kind == "sleep":
            time.sleep(value)
        elif kind == "pid":
            return os.getpid()
        elif kind == "modules":
            return {name.partition(".")[0] for name in sys.modules}
        elif kind == "array":
            return np.arange(value, dtype=np.int16), np.full(3, value, np.float32)
        return value


class OddError(Exception):
    """An error that cannot be made again from its arguments."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class NotHere:
    """A function whose module the worker cannot import."""

    def __reduce__(self):
        return __import__, ("sharmill_no_such_module",)

    def __call__(self, item):
        return item


def killed(batch_size: int, length: float, num_tokens: int | None, device: str) -> None:
    """Kill the process like the kernel without memory, from 6 items on."""
    if batch_size > 5:
        os.kill(os.getpid(), signal.SIGKILL)


def aborts_for_memory(batch_size: int, length: float, num_tokens: int | None, device: str) -> None:
    """As a C++ library does that nobody catches: from 7 items on."""
    if batch_size > 6:
        os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n")
        os.abort()


def hangs(batch_size: int, length: float, num_tokens: int | None, device: str) -> None:
    if batch_size > 1:
        time.sleep(600)


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
