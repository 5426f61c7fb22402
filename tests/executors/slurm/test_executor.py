"""The SLURM executor on a fake cluster made of scripts.

The first tests cover job submission and guards of the run directory. The others cover driver jobs: waiting for an
unreachable controller, recording the outcome, and small stages, which they process themselves.
"""

import multiprocessing
import os
import signal
import subprocess
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.project import raises
from support.toy_cluster import ToyDataset, ToyRun
from support.toy_stage import GpuStage, ToyStage, output_bytes, run, wait_until

from sharmill.engine.attempts import Note
from sharmill.engine.executor import Submitted
from sharmill.engine.fence import make_fence, reserve
from sharmill.engine.launch import begin_launch, read_attempts, read_claim
from sharmill.engine.plan import read_or_make_plan
from sharmill.engine.run import locked
from sharmill.engine.run_dir import RunDir, RunOutcome, RunRequest
from sharmill.engine.unit import Commit
from sharmill.errors import ConfigError, FatalError
from sharmill.executors.slurm.executor import RankTask, SlurmExecutor, find_reason, job_comment
from sharmill.executors.slurm.profile import ClusterProfile, RankProfile
from sharmill.executors.slurm.queue import SlurmSilent, require_no_jobs
from sharmill.executors.supervisor import Device, supervise_rank
from sharmill.files.host import ended_by_sigterm
from sharmill.files.record_log import RecordLog
from sharmill.files.staging import STAGING_NAME
from sharmill.files.trust import make_private_folder


@pytest.fixture
def run_dir(tmp_path):
    """A run directory from which jobs were submitted."""
    run_dir = RunDir(tmp_path / "run")
    run_dir.make_id()
    run_dir.jobs.mkdir()
    return run_dir


@pytest.fixture
def submit(tmp_path):
    """Return a function: profile -> the submission of a toy stage with eight units."""

    def submit(patience=10.0, **profile):
        cluster_profile = ClusterProfile(cpu=RankProfile(max_ranks=2), **profile)
        return ToyRun(ToyDataset(ToyStage(tmp_path, units=8)), cluster_profile, patience=patience).start()

    return submit


@pytest.mark.parametrize("limit", ["AssocMaxSubmitJobLimit", "AssocGrpSubmitJobsLimit", "QOSGrpSubmitJobsLimit"])
def test_a_limit_on_jobs_in_the_queue_is_waited_for(cluster, submit, limit):
    says = f"sbatch: error: {limit}\nsbatch: error: Job violates accounting/QOS policy"
    cluster.script("sbatch", "echo Submitted batch job 7", fails=3, says=says)
    assert submit().jobs == ["7_0", "7_1", "7"]
    cluster.script("sbatch", "", fails=9999, says=says)
    with raises(SlurmSilent, "silent_cluster", limit):
        submit(patience=0.2, qos="gold")


def test_a_refused_request_is_reported_at_once_and_once(cluster, submit, capfd):
    cluster.script("sbatch", "", fails=9, says="Batch job submission failed: Invalid qos specification")
    with raises(FatalError, "jobs_refused", "Invalid qos specification"):
        submit(qos="gold")
    assert cluster.calls("sbatch") == 1
    assert capfd.readouterr().err == ""


NOT_AVAILABLE = "Requested node configuration is not available"
RANK = "each rank of toy requests --cpus-per-task=1 --mem=4096M --time=240, from"
DRIVER = "each driver job (stages.driver) requests --cpus-per-task=1 --mem=4096M --time=240, from"


@pytest.mark.parametrize(
    ("units", "profile_file", "told"),
    [
        (8, "", f"{RANK} the defaults: give a profile of this cluster with --profile"),
        (8, "/home/bob/mine.yaml", f"{RANK} /home/bob/mine.yaml"),
        (1, "/home/bob/mine.yaml", f"{DRIVER} /home/bob/mine.yaml"),
    ],
)
def test_a_refusal_names_the_requested_options_and_the_profile(cluster, tmp_path, units, profile_file, told):
    cluster.script("sbatch", "", fails=9, says=f"Batch job submission failed: {NOT_AVAILABLE}")
    run = ToyRun(ToyDataset(ToyStage(tmp_path, units=units)), ClusterProfile(), profile_file=profile_file)
    with raises(FatalError, "jobs_refused", f"{NOT_AVAILABLE}; {told}"):
        run.start()


