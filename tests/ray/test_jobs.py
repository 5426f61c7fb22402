"""Whole pipelines on Ray, through `ray job submit` and `ray.sbatch`: their bytes and exit statuses."""

import os
import secrets
import shutil
import subprocess
import sys
import urllib.request
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import yaml
from support.project import REPOSITORY, check_page, damage_shard, outcome, run_sharmill
from support.ray_cluster import LOOPBACK, patiently
from support.toy_stage import wait_until

from sharmill.executors.ray_node import free_port
from sharmill.files.locks import lock_owner


def run_to_end(command: list, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=500, **options)


def is_head(address: str, token: str) -> bool:
    """Return True if the head with this token answers at the address, rather than another cluster on this machine."""
    request = urllib.request.Request(f"{address}/api/version", headers={"Authorization": f"Bearer {token}"})
    with suppress(OSError), urllib.request.urlopen(request, timeout=10):
        return True
    return False


class TestJobs:
    @pytest.fixture(scope="class")
    def submit(self, tmp_path_factory, ray_folder):
        """Start a head with a dashboard on 127.0.0.1; return a function that submits a job and follows it."""
        # Put the interpreter with sharmill first, as in a shell with the virtual environment active.
        path, token = f"{Path(sys.executable).parent}:{os.environ['PATH']}", secrets.token_hex(32)
        environment = {**os.environ, **LOOPBACK, "RAY_TMPDIR": str(ray_folder / "jobs"), "PATH": path,
                       "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}  # fmt: skip
        environment.pop("RAY_ADDRESS", None)
        ray = Path(sys.executable).with_name("ray")
        log = tmp_path_factory.mktemp("head") / "head.log"

        def start() -> tuple[subprocess.Popen, str]:
            dashboard = free_port()
            address = f"http://127.0.0.1:{dashboard}"
            command = [ray, "start", "--head", "--block", "--node-ip-address=127.0.0.1", "--num-cpus=2",
                       f"--port={free_port()}",
                       "--object-store-memory=100000000", f"--ray-client-server-port={free_port()}",
                       "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}",
                       f"--dashboard-agent-listen-port={free_port()}"]  # fmt: skip
            with log.open("w") as output:
                head = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
            try:
                wait_until(lambda: head.poll() is not None or is_head(address, token))
                assert head.poll() is None, log.read_text()
            except BaseException:
                head.terminate()
                head.wait(60)
                raise
            return head, address

        # Retry, because another process may have taken a free port meanwhile.
        head, address = patiently(start)

        def submit(working_dir, *arguments, start=run_to_end):
            command = [ray, "job", "submit", "--address", address, "--working-dir", working_dir, "--"]
            return start([*command, "python", "jobs/ray_job.py", *arguments], env=environment)

        yield submit
        head.terminate()
        head.wait(60)

    @pytest.fixture(scope="class")
    def working_dir(self, tmp_path_factory):
        """A working directory that contains only the entry point."""
        folder = tmp_path_factory.mktemp("working")
        (folder / "jobs").mkdir()
        shutil.copy(REPOSITORY / "jobs/ray_job.py", folder / "jobs")
        return folder

    @pytest.fixture
    def relative(self, working_dir, make_config):
        """The name of a configuration with relative paths in the working directory."""
        config = make_config(working_dir)
        values = yaml.safe_load(config.read_text())
        config.write_text(yaml.safe_dump(values | {"run_dir": "run", "dataset_dir": "dataset"}))
        return config.name

    def test_a_dataset_has_the_bytes_of_a_local_run_and_is_repaired(
        self, submit, working_dir, relative, tmp_path, local_outcomes
    ):
        done = submit(working_dir, "all", relative, "--root", tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "ray_job: ended with exit status 0: all is done" in done.stdout
        assert outcome(tmp_path) == local_outcomes[0]
        check_page(tmp_path)
        done = submit(working_dir, "all", relative, "--root", tmp_path, "--redo", damage_shard(tmp_path))
        assert done.returncode == 0, done.stdout + done.stderr
        assert outcome(tmp_path) == local_outcomes[0]

    def test_relative_paths_without_a_root_are_refused(self, submit, working_dir, relative):
        done = submit(working_dir, "all", relative)
        assert done.returncode == 1
        output = done.stdout + done.stderr
        assert "run_dir is 'run'" in output
        assert "exit code 2" in output

    @pytest.mark.slow
    def test_a_cancelled_job_ends_and_continues_when_submitted_again(self, submit, working_dir, make_config, tmp_path):
        config, log = make_config(tmp_path), (tmp_path / "job.log").open("w")
        with submit(working_dir, "all", config, start=partial(subprocess.Popen, stdout=log, stderr=log)) as waiting:
            wait_until(lambda: (owner := lock_owner(tmp_path / "run")) is not None and "Ray job" in owner.job)
            done = run_sharmill("cancel", tmp_path / "run")
            assert "stopped: " in done.stdout
            waiting.wait(60)
        assert lock_owner(tmp_path / "run") is None
        assert not (tmp_path / "dataset/dataset.json").exists()
        assert submit(working_dir, "prepare", config).returncode == 0


@pytest.mark.skipif(shutil.which("sbatch") is None, reason="there is no sbatch on this machine")
class TestAllocation:
    @pytest.fixture
    def sbatch(self, tmp_path):
        """Return a function that runs ray.sbatch on two nodes, and returns the exit status and the log."""
        if run_to_end(["sinfo", "--noheader"]).returncode != 0:
            pytest.skip("no SLURM controller answers: start it with ../shared/slurm/start.sh")

        def run(*arguments):
            log = tmp_path / "job.log"
            options = ["--wait", "--partition=cpu", "--nodes=2", "--cpus-per-task=1", "--mem=3000M", "--time=10"]
            # Drop the settings of clusters that other tests have started.
            environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
            environment["SHARMILL_PYTHON"] = sys.executable
            command = ["sbatch", *options, f"--output={log}", "jobs/sbatch/ray.sbatch", *arguments]
            done = run_to_end(command, env=environment, cwd=REPOSITORY)
            return done.returncode, log.read_text()

        return run

    def test_a_dataset_has_the_same_bytes_and_status_0(self, sbatch, make_config, tmp_path, local_outcomes):
        config = make_config(tmp_path, executor={"workers": 2})
        status, log = sbatch("all", config)
        assert status == 0, log
        assert "ray.sbatch: ended with exit status 0" in log
        assert outcome(tmp_path) == local_outcomes[0]

    def test_its_exit_status_is_passed_on(self, sbatch, make_config, tmp_path):
        config = make_config(tmp_path, sources=[{"manifest": "/no/such.json", "audio_root": "/"}])
        status, log = sbatch("prepare", config)
        assert status == 2, log
        assert "ray.sbatch: ended with exit status 2" in log
