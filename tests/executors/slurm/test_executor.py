"""The SLURM executor where the cluster is a few scripts: requests for jobs, and who may work on a run directory."""

from __future__ import annotations

import dataclasses
import subprocess
from contextlib import nullcontext

import pytest
from support.errors import raises
from support.toy_cluster import ToyDataset, ToyRun
from support.toy_stage import ToyStage

from sharmill.cli.status import QueueView
from sharmill.engine.attempts import Note
from sharmill.engine.reservations import make_run_id
from sharmill.engine.run_notes import End, Given, begin_run, note_end, read_end, read_given
from sharmill.engine.rundir import RunDir
from sharmill.errors import ConfigError, FatalError
from sharmill.executors.slurm.profile import ClusterProfile, RankProfile
from sharmill.executors.slurm.queue import SlurmSilent, find_reason, job_comment, require_no_jobs
from sharmill.files.storage import make_private_folder
from sharmill.files.stored import RecordLog


@pytest.fixture
def run_dir(tmp_path):
    """A run directory from which jobs were submitted."""
    run_dir = RunDir(tmp_path / "run")
    make_run_id(run_dir)
    run_dir.jobs.mkdir()
    return run_dir


@pytest.fixture
def submit(tmp_path):
    """Returns a function: profile -> what was submitted of a toy stage of eight units."""

    def submit(patience=10.0, **profile):
        cluster_profile = ClusterProfile(cpu=RankProfile(max_ranks=2), **profile)
        return ToyRun(ToyDataset(ToyStage(tmp_path, units=8)), cluster_profile, patience=patience).start()

    return submit


def test_a_busy_controller_is_asked_again(cluster, submit, run_dir):
    cluster.script("squeue", "true", fails=2, says="slurm_load_jobs error: Unable to contact slurm controller")
    cluster.script(
        "sbatch", "echo Submitted batch job 7", fails=2, says="Batch job submission failed: Socket timed out"
    )
    assert submit().jobs == ["7_0", "7_1", "7"]
    assert cluster.calls("sbatch") == 2 + 1 + 1 + 1


@pytest.mark.parametrize("limit", ["AssocMaxSubmitJobLimit", "AssocGrpSubmitJobsLimit", "QOSGrpSubmitJobsLimit"])
def test_a_limit_on_jobs_in_the_queue_is_waited_for(cluster, submit, limit):
    says = f"sbatch: error: {limit}\nsbatch: error: Job violates accounting/QOS policy"
    cluster.script("sbatch", "echo Submitted batch job 7", fails=3, says=says)
    assert submit().jobs == ["7_0", "7_1", "7"]
    cluster.script("sbatch", "", fails=9999, says=says)
    with raises(SlurmSilent, "silent_cluster", limit):
        submit(patience=0.2, qos="gold")


def test_what_is_wrong_with_a_request_is_told_at_once_and_once(cluster, submit, capfd):
    cluster.script("sbatch", "", fails=9, says="Batch job submission failed: Invalid qos specification")
    with raises(FatalError, "jobs_refused", "Invalid qos specification"):
        submit(qos="gold")
    assert cluster.calls("sbatch") == 1
    assert capfd.readouterr().err == ""


def test_a_run_directory_with_a_percent_sign_is_refused_before_any_work(cluster, tmp_path):
    with raises(ConfigError, "bad_config_value", "100%accurate/run has a '%' in it"):
        ToyRun(ToyDataset(ToyStage(tmp_path / "100%accurate")), ClusterProfile())


class TestGuard:
    """The questions of a run before it begins, where jobs may be at work in its run directory."""

    def test_where_nothing_was_submitted_nobody_is_asked(self, cluster, tmp_path):
        require_no_jobs(RunDir(tmp_path / "run"))
        assert not cluster.was_called("squeue")

    def test_where_there_is_no_slurm_to_ask_a_run_is_refused_unless_it_takes_over(self, run_dir, monkeypatch):
        monkeypatch.setenv("PATH", str(run_dir.path))
        with raises(ConfigError, "no_cluster", "sharmill run --take-over"):
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
        cluster.script(
            "squeue",
            f"printf '7_1|RUNNING|None|(null)|bob|{job_comment(run_dir, 'rank')}\\n"
            "8|PENDING|a||eve|\\xff\\n|\\n9|RUNNING|None||eve|sharmill:0:rank\\n'",
        )
        with raises(ConfigError, "jobs_in_queue", "jobs 7_1 (user bob)", "scancel 7"):
            require_no_jobs(run_dir, take_over=True)

    def test_a_run_that_waits_on_another_cluster_is_refused_unless_it_is_taken_over(self, cluster, run_dir):
        begin_run(run_dir, Given(stages=["toy"], cluster="elsewhere"))
        run = ToyRun(ToyDataset(ToyStage(run_dir.path.parent)), ClusterProfile())
        wanted = (ConfigError, "jobs_elsewhere", "the cluster elsewhere", "this one is here", "--take-over")
        for ask in (run.start, lambda: require_no_jobs(run_dir)):
            with raises(*wanted):
                ask()
        assert QueueView(run_dir.path).holds_jobs()
        require_no_jobs(run_dir, take_over=True)
        dataclasses.replace(run, take_over=True).start()
        assert read_given(run_dir).cluster == "here"


