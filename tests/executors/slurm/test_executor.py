"""The SLURM executor where the cluster is a few scripts: what it does when the controller is busy, and with arrays."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from support.errors import raises
from support.toy_cluster import ToyDataset
from support.toy_stage import ToyStage

from sharmill.cli.status import QueueView
from sharmill.engine.attempts import AttemptLog, Note
from sharmill.engine.fence import make_fence
from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import Submitted
from sharmill.engine.plan import read_or_make_plan
from sharmill.engine.rejects import RejectLimit
from sharmill.engine.rundir import RunDir
from sharmill.errors import ConfigError, FatalError
from sharmill.executors.slurm.chain import JobChain
from sharmill.executors.slurm.chain_state import ChainState, cancel_chain, read_state, require_no_chain, take_over_chain
from sharmill.executors.slurm.executor import SlurmExecutor
from sharmill.executors.slurm.profile import ClusterProfile, RankProfile
from sharmill.executors.slurm.queue import job_comment, make_run_id, queued_jobs
from sharmill.executors.slurm.setup_lines import checked_lines, find_reason
from sharmill.storage import make_private_folder, write_atomic


def do_nothing() -> None:
    pass


def no_limit() -> RejectLimit:
    return RejectLimit("toy", Path("rejects"), expected_in=24, max_fraction=1.0)


@pytest.fixture
def run_dir(tmp_path):
    """A run directory from which jobs were submitted."""
    run_dir = RunDir(tmp_path / "run")
    make_run_id(run_dir)
    return run_dir


@pytest.fixture
def submit(tmp_path):
    """Returns a function: profile -> what was handed over of a toy stage of eight units."""

    def submit(**profile) -> Submitted:
        stage = ToyStage(tmp_path, units=8)
        ranks = RankProfile(max_ranks=profile.pop("max_ranks", 2))
        executor = SlurmExecutor(
            ClusterProfile(cpu=ranks, **profile), RunDir(tmp_path / "run"), do_nothing, do_nothing, "toy", patience=0.2
        )
        submitted = executor.run(stage, read_or_make_plan(stage, restart=False), no_limit(), Listener())
        assert isinstance(submitted, Submitted)
        return submitted

    return submit


def test_a_busy_controller_is_asked_again(cluster, submit):
    cluster.script("squeue", "true", fails=2, says="slurm_load_jobs error: Unable to contact slurm controller")
    cluster.script(
        "sbatch", "echo Submitted batch job 7", fails=2, says="Batch job submission failed: Socket timed out"
    )
    assert submit().jobs == ["7_0", "7_1", "7"]
    assert cluster.calls("squeue") == 3
    assert cluster.calls("sbatch") == 2 + 1 + 1 + 1


@pytest.mark.parametrize("limit", ["AssocMaxSubmitJobLimit", "AssocGrpSubmitJobsLimit", "QOSGrpSubmitJobsLimit"])
def test_a_limit_on_jobs_in_the_queue_is_waited_for(cluster, submit, limit):
    says = f"sbatch: error: {limit}\nsbatch: error: Job violates accounting/QOS policy"
    cluster.script("sbatch", "echo Submitted batch job 7", fails=3, says=says)
    assert submit().jobs == ["7_0", "7_1", "7"]


def test_what_is_wrong_with_a_request_is_told_at_once_and_once(cluster, tmp_path, capfd):
    cluster.script("sbatch", "", fails=9, says="Batch job submission failed: Invalid qos specification")
    stage = ToyStage(tmp_path, units=8)
    executor = SlurmExecutor(
        ClusterProfile(qos="gold"), RunDir(tmp_path / "run"), do_nothing, do_nothing, "toy", patience=0.2
    )
    with raises(FatalError, "jobs_refused", "Invalid qos specification"):
        executor.run(stage, read_or_make_plan(stage, restart=False), no_limit(), Listener())
    assert cluster.calls("sbatch") == 1
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("max_ranks", "max_parallel", "arrays", "parallel"),
    [
        (8, 8, [3, 3, 2], [3, 3, 2]),
        (99, 8, [3, 3, 2], [3, 3, 2]),
        (8, 4, [3, 3, 2], [1, 1, 1]),
        (8, 2, [3, 3], [1, 1]),
        (8, 1, [3], [1]),
        (2, 9, [2], [9]),
    ],
)
def test_arrays_are_no_larger_than_the_cluster_allows_and_never_run_too_many_at_once(
    cluster, tmp_path, max_ranks, max_parallel, arrays, parallel
):
    profile = ClusterProfile(cpu=RankProfile(max_ranks=max_ranks), max_parallel=max_parallel)
    executor = SlurmExecutor(profile, RunDir(tmp_path / "run"), do_nothing, do_nothing, "toy")
    stage = ToyStage(tmp_path, units=8)
    bins = executor.bins(stage, read_or_make_plan(stage, restart=False))
    assert sorted(unit.index for part in bins for unit in part) == list(range(8))
    shares = executor.arrays(stage, len(bins))
    assert [len(ranks) for ranks, _ in shares] == arrays
    assert [share for _, share in shares] == parallel
    assert f"--array=0-{arrays[0] - 1}%{min(parallel[0], arrays[0])}\n" in executor.script(stage, len(bins))


def test_the_files_of_old_jobs_go_and_those_of_the_last_stay(cluster, submit, tmp_path):
    """The oldest go, whatever their numbers: a cluster may begin to count anew."""
    jobs = tmp_path / "run/jobs"
    make_private_folder(jobs)
    for number in range(100, 200):
        for name in (f"{number}_0_0_log.out", f"{number}_submission.sh"):
            (jobs / name).touch()
            os.utime(jobs / name, (1e9 + number, 1e9 + number))
    (jobs / "chain.log").touch()
    cluster.script("sbatch", "echo Submitted batch job 7")
    submit()
    left = {int(path.name.split("_")[0]) for path in jobs.iterdir() if path.name[0].isdigit()}
    assert left == {7, *range(150, 200)}
    assert (jobs / "chain.log").exists()


def test_split_arrays_are_all_submitted(cluster, submit):
    """In the order of their numbers, and the driver job last."""
    ranks = [*(f"1_{n}" for n in range(3)), *(f"2_{n}" for n in range(3)), "3_0", "3_1"]
    assert submit(max_ranks=8).jobs == [*ranks, "4"]


def test_a_script_can_be_shown_where_there_is_no_slurm(tmp_path, run_dir, monkeypatch):
    """With arrays as large as SLURM allows by default."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    executor = SlurmExecutor(ClusterProfile(), RunDir(tmp_path / "run"), do_nothing, do_nothing, "toy")
    stage = ToyStage(tmp_path)
    assert "#SBATCH --array=0-63%64\n" in executor.script(stage, 64)
    assert executor.arrays(stage, 2500) == [(range(1000), 102), (range(1000, 2000), 102), (range(2000, 2500), 51)]
    with raises(ConfigError, "no_cluster", "squeue"):
        queued_jobs(run_dir)


