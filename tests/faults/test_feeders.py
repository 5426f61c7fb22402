"""Recordings that kill or block their decoding process: the effect on the run and on its processes."""

import os
import shutil
import signal
import subprocess
import textwrap
import time

import pytest
from support.project import REPOSITORY, Project, command, lines, run_sharmill, voice, write_config
from support.toy_stage import session_members, wait_until

from sharmill.manifest import records_checksum

BAD = "anna/2.flac"
# Every new Python process imports this code, whose decoder does not survive one file.
DECODER = f"""
    import os, signal, time
    from sharmill.audio.segments import SegmentReader
    read = SegmentReader.read_or_copy
    def decode(self, segments, *arguments):
        if segments[0].audio_filepath == {BAD!r}:
            {{does}}
        return read(self, segments, *arguments)
    SegmentReader.read_or_copy = decode
"""
KILL, HANG = "os.kill(os.getpid(), signal.SIGSEGV)", "time.sleep(1000)"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A run of two speakers with a finished prepare stage; match has one unit per speaker."""
    project = Project(tmp_path_factory.mktemp("feeders"))
    for number in range(12):
        speaker = "anna" if number < 6 else "bert"
        project.add(f"{speaker}/{number}.flac", voice(1.0 + 0.1 * number, seed=number), speaker=speaker)
    config = project.configure()
    path = write_config(
        project.folder, config.sources[0].manifest, project.root, run_dir=str(project.folder / "work/run"),
        dataset_dir=str(project.folder / "work/dataset"), prepare={"min_duration": 0.0},
        match={"encoder": "resemblyzer", "min_similarity": -1.0, "min_duration": 0.0, "unit_seconds": 6.0},
    )  # fmt: skip
    run_sharmill("run", path, "prepare")
    shutil.copytree(project.folder / "work", project.folder / "prepared")
    yield path
    shutil.rmtree(project.folder)


@pytest.fixture
def environment(prepared, tmp_path):
    """Return a function that makes an environment whose decoder runs a statement in its process."""
    work = prepared.parent / "work"
    shutil.rmtree(work)
    shutil.copytree(work.with_name("prepared"), work)

    def make(does):
        (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(DECODER).format(does=does))
        return os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}

    return make


@pytest.mark.parametrize("workers", [1, 2])
def test_a_recording_that_kills_its_decoder_fails_its_unit(prepared, environment, workers):
    options = ["match", f"executor.workers={workers}", "executor.feeders=2"]
    failed = run_sharmill("run", prepared, *options, status=1, env=environment(KILL))
    assert BAD in failed.stdout + failed.stderr
    assert "SIGSEGV" in failed.stdout + failed.stderr
    assert "Traceback" not in failed.stdout + failed.stderr
    run = prepared.parent / "work/run"
    # The other speaker's unit is complete, because the ranks continued.
    noted = [line for path in run.glob("match/ranks/*/ledger/*.jsonl") for line in lines(path)]
    assert [line["index"] for line in noted if "files" in line] == [1]
    run_sharmill("run", prepared, *options)
    (found,) = run.glob("manifests/*withContext*")
    whole = records_checksum(found)
    shutil.rmtree(prepared.parent / "work")
    shutil.copytree(prepared.parent / "prepared", prepared.parent / "work")
    run_sharmill("run", prepared, "match", "executor.feeders=0")
    assert records_checksum(found) == whole


@pytest.mark.parametrize(
    ("end", "victim"), [(signal.SIGKILL, "driver"), (signal.SIGINT, "group"), (signal.SIGTERM, "driver")]
)
@pytest.mark.parametrize("workers", [1, 2])
def test_all_processes_end_with_the_run_whatever_they_do(prepared, environment, end, victim, workers):
    arguments = command("run", prepared, "match", f"executor.workers={workers}", "executor.feeders=2")
    run = subprocess.Popen(
        arguments, env=environment(HANG), cwd=REPOSITORY, start_new_session=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        logs = prepared.parent / "work/run"
        wait_until(lambda: any("starts" in path.read_text() for path in logs.rglob("*.log")))
        wait_until(lambda: len(session_members(run.pid)) >= 4 * workers)
        time.sleep(1.0)  # it hangs in the decoder
        (os.killpg if victim == "group" else os.kill)(run.pid, end)
        began = time.monotonic()
        wait_until(lambda: not session_members(run.pid))
        assert time.monotonic() - began < 5.0
    finally:
        for pid in session_members(run.pid):
            os.kill(pid, signal.SIGKILL)
        run.wait()
