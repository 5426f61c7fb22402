"""A node of a Ray cluster inside a SLURM allocation; each task of ``jobs/sbatch/ray.sbatch`` runs this module.

``python -m sharmill.executors.ray_node HEAD_ADDRESS PORT`` starts the head if SLURM_NODEID is 0, otherwise a worker.
The node uses this task's share of cores and GPUs, has its own files, and is stopped by SIGTERM.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from sharmill.files.host import Terminated, ended_by_sigterm

_RAY = ("-c", "from ray.scripts.scripts import main; main()")


def node_command(head: str, port: int, folder: Path, environment: Mapping[str, str]) -> list[str]:
    """Return the command that starts this node and blocks until it is stopped."""
    is_head = environment.get("SLURM_NODEID", "0") == "0"
    # For trials on one host, a Python file that is run instead of ``ray`` to start a worker; see
    # jobs/sbatch/ray.sbatch.
    worker = environment.get("SHARMILL_RAY_WORKER")
    cores = environment.get("SLURM_CPUS_PER_TASK") or environment.get("SLURM_CPUS_ON_NODE", "1")
    gpus = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    command = [
        sys.executable,
        "-P",
        *([worker] if worker and not is_head else _RAY),
        "start",
        "--block",
        "--disable-usage-stats",
        f"--num-cpus={cores}",
        f"--num-gpus={len(gpus)}",
        # A small object store is enough, because only stages and errors pass through Ray; everything else goes through
        # files.
        "--object-store-memory=200000000",
        # Use free ports everywhere, because another job may have a node on the same host.
        "--min-worker-port=0",
        "--max-worker-port=0",
        f"--dashboard-agent-listen-port={free_port()}",
        # By default, a worker uses the head's folder, which nodes on one host would then share.
        f"--temp-dir={folder}",
    ]
    if is_head:
        command += ["--head", f"--port={port}", "--include-dashboard=false", f"--ray-client-server-port={free_port()}"]
        return [*command, f"--node-ip-address={head}"]
    address = head
    if not ip_address(head).is_loopback:
        # Find the address of this host on the network of the head; connecting a UDP socket sends nothing.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((head, port))
            address = str(probe.getsockname()[0])
    return [*command, f"--address={head}:{port}", f"--node-ip-address={address}"]


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def run_node(head: str, port: int) -> int:
    """Keep a node running until SIGTERM, and return Ray's exit status.

    A node that fails is restarted up to two times, because on a busy host it may need longer than Ray waits.
    """
    status = 128 + signal.SIGTERM
    with suppress(Terminated), ended_by_sigterm():
        for _ in range(3):
            # Use a short path, because the names of Ray's sockets are limited in length.
            with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
                # Nodes are stopped only after the driver has ended, so draining is pointless.
                environment = {**os.environ, "RAY_TMPDIR": folder, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
                process = subprocess.Popen(node_command(head, port, Path(folder), os.environ), env=environment)
                try:
                    status = process.wait()
                finally:
                    process.terminate()
                    try:
                        process.wait(10)
                    except subprocess.TimeoutExpired:
                        # A worker without its head may ignore SIGTERM. SLURM kills its child processes with the step.
                        process.kill()
            if status == 0:
                break
            time.sleep(2)
    return status


if __name__ == "__main__":
    sys.exit(run_node(sys.argv[1], int(sys.argv[2])))