class TestGuard:
    """What a run asks before it begins, where jobs may be at work in its run directory."""

    def test_where_nothing_was_submitted_nobody_is_asked(self, cluster, tmp_path):
        require_no_chain(RunDir(tmp_path / "run"))
        assert not (cluster.folder / "squeue.calls").exists()

    def test_where_there_is_no_slurm_to_ask_a_run_is_refused_unless_it_takes_over(self, run_dir, monkeypatch):
        monkeypatch.setenv("PATH", str(run_dir.path))
        with raises(ConfigError, "no_cluster", "sharmill run --take-over"):
            require_no_chain(run_dir)
        require_no_chain(run_dir, take_over=True)

    def test_a_silent_controller_lets_nobody_in_unless_they_take_over(self, cluster, run_dir, monkeypatch):
        now = [0.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
        cluster.script("squeue", "", fails=99, says="Unable to contact slurm controller")
        with raises(ConfigError, "silent_cluster", "Unable to contact", "sharmill run --take-over"):
            require_no_chain(run_dir)
        require_no_chain(run_dir, take_over=True)

    def test_a_chain_that_is_done_has_left_no_jobs(self, run_dir, monkeypatch):
        monkeypatch.setenv("PATH", str(run_dir.path))
        write_atomic(run_dir.chain, msgspec.json.encode(ChainState(state="done", message="all stages are done")))
        require_no_chain(run_dir)

    def test_jobs_that_are_known_are_not_taken_over(self, cluster, run_dir):
        cluster.script("squeue", f"echo '7_1|RUNNING|None|bob|{job_comment(run_dir, 'rank')}'")
        with raises(ConfigError, "jobs_in_queue", "7_1", "bob", "scancel 7"):
            require_no_chain(run_dir, take_over=True)

    def test_a_chain_that_waits_on_another_cluster_is_refused_unless_it_is_taken_over(self, cluster, run_dir):
        state = ChainState(state="waiting", message="", jobs=["7_0", "7_1", "8"], cluster="elsewhere")
        write_atomic(run_dir.chain, msgspec.json.encode(state))
        chain = JobChain(ToyDataset(ToyStage(run_dir.path.parent)), ClusterProfile())
        wanted = (ConfigError, "jobs_elsewhere", "the cluster elsewhere (jobs 7, 8)", "this one is here", "--take-over")
        for ask in (chain.start, lambda: require_no_chain(run_dir), lambda: cancel_chain(run_dir)):
            with raises(*wanted):
                ask()
        require_no_chain(run_dir, take_over=True)
        with raises(*wanted):
            require_no_chain(run_dir)
        take_over_chain(run_dir)
        require_no_chain(run_dir)
        assert read_state(run_dir).message.startswith("taken over by process ")
        write_atomic(run_dir.chain, msgspec.json.encode(state))
        dataclasses.replace(chain, take_over=True).start()
        assert read_state(run_dir).cluster == "here"
        require_no_chain(run_dir)
        queue = QueueView(run_dir.path)
        write_atomic(run_dir.chain, msgspec.json.encode(state))
        assert queue.holds_jobs()
        assert "the cluster elsewhere" in queue.problem

    def test_comments_of_others_are_nothing(self, cluster, run_dir):
        cluster.script(
            "squeue",
            "printf '7|RUNNING|None|bob|(null)\\n8|PENDING|a|b|\\xff\\n|\\n9|RUNNING|None|x|sharmill:0:rank\\n'",
        )
        assert queued_jobs(run_dir) == []


class TestSetupLines:
    """Setup lines of a profile, in scripts that a shell really runs; ``srun`` stands in for the rank."""

    @pytest.fixture
    def run_script(self, cluster, tmp_path):
        """Returns a function: setup lines -> the end of the rank's script, whose errors are in the folder of jobs."""
        cluster.script("srun", "echo the rank runs")

        def run(*setup: str) -> subprocess.CompletedProcess[str]:
            profile = ClusterProfile(cpu=RankProfile(max_ranks=2), setup=list(setup))
            executor = SlurmExecutor(profile, RunDir(tmp_path / "run"), do_nothing, do_nothing, "toy", patience=0.2)
            jobs = executor.run_dir.jobs
            make_private_folder(jobs)
            with (jobs / "7_0_0_log.err").open("w") as errors:
                return subprocess.run(
                    ["bash", "-c", executor.script(ToyStage(tmp_path), 2)], stdout=subprocess.PIPE, stderr=errors,
                    text=True, check=False,
                )  # fmt: skip

        return run

    def test_lines_that_succeed_change_the_shell_of_the_rank(self, run_script, cluster):
        cluster.script("srun", 'echo "$GREETING $(type -t module)"')
        ended = run_script(
            "export GREETING='good day'", "module() {\n  false\n  true\n}\nexport -f module", "# nothing"
        )
        assert (ended.returncode, ended.stdout) == (0, "good day function\n")

    def test_names_in_a_script_are_text(self, cluster, tmp_path, monkeypatch):
        """Of the run directory, of the dataset, of the folder that jobs start in and of the chain's command."""
        name = """$(touch ran1) `touch ran2` 'a' "b" ; touch ran3 & x\\"""
        folder = tmp_path / name.replace("/", "|")
        folder.mkdir()
        monkeypatch.chdir(folder)
        cluster.script("srun", "echo the rank runs")
        dataset = SimpleNamespace(name=name, run_dir=folder / "run")
        executor = JobChain(dataset, ClusterProfile(), command=f"sharmill submit {name}").executor()
        make_private_folder(executor.run_dir.jobs)
        write_atomic(executor.run_dir.chain, msgspec.json.encode(ChainState(state="waiting", message="jobs")))
        watcher = "\n".join([*executor.watcher_setup, "exit 1"])
        for script in (executor.script(ToyStage(folder), 2), watcher):
            ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path)
            assert ended.stderr == ""
        assert read_state(executor.run_dir).command == f"sharmill submit {name}"
        assert not list(tmp_path.rglob("ran[0-9]"))

    def test_commands_that_fail_within_a_line_end_nothing(self, run_script):
        """As those of conda's and Lmod's own scripts."""
        assert run_script("activate() { [ -n '' ]; false; return 0; }; activate", "false || true").returncode == 0

    def test_a_line_that_fails_ends_the_script_before_the_rank(self, run_script, tmp_path):
        ended = run_script("true", "echo 'EnvironmentNameNotFound: no environment' >&2; false", "true")
        assert (ended.returncode, ended.stdout) == (1, "")
        assert find_reason(tmp_path / "run/jobs") == (
            "the setup line failed with status 1: echo 'EnvironmentNameNotFound: no environment' >&2; false "
            f"(EnvironmentNameNotFound: no environment); {tmp_path / 'run/jobs/7_0_0_log.err'}"
        )
        # It is not what later ranks that say nothing ended with.
        assert find_reason(tmp_path / "run/jobs", (tmp_path / "run/jobs/7_0_0_log.err").stat().st_mtime + 1) == ""

    def test_after_three_rounds_the_message_says_why(self, run_script, cluster, submit, tmp_path):
        cluster.script("sbatch", "echo Submitted batch job 7")
        for _ in range(3):
            submit()
        run_script("no_such_module load cuda")
        with raises(FatalError, "no_ranks", "failed with status 127: no_such_module load cuda", "command not found"):
            submit()

    def test_three_rounds_in_which_no_node_can_do_a_unit_end_with_the_reason(self, cluster, submit, tmp_path):
        cluster.script("sbatch", "echo Submitted batch job 7")
        stage = ToyStage(tmp_path, units=8)
        read_or_make_plan(stage, restart=False)
        make_fence(stage)
        message = "cannot write /scratch on node7: No space left on device"
        for _ in range(3):
            submit()
            note = Note(kind="failed", slot="node7/rank 0", message=message, code="disk", place="node7")
            AttemptLog(stage.dir.attempts).add(note)
        with raises(FatalError, "disk", message):
            submit()

    @pytest.fixture
    def waiting(self, tmp_path):
        """A chain that waits for jobs."""
        dataset = SimpleNamespace(name="toy", run_dir=tmp_path / "run")
        chain = JobChain(dataset, ClusterProfile(), command="sharmill submit all c.yaml")
        chain.run_dir.path.mkdir()
        write_atomic(chain.run_dir.chain, msgspec.json.encode(ChainState(state="waiting", message="jobs")))
        return chain

    def test_a_watcher_job_on_a_full_disk_leaves_the_state_as_it_was(self, waiting):
        # As a full disk does, the limit makes every write fail.
        lines = ["trap '' XFSZ", "ulimit -f 0", *waiting.executor().watcher_setup, "exit 1"]
        subprocess.run(["bash", "-c", "\n".join(lines)], stderr=subprocess.DEVNULL, check=False)
        assert read_state(waiting.run_dir) == ChainState(state="waiting", message="jobs")

    def test_a_watcher_job_that_a_line_ends_notes_which(self, waiting):
        chain = waiting
        lines = [*chain.executor().watcher_setup, *checked_lines(['no_such_module "a" && \\'])]
        subprocess.run(["bash", "-c", "\n".join(lines)], stderr=subprocess.DEVNULL, check=False)
        state = read_state(chain.run_dir)
        assert (state.state, state.command) == ("failed", "sharmill submit all c.yaml")
        assert 'behind it: the setup line failed: no_such_module "a" && \\: see the last logs' in state.message

    @pytest.mark.parametrize(
        ("log", "reason"),
        [
            ("\x1b[31msrun: warning\nTraceback:\n  File errors.py\nModuleNotFoundError: No module named 'x'\n",
             "ModuleNotFoundError: No module named 'x'"),
            ("all is well\n", ""),
        ],
    )  # fmt: skip
    def test_a_log_says_why_in_its_first_line_about_it(self, tmp_path, log, reason):
        (tmp_path / "8_0_0_log.err").write_text(log)
        assert find_reason(tmp_path).partition(";")[0] == reason