@pytest.mark.parametrize("others", ["may write", "own it"])
def test_no_jobs_are_submitted_if_others_can_write_to_their_folder(cluster, submit, tmp_path, monkeypatch, others):
    jobs = ToyStage(tmp_path).run_dir.jobs
    jobs.mkdir(parents=True)
    if others == "may write":
        jobs.parent.chmod(0o777)
    else:
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with raises(ConfigError, "foreign_output", f"to {jobs.parent}; " if others == "may write" else f"{jobs} belongs"):
        submit()
    assert not (cluster.folder / "sbatch.calls").exists()


@pytest.mark.parametrize(
    ("name", "problem"),
    [("100%accurate", "100%accurate/run contains '%'"), ("a\n#SBATCH --wrap=x", "control character")],
)
def test_a_run_directory_that_scripts_cannot_name_is_refused(cluster, tmp_path, name, problem):
    with raises(ConfigError, "bad_config_value", problem):
        ToyRun(ToyDataset(ToyStage(tmp_path / name)), ClusterProfile())


class TestGuard:
    """Checks before a run starts, since jobs may be at work in its run directory."""

    def test_a_run_without_slurm_is_refused_unless_it_takes_over(self, run_dir, monkeypatch):
        monkeypatch.setenv("PATH", str(run_dir.path))
        with raises(ConfigError, "no_cluster", "sharmill run --take-over"):
            require_no_jobs(run_dir)
        require_no_jobs(run_dir, take_over=True)

    @pytest.mark.parametrize("is_done", [True, False])
    def test_a_finished_or_local_run_has_left_no_jobs(self, run_dir, monkeypatch, is_done):
        monkeypatch.setenv("PATH", str(run_dir.path))
        run_dir.begin(RunRequest(stages=[], cluster="here" if is_done else ""))
        if is_done:
            run_dir.note_outcome(RunOutcome(state="done", message="all stages are done"))
        require_no_jobs(run_dir)

    def test_a_run_on_another_cluster_is_refused_unless_taken_over(self, cluster, run_dir):
        run_dir.begin(RunRequest(stages=["toy"], cluster="elsewhere"))
        run = ToyRun(ToyDataset(ToyStage(run_dir.path.parent)), ClusterProfile())
        wanted = (ConfigError, "jobs_elsewhere", "the cluster elsewhere", "this machine belongs to here", "--take-over")
        for ask in (run.start, lambda: require_no_jobs(run_dir)):
            with raises(*wanted):
                ask()
        require_no_jobs(run_dir, take_over=True)
        replace(run, take_over=True).start()
        assert run_dir.read_request().cluster == "here"


def _supervise(stage):
    with ended_by_sigterm():
        supervise_rank(stage, Device("cpu"), 0, job_seconds=0.1)


def _leave(stage):
    with ended_by_sigterm():
        RankTask(stage, 0, RankProfile()).checkpoint()
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(3)


def test_a_second_signal_keeps_no_rank_from_its_requeue(tmp_path):
    """SLURM sends both signals at once on preemption without a grace time, and after a reduced time limit."""
    job = multiprocessing.get_context("spawn").Process(target=_leave, args=(ToyStage(tmp_path).in_run,))
    job.start()
    job.join()
    assert job.exitcode == 3


def test_a_bad_unit_waits_for_no_other_rank_where_all_are_there(tmp_path):
    """A unit is kept only for ranks that are still queued, which might process it on another host."""
    stage = ToyStage(tmp_path, units=3, behaviour={1: "raise"})
    planned, units = read_or_make_plan(stage.in_run)
    make_fence(planned)
    begin_launch(planned, units, 1, join_seconds=600.0)
    job = multiprocessing.get_context("spawn").Process(target=_supervise, args=(planned,))
    job.start()
    job.join(60.0)
    assert job.exitcode == 0
    assert stage.attempts()[1] == 3


@pytest.mark.parametrize("does", ["wait:never", "hold_gil"])
def test_a_unit_that_hangs_until_its_job_ends_fails(tmp_path, does):
    stage = ToyStage(tmp_path, units=1, behaviour={0: does})
    planned, units = read_or_make_plan(stage.in_run)
    make_fence(planned)
    begin_launch(planned, units, 1, join_seconds=1.0)
    job = multiprocessing.get_context("spawn").Process(target=_supervise, args=(planned,))
    job.start()
    wait_until(lambda: stage.attempts()[0])
    began = read_claim(planned, "0.0").time
    wait_until(lambda: time.time() > began + 0.1)
    job.terminate()
    job.join()
    assert "executor.unit_time_limit" in read_attempts(planned).error(0).message


