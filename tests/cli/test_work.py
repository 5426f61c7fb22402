"""``sharmill work``, and a second ``run`` beside a running one."""

import os
import signal
import subprocess

import pytest
import yaml
from support.project import command, make_record, raises, run_sharmill, snapshot, write_lines, write_tone
from support.toy_stage import wait_until

from sharmill.config import load_config
from sharmill.engine.launch import driven_launch
from sharmill.engine.order import make_stages
from sharmill.engine.plan import read_or_make_plan
from sharmill.engine.run_dir import RunDir, RunOutcome
from sharmill.errors import ConfigError
from sharmill.files.trust import require_private


@pytest.fixture
def project(tmp_path):
    """A folder with a corpus of tones, and a configuration whose paths are relative to it."""
    tmp_path.chmod(0o755)
    records = []
    for number in range(12):
        write_tone(tmp_path / f"audio/{number}.wav", 0.3)
        records.append(make_record(audio_filepath=f"{number}.wav", duration=0.3))
    write_lines(tmp_path / "manifest.json", records)
    values = {
        "name": "tones", "run_dir": "run", "dataset_dir": "dataset", "match": None, "encode": {"codecs": []},
        "sources": [{"manifest": "manifest.json", "audio_root": "audio"}], "prepare": {"unit_records": 2},
        "write": {"shard_size": 2}, "executor": {"workers": 1},
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    return tmp_path


def run(project, *options):
    return run_sharmill("run", "config.yaml", *options, cwd=project, status=None)


@pytest.fixture
def at_work(project, monkeypatch):
    """The project while this process is at work on its first stage."""
    assert run(project, "prepare").returncode == 0
    monkeypatch.chdir(project)
    (stage,) = make_stages(load_config("config.yaml"), ["prepare"])
    planned, units = read_or_make_plan(stage)
    stage.dir.done.unlink()
    with driven_launch(planned, units, 1):
        yield project


@pytest.mark.slow
def test_goes_on_from_any_folder_with_a_run_that_was_killed(project, tmp_path_factory):
    with subprocess.Popen(command("run", "config.yaml"), cwd=project, stdout=subprocess.PIPE) as killed:
        wait_until(lambda: RunDir(project / "run").read_request())
        killed.send_signal(signal.SIGKILL)
    done = run_sharmill("work", project / "run", cwd="/")
    assert (done.returncode, done.stderr) == (0, "")
    first = snapshot(project / "dataset")
    assert run(project, "--restart", "dataset_dir=again", "run_dir=other").returncode == 0
    assert snapshot(project / "again") == first
    # It is done already.
    run_sharmill("work", project / "run", cwd="/")


def test_a_failed_run_is_restarted_only_by_its_own_command(project):
    assert run(project, "prepare").returncode == 0
    RunDir(project / "run").note_outcome(RunOutcome(state="failed", message="toy: 1 units failed", code="units_failed"))
    done = run_sharmill("work", project / "run", status=1)
    assert (done.returncode, done.stderr) == (1, "Error: toy: 1 units failed\n")


def test_a_moved_or_empty_run_directory_is_refused(project):
    (project / "empty").mkdir(mode=0o755)
    for name in ("empty", "nowhere"):
        none = run_sharmill("work", project / name, status=2)
        assert (none.returncode, none.stderr.count("\n")) == (2, 1)
        assert "no run has been started" in none.stderr
    assert run(project, "prepare").returncode == 0
    (project / "run").rename(project / "moved")
    done = run_sharmill("work", project / "moved", status=2)
    assert "is a copy of the run directory" in done.stderr


def test_of_a_run_directory_of_others_nothing_is_read(project, monkeypatch):
    assert run(project, "prepare").returncode == 0
    run_dir = project / "run"
    (run_dir / "given.json").write_text("not JSON")
    run_dir.chmod(0o775)
    done = run_sharmill("work", run_dir, status=2)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "is not private" in done.stderr
    run_dir.chmod(0o755)
    (run_dir / "linked").symlink_to("given.json")
    with raises(ConfigError, "foreign_output", "linked"):
        require_private(run_dir)
    (run_dir / "linked").unlink()
    require_private(run_dir)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with raises(ConfigError, "foreign_output", "is not private"):
        require_private(run_dir)


def test_restart_beside_live_ranks_needs_take_over(at_work):
    token = (at_work / "run/prepare/plan/token").read_text()
    refused = run(at_work, "prepare", "--restart")
    assert refused.returncode == 2
    assert f"process {os.getpid()} on" in refused.stderr
    assert "--take-over" in refused.stderr
    assert (at_work / "run/prepare/plan/token").read_text() == token
    assert run(at_work, "prepare", "--restart", "--take-over").returncode == 0
    assert (at_work / "run/prepare/plan/token").read_text() != token


def test_another_configuration_beside_live_ranks_is_refused(at_work):
    before = (at_work / "run/resolved_config.yaml").read_text()
    refused = run(at_work, "write.shard_size=3")
    assert refused.returncode == 2
    assert f"process {os.getpid()} on" in refused.stderr
    assert "a different configuration (write in" in refused.stderr
    assert (at_work / "run/resolved_config.yaml").read_text() == before
    # The number of ranks may differ.
    assert run(at_work, "executor.workers=2").returncode == 0
