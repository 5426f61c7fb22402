"""Run the GPU benchmarks from the archive that this file is the ``__main__`` of: ``python3 bench-gpu.pyz``.

Python's standard library is all that it needs before it has unpacked the wheels beside a machine's own torch,
torchaudio and transformers. Nothing is installed into the machine's Python, and nothing is fetched.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

NEEDED = ("torch", "torchaudio", "transformers", "numpy", "yaml")
# For the last line of figures, and for Python to end.
SPARE_SECONDS = 10.0


def unpack(archive: Path, folder: Path) -> dict[str, str]:
    """Unpack the archive, install its wheels into a folder, and return the environment of the program."""
    with zipfile.ZipFile(archive) as found:
        found.extractall(folder)
    # One wheel for each interpreter lies there, of which pip takes what fits.
    names = sorted({wheel.name.split("-")[0] for wheel in (folder / "wheels").glob("*.whl")})
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    pip += ["--no-index", "--no-deps", "--find-links", str(folder / "wheels"), "--target", str(folder / "site")]
    subprocess.run([*pip, *names], check=True)
    paths = [str(folder / "site"), str(folder / "program")]
    # Compiled codecs are made anew each time, and leave nothing behind.
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
    return {**os.environ, **cache, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def main() -> int:
    started = time.time()
    parser = argparse.ArgumentParser(prog="python3 bench-gpu.pyz", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the program out")
    parser.add_argument("--seconds", type=float, default=520.0, help="the end, from the start of this (default 520)")
    parser.add_argument("--json", type=Path, default=Path("bench-gpu.json"), help="all figures (default %(default)s)")
    parser.add_argument("--rows", nargs="*", default=[""], help="the rows whose names begin so (default all)")
    options = parser.parse_args()
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        parser.error(f"{sys.executable} has no {', '.join(missing)}: use the Python that has torch, torchaudio and "
                     "transformers")  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as name:
        folder = Path(name)
        environment = unpack(Path(__file__).parent, folder)
        print(f"unpacked after {time.time() - started:.0f} s", flush=True)
        command = [sys.executable, "-m", "bench_gpu.program", "--device", options.device]
        command += ["--until", str(started + options.seconds - SPARE_SECONDS), "--folder", str(folder / "data")]
        command += ["--json", str(options.json), "--rows", *options.rows]
        program = subprocess.Popen(command, env=environment)
        try:
            status = program.wait(started + options.seconds - time.time())
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()
            print(f"ended after {options.seconds:.0f} s in the middle of a row; all before it is in {options.json}")
            return 1
    if status == 2:
        return status  # there is no GPU, and the program has said so
    print(f"done after {time.time() - started:.0f} s; all figures are in {options.json}")
    return status


if __name__ == "__main__":
    sys.exit(main())
