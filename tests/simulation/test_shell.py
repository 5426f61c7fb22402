"""The simulated shell of a watcher job notes what the real one does."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from support.toy_stage import wait_until

from sharmill.engine.rundir import RunDir
from sharmill.executors.slurm.chain_state import read_state
from sharmill.storage import write_atomic
from simulation.dataset import SimDataset
from simulation.scheduler import shell_notes
from simulation.world import make_chain

# In the place of Python: the status that it ends with, and a file that says that it is there.
_CHILD = 'import os, time; open({ready!r}, "w").close(); time.sleep({seconds}); os._exit({status})'


@pytest.mark.parametrize("status", [0, 1, 255, -signal.SIGKILL, -signal.SIGTERM])
def test_it_notes_a_failure_of_its_python_alone(tmp_path, status):
    script, run_dir = watcher_script(tmp_path, status=max(status, 0), seconds=0 if status >= 0 else 60)
    with subprocess.Popen(["bash", script]) as shell:
        if status < 0:
            (child,) = wait_for_child(tmp_path, shell.pid)
            os.kill(child, -status)
    assert (read_state(run_dir).state == "failed") == shell_notes(status, is_told=False)


def test_it_notes_nothing_where_all_are_told_to_end(tmp_path):
    script, run_dir = watcher_script(tmp_path, status=0, seconds=60)
    with subprocess.Popen(["bash", script]) as shell:
        (child,) = wait_for_child(tmp_path, shell.pid)
        # As SLURM does, whose signal of a job reaches each of its processes.
        for pid in (shell.pid, child):
            os.kill(pid, signal.SIGTERM)
    assert shell.returncode == -signal.SIGTERM
    assert read_state(run_dir).state == "waiting"
    assert not shell_notes(-signal.SIGTERM, is_told=True)


def watcher_script(folder: Path, *, status: int, seconds: float) -> tuple[Path, RunDir]:
    """Return the script that the executor makes, with another command in the place of Python's, and the run."""
    dataset = SimDataset(folder)
    run_dir = RunDir(dataset.run_dir)
    run_dir.path.mkdir()
    write_atomic(run_dir.chain, b'{"state":"waiting","message":""}')
    executor = make_chain(dataset, driver_units=0).executor()
    *lines, command = executor.watcher_script(dataset.make_stages()[0]).rstrip().splitlines()
    assert "submitit" in command
    child = _CHILD.format(ready=str(folder / "ready"), seconds=seconds, status=status)
    script = folder / "script.sh"
    script.write_text("\n".join([*lines, f"python3 -c {shlex.quote(child)}"]) + "\n")
    return script, run_dir


def wait_for_child(folder: Path, shell: int) -> list[int]:
    wait_until((folder / "ready").exists)
    return [int(pid) for pid in Path(f"/proc/{shell}/task/{shell}/children").read_text().split()]
