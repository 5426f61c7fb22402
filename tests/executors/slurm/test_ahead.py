"""Jobs that are submitted before their work is known, where the cluster is a few scripts."""

from __future__ import annotations

import errno
import os
import pickle
import re
import signal
from pathlib import Path

import msgspec
import pytest
from support.errors import raises
from support.toy_cluster import LastStage, MiddleStage, SleepyStage, ToyChain, ToyDataset

from sharmill.config.schema import ExecutorConfig
from sharmill.engine.listener import Listener
from sharmill.engine.plan import read_or_make_plan
from sharmill.engine.rejects import RejectLimit
from sharmill.engine.run import locked
from sharmill.engine.rundir import RunDir
from sharmill.errors import FatalError
from sharmill.executors.slurm.ahead import WaitingJob, WaitingRank
from sharmill.executors.slurm.chain_state import ChainState, read_state
from sharmill.executors.slurm.executor import SlurmExecutor
from sharmill.executors.slurm.job_requests import JobRequests
from sharmill.executors.slurm.profile import ClusterProfile, RankProfile
from sharmill.executors.slurm.queue import competing_jobs, job_comment, jobs_ahead, make_run_id, queued_jobs
from sharmill.ports import clock
from sharmill.storage import make_private_folder

DRIVER = "50"


def note(**told: object) -> dict[str, object]:
    return told


