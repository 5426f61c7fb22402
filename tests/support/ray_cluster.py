"""A real Ray on this machine, listening on 127.0.0.1 only."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tenacity import Retrying, stop_after_attempt

# Ray listens on all interfaces unless it takes itself for a cluster of one machine, which this makes it do. It is read
# when Ray is imported.
LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A node that is gone is noticed within seconds.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
NODE = {"node_ip_address": "127.0.0.1", "object_store_memory": 100_000_000, "include_dashboard": False}


def patiently(start: Callable[..., Any], **options: Any) -> Any:
    """Start a node again if it is not up within Ray's 30 s, since the machine may be busy."""
    return Retrying(stop=stop_after_attempt(3), reraise=True)(start, **options)


@pytest.fixture(scope="session")
def ray_folder() -> Iterator[Path]:
    """Folder for Ray's files and sockets, whose names must be short."""
    folder = Path(tempfile.mkdtemp(prefix="sr-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def cluster(ray_folder: Path) -> Iterator[Any]:
    """A cluster with one node of two CPUs; tests may add nodes and remove them again."""
    before = dict(os.environ)
    os.environ.update(LOOPBACK, RAY_TMPDIR=str(ray_folder))
    import ray
    from ray.cluster_utils import Cluster

    cluster = patiently(Cluster, initialize_head=True, head_node_args=NODE | {"num_cpus": 2})
    os.environ["RAY_ADDRESS"] = cluster.address
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    os.environ.clear()
    os.environ.update(before)
