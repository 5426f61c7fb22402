"""The SLURM executor where the cluster is a few scripts: what it does when the controller is busy, and with arrays."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import time
from types import SimpleNamespace

import pytest
from support.errors import raises
from support.toy_cluster import ToyDataset, ToyRun
from support.toy_stage import ToyStage

from sharmill.cli.status import QueueView
from sharmill.engine.attempts import AttemptLog, Note
from sharmill.engine.fence import make_fence
from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import Submitted
from sharmill.engine.plan import read_or_make_plan
from sharmill.engine.run import locked, run_stage
from sharmill.engine.run_notes import End, Given, begin_run, note_end, read_end, read_given
from sharmill.engine.rundir import RunDir
from sharmill.errors import ConfigError, FatalError
from sharmill.executors.slurm.executor import SlurmExecutor
from sharmill.executors.slurm.profile import ClusterProfile, RankProfile
from sharmill.executors.slurm.queue import job_comment, make_run_id, outside_own_job, queued_jobs, require_no_jobs
from sharmill.executors.slurm.setup_lines import checked_lines, find_reason, lines_that_note_failure
from sharmill.storage import make_private_folder


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
        executor = ToyRun(ToyDataset(stage), ClusterProfile(cpu=ranks, **profile), patience=0.2)
        with locked(stage.run_dir):
            make_run_id(stage.run_dir)
            submitted = run_stage(stage, executor, Listener(), max_reject_fraction=1.0).submitted
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


def test_what_is_wrong_with_a_request_is_told_at_once_and_once(cluster, submit, capfd):
    cluster.script("sbatch", "", fails=9, says="Batch job submission failed: Invalid qos specification")
    with raises(FatalError, "jobs_refused", "Invalid qos specification"):
        submit(qos="gold")
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
    stage = ToyStage(tmp_path, units=8)
    jobs = ToyRun(ToyDataset(stage), profile).jobs
    num_ranks = jobs.num_ranks(stage, read_or_make_plan(stage, restart=False))
    shares = jobs.arrays(stage, num_ranks)
    assert [len(ranks) for ranks, _ in shares] == arrays
    assert [share for _, share in shares] == parallel
    assert f"--array=0-{arrays[0] - 1}%{min(parallel[0], arrays[0])}\n" in jobs.scripts(stage, num_ranks)[0]


def test_split_arrays_are_all_submitted(cluster, submit):
    """In the order of their numbers, and the advance job last."""
    ranks = [*(f"1_{n}" for n in range(3)), *(f"2_{n}" for n in range(3)), "3_0", "3_1"]
    assert submit(max_ranks=8).jobs == [*ranks, "4"]


def test_a_script_can_be_shown_where_there_is_no_slurm(tmp_path, run_dir, monkeypatch):
    """With arrays as large as SLURM allows by default."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    stage = ToyStage(tmp_path)
    jobs = ToyRun(ToyDataset(stage), ClusterProfile()).jobs
    assert "#SBATCH --array=0-63%64\n" in jobs.scripts(stage, 64)[0]
    assert jobs.arrays(stage, 2500) == [(range(1000), 102), (range(1000, 2000), 102), (range(2000, 2500), 51)]
    with raises(ConfigError, "no_cluster", "squeue"):
        queued_jobs(run_dir)


