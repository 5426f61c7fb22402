"""Make the archive of the GPU benchmarks: ``python tests/bench_gpu/archive.py build/bench-gpu.pyz``.

It has the project's wheel, the wheels that a machine with only torch, torchaudio and transformers lacks, for several
versions of Python on x86-64 Linux, and the program. It fetches them from the package index.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
# What the stages import beyond what torch, torchaudio and transformers bring.
MISSING = ("cffi", "msgspec", "pycparser", "soundfile", "soxr", "tenacity", "xxhash")
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = ("2_28", "2_27", "2_17")
PROGRAM = ("bench_gpu/__init__.py", "bench_gpu/models.py", "bench_gpu/program.py", "bench_gpu/rows.py",
           "support/__init__.py", "support/manifests.py", "support/models.py", "support/shar.py")  # fmt: skip
MOST_BYTES = 60 * 10**6


def pinned() -> list[str]:
    """Return the missing packages in the versions of the tests."""
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    found = [line for line in lines if line.partition("==")[0].lower() in MISSING]
    assert len(found) == len(MISSING), found
    return found


def fetch_wheels(folder: Path) -> None:
    """Fetch the wheels of the missing packages for each version of Python."""
    platforms = [f"--platform=manylinux_{version}_x86_64" for version in PLATFORMS]
    for version in PYTHONS:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", version, *platforms]
        subprocess.run([*command, "--platform=manylinux2014_x86_64", "--dest", str(folder), *pinned()], check=True)


def build_wheel(folder: Path) -> None:
    """Build the project's wheel, from a copy of what it is made of."""
    with tempfile.TemporaryDirectory() as name:
        source = Path(name)
        for file in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(REPOSITORY / file, source)
        shutil.copytree(REPOSITORY / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
        subprocess.run([*command, "--wheel-dir", str(folder), str(source)], check=True)


def make_archive(path: Path, wheels: Path) -> None:
    """Write the archive, which Python runs, from a folder of wheels.

    Raises:
        ValueError: it is too large.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(Path(__file__).with_name("launch.py"), "__main__.py")
        for name in PROGRAM:
            archive.write(REPOSITORY / "tests" / name, f"program/{name}")
        for wheel in sorted(wheels.glob("*.whl")):
            archive.write(wheel, f"wheels/{wheel.name}")
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes, more than {MOST_BYTES:,}")


def main() -> None:
    path = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as name:
        wheels = Path(name)
        build_wheel(wheels)
        fetch_wheels(wheels)
        make_archive(path, wheels)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB; run it with: python3 {path}")


if __name__ == "__main__":
    main()
