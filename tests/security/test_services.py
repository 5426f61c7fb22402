"""What listens on the network: nothing of sharmill's own, and Ray's head on loopback unless nodes lie apart.

No cluster is started here; ``tests/ray`` has one, on 127.0.0.1.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from ipaddress import ip_address
from unittest import mock

import pytest
import start_ranks
from support.paths import REPOSITORY
from torch.distributed import HashStore

from sharmill.executors.ray_node import WORKER_VARIABLE, node_command

SOURCES = [path for folder in ("src", "jobs", "pipelines") for path in sorted((REPOSITORY / folder).rglob("*"))
           if path.suffix in (".py", ".sbatch", ".sh")]  # fmt: skip
SERVER = re.compile(r"\.listen\(|http\.server|socketserver|TCPServer|start_server|uvicorn|flask|\.serve\(", re.I)


def options(command: list[str]) -> dict[str, str]:
    return dict(part[2:].split("=", 1) for part in command if part.startswith("--") and "=" in part)


@pytest.fixture
def head(tmp_path):
    """Returns a function: address of the head, node number -> the options of the node's command."""

    def make(address: str, node: int = 0) -> dict[str, str]:
        return options(node_command(address, 6379, tmp_path, {"SLURM_NODEID": str(node), "SLURM_CPUS_PER_TASK": "2"}))

    return make


def test_the_head_of_one_machine_stays_on_loopback(head):
    assert head("127.0.0.1")["node-ip-address"] == "127.0.0.1"
    assert head("127.0.0.1", node=1)["node-ip-address"] == "127.0.0.1"


def test_no_head_has_a_dashboard(head):
    for address in ("127.0.0.1", "10.0.0.7"):
        assert head(address)["include-dashboard"] == "false"


def test_no_node_listens_on_every_address_by_its_options(head):
    for node in (0, 1):
        assert not {"0.0.0.0", "::", ""} & set(head("127.0.0.1", node).values())


def test_a_cluster_in_an_allocation_asks_for_a_token_of_its_own():
    script = (REPOSITORY / "jobs/sbatch/ray.sbatch").read_text()
    started = script.index('sharmill.executors.ray_node "$head_address"')
    assert script.index("export RAY_AUTH_MODE=token") < started
    assert script.index("secrets.token_hex(32)") < started
    # Where all nodes are one machine, Ray is told to believe it.
    assert "127.*) export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0" in script[:started]


def test_only_a_worker_of_a_trial_is_started_by_another_program(tmp_path):
    started = {
        (node, worker): node_command("127.0.0.1", 6379, tmp_path, {"SLURM_NODEID": node, WORKER_VARIABLE: worker})[2]
        for node in ("0", "1")
        for worker in ("", "worker.py")
    }
    assert started == {("0", ""): "-c", ("0", "worker.py"): "-c", ("1", ""): "-c", ("1", "worker.py"): "worker.py"}


def test_nothing_of_our_own_listens():
    assert len(SOURCES) > 100
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES}
    assert [path for path, text in texts.items() if SERVER.search(text) or "0.0.0.0" in text] == []


@pytest.fixture
def asked(tmp_path):
    """Returns a function: number of nodes -> words that train.sbatch asks a stub of srun to run, and its variables."""
    stubs = {
        "scontrol": 'case "$*" in *hostnames*) printf "node1\\nnode2\\n" ;; *node1) echo "NodeAddr=localhost x" ;; '
        '*) echo "NodeAddr=127.0.0.1 x" ;; esac',
        "python": f'exec {sys.executable} {REPOSITORY}/"$@"',
        "srun": 'printf "%s\\n" "$@" "gloo=$GLOO_SOCKET_IFNAME" "nccl=$NCCL_SOCKET_IFNAME" "id=$PET_RDZV_ID"',
    }
    for name, line in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)

    def ask(nodes: int) -> list[str]:
        environment = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_CPUS_PER_TASK": "1", "SLURM_SUBMIT_DIR": str(tmp_path),
        }  # fmt: skip
        script = REPOSITORY / "jobs/sbatch/train.sbatch"
        return subprocess.run(
            ["bash", str(script), "x.yaml"], env=environment, capture_output=True, text=True, check=True, timeout=60
        ).stdout.splitlines()

    return ask


