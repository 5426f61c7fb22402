"""A node of a Ray cluster inside a SLURM allocation: what each task of ``jobs/sbatch/ray.sbatch`` runs.

``python -m sharmill.executors.ray.node HEAD_ADDRESS PORT`` starts the head where SLURM_NODEID is 0 and a worker
elsewhere, with this node's share of cores and GPUs and files of its own, and takes them down when it is told to end.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from types import FrameType

from tenacity import Retrying, retry_if_result, stop_after_attempt, wait_fixed

# A Python file that starts a worker in the place of ``ray``; for trials on one host, see jobs/sbatch/ray.sbatch.
WORKER_VARIABLE = "SHARMILL_RAY_WORKER"
_RAY = ("-c", "from ray.scripts.scripts import main; main()")
_SECONDS_TO_END = 10
_MOST_STARTS = 3
_SECONDS_BETWEEN_STARTS = 2.0
_OBJECT_STORE_BYTES = 200_000_000  # units and commit records are small, and all else goes through files


def node_command(head: str, port: int, folder: Path, environment: Mapping[str, str]) -> list[str]:
    """Return the command that starts this node and stays until it is ended."""
    is_head = environment.get("SLURM_NODEID", "0") == "0"
    worker = environment.get(WORKER_VARIABLE)
    program = [worker] if worker and not is_head else _RAY
    command = [sys.executable, "-P", *program, "start", "--block", "--disable-usage-stats"]
    if is_head:
        command += ["--head", f"--port={port}", "--include-dashboard=false", f"--ray-client-server-port={free_port()}"]
        command += [f"--node-ip-address={head}"]
    else:
        address = head if ip_address(head).is_loopback else address_towards(head, port)
        command += [f"--address={head}:{port}", f"--node-ip-address={address}"]
    # Other jobs may have a node on the same host: every port is one that is free, as are those of the workers.
    command += ["--min-worker-port=0", "--max-worker-port=0", f"--dashboard-agent-listen-port={free_port()}"]
    cores = environment.get("SLURM_CPUS_PER_TASK") or environment.get("SLURM_CPUS_ON_NODE", "1")
    gpus = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    command += [f"--num-cpus={cores}", f"--num-gpus={len(gpus)}", f"--object-store-memory={_OBJECT_STORE_BYTES}"]
    # A worker started as usual takes the head's folder, which would be shared by nodes on one host.
    return [*command, f"--temp-dir={folder}"]


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def address_towards(host: str, port: int) -> str:
    """Return the address that this host has on the network on which it reaches ``host``; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


class RayNode:
    """A node that is kept running until it is told to end."""

    def __init__(self, head: str, port: int) -> None:
        self._head = head
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._told_to_end = False

    def run(self) -> int:
        """Return Ray's exit status. A node that does not come up, which takes a busy host longer than Ray waits, or
        that fails later, is started again."""
        signal.signal(signal.SIGTERM, self._end)
        # A worker whose head is gone may not listen. What it leaves behind, SLURM ends with the step.
        signal.signal(signal.SIGALRM, self._kill)
        retrying = Retrying(
            stop=stop_after_attempt(_MOST_STARTS),
            wait=wait_fixed(_SECONDS_BETWEEN_STARTS),
            retry=retry_if_result(lambda status: status != 0 and not self._told_to_end),
            retry_error_callback=lambda state: state.outcome.result(),  # type: ignore[union-attr]
        )
        return int(retrying(self._run_once))

    def _run_once(self) -> int:
        # Short, for the names of Ray's sockets have to be.
        folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        # The driver has ended when a node is told to, so there is nothing that it should wait for.
        environment = {**os.environ, "RAY_TMPDIR": str(folder), "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
        try:
            command = node_command(self._head, self._port, folder, os.environ)
            self._process = subprocess.Popen(command, env=environment)
            if self._told_to_end:
                self._end()
            return self._process.wait()
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _end(self, number: int = 0, frame: FrameType | None = None) -> None:
        self._told_to_end = True
        if self._process is not None:
            self._process.terminate()
            signal.alarm(_SECONDS_TO_END)

    def _kill(self, number: int, frame: FrameType | None) -> None:
        assert self._process is not None
        self._process.kill()


def run_node(arguments: Sequence[str]) -> int:
    """Run the node until SIGTERM and return Ray's exit status."""
    return RayNode(arguments[0], int(arguments[1])).run()


if __name__ == "__main__":
    sys.exit(run_node(sys.argv[1:]))
