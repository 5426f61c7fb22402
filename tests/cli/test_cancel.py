"""`sharmill cancel`: it stops the processes and jobs of a run directory, and nothing else."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest
from support.project import REPOSITORY, command, run_sharmill
from support.toy_stage import ToyStage, wait_until

from sharmill.engine.launch import find_workers
from sharmill.engine.run_dir import RunDir, RunOutcome, RunRequest
from sharmill.files.host import state_and_start, this_kernel
from sharmill.files.locks import lock_owner

_HOLD = """
import sys, time
from pathlib import Path
from sharmill.engine.run_dir import RunDir
from sharmill.files import host
from sharmill.files.locks import FolderLock
if len(sys.argv) > 2:
    host.this_kernel = lambda: sys.argv[2]
try:
    with FolderLock(Path(sys.argv[1])) as lock:
        lock.must_end = lambda: RunDir(Path(sys.argv[1])).is_cancelled()
        time.sleep(120)
except KeyboardInterrupt:
    print("ended")
"""


@contextmanager
def ended(process):
    """Ends a process in any case: one that a failed test leaves would be waited for without end."""
    try:
        yield
    finally:
        process.kill()


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "resolved_config.yaml").write_text("{}")
    assert RunDir(tmp_path).config.exists()
    return tmp_path


def cancel(run_dir, *options, environment=None):
    return run_sharmill("cancel", str(run_dir), *options, status=None, env=environment)


@pytest.mark.parametrize("kernel", [[], ["another"]], ids=["of this machine", "of another"])
def test_a_process_that_holds_the_lock_ends_and_leaves_it(run_dir, kernel):
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "src")}
    command = [sys.executable, "-c", _HOLD, run_dir, *kernel]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as holder, ended(holder):
        wait_until(lambda: lock_owner(run_dir))
        done = cancel(run_dir)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"stopped: process {holder.pid} of" in " ".join(done.stdout.split())
        assert holder.communicate()[0] == "ended\n"
    assert lock_owner(run_dir) is None


def leave_lock(run_dir, **record):
    """Write the lock file of a process, as an untrusted file may contain it."""
    (run_dir / ".sharmill-lock").mkdir()
    (run_dir / ".sharmill-lock/owner-1.json").write_text(json.dumps({"host": "node7", "lease_seconds": 0.5} | record))


def test_a_process_that_a_file_names_gets_no_signal(run_dir):
    mark = RunDir(run_dir).outcome
    with subprocess.Popen(["sleep", "120"]) as victim, ended(victim):
        started = state_and_start(victim.pid)[1]
        leave_lock(run_dir, pid=victim.pid, kernel=this_kernel(), process_started=started)
        with subprocess.Popen(command("cancel", run_dir), stdout=subprocess.DEVNULL) as canceller, ended(canceller):
            wait_until(mark.exists)
            # It comes again while the process is waited for.
            mark.unlink()
            wait_until(mark.exists)
            assert (victim.poll(), canceller.poll()) == (None, None)
            victim.kill()
            victim.wait()
            assert canceller.wait() == 0


def test_a_number_that_no_process_has_is_of_none(run_dir):
    leave_lock(run_dir, pid=1 << 62, kernel=this_kernel(), process_started=1)
    done = cancel(run_dir)
    assert (done.returncode, done.stderr, RunDir(run_dir).read_outcome()) == (0, "", None)
    assert "nothing is running" in " ".join(done.stdout.split())


def test_a_folder_that_is_no_run_directory_is_refused(tmp_path):
    done = cancel(tmp_path)
    assert done.returncode == 2
    assert "is not a run directory" in done.stderr


@pytest.fixture
def jobs(run_dir, tmp_path_factory):
    """Stand-ins for SLURM's commands, and a run of which the driver job submits ranks while it is being ended.

    Returns the folder of the commands, which holds what ``scancel`` was asked, and the environment with it.
    """
    folder = tmp_path_factory.mktemp("bin")
    queue = folder / "queue"
    comment = "ada|sharmill:feedfeedfeedfeed"
    queue.write_text(
        f"12_0|RUNNING|None|(null)|{comment}:rank\n13|PENDING|Dependency|afterany:12_*(unfulfilled)|{comment}:advance\n"
        f"14|PENDING|Dependency|afternotok:13(unfulfilled)|{comment}:second\n"
    )
    (folder / "squeue").write_text(f"#!/bin/sh\ncat {queue}\n")
    (folder / "scancel").write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/asked\n'
        f"if grep -q '^13' {queue}; then echo '15_0|PENDING|None|(null)|{comment}:rank' > {queue}; "
        f"else : > {queue}; fi\n"
    )
    for name in ("squeue", "scancel"):
        (folder / name).chmod(0o755)
    paths = RunDir(run_dir)
    paths.id.write_text("feedfeedfeedfeed")
    paths.jobs.mkdir()
    paths.begin(RunRequest(stages=["prepare"], command="sharmill submit c", cluster="here"))
    return folder, os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.parametrize("has_failed", [False, True])
def test_cancel_ends_slurm_jobs_and_records_an_outcome(run_dir, jobs, has_failed):
    folder, environment = jobs
    if has_failed:
        RunDir(run_dir).note_outcome(RunOutcome(state="failed", message="units failed"))
    done = cancel(run_dir, environment=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "stopped on SLURM: jobs 12, 13, 14, 15" in " ".join(done.stdout.split())
    assert (folder / "asked").read_text().splitlines() == ["12 13 14", "15"]
    end = RunDir(run_dir).read_outcome()
    assert (end.state, end.message.split()[0]) == (("failed", "units") if has_failed else ("cancelled", "cancelled"))


# Changes of a run directory by the text of the refusal. A foreign id could be the id of another run, whose jobs would
# be cancelled.
FOREIGN = {
    "id belongs to another user": lambda path: os.chown(path / "id", 65534, 65534),
    "id is a link": lambda path: ((path / "victim").hardlink_to(path / "id"), os.chown(path, 65534, 65534)),
    "reserved is a link": lambda path: (path / "reserved").symlink_to("victim"),
    "in which the run was started": lambda path: RunDir(path).begin(
        RunRequest(stages=[], run=str(shutil.copytree(path, path / "first")), cluster="here")
    ),
}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize(("words", "change"), FOREIGN.items())
def test_no_job_ends_by_an_id_that_may_be_of_another_run(run_dir, jobs, words, change):
    folder, environment = jobs
    change(run_dir)
    done = cancel(run_dir, environment=environment)
    assert done.returncode == 2
    assert words in " ".join(done.stderr.split())
    assert not (folder / "asked").exists()


def test_a_lock_of_a_driver_job_killed_on_another_host_expires(run_dir, jobs):
    """A live process still writes, so its claims must be kept."""
    leave_lock(run_dir, pid=77, kernel="another", job="SLURM job 13")
    assert cancel(run_dir, environment=jobs[1]).returncode == 0
    assert lock_owner(run_dir) is None


_WORK = """
import sys, time
from pathlib import Path
from support.toy_stage import ToyStage
from sharmill.engine.fence import make_fence
from sharmill.engine.plan import read_or_make_plan
from sharmill.engine.launch import driven_launch
from sharmill.errors import FatalError
stage, units = read_or_make_plan(ToyStage(Path(sys.argv[1])).in_run)
make_fence(stage)
with driven_launch(stage, units, 1):
    try:
        while True:
            stage.run_dir.require_not_cancelled()
            time.sleep(0.1)
    except FatalError as error:
        print(error)
"""


def test_ranks_that_hold_no_lock_read_that_the_run_is_cancelled(tmp_path):
    run_dir = ToyStage(tmp_path).run_dir
    run_dir.path.mkdir()
    run_dir.config.write_text("{}")
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY / 'tests'}"}
    command = [sys.executable, "-c", _WORK, tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as worker, ended(worker):
        wait_until(lambda: find_workers(run_dir))
        done = cancel(run_dir.path)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"stopped: process {worker.pid} on" in " ".join(done.stdout.split())
        assert worker.communicate()[0].startswith("the run was cancelled by")
    # A heartbeat of a time to come is none.
    (beat,) = run_dir.path.glob("toy/ranks/*/progress/*.json")
    beat.write_text(json.dumps(json.loads(beat.read_text()) | {"ended": False, "kernel": "another"}))
    os.utime(beat, (4e9, 4e9))
    assert "nothing is running" in " ".join(cancel(run_dir.path).stdout.split())