class TestSetupLines:
    """Setup lines of a profile in scripts run by a real shell, with a fake ``srun`` instead of the rank."""

    @pytest.fixture
    def run_script(self, cluster, tmp_path):
        """Return a function: setup lines -> the finished script of a rank, with its errors in the folder of jobs."""
        cluster.script("srun", 'echo "$GREETING $(type -t module)"')

        def run(*setup: str) -> subprocess.CompletedProcess[str]:
            stage = ToyStage(tmp_path)
            script = ToyRun(ToyDataset(stage), ClusterProfile(setup=list(setup))).scripts(stage.in_run, 2)[0]
            make_private_folder(stage.run_dir.jobs)
            with (stage.run_dir.jobs / "7_0_0_log.err").open("w") as errors:
                return subprocess.run(
                    ["bash", "-c", script], stdout=subprocess.PIPE, stderr=errors, text=True, check=False
                )

        return run

    def test_names_in_a_script_are_text(self, cluster, tmp_path, monkeypatch):
        """The names of the run directory, of the dataset and of the working directory contain shell code."""
        name = """$(touch ran1) `touch ran2` 'a' "b" ; touch ran3 & x\\"""
        folder = tmp_path / name.replace("/", "|")
        folder.mkdir()
        monkeypatch.chdir(folder)
        cluster.script("srun", "echo the rank runs")
        run = ToyRun(ToyDataset(ToyStage(folder), name=name), ClusterProfile())
        make_private_folder(run.run_dir.jobs)
        script = run.scripts(run.stage.in_run, 2)[0]
        ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path)
        assert ended.stderr == ""
        assert not list(tmp_path.rglob("ran[0-9]"))

    def test_a_line_that_fails_ends_the_script_and_is_named(self, run_script, tmp_path):
        ended = run_script("true", "echo 'EnvironmentNameNotFound: no environment' >&2; false", "true")
        assert (ended.returncode, ended.stdout) == (1, "")
        log = tmp_path / "run/jobs/7_0_0_log.err"
        assert find_reason(tmp_path / "run/jobs") == (
            "EnvironmentNameNotFound: no environment | sharmill: the setup line failed with status 1: "
            f"echo 'EnvironmentNameNotFound: no environment' >&2; false; {log}"
        )
        # This log is not blamed for the end of later ranks without a message.
        assert find_reason(tmp_path / "run/jobs", log.stat().st_mtime + 1) == ""

    @pytest.mark.parametrize(
        ("setup", "rank", "reason"),
        [
            ("", "", ("disk", "on node7: No space left")),
            ("no_such_module load cuda", "true", ("no_ranks", "module: command not found")),
            ("true", """echo "ModuleNotFoundError: No module named 'submitit'" >&2; false""",
             ("no_ranks", "the package submitit is not installed: run pip install 'sharmill[slurm]'")),
            # Messages of submitit come before the error itself, and are skipped.
            ("true", "echo 'submitit ERROR - it failed' >&2; echo 'ValueError: a bad day' >&2; false",
             ("no_ranks", ": ValueError: a bad day")),
        ],
    )  # fmt: skip
    def test_three_launches_without_progress_end_the_run(
        self, run_script, cluster, submit, tmp_path, monkeypatch, setup, rank, reason
    ):
        cluster.script("sbatch", "echo Submitted batch job 7")
        cluster.script("srun", rank)
        stage = ToyStage(tmp_path, units=8)
        submit()
        monkeypatch.setenv("SLURM_JOB_ID", "17")
        job = ToyRun(ToyDataset(stage), ClusterProfile(), role="advance", given=stage.run_dir.read_request())
        for number in range(3):
            assert stage.run_dir.read_outcome() is None
            if not setup:
                message = "cannot write /scratch on node7: No space left on device"
                note = Note(kind="failed", slot="node7/rank 0", launch=read_attempts(stage.in_run).launch,
                            message=message, code="disk", place="node7")  # fmt: skip
                RecordLog(stage.ranks.log("first")).append(note)
            else:
                run_script(setup)
            with raises(FatalError, *reason) if number == 2 else nullcontext():
                job.advance("toy", stage.dir.read_token(), True)
        end = stage.run_dir.read_outcome()
        assert (end.code, reason[1] in end.message) == (reason[0], True), end

    LACKS = "/venv/python: Error while finding module specification (ModuleNotFoundError: No module named 'submitit')\n"
    ENDED = "srun: error: {node}: task 0: Exited with exit code 1\n"
    # A harmless message of a setup line.
    WARNED = "ModuleNotFoundError: No module named 'extras'\n"
    PREEMPTED = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED DUE TO PREEMPTION ***\n"

    @pytest.mark.parametrize(
        ("logs", "rounds"),
        [
            ([LACKS, LACKS], 1),
            ([LACKS + ENDED.format(node="n1"), LACKS + ENDED.format(node="n2")], 1),
            ([LACKS], 3),
            ([LACKS + ENDED.format(node="n1")] * 2, 3),
            ([WARNED + PREEMPTED] * 2, 3),
        ],
        ids=["two", "on two nodes", "one", "on one node", "preempted"],
    )
    def test_a_module_missing_on_all_ranks_ends_the_run_at_once(
        self, cluster, submit, tmp_path, monkeypatch, logs, rounds
    ):
        """An example is a ``python`` of the profile that names an interpreter without the packages."""
        cluster.script("sbatch", "echo Submitted batch job 7")
        stage = ToyStage(tmp_path, units=8)
        submit()
        monkeypatch.setenv("SLURM_JOB_ID", "17")
        job = ToyRun(ToyDataset(stage), ClusterProfile(), role="advance", given=stage.run_dir.read_request())
        for number in range(rounds):
            assert stage.run_dir.read_outcome() is None
            for rank, text in enumerate(logs):
                (stage.run_dir.jobs / f"7_{rank}_0_log.err").write_text(text)
            code = "missing_package" if rounds == 1 else "no_ranks"
            reason = "submitit is not" if rounds == 1 else "the ranks ended 3 times"
            with raises(FatalError, code, reason) if number == rounds - 1 else nullcontext():
                job.advance("toy", stage.dir.read_token(), True)

    @pytest.mark.parametrize(
        ("nodes", "done", "rounds"),
        [([0, 1], False, 1), ([0], False, 3), ([0, 0], False, 3), ([0, 1], True, 4)],
        ids=["all", "one", "all on one node", "one unit done"],
    )
    def test_a_package_missing_on_all_ranks_ends_the_run_at_once(
        self, cluster, submit, tmp_path, monkeypatch, nodes, done, rounds
    ):
        cluster.script("sbatch", "echo Submitted batch job 7")
        stage = ToyStage(tmp_path, units=8)
        submit()
        monkeypatch.setenv("SLURM_JOB_ID", "17")
        job = ToyRun(ToyDataset(stage), ClusterProfile(), role="advance", given=stage.run_dir.read_request())
        planned = stage.in_run.with_plan(stage.dir.read_token())
        attempts = read_attempts(planned)
        log = RecordLog(stage.ranks.log("first"))
        if done:
            log.append(Commit(token=planned.token, index=0, id=stage.dir.read_units()[0].id, files=[], num_in=3,
                              num_out=3, rejects={}, stats={}, seconds=1.0, rank=0, slot="node0/rank 0",
                              launch=attempts.launch, time=1.0))  # fmt: skip
        for number, node in enumerate(nodes):
            message = f"on node{node}, the package nemo is not installed"
            log.append(Note(kind="failed", slot=f"node{node}/rank {number}", launch=attempts.launch,
                            message=message, code="missing_package"))  # fmt: skip
        for number in range(rounds):
            assert stage.run_dir.read_outcome() is None
            with raises(FatalError, "missing_package", "nemo") if number == rounds - 1 else nullcontext():
                job.advance("toy", stage.dir.read_token(), True)
        assert stage.run_dir.read_outcome().code == "missing_package"