@pytest.fixture
def run_dir(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    make_run_id(run_dir)
    make_private_folder(run_dir.jobs)
    return run_dir


@pytest.fixture
def run(tmp_path, run_dir):
    """Returns a function: runs a stage of eight units, the first of three; with ``here`` as the driver job 50 does."""
    stages = [SleepyStage(tmp_path, units=8), MiddleStage(tmp_path, units=8), LastStage(tmp_path, units=8)]

    def run(number: int = 0, *, small_stages="driver", max_ranks=3, **profile):
        executor = SlurmExecutor(
            ClusterProfile(cpu=RankProfile(max_ranks=max_ranks), submit_ahead=True, **profile),
            run_dir, note, note, "toy", patience=0.2, small_stages=small_stages,
            later_stages=lambda stage: stages[stages.index(stage) + 1 :],
        )  # fmt: skip
        stage = stages[number]
        rejects = RejectLimit(stage.name, Path("rejects"), expected_in=24, max_fraction=1.0)
        submitted = executor.run(stage, read_or_make_plan(stage, restart=False), rejects, Listener())
        executor.submit_ahead(stage, submitted.jobs[-1])
        return submitted

    return run


def line(run_dir: RunDir, job: str, role: str, ahead: str, state: str = "PENDING") -> str:
    return f"{job}|{state}|Dependency|ann|{job_comment(run_dir, role, ahead)}"


def waiting(run_dir: RunDir, first: int, ahead: str, num_ranks: int = 3) -> list[str]:
    """What squeue says of the jobs that wait for a stage."""
    ranks = [line(run_dir, f"{first}_{task}", "rank", ahead) for task in range(num_ranks)]
    return [*ranks, line(run_dir, f"{first + 1}", "driver", ahead), line(run_dir, f"{first + 2}", "watcher", ahead)]


def set_queue(cluster, lines):
    cluster.script("squeue", "\n".join(["cat <<'END'", *lines, "END"]))


def cancelled(cluster):
    path = cluster.folder / "cancelled"
    return path.read_text().splitlines() if path.exists() else []


def test_the_jobs_of_later_stages_are_submitted_behind_one_another(cluster, run):
    assert run().jobs == ["1_0", "1_1", "1_2", "2"]
    scripts = [(cluster.folder / f"script.{number}").read_text() for number in range(1, 10)]
    # Ranks, driver job and watcher job, of each stage.
    waits = [re.findall(r"--dependency=(\S+)", script) for script in scripts]
    assert waits == [
        [], ["afterany:1"], ["afternotok:2"],
        ["afterok:2"], ["afterany:4"], ["afternotok:5"],
        ["afterok:5"], ["afterany:7"], ["afternotok:8"],
    ]  # fmt: skip
    roles = [re.search(r"--comment=\S*sharmill:\w+:(\S+?)\"?\n", script)[1] for script in scripts]
    later = [f"{role}:ahead:{stage}" for stage in ("middle", "last") for role in ("rank", "driver", "watcher")]
    assert roles == ["rank", "driver", "watcher", *later]
    assert ["--kill-on-invalid-dep=yes" in script for script in scripts] == [
        False, False, True, True, False, True, True, False, True
    ]  # fmt: skip
    # As many as there may be: three ranks at most, in arrays of three at most.
    assert all("--array=0-2%3\n" in scripts[number] for number in (3, 6))


def test_one_array_of_ranks_that_wait_may_run_as_many_at_once_as_the_stage(cluster, run):
    """Of nine ranks, three arrays would share the limit; ahead is only one of them."""
    run(max_ranks=9, max_parallel=6)
    scripts = [(cluster.folder / f"script.{number}").read_text() for number in (1, 6)]
    assert [re.search(r"--array=(\S+)", script)[1] for script in scripts] == ["0-2%2", "0-2%3"]


def test_where_slurm_takes_no_more_jobs_the_last_stages_are_left_out(cluster, run):
    """The driver job of the last is refused: its ranks go, and the stage before stays."""
    cluster.script(
        "sbatch",
        'n=$(wc -l < sbatch.calls); if (( n > 7 )); then echo "AssocMaxSubmitJobLimit" >&2; exit 1; fi\n'
        'cp "$1" script.$n; echo Submitted batch job $n',
    )
    assert run().jobs == ["1_0", "1_1", "1_2", "2"]
    assert cluster.calls("sbatch") == 8
    assert cancelled(cluster) == ["7"]


@pytest.fixture
def start(cluster, tmp_path, monkeypatch):
    """Returns a function: begins a chain of three stages, whose n-th submission of jobs goes wrong first."""
    later = (MiddleStage(tmp_path, units=8), LastStage(tmp_path, units=8))
    profile = ClusterProfile(cpu=RankProfile(max_ranks=3), driver_units=0, submit_ahead=True)
    chain = ToyChain(ToyDataset(SleepyStage(tmp_path, units=8), later), profile)
    really = JobRequests.try_to_submit

    def start(number, goes_wrong):
        calls = []

        def submit(self, *arguments):
            calls.append(arguments)
            if len(calls) == number:
                goes_wrong()
            return really(self, *arguments)

        monkeypatch.setattr(JobRequests, "try_to_submit", submit)
        chain.start()
        chain.submit_ahead()

    start.chain = chain
    return start


def meet_a_full_disk():
    raise OSError(errno.EDQUOT, "Disk quota exceeded")


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(("number", "left_out"), [(4, []), (6, ["4 5"]), (8, ["7"])])
def test_a_disk_that_is_full_only_leaves_jobs_ahead_out(cluster, start, caplog, number, left_out):
    start(number, meet_a_full_disk)
    state = read_state(start.chain.run_dir)
    assert (state.state, state.jobs) == ("waiting", ["1_0", "1_1", "1_2", "2"])
    # Numbers are those of calls of sbatch: the stage that cannot be submitted goes as a whole.
    assert [sorted(ids.split()) for ids in cancelled(cluster)] == [ids.split() for ids in left_out]
    assert "jobs are not submitted ahead from" in caplog.text


@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_ctrl_c_waits_until_what_is_in_the_queue_is_noted(cluster, start, number):
    with pytest.raises(KeyboardInterrupt):
        start(number, press_ctrl_c)
    state = read_state(start.chain.run_dir)
    assert (state.state, state.jobs) == ("waiting", ["1_0", "1_1", "1_2", "2"])
    assert cancelled(cluster) == []
    # The jobs of the stage within which it came are complete.
    assert cluster.calls("sbatch") == (3 if number <= 3 else 6)


@pytest.mark.parametrize("directed", [False, True])
def test_at_the_limit_the_jobs_ahead_of_the_last_stages_of_other_datasets_make_room(cluster, run, tmp_path, directed):
    """Where another process directs the other dataset, it may just be giving them work."""
    other = RunDir(tmp_path / "other run")
    make_run_id(other)
    make_private_folder(other.jobs)
    for stage, first in (("middle", 60), ("last", 70)):
        lines = "".join(f"{job}\n" for job in waiting(other, first, stage))
        (cluster.folder / f"queue.{first}").write_text(lines)
    # Of --me: arrays are one line, and with the script.
    cluster.script(
        "squeue",
        'if [[ "$*" == *--me* ]]; then sed -nE "s#^([0-9]+)(_0)?\\|.*\\|#\\1|$OTHER/jobs/s.sh|#p" queue.*\n'
        "else cat queue.*; fi".replace("$OTHER", str(other.path)),
    )
    cluster.script("scancel", 'echo "$@" >> cancelled; for id in "$@"; do sed -i "/^$id[_|]/d" queue.*; done')
    cluster.script(
        "sbatch",
        'n=$(wc -l < sbatch.calls); if [ -s queue.70 ]; then echo "AssocMaxSubmitJobLimit" >&2; exit 1; fi\n'
        'cp "$1" script.$n; echo Submitted batch job $n',
    )
    if directed:
        with locked(other), raises(FatalError, "jobs_refused"):
            run()
        assert cancelled(cluster) == []
    else:
        assert run().jobs == ["2_0", "2_1", "2_2", "3"]
        assert cancelled(cluster) == ["72 71 70"]


def test_nothing_is_submitted_ahead_once_a_chain_has_ended(cluster, start):
    start.chain.run_dir.path.mkdir(exist_ok=True)
    make_run_id(start.chain.run_dir)
    start.chain.run_dir.chain.write_bytes(msgspec.json.encode(ChainState(state="failed", message="", jobs=["1"])))
    start.chain.submit_ahead()
    assert not cluster.was_called("sbatch")


def test_the_jobs_that_wait_for_a_stage_are_given_its_work(cluster, run, run_dir, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", DRIVER)
    lines = [
        line(run_dir, DRIVER, "driver", "", "RUNNING"),
        *waiting(run_dir, 60, "middle"),
        *waiting(run_dir, 70, "last"),
    ]
    set_queue(cluster, lines)
    assert run(1, small_stages="here", max_ranks=2, driver_units=0).jobs == ["60_0", "60_1", "61"]
    assert not cluster.was_called("sbatch")
    # Two ranks are enough.
    assert cancelled(cluster) == ["60_2"]
    ranks = pickle.loads(run_dir.job_work(60).read_bytes())
    assert sorted(unit for rank in ranks for unit in rank.units) == list(range(8))
    for number in (61, 62):
        (job,) = pickle.loads(run_dir.job_work(number).read_bytes())
        assert (job()["stage"], job()["had_ranks"]) == ("middle", True)
    assert {job.id: job.ahead for job in queued_jobs(run_dir)}["60_0"] == ""
    assert {job.ahead for job in jobs_ahead(run_dir)} == {"last"}
    assert [job.id for job in competing_jobs(run_dir)] == ["60_0", "60_1", "60_2", "61"]


def test_where_a_stage_was_done_without_them_its_jobs_go_and_the_next_move_up(cluster, run, run_dir, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", DRIVER)
    cluster.script("scontrol", 'echo "$@" >> orders; echo "MaxArraySize = 4"')
    lines = [
        line(run_dir, DRIVER, "driver", "", "RUNNING"),
        *waiting(run_dir, 60, "middle"),
        *waiting(run_dir, 70, "last"),
    ]
    set_queue(cluster, lines)
    assert run(2, small_stages="here", driver_units=0).jobs[-1] == "71"
    assert "update JobId=70 Dependency=afterok:50" in (cluster.folder / "orders").read_text().splitlines()
    assert cancelled(cluster) == ["62 61 60"]


@pytest.mark.parametrize("why", ["too few", "no watcher job", "begun", "a watcher job goes on"])
def test_jobs_that_do_not_fit_are_cancelled_from_behind_and_others_submitted(cluster, run, run_dir, monkeypatch, why):
    monkeypatch.setenv("SLURM_JOB_ID", DRIVER)
    lines = waiting(run_dir, 60, "middle", 2 if why == "too few" else 3)
    if why == "no watcher job":
        lines.pop()
    if why == "begun":
        lines[0] = line(run_dir, "60_0", "rank", "middle", "RUNNING")
    set_queue(cluster, [line(run_dir, DRIVER, "driver", "", "RUNNING"), *lines])
    cluster.script("scancel", 'echo "$@" >> cancelled; echo "#!/bin/bash" > squeue')
    small_stages = "ranks" if why == "a watcher job goes on" else "here"
    assert run(1, small_stages=small_stages, driver_units=0).jobs == ["1_0", "1_1", "1_2", "2"]
    assert cancelled(cluster) == ["61 60" if why == "no watcher job" else "62 61 60"]
    # With those of the last stage.
    assert cluster.calls("sbatch") == 6
    assert list(run_dir.jobs.glob("*_work.pkl")) == []


@pytest.mark.parametrize("status", [0, 1])
def test_a_job_without_work_ends_at_once(run_dir, monkeypatch, caplog, status):
    monkeypatch.setenv("SLURM_JOB_ID", "61")
    with pytest.raises(SystemExit) as ended:
        WaitingJob(run_dir, status=status)()
    assert ended.value.code == status
    assert "job 61 ends, since it was submitted ahead and has not been given any work" in caplog.text


def begin(monkeypatch, job) -> tuple[float, bool]:
    """Seconds that a job waits for its work, and if it ended without."""
    now = [0.0]
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    monkeypatch.setattr(clock, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setenv("SLURM_JOB_ID", "60")
    try:
        job()
    except SystemExit:
        return now[0], True
    return now[0], False


def test_a_rank_without_work_holds_its_gpus_for_seconds_only(run_dir, monkeypatch):
    seen = ExecutorConfig().seconds_until_seen
    state = ChainState(state="waiting", message="", jobs=["59_0", "61"])
    run_dir.chain.write_bytes(msgspec.json.encode(state))
    assert begin(monkeypatch, WaitingRank(run_dir, 0, seen)) == (5.0, True)
    # One that the chain waits for waits for its work; and so does a driver job, in whose place no other would begin.
    run_dir.chain.write_bytes(msgspec.json.encode(msgspec.structs.replace(state, jobs=["60_0", "60_1", "61"])))
    assert begin(monkeypatch, WaitingRank(run_dir, 0, seen)) == (seen, True)
    assert begin(monkeypatch, WaitingJob(run_dir, 0, seen)) == (seen, True)
    assert seen > 5.0


def test_a_rank_whose_work_is_seen_does_not_wait(run_dir, monkeypatch):
    run_dir.job_work(60).write_bytes(pickle.dumps([Work(1)]))
    assert begin(monkeypatch, WaitingRank(run_dir, 0, 60.0)) == (0.0, False)


class Work:
    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self) -> int:
        return self.number

    def checkpoint(self) -> int:
        return -self.number


def test_each_task_of_an_array_does_its_own_work_and_those_beyond_end(run_dir, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "99")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "60")
    run_dir.job_work(60).write_bytes(pickle.dumps([Work(1), Work(2)]))
    assert [WaitingRank(run_dir, index)() for index in range(3)] == [1, 2, None]


def test_a_rank_that_has_to_leave_comes_back_with_its_work(run_dir, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "60")
    rank = WaitingRank(run_dir, 0)
    before = rank.checkpoint()
    assert before.function == rank
    run_dir.job_work(60).write_bytes(pickle.dumps([Work(7)]))
    rank()
    assert rank.checkpoint() == -7


def test_without_the_key_nothing_is_submitted_ahead_nor_asked_for(cluster, tmp_path, run_dir):
    stage = SleepyStage(tmp_path, units=2)
    executor = SlurmExecutor(ClusterProfile(driver_units=0), run_dir, note, note, "toy", patience=0.2)
    rejects = RejectLimit(stage.name, Path("rejects"), expected_in=6, max_fraction=1.0)
    executor.run(stage, read_or_make_plan(stage, restart=False), rejects, Listener())
    assert (cluster.calls("sbatch"), cluster.calls("squeue")) == (3, 1)


def test_one_that_has_begun_and_whose_work_is_not_seen_yet_keeps_a_new_submission_away(cluster, run_dir):
    set_queue(cluster, [line(run_dir, "60_0", "rank", "middle", "RUNNING"), *waiting(run_dir, 70, "last")])
    assert competing_jobs(run_dir) == []
    assert [job.id for job in competing_jobs(run_dir, begun_ahead=True)] == ["60_0"]


def test_to_who_cannot_look_every_job_has_work(cluster, run_dir, monkeypatch):
    """Another user asks; and root may look everywhere."""
    set_queue(cluster, waiting(run_dir, 60, "middle"))
    really = os.stat

    def stat(path, **options):
        if str(path).startswith(f"{run_dir.jobs}/"):
            raise PermissionError(13, "Permission denied", str(path))
        return really(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    assert len(competing_jobs(run_dir)) == len(queued_jobs(run_dir)) == 5
    assert jobs_ahead(run_dir) == []