def test_nodes_of_a_training_meet_at_a_random_place_where_nothing_is_unpickled(asked):
    one, other = asked(2), asked(2)
    assert {"--rdzv-backend=bound", "--nnodes=2", "jobs/train.py", "x.yaml"} <= set(one)
    assert any(re.fullmatch(r"--rdzv-endpoint=127\.0\.0\.1:2\d{4}", word) for word in one)
    assert re.fullmatch(r"id=[0-9a-f]{32}", one[-1])
    assert one[-1] != other[-1]
    assert any('"--node-rank=$SLURM_NODEID" "--rdzv-conf=rank=$SLURM_NODEID"' in word for word in one)


def test_a_training_on_one_node_stays_on_loopback(asked):
    one = asked(1)
    assert {"--rdzv-backend=bound", "--rdzv-endpoint=127.0.0.1:0", "--nnodes=1", "gloo=lo", "nccl=lo"} <= set(one)
    assert not any("standalone" in word for word in one)


@pytest.mark.parametrize(("host", "nodes"), [("127.0.0.1", 2), ("localhost", 1), ("mine", 2)])
def test_the_store_is_bound_to_an_address_that_the_nodes_reach(host, nodes, monkeypatch):
    """The first node may know its own name as an address of loopback beside another, which is here 127.0.0.1."""
    look_up = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *rest, **options: [
        *(look_up("127.0.1.1", *rest, **options) if name == "mine" else []),
        *look_up("127.0.0.1" if name == "mine" else name, *rest, **options),
    ])  # fmt: skip
    if host == "mine":
        monkeypatch.setattr(start_ranks, "ip_address", lambda text: mock.Mock(is_loopback=text == "127.0.1.1"))
    bound = []
    monkeypatch.setattr(start_ranks, "TCPStore", lambda *_, master_listen_fd, **__: bound.append(
        socket.socket(fileno=master_listen_fd)
    ) or HashStore())  # fmt: skip
    start_ranks.BoundRendezvous(host, 0, 0, nodes, "id", 5).next_rendezvous()
    (listener,) = bound
    assert ip_address(listener.getsockname()[0]).is_loopback
    assert listener.getsockname()[0] != "127.0.1.1"
    listener.close()


def test_a_name_that_other_nodes_cannot_reach_is_refused_in_one_line():
    with pytest.raises(SystemExit, match="Error: --rdzv-endpoint: on this node localhost") as end:
        start_ranks.BoundRendezvous("localhost", 0, 0, 2, "id", 5).next_rendezvous()
    assert "\n" not in str(end.value)


# Prints every address that a process of this training listens on, once all ranks have met.
LISTENERS = """
import os, socket
from pathlib import Path
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    group = [os.getppid(), *map(int, Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split())]
    links = [os.readlink(fd) for pid in group for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = row.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in links:
                print("listens", words[1].partition(":")[0])
    print("met", dist.get_world_size())
dist.barrier()
"""


@pytest.mark.slow
def test_the_store_and_the_ranks_of_one_node_listen_on_loopback_alone(tmp_path):
    (tmp_path / "ranks.py").write_text(LISTENERS)
    command = [
        sys.executable, str(REPOSITORY / "jobs/start_ranks.py"), "--nnodes=1", "--node-rank=0", "--nproc-per-node=2",
        "--rdzv-backend=bound", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-conf=rank=0", str(tmp_path / "ranks.py"),
    ]  # fmt: skip
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")
    assert "met 2" in lines
    # The store of the first node, and one socket of each rank: 127.0.0.1, byte by byte.
    assert [line for line in lines if line.startswith("listens")] == ["listens 0100007F"] * 3
