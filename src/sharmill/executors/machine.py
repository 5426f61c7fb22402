"""The state of this machine: versions, GPUs, the file system of a folder, and the clusters that can be reached."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from sharmill.engine.identity import versions
from sharmill.engine.locks import FolderLock
from sharmill.errors import DeviceError, SharmillError
from sharmill.storage import write_atomic

# Packages that every run needs, and those that some do.
_NEEDED: Final = ("torch", "torchaudio", "lhotse", "numpy", "soundfile")
_OPTIONAL: Final = ("nemo_toolkit", "transformers", "pyarrow", "av", "submitit", "ray")
_FEW_BYTES: Final = 10e9
_FEW_INODES: Final = 100_000
_SECONDS_TO_ASK: Final = 10.0
_MAKE_ROOM: Final = "make room: an hour of speech with its contexts takes about 0.2 GB as FLAC"
_MAKE_FILES: Final = "remove small files: a shard has about five files"


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """A thing that was looked at: what was found, and what to do where that is off."""

    name: str
    found: str
    to_do: str = ""


def examine_machine(folder: Path) -> Iterator[Check]:
    """Yield what was found on this machine and in the file system of ``folder``, where datasets are to be made."""
    yield Check(name="python", found=f"{platform.python_version()} on {platform.platform()}")
    yield from _examine_packages()
    cores = len(os.sched_getaffinity(0))
    yield Check(name="cores", found=f"{cores} for this process, {os.cpu_count()} in all")
    yield from _examine_gpus()
    yield from _examine_folder(folder)
    yield _examine_slurm()
    yield _examine_ray()


def _examine_packages() -> Iterator[Check]:
    found = versions(*_NEEDED, *_OPTIONAL)
    yield Check(name="sharmill", found=found["sharmill"])
    for package in _NEEDED:
        absent = found[package] == "absent"
        yield Check(name=package, found=found[package], to_do=f"pip install {package}" if absent else "")
    if found["torch"].partition("+")[0] != found["torchaudio"].partition("+")[0]:
        wanted = found["torch"].partition("+")[0]
        yield Check(name="torch and torchaudio", found="different versions",
                    to_do=f"pip install torchaudio=={wanted}: one is built for the other")  # fmt: skip
    # A dataset may need none of them.
    yield Check(name="optional", found=", ".join(f"{package} {found[package]}" for package in _OPTIONAL))


def _examine_gpus() -> Iterator[Check]:
    from sharmill.executors.devices import visible_gpus
    from sharmill.models.device import check_device, driver_version, explain_missing

    gpus = visible_gpus()
    if gpus:
        try:
            kind = check_device("cuda")
        except DeviceError as error:
            yield Check(name="GPUs", found=f"{len(gpus)}, which cannot be used", to_do=str(error))
        else:
            yield Check(name="GPUs", found=f"{len(gpus)}: {kind}; driver {driver_version()}")
    elif Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi"):
        yield Check(name="GPUs", found="there is one, and torch finds none", to_do=explain_missing())
    else:
        yield Check(name="GPUs", found="none: match and encode run on cores")


def _examine_folder(folder: Path) -> Iterator[Check]:
    """Yield what the file system of a folder can do; what is tried there is removed again."""
    try:
        with tempfile.TemporaryDirectory(prefix="sharmill-doctor-", dir=folder) as name:
            with FolderLock(Path(name)):
                pass
            yield Check(name="locks", found=f"work in {folder.resolve()}")
            first, second = Path(name) / "first", Path(name) / "second"
            write_atomic(first, b"1")
            first.rename(second)
            is_right = second.read_bytes() == b"1" and not first.exists()
            yield Check(name="rename", found="atomic writes and renames work" if is_right else "a renamed file is lost",
                        to_do="" if is_right else "choose another file system for run_dir and dataset_dir")  # fmt: skip
    except (OSError, SharmillError) as error:
        yield Check(name="file system", found=f"{folder.resolve()} cannot be used: {error}",
                    to_do="choose a folder on a file system with locks that you may write to")  # fmt: skip
        return
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    yield Check(name="free space", found=f"{free / 1e9:,.1f} GB",
                to_do="" if free >= _FEW_BYTES else _MAKE_ROOM)  # fmt: skip
    # Some file systems count no inodes, and say 0 of 0.
    if space.f_files:
        yield Check(name="free inodes", found=f"{space.f_favail:,}",
                    to_do="" if space.f_favail >= _FEW_INODES else _MAKE_FILES)  # fmt: skip


def _examine_slurm() -> Check:
    if shutil.which("sbatch") is None:
        return Check(name="SLURM", found="none here")
    try:
        said = subprocess.run(
            ["scontrol", "ping"], capture_output=True, text=True, errors="replace", check=False, timeout=_SECONDS_TO_ASK
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return Check(name="SLURM", found=f"does not answer: {error}", to_do="ask its administrators, or try again")
    line = next(iter((said.stdout or said.stderr).splitlines()), "no answer")
    return Check(name="SLURM", found=line, to_do="" if "UP" in line else "ask its administrators: no controller is up")


def _examine_ray() -> Check:
    found = versions("ray")["ray"]
    if found == "absent":
        return Check(name="Ray", found="not installed")
    address = os.environ.get("RAY_ADDRESS")
    return Check(name="Ray", found=f"{found}, " + (f"cluster at {address}" if address else "RAY_ADDRESS is not set"))
