"""The memory that is available, a limit on it, and the errors of libraries that are about memory."""

from __future__ import annotations

import errno
import mmap
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from sharmill.errors import ConfigError, FatalError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30,
          "TIB": 2**40}  # fmt: skip
# What torch and the libraries below it say in a plain RuntimeError, and C++ on its way down.
_MESSAGES = (
    # CUDA, HIP, its driver, Triton, NCCL: all in their own sentence.
    "out of memory",
    # cuBLAS, cuDNN, cuFFT, cuSOLVER, cuSPARSE.
    "_ALLOC_FAILED",
    "_ALLOCATION_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "std::bad_alloc",
    "failed to map segment from shared object",
    "Cannot allocate memory",
    # oneDNN says no more when it gets no memory for its code or its workspace.
    "could not create a primitive",
    "could not create a memory",
    "could not execute a primitive",
)


def parse_memory(text: str) -> int:
    """Return the bytes of ``8GiB``, ``500 MB`` or ``1000000``.

    Raises:
        ConfigError: it is none of these, or nothing.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in _UNITS:
        raise ConfigError(f"{text!r} is no size of memory; write it like 8GiB or 500MB", code="bad_config_value")
    size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size <= 0:
        raise ConfigError(f"{text!r} is no memory at all", code="bad_config_value")
    return size


def format_memory(size: float) -> str:
    """Format bytes in GiB."""
    return f"{size / 2**30:.2f} GiB"


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process may still take: of the machine, and of the control groups that it is in."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", (proc / "meminfo").read_text(), re.MULTILINE)
    assert match is not None, "Linux tells what is available since 3.14"
    return min([int(match[1]) * 1024, *_left_in_groups(proc, cgroups)])


def _left_in_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yield the bytes that each control group of this process with a limit leaves; version 2 and version 1."""
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, used = cgroups, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, used = cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = root / path.lstrip("/")
        for group in [folder, *folder.parents][: len(Path(path).parts)]:
            # In a container the path may be that outside of it; the root, which is last, is always its own.
            if (group / limit).is_file() and (text := (group / limit).read_text().strip()) != "max":
                yield max(0, int(text) - int((group / used).read_text()))


def limit_memory(size: int) -> None:
    """Limit the data of this process to ``size`` bytes from now on; what it has already counts.

    By RLIMIT_DATA, which counts private writable memory. RLIMIT_AS would count the libraries of torch as well, and
    address space that is reserved and never used.

    Raises:
        FatalError: the kernel does not enforce it.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    # An abort for lack of memory must not write that memory to the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return
    raise FatalError(
        "this kernel does not enforce RLIMIT_DATA, so that memory on the CPU cannot be limited",
        code="unsupported_system",
    )


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if an exception, or what caused it, is about memory."""
    if error is None:
        return False
    # torch is not imported for this: without it there is no such error.
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.cuda.OutOfMemoryError)):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    # A library that finds no room when it is imported is an ImportError.
    if isinstance(error, (RuntimeError, ImportError)) and mentions_memory(str(error)):
        return True
    return is_out_of_memory(error.__cause__)


def mentions_memory(text: str) -> bool:
    """Return True if a message, or the last output of a process, says that memory was lacking."""
    return any(message in text for message in _MESSAGES)
