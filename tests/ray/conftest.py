"""A real Ray on this machine, listening on 127.0.0.1 only, and the toy stage on it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.ray_cluster import patiently
from support.ray_node import NODE
from support.toy_stage import RecordingListener, is_running, wait_until

from sharmill.engine.run import locked, run_stage
from sharmill.executors.ray.executor import RayExecutor


def pytest_collection_modifyitems(items):
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.ray)
        if find_spec("ray") is None:
            item.add_marker(pytest.mark.skip(reason="ray is not installed: pip install 'sharmill[ray]'"))


@pytest.fixture
def add_node(cluster):
    """Returns a function that adds a node, which is gone after the test."""
    added = []

    def add(**options):
        added.append(patiently(cluster.add_node, **NODE, **options))
        return added[-1]

    yield add
    for node in added:
        if node in cluster.worker_nodes:
            cluster.remove_node(node)


_WITHOUT_DRIVERS_FOLDER = """
import os


def chdir(path):
    raise FileNotFoundError(2, "No such file or directory")


os.chdir = chdir
"""
_WITHOUT_NAMED_FOLDER = """
import os

stat = os.stat


def stat_without(path, *args, **options):
    if str(path).startswith({!r}):
        raise FileNotFoundError(2, "No such file or directory")
    return stat(path, *args, **options)


os.stat = stat_without
"""


@pytest.fixture
def add_blind_node(add_node, tmp_path):
    """Returns a function that adds a node whose processes do not see a folder: the driver's own, or a named one."""
    folder = tmp_path / "blind"
    folder.mkdir()

    def add(hidden=None, **resources):
        source = _WITHOUT_DRIVERS_FOLDER if hidden is None else _WITHOUT_NAMED_FOLDER.format(str(hidden))
        (folder / "sitecustomize.py").write_text(source)
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        return add_node(env_vars={"PYTHONPATH": path}, **resources)

    return add


@pytest.fixture
def on_ray(cluster):
    """Returns a function that runs a toy stage as the pipeline would; afterwards none of its actors may be left."""
    stages = []

    def run(stage, workers="auto", *, max_reject_fraction=0.5, **options):
        stages.append(stage)
        heard = RecordingListener()
        executor = RayExecutor(workers=workers, address=cluster.address, **options)
        with locked(stage.run_dir) as lock:
            result = run_stage(stage, executor, heard, max_reject_fraction=max_reject_fraction, unlocked=lock.released)
        return result, heard

    yield run
    wait_until(lambda: not any(is_running(pid) for stage in stages for pid in stage.pids() - {os.getpid()}))


@pytest.fixture
def start(cluster):
    """Returns a function that starts a Python program as a driver of the cluster, in a process group of its own."""
    started: list[subprocess.Popen] = []

    def start(*arguments, **options) -> subprocess.Popen:
        command = [sys.executable, *map(str, arguments)]
        started.append(subprocess.Popen(command, start_new_session=True, text=True, **options))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
        process.wait()
