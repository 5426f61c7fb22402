"""A disk that fails, fills up or turns read-only in the middle of a stage.

A run on it ends with one clear line, or succeeds at the second attempt. Readers never see partial output, and a
relaunch on a good disk gives the same bytes. See ``faults/failing_disk`` for the operations and the kinds of fault.
"""

import errno
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from faults.runs import STAGES, SmallRun
from support.project import REPOSITORY, TESTS

# Each test launches the program many times.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

SEED = 20
# Every launch reads at least this often: the input of the stage, its plan, its ledger.
_FEWEST_READS = 4
_PASSING = ("stale", "glitch")

# The error of each kind of fault; a kill has none.
_ERRNOS = {
    "glitch": errno.EIO, "dead": errno.EIO, "full": errno.ENOSPC, "quota": errno.EDQUOT, "readonly": errno.EROFS,
    "fsync": errno.EIO, "unreadable": errno.EIO, "stale": errno.ESTALE, "kill": 0,
}  # fmt: skip
KINDS = tuple(_ERRNOS)
# The kinds that affect reads.
READ_KINDS = ("unreadable", "stale")
# With these kinds, temporary files cannot be removed either, and stay until the relaunch.
_NOTHING_GOES = ("dead", "readonly", "kill")
_OK, _FAILED, _WRONG_USE, _KILLED = 0, 1, 2, -9


class FaultyDisk:
    """A failing disk below the folder of a run, for Python processes with ``failing_disk`` on their path."""

    def __init__(self, folder: Path) -> None:
        self._count = folder / "count"
        self._log = folder / "log"
        self._counts: dict[tuple[str, bool], int] = {}

    def run(self, run: SmallRun, stage: str, kind: str, at: int, workers: int = 1) -> subprocess.CompletedProcess[str]:
        """Run a stage on this disk until it ends or fails."""
        for path in (self._count, self._log, self._count.with_suffix(".failed")):
            path.unlink(missing_ok=True)
        values = {"FOLDER": f"{run.work}/", "KIND": kind, "AT": at, "COUNT": self._count, "LOG": self._log,
                  "ERRNO": _ERRNOS.get(kind, 0)}  # fmt: skip
        settings = {f"FAULTY_DISK_{key}": str(value) for key, value in values.items()}
        path = ":".join(map(str, (TESTS / "faults/failing_disk", TESTS, REPOSITORY / "src")))
        return run.run(stage, workers, env=os.environ | settings | {"PYTHONPATH": path})

    def operations(self) -> list[str]:
        """Return the name and path of each failed operation of the last run, or of all operations with ``none``."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [line.split(" ", 1)[1] for line in lines]

    def count(self, run: SmallRun, stage: str, kind: str) -> int:
        """Return the number of operations of the stage that the fault can hit; the run is restored."""
        run.restore(stage)
        key = stage, kind in READ_KINDS
        if key not in self._counts:
            # A fault after the last operation never happens, so this run only counts.
            assert self.run(run, stage, "unreadable" if key[1] else "none", sys.maxsize).returncode == _OK
            self._counts[key] = self._count.stat().st_size
            run.restore(stage)
        return self._counts[key]


def trouble(
    disk: FaultyDisk, run: SmallRun, stage: str, kind: str, at: int, workers: int = 1
) -> tuple[str, int, list[str]]:
    """Continue a stage with one fault.

    Returns:
        The first operation that failed ("" if the run ended before the fault), the exit status, and a list of problems.
    """
    earlier = run.leftovers()
    outcome = disk.run(run, stage, kind, at, workers)
    failed = disk.operations()
    problems = check_message(outcome, kind)
    if outcome.returncode == _OK:
        problems += run.differences(stage)
    elif kind not in _NOTHING_GOES:
        problems += [f"{name} is left over" for name in run.leftovers() if name not in earlier]
    try:
        run.check_readers(stage)
    except Exception as error:  # noqa: BLE001 - whatever a reader meets is the outcome
        problems.append(f"a reader gets {error!r}")
    return failed[0].replace(f"{run.work}/", "") if failed else "", outcome.returncode, problems


def relaunch(run: SmallRun, stage: str) -> list[str]:
    """Run the stage on a good disk, and return a list of problems."""
    outcome = run.run(stage)
    wrong = [] if outcome.returncode == _OK else [f"the relaunch ends with {outcome.returncode}: {outcome.stderr}"]
    return wrong + run.differences(stage)


def check_message(outcome: subprocess.CompletedProcess[str], kind: str) -> list[str]:
    """Return the problems of a run's end: one line must give the failure and its reason, and the status must fit."""
    status, name = outcome.returncode, os.strerror(_ERRNOS[kind])
    if status == _OK:
        return []
    if kind == "kill":
        return [] if status == _KILLED else [f"the exit status is {status}"]
    if status not in (_FAILED, _WRONG_USE):
        return [f"the exit status is {status}: {outcome.stderr}"]
    # Ignore the line about an incomplete record of an earlier launch.
    lines = [line for line in outcome.stderr.strip().splitlines() if "a process with an incomplete record" not in line]
    units = re.findall(r"unit \d+ failed: .*", outcome.stdout)
    if not lines and status == _FAILED and units:
        return [] if all(name in " ".join(outcome.stdout.split()) for _ in units) else [f"unclear: {outcome.stdout}"]
    if len(lines) != 1 or not lines[0].startswith("Error: ") or name not in lines[0]:
        return [f"no single clear line: {outcome.stderr}"]
    before_any_work = "cannot write to " in lines[0]
    return [] if (status == _WRONG_USE) == before_any_work else [f"the exit status is {status}: {lines[0]}"]


