"""A real Ray cluster on this machine, on 127.0.0.1 only, and toy stages on it."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.ray_cluster import NODE, patiently
from support.toy_stage import is_running, run, wait_until

from sharmill.executors.ray import RayExecutor


def pytest_collection_modifyitems(items):
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.ray)
        if find_spec("ray") is None:
            item.add_marker(pytest.mark.skip(reason="ray is not installed: pip install 'sharmill[ray]'"))


@pytest.fixture
def add_node(cluster):
    """Return a function that adds a node, which is removed after the test."""
    added = []

    def add(**options):
        added.append(patiently(cluster.add_node, **NODE, **options))
        return added[-1]

    yield add
    for node in added:
        if node in cluster.worker_nodes:
            cluster.remove_node(node)


_BLIND = """
import os

chdir, stat = os.chdir, os.stat


def chdir_where_seen(path):
    if str(path) == {0!r}:
        raise FileNotFoundError(2, "No such file or directory")
    chdir(path)


def stat_where_seen(path, *args, **options):
    if str(path).startswith({0!r} + "/.sharmill"):
        raise FileNotFoundError(2, "No such file or directory")
    return stat(path, *args, **options)


os.chdir, os.stat = chdir_where_seen, stat_where_seen
"""


@pytest.fixture
def add_blind_node(add_node, tmp_path):
    """Return a function that adds a node whose processes do not see a folder: the driver's own, or an output."""

    def add(hidden, **resources):
        (tmp_path / "blind").mkdir()
        (tmp_path / "blind/sitecustomize.py").write_text(_BLIND.format(str(hidden)))
        path = os.pathsep.join([str(tmp_path / "blind"), os.environ["PYTHONPATH"]])
        return add_node(env_vars={"PYTHONPATH": path}, **resources)

    return add


@pytest.fixture
def on_ray(cluster):
    """Return a function that runs a toy stage like the pipeline; none of its actors may be left after the test."""
    stages = []

    def run_there(stage, workers="auto", **options):
        stages.append(stage)
        return run(stage, executor=RayExecutor(workers=workers, address=cluster.address, **options))

    yield run_there
    wait_until(lambda: not any(is_running(pid) for stage in stages for pid in stage.pids() - {os.getpid()}))
