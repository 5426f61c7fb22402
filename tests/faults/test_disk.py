"""A disk that fails, fills up or turns read-only in the middle of every stage.

A run on it ends with one clear line, or does what could not be done at the second attempt; nothing half published is
ever seen, and a relaunch on a good disk brings the same bytes.
"""

from __future__ import annotations

import os
import random
import subprocess

import pytest
from support.disk import KINDS, READ_KINDS, FaultyDisk, relaunch, trouble
from support.small_run import STAGES

# Many whole launches a test.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

SEED = 20
# Every launch reads so often: what the stage begins with, its plan, its ledger.
_FEWEST_READS = 4
_PASSING = ("stale", "glitch")


@pytest.fixture(scope="module")
def faulty_disk(tmp_path_factory):
    return FaultyDisk(tmp_path_factory.mktemp("faulty_disk"))


@pytest.mark.parametrize("stage", STAGES)
def test_faults_one_after_the_other(small_run, faulty_disk, stage):
    """Each launch meets another fault, a little further on, and the last one completes the stage."""
    rng = random.Random(f"{SEED} {stage}")
    # Launches that get no further than this leave something for the next ones to do.
    reach = faulty_disk.count(small_run, stage, "full") // (len(KINDS) + 1)
    # One of the two is enough for a stage.
    ending = [kind for kind in KINDS if kind not in (*_PASSING, rng.choice(["full", "quota"]))]
    # Last, since a further attempt may outlast it.
    for kind in (*rng.sample(ending, len(ending)), rng.choice(_PASSING)):
        at = rng.randint(1, _FEWEST_READS if kind in READ_KINDS else reach)
        found = trouble(faulty_disk, small_run, stage, kind, at)
        assert found.hit
        assert found.problems == []
        assert found.status != 0 or kind in _PASSING
    assert relaunch(small_run, stage) == []


@pytest.mark.parametrize(("from_end", "kind"), enumerate(["full", "kill", "glitch", "dead", "readonly", "kill"]))
def test_the_last_operations_of_a_stage_fail(small_run, faulty_disk, from_end, kind):
    """Those by which a stage, and the dataset, become finished."""
    at = faulty_disk.count(small_run, "write", kind) - 4 * from_end
    found = trouble(faulty_disk, small_run, "write", kind, at)
    assert found.hit or kind == "full"
    assert found.problems == []
    assert relaunch(small_run, "write") == []


@pytest.mark.parametrize(("later", "log"), [(1, "driver.log"), (2, "rank-00")], ids=["what forks the ranks", "a rank"])
def test_a_process_that_cannot_open_its_log_ends_the_stage_in_one_line(small_run, faulty_disk, later, log):
    small_run.restore("write")
    faulty_disk.run(small_run, "write", "none", 1, workers=2)
    first = next(n for n, name in enumerate(faulty_disk.operations(), start=1) if name.endswith("logs/driver.log"))
    small_run.restore("write")
    found = trouble(faulty_disk, small_run, "write", "readonly", first + later, workers=2)
    assert found.hit.startswith(f"open run/write/logs/{log}")
    assert (found.status, found.problems) == (1, [])
    assert relaunch(small_run, "write") == []


def test_the_error_told_is_that_of_the_work_and_not_of_its_closing_words(small_run, faulty_disk):
    small_run.restore("write")
    faulty_disk.run(small_run, "write", "none", 1)
    first = next(n for n, name in enumerate(faulty_disk.operations(), start=1) if "/ledger/" in name)
    small_run.restore("write")
    outcome = faulty_disk.run(small_run, "write", "dead", first)
    assert outcome.returncode == 1
    assert "/run/write/ranks/" in outcome.stderr
    assert "/ledger/" in outcome.stderr


@pytest.fixture
def resize(small_run):
    """Mounts a file system over the run; returns a function that sets how many bytes are free on it."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=500m", "tmpfs", small_run.work]
    attempt = subprocess.run(mount, capture_output=True, text=True, check=False)
    if attempt.returncode != 0:
        pytest.skip(f"mounting a tmpfs is not permitted here: {attempt.stderr.strip()}")

    def set_free(size: int) -> None:
        status = os.statvfs(small_run.work)
        size += (status.f_blocks - status.f_bfree) * status.f_frsize
        subprocess.run(["mount", "-o", f"remount,size={size}", small_run.work], check=True)

    yield set_free
    subprocess.run(["umount", "--lazy", small_run.work], check=True)


def pages(folder):
    return sum(-(-path.stat().st_size // 4096) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("stage", STAGES)
def test_the_disk_fills_up(small_run, resize, stage):
    """On two ranks, with room for a part of what the stage writes."""
    small_run.restore(stage)
    needed = pages(small_run.state(stage)) - pages(small_run.before(stage))
    resize(random.Random(f"{SEED} {stage}").randint(needed // 4, needed // 2) * 4096)
    outcome = small_run.run(stage, workers=2)
    assert outcome.returncode == 1
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("Error: ")
    assert "No space left on device" in line
    assert small_run.leftovers() == []
    small_run.check_readers(stage)
    resize(100 << 20)
    outcome = small_run.run(stage, workers=2)
    assert (outcome.returncode, outcome.stderr) == (0, "")
    assert small_run.differences(stage) == []
