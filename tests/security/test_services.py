"""What listens on the network: nothing of sharmill's own, and Ray's head on loopback unless nodes lie apart.

No cluster is started here; ``tests/ray`` has one, on 127.0.0.1.
"""

from __future__ import annotations

import os
import re
import subprocess

import pytest
from support.paths import REPOSITORY

from sharmill.executors.ray.node import WORKER_VARIABLE, node_command

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
    started = script.index('sharmill.executors.ray.node "$head_address"')
    assert script.index("export RAY_AUTH_MODE=token") < started
    assert script.index("secrets.token_hex(32)") < started
    # Where all nodes are one machine, Ray is told to believe it.
    assert "127.*) export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0" in script[:started]


def test_only_a_worker_of_a_trial_is_started_by_another_program(tmp_path):
    started = {
        (node, worker): node_command("127.0.0.1", 6379, tmp_path, {"SLURM_NODEID": node, WORKER_VARIABLE: worker})[1]
        for node in ("0", "1")
        for worker in ("", "worker.py")
    }
    assert started == {("0", ""): "-c", ("0", "worker.py"): "-c", ("1", ""): "-c", ("1", "worker.py"): "worker.py"}


def test_nothing_of_our_own_listens():
    assert len(SOURCES) > 100
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES}
    assert [path for path, text in texts.items() if SERVER.search(text) or "0.0.0.0" in text] == []


def test_nodes_of_a_training_meet_at_a_random_place_where_nothing_is_unpickled(tmp_path):
    """The script for two nodes, with a SLURM that prints what it is asked to run."""
    stubs = {
        "scontrol": 'if [[ $2 == hostnames ]]; then echo node1; else echo "NodeAddr=10.0.0.1 x"; fi',
        "srun": 'printf "%s\\n" "$@" "id=$PET_RDZV_ID"',
    }
    for name, line in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1", "SLURM_SUBMIT_DIR": str(tmp_path),
    }  # fmt: skip

    def asked() -> list[str]:
        script = REPOSITORY / "jobs/sbatch/train.sbatch"
        return subprocess.run(
            ["bash", str(script), "x.yaml"], env=environment, capture_output=True, text=True, check=True, timeout=60
        ).stdout.splitlines()

    one, other = asked(), asked()
    assert {"--rdzv-backend=static", "--master-addr=10.0.0.1", "--nnodes=2", "jobs/train.py", "x.yaml"} <= set(one)
    assert re.fullmatch(r"id=[0-9a-f]{32}", one[-1])
    assert one[-1] != other[-1]
    assert any("--node-rank=$SLURM_NODEID" in word for word in one)
