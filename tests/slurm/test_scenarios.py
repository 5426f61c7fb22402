"""Real faults on a cluster: the bytes stay the same, and only units in progress are processed again."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from support.project import raises
from support.toy_cluster import (
    KILL_NODE,
    SETUP,
    assert_same_as_local,
    make_profile,
    running_ranks,
    slurm,
    wait_for_units,
)
from support.toy_stage import wait_until

from sharmill.engine.launch import read_attempts
from sharmill.errors import FatalError
from sharmill.executors.slurm.executor import wait_for_end
from sharmill.executors.slurm.queue import queued_jobs

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def finish(run, folder, record_property, units_lost: int) -> None:
    """Wait for the end of a run, and compare it with a local one; the JUnit file shows the number of repeated units."""
    assert wait_for_end(run.run_dir).state == "done"
    assert_same_as_local(run, folder)
    record_property("units redone", run.stage.redone())
    assert run.stage.redone() <= units_lost


def cancel_rank(run) -> int:
    slurm("scancel", running_ranks(run)[0])
    return 1


def kill_rank_task(run) -> int:
    """Kill the process of the task itself, which is the supervisor of its rank."""
    slurm("scancel", "--signal=KILL", running_ranks(run)[0])
    return 1


def kill_node(run) -> int:
    if not KILL_NODE.exists() or os.getuid() != 0:
        pytest.skip("needs kill_node.sh of the test cluster, as root")
    node = slurm("squeue", "--noheader", "--format=%N", f"--jobs={running_ranks(run)[0]}").strip()
    lost = slurm("squeue", "--noheader", "--array", f"--nodelist={node}", "--format=%i").split()
    subprocess.run(["bash", KILL_NODE, node], check=True)
    return len(lost)


@pytest.mark.parametrize("end", [cancel_rank, kill_rank_task, kill_node])
def test_the_end_of_ranks_costs_at_most_their_units(make_run, tmp_path, record_property, nodes_come_back, end):
    """Another rank repeats the unit, unless the rank ended between two units."""
    run = make_run(units=40, seconds=0.7)
    run.start()
    wait_for_units(run, 4)
    lost = end(run)
    run.stage.mark("hurry")
    finish(run, tmp_path, record_property, lost)


def test_preempted_ranks_are_requeued_and_continue(make_run, tmp_path, record_property):
    """As in configs/clusters/preemptible.yaml, the driver job uses a partition without preemption."""
    profile = make_profile(partition="scavenge", stages={"driver": {"partition": "cpu"}})
    run = make_run(units=120, seconds=3.0, profile=profile)
    advance_job = run.start().jobs[-1]
    # Wait until all ranks run, because a signal during the start of Python would end the process without a requeue.
    wait_until(lambda: len(run.stage.pids()) == 4)
    ranks = running_ranks(run)
    shown = slurm("squeue", "--noheader", "--format=%P", f"--jobs={advance_job},{ranks[0]}")
    assert sorted(shown.split()) == ["cpu", "scavenge"]
    intruder = slurm(
        "sbatch", "--parsable", "--partition=cpu", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 2"
    ).strip()
    for rank in ranks:
        wait_until(lambda rank=rank: restarts(rank), 300)
    slurm("scancel", intruder)
    run.stage.mark("hurry")
    finish(run, tmp_path, record_property, len(ranks))


def test_work_for_longer_than_the_time_limit(make_run, tmp_path, record_property):
    """Two minutes of work for each of four ranks, with a time limit of one minute and a signal 30 s before it."""
    run = make_run(units=200, seconds=2.5, profile=make_profile(timeout_min=1))
    ranks = [job for job in run.start().jobs if "_" in job]
    # SLURM checks limits every 30 s, so on a busy machine the last rank may find no work after its first limit.
    wait_until(lambda: any(restarts(rank) for rank in ranks), 300)
    run.stage.mark("hurry")
    finish(run, tmp_path, record_property, len(ranks))


def test_a_package_missing_on_all_ranks_ends_the_first_launch(make_run, tmp_path):
    """The driver job need not wait for late files, since each rank has noted its end."""
    # Each node takes one rank and has its own host name, as on a cluster of several machines.
    site = tmp_path / "site/sitecustomize.py"
    site.parent.mkdir()
    site.write_text("import os, socket\nsocket.gethostname = lambda: os.environ.get('SLURMD_NODENAME', 'login')\n")
    profile = make_profile(max_ranks=2, cores=5, setup=[*SETUP, f"export PYTHONPATH={site.parent}:$PYTHONPATH"])
    run = make_run(units=6, setup_does="absent", seconds_until_seen=60.0, profile=profile)
    run.start()
    end = wait_for_end(run.run_dir)
    assert (end.code, "the package nemo is not installed" in end.message) == ("missing_package", True)
    assert len(list(run.run_dir.jobs.glob("*_submission.sh"))) == 3
    assert "still not visible here" not in run.run_dir.advance_log.read_text()


def test_a_unit_that_kills_its_ranks_ends_within_a_lease(make_run):
    run = make_run(units=12, behaviour={5: "kill"}, profile=make_profile(max_ranks=3))
    run.start()
    assert wait_for_end(run.run_dir).code == "units_failed"
    noted = run.stage.in_run.with_plan(run.stage.dir.read_token())
    last = read_attempts(noted).failures(5)[-1].time
    assert run.stage.ranks.state.stat().st_mtime - last < noted.options.lease_seconds - 5


def test_ranks_in_an_image_of_apptainer(make_run, tmp_path, record_property):
    """A fake apptainer runs the command that follows the image."""
    apptainer = tmp_path / "bin/apptainer"
    apptainer.parent.mkdir()
    apptainer.write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/calls\nexec "${{@:4}}"\n')
    apptainer.chmod(0o755)
    setup = [*SETUP, f"export PATH={apptainer.parent}:$PATH"]
    python = f"apptainer exec --nv image.sif {sys.executable}"
    run = make_run(units=4, profile=make_profile(max_ranks=2, python=python, setup=setup, driver_units=4))
    run.start()
    finish(run, tmp_path, record_property, 0)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.startswith(f"exec --nv image.sif {sys.executable} -u -m submitit") for call in calls] == [True, True]


def test_a_refused_submission_leaves_no_job_behind(make_run):
    """The ranks are accepted, but the driver job after them is refused."""
    run = make_run(units=8, profile=make_profile(stages={"driver": {"partition": "nowhere"}}))
    with raises(FatalError, "jobs_refused", "invalid partition", "each driver job", "--partition=nowhere"):
        run.start()
    wait_until(lambda: queued_jobs(run.run_dir) == [])


def test_a_lost_answer_of_sbatch_costs_no_unit(make_run, tmp_path, record_property, monkeypatch):
    """In this case, the ranks are submitted twice."""
    run = make_run(units=8, seconds=0.3, profile=make_profile(max_ranks=2))
    lose = f"[ -e {tmp_path}/lost ] || {{ touch {tmp_path}/lost; $real $1; echo Socket timed out >&2; exit 1; }}"
    monkeypatch.setenv("PATH", put_before_sbatch(tmp_path, lose))
    run.start()
    finish(run, tmp_path, record_property, 0)


def put_before_sbatch(folder, line) -> str:
    """Return a search path with an sbatch script that first runs ``line``; ``$real`` is the real command."""
    sbatch = folder / "bin/sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f"#!/bin/bash\nreal={shutil.which('sbatch')}\n{line}\nexec $real $1\n")
    sbatch.chmod(0o755)
    return f"{sbatch.parent}:{os.environ['PATH']}"


def test_a_submission_killed_half_way_can_be_repeated(make_run, tmp_path, record_property):
    import cloudpickle

    run = make_run(units=8, seconds=0.3, profile=make_profile(max_ranks=2))
    (tmp_path / "run.pkl").write_bytes(cloudpickle.dumps(run))
    code = "import cloudpickle, sys; cloudpickle.load(open(sys.argv[1], 'rb')).start()"
    environment = dict(line.removeprefix("export ").split("=", 1) for line in SETUP)
    environment["PATH"] = put_before_sbatch(tmp_path, "grep -q array= $1 || { kill -9 $PPID; exit 1; }")
    command = [sys.executable, "-c", code, tmp_path / "run.pkl"]
    assert subprocess.run(command, env=os.environ | environment, check=False).returncode == -9
    assert "still in the queue, then driver job" in run.start().message
    finish(run, tmp_path, record_property, 0)


@pytest.fixture
def nodes_come_back():
    yield
    for node in ("n1", "n2"):
        command = ["pgrep", "--pidfile", f"/run/slurm-test/slurmd-{node}.pid"]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            slurm(shutil.which("slurmd") or "/usr/sbin/slurmd", "-N", node)
    shown = ("sinfo", "--noheader", "--Node", "--partition=cpu", "--format=%t")
    wait_until(lambda: not {"down", "down*", "idle*"} & set(slurm(*shown).split()))


def restarts(task: str) -> int:
    return int(re.search(r"Restarts=(\d+)", slurm("scontrol", "show", "job", task))[1])