def test_a_job_hides_its_allocation_from_sbatch_and_keeps_it_for_itself(monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_CPUS_PER_TASK", "SBATCH_PARTITION", "SLURM_CONF"):
        monkeypatch.setenv(name, "1")
    with outside_own_job():
        assert {name for name in os.environ if name.startswith(("SLURM_", "SBATCH_"))} == {"SLURM_CONF"}
    assert os.environ["SLURM_JOB_ID"] == "1"
    monkeypatch.delenv("SLURM_JOB_ID")
    with outside_own_job():
        assert os.environ["SBATCH_PARTITION"] == "1"


def test_a_run_directory_with_a_percent_sign_is_refused_before_any_work(cluster, tmp_path):
    run = ToyRun(ToyDataset(ToyStage(tmp_path / "100%accurate", units=8)), ClusterProfile())
    with raises(ConfigError, "bad_config_value", "100%accurate/run has a '%' in it"):
        run.start()
    assert not run.run_dir.path.exists()


class TestGuard:
    """What a run asks before it begins, where jobs may be at work in its run directory."""

    def test_where_nothing_was_submitted_nobody_is_asked(self, cluster, tmp_path):
        require_no_jobs(RunDir(tmp_path / "run"))
        assert not (cluster.folder / "squeue.calls").exists()

    def test_where_there_is_no_slurm_to_ask_a_run_is_refused_unless_it_takes_over(self, run_dir, monkeypatch):
        monkeypatch.setenv("PATH", str(run_dir.path))
        with raises(ConfigError, "no_cluster", "sharmill run --take-over"):
            require_no_jobs(run_dir)
        require_no_jobs(run_dir, take_over=True)

    def test_a_silent_controller_lets_nobody_in_unless_they_take_over(self, cluster, run_dir, monkeypatch):
        now = [0.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
        cluster.script("squeue", "", fails=99, says="Unable to contact slurm controller")
        with raises(ConfigError, "silent_cluster", "Unable to contact", "sharmill run --take-over"):
            require_no_jobs(run_dir)
        require_no_jobs(run_dir, take_over=True)

    @pytest.mark.parametrize("is_done", [True, False])
    def test_a_run_that_is_done_or_was_not_on_a_cluster_has_left_no_jobs(self, run_dir, monkeypatch, is_done):
        monkeypatch.setenv("PATH", str(run_dir.path))
        begin_run(run_dir, Given(stages=[], cluster="here" if is_done else ""))
        if is_done:
            note_end(run_dir, End(state="done", message="all stages are done"))
        require_no_jobs(run_dir)

    def test_jobs_that_are_known_are_not_taken_over(self, cluster, run_dir):
        cluster.script("squeue", f"echo '7_1|RUNNING|None|(null)|bob|{job_comment(run_dir, 'rank')}'")
        with raises(ConfigError, "jobs_in_queue", "7_1", "bob", "scancel 7"):
            require_no_jobs(run_dir, take_over=True)

    def test_a_run_that_waits_on_another_cluster_is_refused_unless_it_is_taken_over(self, cluster, run_dir):
        begin_run(run_dir, Given(stages=["toy"], cluster="elsewhere"))
        run = ToyRun(ToyDataset(ToyStage(run_dir.path.parent)), ClusterProfile())
        wanted = (ConfigError, "jobs_elsewhere", "the cluster elsewhere", "this one is here", "--take-over")
        for ask in (run.start, lambda: require_no_jobs(run_dir)):
            with raises(*wanted):
                ask()
        queue = QueueView(run_dir.path)
        assert queue.holds_jobs()
        assert "the cluster elsewhere" in queue.problem
        require_no_jobs(run_dir, take_over=True)
        dataclasses.replace(run, take_over=True).start()
        assert read_given(run_dir).cluster == "here"
        require_no_jobs(run_dir)

    def test_comments_of_others_are_nothing(self, cluster, run_dir):
        cluster.script(
            "squeue",
            "printf '7|RUNNING|None|(null)|bob|\\n8|PENDING|a||b|\\xff\\n|\\n9|RUNNING|None||x|sharmill:0:rank\\n'",
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
            stage = ToyStage(tmp_path)
            script = ToyRun(ToyDataset(stage), profile).jobs.scripts(stage, 2)[0]
            make_private_folder(stage.run_dir.jobs)
            with (stage.run_dir.jobs / "7_0_0_log.err").open("w") as errors:
                return subprocess.run(
                    ["bash", "-c", script], stdout=subprocess.PIPE, stderr=errors, text=True, check=False
                )

        return run

    def test_lines_that_succeed_change_the_shell_of_the_rank(self, run_script, cluster):
        cluster.script("srun", 'echo "$GREETING $(type -t module)"')
        ended = run_script(
            "export GREETING='good day'", "module() {\n  false\n  true\n}\nexport -f module", "# nothing"
        )
        assert (ended.returncode, ended.stdout) == (0, "good day function\n")

    def test_names_in_a_script_are_text(self, cluster, tmp_path, monkeypatch):
        """Of the run directory, of the dataset and of the folder that jobs start in."""
        name = """$(touch ran1) `touch ran2` 'a' "b" ; touch ran3 & x\\"""
        folder = tmp_path / name.replace("/", "|")
        folder.mkdir()
        monkeypatch.chdir(folder)
        cluster.script("srun", "echo the rank runs")
        run = SlurmExecutor(SimpleNamespace(name=name, run_dir=folder / "run", ranks_of_use=None), ClusterProfile())
        make_private_folder(run.run_dir.jobs)
        second = "\n".join([*lines_that_note_failure(run.run_dir), "exit 1"])
        for script in (run.jobs.scripts(ToyStage(folder), 2)[0], second):
            ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path)
            assert ended.stderr == ""
        assert read_end(run.run_dir).state == "failed"
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

    def test_a_second_job_on_a_full_disk_leaves_no_broken_note(self, run_dir):
        # As a full disk does, the limit makes every write fail.
        lines = ["trap '' XFSZ", "ulimit -f 0", *lines_that_note_failure(run_dir), "exit 1"]
        subprocess.run(["bash", "-c", "\n".join(lines)], stderr=subprocess.DEVNULL, check=False)
        assert read_end(run_dir) is None

    @pytest.mark.parametrize("was_cancelled", [True, False])
    def test_a_second_job_that_a_line_ends_notes_which_unless_the_run_has_ended(self, run_dir, was_cancelled):
        if was_cancelled:
            note_end(run_dir, End(state="cancelled", message="cancelled by bob"))
        lines = [*lines_that_note_failure(run_dir), *checked_lines(['no_such_module "a" && \\'])]
        subprocess.run(["bash", "-c", "\n".join(lines)], stderr=subprocess.DEVNULL, check=False)
        end = read_end(run_dir)
        assert (end.state, end.code) == (("cancelled", "") if was_cancelled else ("failed", "jobs_gone"))
        assert (
            was_cancelled or 'behind it: the setup line failed: no_such_module "a" && \\: see the last' in end.message
        )

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