# Import submitit first, as in a job that it starts, because importing it closes log files.
pytest.importorskip("submitit")
SILENT = SlurmSilent("SLURM does not answer squeue")


@pytest.fixture
def job(cluster, tmp_path, monkeypatch):
    """The driver job 17 of a run whose stages are all finished; ``scontrol requeue`` records its calls."""
    cluster.script("scontrol", 'echo "$@" >> orders')
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    (tmp_path / "run").mkdir()
    dataset = SimpleNamespace(name="toy", run_dir=tmp_path / "run", make_stages=lambda: [ToyStage(tmp_path).in_run])
    dataset.run = lambda executor, **options: RunOutcome(state="done", message="all stages are done")
    dataset.show = lambda: None
    job = SlurmExecutor(dataset, ClusterProfile(), role="advance", given=RunRequest(stages=["toy"], cluster="here"))
    job.run_dir.begin(job.given)
    return job


def advance(job, error=None, *, raised=None):
    """Run a job whose stages end with the given error, if any; return the recorded outcome of the run."""

    def fail(executor, **options):
        raise error

    if error is not None:
        job.dataset.run = fail
    with suppress(type(error)) if raised is None else raises(type(error), raised):
        job.advance("toy", "0" * 16, False)
    return job.run_dir.read_outcome()


