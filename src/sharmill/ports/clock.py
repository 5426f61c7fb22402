"""The clock: the time, by this machine and by the file system, and waiting."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from time import monotonic, sleep, time

__all__ = ["monotonic", "of_folder", "sleep", "time"]


def of_folder(folder: Path) -> float:
    """Return the time of the file system that a folder is on, in Unix seconds, as it stands at files written now.

    Nodes' clocks may be minutes apart. Where this user cannot write there, it is the time of this machine.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\n")
            probe.flush()
            return os.fstat(probe.fileno()).st_mtime
    except OSError:
        return time()
