"""Programs on a machine with another /dev/shm, as in a container."""

import subprocess
import sys
from typing import Any

import pytest


def run_with_shm(options: str, *arguments: Any, seconds: float = 120) -> subprocess.CompletedProcess[str]:
    """Run Python with /dev/shm mounted with these tmpfs options; skip if mounting is not permitted."""
    mount = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o {options} tmpfs /dev/shm && exec "$@"', "sh"]
    command = [*mount, sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip("this machine allows no mounts")
    return done