def test_a_job_whose_patience_is_over_is_requeued(job, cluster):
    assert advance(job, SILENT) is None
    assert (cluster.folder / "orders").read_text() == "requeue 17\n"


@pytest.mark.parametrize(
    ("error", "restarts"),
    [
        # The 240th wait of 180 s reaches the limit of twelve hours.
        (SILENT, "239"),
        (FatalError("Invalid qos specification", code="jobs_refused"), "0"),
        (FatalError("the disk is full", code="disk"), "0"),
        (RuntimeError("nobody thought of this"), "0"),
    ],
)
def test_a_lasting_error_ends_the_run_in_the_second_job(job, cluster, monkeypatch, error, restarts):
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    end = advance(replace(job, patience=180.0, role="second"), error, raised=getattr(error, "code", None))
    assert not (cluster.folder / "orders").exists()
    assert (end.state, end.code) == ("failed", getattr(error, "code", ""))


def test_a_passing_error_without_a_requeue_is_left_to_the_second_job(job, monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "9999")
    assert advance(job, SILENT, raised="silent_cluster") is None


@pytest.mark.parametrize("state", ["done", "failed"])
def test_the_command_of_the_profile_is_told_of_the_end(job, tmp_path, state):
    said = tmp_path / "said"
    command = f'cat > {said}; echo "$SHARMILL_NAME $SHARMILL_STATE $SHARMILL_FINDINGS $SHARMILL_RUN_DIR" >> {said}'
    # The failure of the command is ignored.
    job.profile = replace(job.profile, notify=f"{command}; printf 'no such user \\xff' >&2; exit 3")
    message = "all stages are done" if state == "done" else 'it\'s "over" $(touch no)'
    assert advance(job, None if state == "done" else FatalError(message, code="disk")).state == state
    assert said.read_text() == f"{message}\ntoy {state} 0 {job.run_dir.path}\n"
    assert "no such user" in job.run_dir.advance_log.read_text()


def test_a_job_that_has_lost_the_lock_records_no_outcome(job):
    taken = FatalError("another process took the lock over", code="locked")
    assert advance(replace(job, role="second"), taken, raised="locked") is None


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_job_of_a_cancelled_or_replaced_run_does_nothing(job, is_cancelled):
    if is_cancelled:
        job.run_dir.note_outcome(RunOutcome(state="cancelled", message="cancelled by bob"))
    else:
        job.run_dir.begin(RunRequest(stages=[]))
    before = job.run_dir.read_outcome()
    assert advance(job, AssertionError("it goes on")) == before
    assert "the run has ended, or another run was started" in job.run_dir.advance_log.read_text()


def test_the_end_of_a_run_releases_unless_another_process_took_over(job):
    stage = ToyStage(job.run_dir.path.parent).in_run
    reserve([stage], restart=False)
    job.dataset.make_stages = lambda: [stage]
    error = ConfigError("write was started with other settings", code="changed_plan")
    with locked(job.run_dir):
        assert advance(job, error).code == "changed_plan"
    assert len(list((stage.root / STAGING_NAME).glob("*.reservation"))) == 1
    job.run_dir.begin(job.given)
    advance(job, error)
    assert not (stage.root / STAGING_NAME).exists()


