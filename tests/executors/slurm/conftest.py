"""A fake cluster: a few scripts in place of SLURM's commands."""

import os
from pathlib import Path

import pytest

from sharmill.executors.slurm import queue as slurm_queue


class Cluster:
    """Scripts in place of SLURM's commands. Each records its calls, and fails for its first ``fails`` calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script("scontrol", "echo 'ClusterName             = here'; echo 'MaxArraySize            = 4'")
        # submitit recognizes a cluster by its srun command.
        self.script("srun", "exit 1")
        self.script("squeue", "true")
        self.script("scancel", 'echo "$@" >> cancelled')
        self.script(
            "sbatch", 'cp "$1" script.$(wc -l < sbatch.calls); echo Submitted batch job $(wc -l < sbatch.calls)'
        )

    def script(self, name: str, does: str, *, fails: int = 0, says: str = "") -> None:
        path = self.folder / name
        path.write_text(
            f"#!/bin/bash\ncd {self.folder}\necho call >> {name}.calls\n"
            f'if (( $(wc -l < {name}.calls) <= {fails} )); then echo "{says}" >&2; exit 1; fi\n{does}\n'
        )
        path.chmod(0o755)

    def calls(self, name: str) -> int:
        return len((self.folder / f"{name}.calls").read_text().splitlines())

    def scripts(self) -> list[str]:
        """Return the scripts that were passed to sbatch."""
        return [path.read_text() for path in sorted(self.folder.glob("script.*"))]


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm_queue, "_PAUSE_SECONDS", 0.01)
    return Cluster(folder)
