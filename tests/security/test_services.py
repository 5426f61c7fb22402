"""Network listeners: sharmill has none of its own, and Ray's head uses loopback unless nodes are on other machines.

No cluster is started here; ``tests/ray`` starts one on 127.0.0.1.
"""

import os
import re
import subprocess
import sys

import pytest
from support.project import REPOSITORY

from sharmill.executors.ray_node import node_command


@pytest.mark.parametrize(("address", "node"), [("127.0.0.1", 0), ("127.0.0.1", 1), ("10.0.0.7", 0)])
def test_a_local_head_uses_loopback_and_has_no_dashboard(address, node, tmp_path):
    environment = {"SLURM_NODEID": str(node), "SLURM_CPUS_PER_TASK": "2"}
    command = node_command(address, 6379, tmp_path, environment)
    assert ("--include-dashboard=false" in command) == (node == 0)
    assert ("--node-ip-address=127.0.0.1" in command) == (address == "127.0.0.1")


def test_a_cluster_in_an_allocation_asks_for_a_token_of_its_own():
    script = (REPOSITORY / "jobs/sbatch/ray.sbatch").read_text()
    started = script.index('sharmill.executors.ray_node "$head_address"')
    assert script.index("export RAY_AUTH_MODE=token") < started
    assert script.index("secrets.token_hex(32)") < started
    # If all nodes are on one machine, Ray must be told.
    assert "127.*) export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0" in script[:started]


@pytest.fixture
def asked(tmp_path):
    """Return a function from a number of nodes to the arguments and variables that train.sbatch passes to srun."""
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


def test_nodes_meet_at_a_random_port_without_unpickling(asked):
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


# Prints every address that a process of this training listens on, after all ranks have met.
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
def test_store_and_ranks_of_one_node_listen_on_loopback_only(tmp_path):
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