@pytest.fixture(scope="module")
def faulty_disk(tmp_path_factory):
    return FaultyDisk(tmp_path_factory.mktemp("faulty_disk"))


@pytest.mark.parametrize("stage", STAGES)
def test_faults_one_after_the_other(small_run, faulty_disk, stage):
    """Each launch meets another fault at a later operation, and the last one completes the stage."""
    rng = random.Random(f"{SEED} {stage}")
    # Limit the progress of each launch, so that work is left for the next ones.
    reach = faulty_disk.count(small_run, stage, "full") // (len(KINDS) + 1)
    # Use only one of "full" and "quota" for each stage.
    ending = [kind for kind in KINDS if kind not in (*_PASSING, rng.choice(["full", "quota"]))]
    # A passing fault comes last, since the stage may succeed at its next attempt.
    for kind in (*rng.sample(ending, len(ending)), rng.choice(_PASSING)):
        at = rng.randint(1, _FEWEST_READS if kind in READ_KINDS else reach)
        hit, status, problems = trouble(faulty_disk, small_run, stage, kind, at)
        assert (bool(hit), problems) == (True, [])
        assert status != 0 or kind in _PASSING
    assert relaunch(small_run, stage) == []


@pytest.mark.parametrize(("from_end", "kind"), enumerate(["full", "kill", "glitch", "dead", "readonly", "kill"]))
def test_the_last_operations_of_a_stage_fail(small_run, faulty_disk, from_end, kind):
    """These operations complete the stage and the dataset."""
    at = faulty_disk.count(small_run, "write", kind) - 4 * from_end
    hit, _, problems = trouble(faulty_disk, small_run, "write", kind, at)
    assert hit or kind == "full"
    assert problems == []
    assert relaunch(small_run, "write") == []


@pytest.mark.parametrize(("time", "log"), [(1, "driver.log"), (0, "rank-00")], ids=["what forks the ranks", "a rank"])
def test_a_process_without_a_log_ends_the_stage_in_one_line(small_run, faulty_disk, time, log):
    small_run.restore("write")
    faulty_disk.run(small_run, "write", "none", 1, workers=2)
    opened = [n for n, name in enumerate(faulty_disk.operations(), start=1) if f"logs/{log}" in name]
    small_run.restore("write")
    hit, status, problems = trouble(faulty_disk, small_run, "write", "readonly", opened[time], workers=2)
    assert hit.startswith(f"open run/write/logs/{log}")
    assert (status, problems) == (1, [])
    assert relaunch(small_run, "write") == []


def test_the_first_error_is_reported_rather_than_its_aftermath(small_run, faulty_disk):
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
    """Mount a file system over the run; return a function that sets its number of free bytes."""
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
    """The stage runs on two ranks, with space for only a part of its output."""
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