class TestSetupLines:
    """Setup lines of a profile, in scripts that a shell really runs; ``srun`` stands in for the rank."""

    @pytest.fixture
    def run_script(self, cluster, tmp_path):
        """Returns a function: setup lines -> the end of the rank's script, whose errors are in the folder of jobs."""
        cluster.script("srun", 'echo "$GREETING $(type -t module)"')

        def run(*setup: str) -> subprocess.CompletedProcess[str]:
            stage = ToyStage(tmp_path)
            script = ToyRun(ToyDataset(stage), ClusterProfile(setup=list(setup))).scripts(stage, 2)[0]
            make_private_folder(stage.run_dir.jobs)
            with (stage.run_dir.jobs / "7_0_0_log.err").open("w") as errors:
                return subprocess.run(
                    ["bash", "-c", script], stdout=subprocess.PIPE, stderr=errors, text=True, check=False
                )

        return run

    def test_lines_change_the_shell_of_the_rank_and_may_have_commands_that_fail(self, run_script):
        """As those of conda's and Lmod's own scripts."""
        ended = run_script(
            "export GREETING='good day'", "module() {\n  false\n  true\n}\nexport -f module", "# nothing",
            "activate() { [ -n '' ]; false; return 0; }; activate", "false || true",
        )  # fmt: skip
        assert (ended.returncode, ended.stdout) == (0, "good day function\n")

    def test_names_in_a_script_are_text(self, cluster, tmp_path, monkeypatch):
        """Of the run directory, of the dataset and of the folder that jobs start in."""
        name = """$(touch ran1) `touch ran2` 'a' "b" ; touch ran3 & x\\"""
        folder = tmp_path / name.replace("/", "|")
        folder.mkdir()
        monkeypatch.chdir(folder)
        cluster.script("srun", "echo the rank runs")
        run = ToyRun(ToyDataset(ToyStage(folder), name=name), ClusterProfile())
        make_private_folder(run.run_dir.jobs)
        script = run.scripts(run.stage, 2)[0]
        ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path)
        assert ended.stderr == ""
        assert not list(tmp_path.rglob("ran[0-9]"))

    def test_a_line_that_fails_ends_the_script_before_the_rank_and_is_named(self, run_script, tmp_path):
        ended = run_script("true", "echo 'EnvironmentNameNotFound: no environment' >&2; false", "true")
        assert (ended.returncode, ended.stdout) == (1, "")
        log = tmp_path / "run/jobs/7_0_0_log.err"
        assert find_reason(tmp_path / "run/jobs") == (
            "EnvironmentNameNotFound: no environment | sharmill: the setup line failed with status 1: "
            f"echo 'EnvironmentNameNotFound: no environment' >&2; false; {log}"
        )
        # It is not what later ranks that say nothing ended with.
        assert find_reason(tmp_path / "run/jobs", log.stat().st_mtime + 1) == ""

    @pytest.mark.parametrize("has_full_disk", [False, True])
    def test_three_rounds_in_which_no_rank_can_work_end_the_run_with_the_reason(
        self, run_script, cluster, submit, tmp_path, monkeypatch, has_full_disk
    ):
        cluster.script("sbatch", "echo Submitted batch job 7")
        stage = ToyStage(tmp_path, units=8)
        submit()
        monkeypatch.setenv("SLURM_JOB_ID", "17")
        job = ToyRun(ToyDataset(stage), ClusterProfile(), role="advance", given=read_given(stage.run_dir))
        reason = ("disk", "on node7: No space left") if has_full_disk else ("no_ranks", "module: command not found")
        for number in range(3):
            assert read_end(stage.run_dir) is None
            if has_full_disk:
                message = "cannot write /scratch on node7: No space left on device"
                note = Note(kind="failed", slot="node7/rank 0", message=message, code="disk", place="node7")
                RecordLog(stage.dir.attempts).append(note)
            else:
                run_script("no_such_module load cuda")
            with raises(FatalError, *reason) if number == 2 else nullcontext():
                job.advance("toy", stage.dir.read_token(), True)
        end = read_end(stage.run_dir)
        assert (end.code, reason[1] in end.message) == (reason[0], True), end