@pytest.mark.parametrize(
    ("role", "says", "behind"),
    [("rank", "jobs 16_0 (user bob) are still in the queue, then driver job 1", ["--dependency=afterany:16"]),
     ("advance", "jobs 18 (user bob) are still in the queue", [])],
)  # fmt: skip
def test_a_job_that_meets_ranks_or_a_later_job_leaves_them_the_work(cluster, tmp_path, monkeypatch, role, says, behind):
    """In one case, the job was requeued after submitting; in the other, the answer to its submission was lost."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    given = RunRequest(stages=["toy"], cluster="here")
    run = ToyRun(ToyDataset(ToyStage(tmp_path, units=8)), ClusterProfile(), role="advance", given=given)
    with locked(run.run_dir):
        run.run_dir.make_id()
        run.run_dir.jobs.mkdir()
        run.run_dir.begin(given)
    number = "16_0" if role == "rank" else "18"
    cluster.script(
        "squeue",
        f"echo '17|RUNNING|None|(null)|bob|{job_comment(run.run_dir, 'advance')}'; "
        f"echo '{number}|RUNNING|None|(null)|bob|{job_comment(run.run_dir, role)}'",
    )
    assert advance(run) is None
    assert says in run.run_dir.advance_log.read_text()
    scripts = cluster.scripts()
    assert len(scripts) == 2 * len(behind)
    assert all(line in scripts[0] for line in behind)


@pytest.fixture(autouse=True)
def own_cores(monkeypatch):
    """Reset the limit of cores, which belongs to the process."""
    monkeypatch.setattr("sharmill.files.host._own_cores", None)


@pytest.fixture
def make_job(cluster, monkeypatch):
    """Return a function: a stage -> the driver job 17 of its run."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")

    def make(stage, role="advance"):
        given = RunRequest(stages=["toy"], cluster="here")
        job = ToyRun(ToyDataset(stage), ClusterProfile(), patience=0.2, role=role, given=given)
        stage.run_dir.path.mkdir()
        stage.run_dir.begin(given)
        return job

    return make


@pytest.mark.parametrize("role", [None, "second"])
def test_a_small_stage_is_left_to_an_advance_job(cluster, tmp_path, make_job, role):
    """Both the submitting process and a second job submit such a driver job."""
    stage = ToyStage(tmp_path, units=4)
    message = "toy: 4 units, which need no ranks, then driver job 1"
    if role is None:
        assert ToyRun(ToyDataset(stage), ClusterProfile(), patience=0.2).start() == Submitted(message, ["1"])
    else:
        job = make_job(stage, role)
        job.advance("toy", "", False)
        assert message in job.run_dir.advance_log.read_text()
    # The scripts are those of the driver job and of its backup driver job.
    assert [script.count("--dependency") for script in cluster.scripts()] == [0, 1]


def test_a_small_stage_has_the_same_bytes_and_submits_nothing(cluster, tmp_path, make_job):
    stage, local = ToyStage(tmp_path, units=4), ToyStage(tmp_path / "local", units=4)
    make_job(stage).advance("toy", "", False)
    assert run(local)[0].ok
    assert output_bytes(stage) == output_bytes(local)
    assert stage.run_dir.read_outcome().state == "done"
    assert cluster.scripts() == []


@pytest.mark.parametrize(
    ("units", "profile", "workers"),
    [
        (4, {}, 1),
        (5, {}, 0),
        (5, {"driver_units": 5}, 1),
        (1, {"driver_units": 0}, 0),
        (4, {"driver_hours": 10.0 / 3600}, 1),
        (4, {"driver_hours": 9.0 / 3600}, 0),
        (8, {"stages": {"driver": {"cores": 2, "memory_gb": 8}}}, 2),
        (1, {"stages": {"driver": {"cores": 2, "memory_gb": 8}}}, 1),
        (4, {"stages": {"driver": {"cores": 2, "memory_gb": 7}}}, 1),
        (4, {"stages": {"driver": {"memory_gb": 3.9}}}, 0),
        (8, {"cpu": RankProfile(memory_gb=None), "stages": {"driver": {"cores": 2}}}, 2),
        (4, {"cpu": RankProfile(cores=2), "stages": {"driver": {"cores": 1}}}, 0),
        (4, {"python": "/other/python"}, 0),
        (4, {"container_image": "image.sqsh"}, 0),
    ],
)
def test_units_cores_memory_and_python_make_a_stage_small(tmp_path, units, profile, workers):
    stage = ToyStage(tmp_path, units=units)
    run = ToyRun(ToyDataset(stage), ClusterProfile(**profile))
    planned, unit_list = read_or_make_plan(stage.in_run)
    assert run.workers_in_job(planned, unit_list) == workers
    assert run.workers_in_job(GpuStage(tmp_path).in_run, unit_list) == 0
