"""Checks of this machine: versions, GPUs, the file system of a folder, and the reachable clusters."""

import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sharmill.engine.stage import versions
from sharmill.errors import ConfigError, DeviceError, SharmillError
from sharmill.executors.local import Check
from sharmill.files.atomic import write_atomic
from sharmill.files.locks import FolderLock
from sharmill.registry import CODECS, ENCODERS, EXECUTORS

_SHARED_MEMORY: Final = "/dev/shm"
# Packages that every run needs.
_NEEDED: Final = ("torch", "torchaudio", "lhotse", "numpy", "soundfile")


def examine_machine(folder: Path) -> Iterator[Check]:
    """Yield the checks of this machine and of the file system of ``folder``, which is meant for datasets."""
    yield Check("python", f"{platform.python_version()} on {platform.platform()}")
    families = [registry.load(name) for registry in (ENCODERS, CODECS) for name in registry.own]
    of_models = dict.fromkeys(package for family in families for package in family.packages)
    optional = [*of_models, "pyarrow", "av", "submitit", "ray"]
    found = versions(*_NEEDED, *optional)
    yield Check("sharmill", found["sharmill"])
    to_do = {package: f"pip install {package}" for package in _NEEDED if found[package] == "absent"}
    torch, torchaudio = (found[package].partition("+")[0] for package in ("torch", "torchaudio"))
    # From 2.11 on, torchaudio works with any later torch.
    if (
        not to_do.keys() & {"torch", "torchaudio"}
        and torchaudio != torch
        and re.match(r"[01]\.|2\.(\d|10)\.", torchaudio)
    ):
        to_do["torchaudio"] = f"pip install torchaudio=={torch}: torchaudio must have the same version as torch"
    for package in _NEEDED:
        yield Check(package, found[package], to_do.get(package, ""))
    # Missing optional packages are no problem, since a dataset may need none of them.
    yield Check("optional", ", ".join(f"{package} {found[package]}" for package in optional))
    yield Check("cores", f"{len(os.sched_getaffinity(0))} for this process, {os.cpu_count()} in total")
    yield _examine_shared_memory()
    yield _examine_gpus()
    yield from _examine_folder(folder)
    yield _examine_slurm()
    for name in EXECUTORS.names():
        try:
            yield from EXECUTORS.load_class(name).examine()
        except ConfigError as error:
            yield Check(f"executor {name}", "cannot be used", str(error))


def _examine_shared_memory() -> Check:
    """Check the free shared memory, through which worker processes of torch's DataLoader pass their batches."""
    try:
        space = os.statvfs(_SHARED_MEMORY)
    except OSError as error:
        free, found = 0, f"{_SHARED_MEMORY} cannot be used: {error.strerror}"
    else:
        free = space.f_bavail * space.f_frsize
        found = f"{free / 1e9:,.2f} GB free in {_SHARED_MEMORY}"
    return Check(
        "shared memory",
        found,
        "" if free >= 1e9 else "worker processes of a DataLoader need more: start the container with docker run "
        "--shm-size=8g, or mount a larger tmpfs there",
    )  # fmt: skip


def _examine_gpus() -> Check:
    from sharmill.executors.supervisor import visible_gpus
    from sharmill.models.device import check_device, driver_version, explain_missing

    if gpus := visible_gpus():
        try:
            return Check("GPUs", f"{len(gpus)}: {check_device('cuda')}; driver {driver_version()}")
        except DeviceError as error:
            return Check("GPUs", f"{len(gpus)}, but they cannot be used", str(error))
    if Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi"):
        return Check("GPUs", "this machine has a GPU driver, but torch finds no GPU", explain_missing())
    return Check("GPUs", "none: match and encode run on the CPU")


def _examine_folder(folder: Path) -> Iterator[Check]:
    """Yield the checks of the file system of a folder, using temporary files there."""
    place = folder.resolve()
    try:
        with tempfile.TemporaryDirectory(prefix="sharmill-doctor-", dir=folder) as name, FolderLock(Path(name)):
            write_atomic(Path(name) / "file", b"1")
    except (OSError, SharmillError) as error:
        yield Check("file system", f"{place} cannot be used: {error}",
                    "choose a writable folder on a file system that supports locks")  # fmt: skip
        return
    yield Check("file system", f"locks and atomic writes work in {place}")
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    yield Check(
        "free space",
        f"{free / 1e9:,.1f} GB",
        "" if free >= 10e9 else "make room: an hour of speech with its contexts takes about 0.2 GB as FLAC",
    )
    # File systems without a limit on inodes report a total of 0.
    if space.f_files:
        yield Check(
            "free inodes",
            f"{space.f_favail:,}",
            "" if space.f_favail >= 100_000 else "remove small files: a shard has about five files",
        )


def _examine_slurm() -> Check:
    if shutil.which("sbatch") is None:
        return Check("SLURM", "not installed here")
    try:
        said = subprocess.run(
            ["scontrol", "ping"], capture_output=True, text=True, errors="replace", check=False, timeout=10.0
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return Check("SLURM", f"does not answer: {error}", "ask its administrators, or try again")
    line = next(iter((said.stdout or said.stderr).splitlines()), "no answer")
    return Check("SLURM", line, "" if "UP" in line else "ask its administrators: no controller is up")
