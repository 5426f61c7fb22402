"""Feeders: order and integrity of results, limits, and the effect of dying or hanging feeders on their rank."""

import itertools
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support.project import TESTS
from support.shared_memory import run_with_shm
from support.toy_stage import is_running, session_members, wait_until
from support.work import Decoder

from sharmill.engine import feeders as module
from sharmill.engine.feeders import Feeders
from sharmill.errors import DeviceError, UnitFailed
from sharmill.files.messages import RemoteTraceback


def feeding(number, **options):
    options = {"weigh": lambda task: 1.0, "ahead": 10.0} | options
    return closing(Feeders(Decoder(), number, **options))


def outcomes(feed):
    """Return the results of a feed, with errors in the places of missing results."""
    found = []
    for parts in feed:
        try:
            found += parts
        except Exception as error:  # noqa: BLE001 - of any kind
            found.append(error)
    return found


@pytest.mark.parametrize("number", [0, 1, 3])
def test_results_come_in_order_and_arrays_are_whole(number):
    sizes = [1, 0, 5, 40_000, 9_000_000, 2, 33_000_000, *range(1000, 1400)]  # some exceed the limits for memory
    with feeding(number) as feeders:
        held = []
        arrays = itertools.chain.from_iterable(feeders.feed(("array", size) for size in sizes))
        for size, (numbers, three) in zip(sizes, arrays, strict=True):
            held.append((size, numbers, three))
            # Keep some arrays in use while later ones arrive.
            if len(held) > 20:
                size, numbers, three = held.pop(0)
                np.testing.assert_array_equal(numbers, np.arange(size, dtype=np.int16))
                np.testing.assert_array_equal(three, np.full(3, size, np.float32))


@pytest.mark.parametrize("number", [0, 2])
def test_an_error_comes_where_its_result_would_have_come(number):
    tasks = [("is", 1), ("fail", "x.wav"), ("no memory", 0), ("odd error", 0), ("is", 2)]
    with feeding(number) as feeders:
        one, failed, memory, odd, two = outcomes(feeders.feed(tasks))
    assert (one, two) == (1, 2)
    assert (failed.errno, failed.filename) == (5, "x.wav")
    assert isinstance(memory, MemoryError)
    assert "1 and 2" in str(odd)
    if number:
        assert isinstance(failed.__cause__, RemoteTraceback)
        assert "in __call__" in str(failed.__cause__)


def test_tasks_of_the_next_unit_wait_behind_those_of_this_one():
    with feeding(2) as feeders:
        first = feeders.feed(("is", number) for number in range(100))
        second = feeders.feed(("is", number) for number in range(100, 200))
        assert outcomes(first) == [*range(100)]
        assert outcomes(second) == [*range(100, 200)]
        assert first.all_given
        assert second.all_given


@pytest.mark.parametrize(("ahead", "number"), [(10.0, 1), (1000.0, 1), (1000.0, 4)])
def test_no_more_is_given_than_may_be_ahead(ahead, number):
    given = itertools.count()
    with feeding(number, ahead=ahead) as feeders:
        feed = feeders.feed(("is", number) for number in given)
        for _ in range(500):
            list(next(feed))
        assert not feed.all_given
        most = max(ahead, 120.0 * number)
        # The last bundle may exceed the limit.
        assert next(given) - 500 <= most + max(40.0, most / 8 / number) + 1


ENDS = {
    "kill": "was ended by signal SIGKILL", "segfault": "was ended by signal SIGSEGV",
    "exit": "ended with exit status 3", "hang": "has not answered for",
}  # fmt: skip


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("end", ENDS)
def test_a_feeder_that_dies_fails_only_its_current_recording(end, number):
    tasks = [("is", number) for number in range(30)]
    tasks[7], tasks[20] = (end, 3), (end, 3)
    with feeding(number, hang_seconds=1.0, weigh=lambda task: 0.05) as feeders:
        found = outcomes(feeders.feed(tasks))
        for place in (7, 20):
            assert isinstance(found[place], UnitFailed)
            assert ENDS[end] in str(found[place])
            assert str(tasks[place]) in str(found[place])
            found[place] = place
        assert found == [*range(30)]
        # Feeders that ended were replaced.
        assert len(set(outcomes(feeders.feed([("pid", 0)] * 300)))) >= 1
        assert len(feeders._feeders) == number


def test_one_that_is_killed_without_a_task_costs_nothing():
    with feeding(1) as feeders:
        (pid,) = outcomes(feeders.feed([("pid", 0)]))
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid))
        assert outcomes(feeders.feed([("is", 1), ("is", 2)])) == [1, 2]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_long_recording_is_never_in_memory_as_a_whole(number):
    """The rank uses a gigabyte in parts of 4 MiB one after the other, between short recordings."""
    with feeding(number, ahead=500.0) as feeders:
        feed = feeders.feed([("is", 0), ("parts", 256), *[("is", 1)] * 40, ("parts", 3)])
        assert list(next(feed)) == [0]
        # The short recording does not wait for the end of the long one after it.
        assert waiting_parts(feeders) < 100
        wait_until(lambda: not number or waiting_parts(feeders) > 0 or feeders.listen())
        most, held, files = 0, 0, 0
        for place, part in enumerate(next(feed)):
            assert (part == place).all()
            most = max(most, sum(map(resident, [feeder.process.pid for feeder in feeders._feeders])))
            held = max(held, waiting_parts(feeders))
            files = max(files, len([*Path("/proc/self/fd").iterdir()]))
        assert place == 255
        assert most < 400 << 20
        assert held <= 101
        # Waiting parts need no open files.
        assert files < 200
        assert outcomes(feed)[:40] == [1] * 40


def waiting_parts(feeders):
    return sum(len(request.parts) for one in feeders._feeders for bundle in one.bundles for request in bundle)


def test_parts_come_once_although_their_feeder_ends():
    tasks = [("is", 1), ("parts", 6), ("segfault", 0), ("parts", 2), ("is", 2)]
    with feeding(1) as feeders:
        first, many, failed, few, last = map(list_or_error, feeders.feed(tasks))
    assert (first, last) == ([1], [2])
    assert [part[0] for part in many] == [*range(6)]
    assert [part[0] for part in few] == [0, 1]
    assert isinstance(failed, UnitFailed)


def list_or_error(parts):
    try:
        return list(parts)
    except UnitFailed as error:
        return error


def test_remaining_tasks_of_a_failed_unit_block_no_feeder():
    with feeding(2, ahead=1000.0) as feeders:
        feeders.feed([("parts", 200), ("parts", 200)])
        later = feeders.feed([("pid", 0)] * 3000)
        feeders.drop_earlier()
        pids = outcomes(later)
        assert len(pids) == 3000
        wait_until(lambda: not any(feeder.bundles for feeder in feeders._feeders) or feeders.listen())
        assert waiting_parts(feeders) == 0


class Unusable:
    """An object that no feeder can unpickle."""

    def __reduce__(self):
        return __import__, ("sharmill_no_such_module",)


def test_feeders_that_cannot_start_are_given_up():
    feeders = Feeders(Unusable(), 1, weigh=lambda task: 1.0, ahead=1.0)
    with closing(feeders), pytest.raises(DeviceError, match="exit status 1"):
        list(next(feeders.feed([1, 2, 3])))


FULL = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from support.work import Decoder
from sharmill.engine.feeders import Feeders
if __name__ == "__main__":
    feeders = Feeders(Decoder(), 1, weigh=lambda task: 1.0, ahead=10.0)
    for parts in feeders.feed([("is", 1), ("array", 20_000_000), ("is", 2)]):
        try:
            print(*parts, flush=True)
        except OSError as error:
            print(error.errno, flush=True)
    print(*next(feeders.feed([("is", 3)])))
    feeders.close()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_full_disk_is_reported_and_blames_no_recording(tmp_path):
    # The name of the folder is too long for sockets, which must be placed elsewhere.
    program, folder = tmp_path / "full.py", tmp_path / ("f" * 90)
    program.write_text(FULL)
    folder.mkdir()
    mount = f"mount -t tmpfs -o size=1m tmpfs {folder} && TMPDIR={folder} exec {sys.executable} {program}"
    done = subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, text=True, check=False, timeout=90)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip("this machine allows no mounts")
    assert done.stdout == "28\n28\n28\n3\n", done.stderr


def resident(pid):
    """Return the resident memory of a process in bytes, including shared memory."""
    return int(re.search(r"^Rss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)[1]) << 10


def test_failed_units_leave_nothing_behind():
    with feeding(2) as feeders:
        for _ in range(40):
            given_up = feeders.feed([("sleep", 0.001)] * 1000)
        assert list(next(given_up)) == [0.001]
        assert outcomes(feeders.feed(("is", number) for number in range(50))) == [*range(50)]


def test_too_many_open_files_fail_only_the_attempt(monkeypatch):
    with feeding(2) as feeders:
        outcomes(feeders.feed([("is", 1)] * 4))
        feed = feeders.feed([*[("is", 1)] * 5, *(("array", 10_000 * number) for number in range(1, 200))])
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limit[1]))  # open files stay open
        try:
            with pytest.raises(DeviceError, match="ulimit"):
                list(itertools.chain.from_iterable(feed))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        sizes = [len(numbers) for numbers, _ in outcomes(feeders.feed(("array", 20_000 * n) for n in range(50)))]
        assert sizes == [20_000 * number for number in range(50)]


def test_feeders_end_with_their_owner():
    feeders = Feeders(Decoder(), 2, weigh=lambda task: 1.0, ahead=10.0)
    pids = [feeder.process.pid for feeder in feeders._feeders]
    del feeders
    wait_until(lambda: not any(map(is_running, pids)))


def test_feeders_import_no_torch():
    with feeding(1) as feeders:
        (modules,) = outcomes(feeders.feed([("modules", 0)]))
    assert "sharmill" in modules
    assert not modules & {"torch", "nemo", "ray"}


RANK = f"""
import resource, sys
sys.path.insert(0, {str(TESTS)!r})
from support.work import Decoder
from sharmill.engine.feeders import Feeders
from sharmill.errors import DeviceError
if __name__ == "__main__":
    if sys.argv[1:]:
        kind, number = getattr(resource, sys.argv[1]), int(sys.argv[2])
        resource.setrlimit(kind, (number, number))
    try:
        feeders = Feeders(Decoder(), 3, weigh=lambda task: 50.0, ahead=500.0)
    except DeviceError as error:
        print(error, flush=True)
        sys.exit(7)
    try:
        feed = feeders.feed([("is", 1), *([("hang", 0)] * 6)])
        print(*next(feed), flush=True)
        list(next(feed))
    finally:
        feeders.close()
"""


def start_rank(tmp_path, *limit):
    """Start a process whose feeders all hang, in its own session; it sets a limit before it starts them."""
    program = tmp_path / "rank.py"
    program.write_text(textwrap.dedent(RANK))
    return subprocess.Popen(
        [sys.executable, program, *limit], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_no_feeder_outlives_its_rank(tmp_path, end):
    rank = start_rank(tmp_path)
    assert rank.stdout.readline() == "1\n"
    assert len(session_members(rank.pid)) >= 5  # the rank, the server, the feeders
    if end == signal.SIGINT:
        os.killpg(rank.pid, end)  # Ctrl-C reaches all processes of the group
    else:
        rank.send_signal(end)
    began = time.monotonic()
    wait_until(lambda: not session_members(rank.pid))
    assert time.monotonic() - began < 5.0
    rank.communicate()


@pytest.mark.parametrize("limit", [("RLIMIT_NOFILE", "12"), ("RLIMIT_AS", str(80 << 20))])
def test_limits_that_are_too_small_give_one_line(tmp_path, limit):
    rank = start_rank(tmp_path, *limit)
    said, errors = rank.communicate(timeout=60)
    assert rank.returncode == 7, errors
    assert said.count("\n") == 1
    assert "executor.feeders" in said
    assert "ulimit" in said


def test_too_few_processes_give_one_line(monkeypatch):
    def refuse(*arguments):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(module, "ForkedProcess", refuse)
    with pytest.raises(DeviceError, match=r"Resource temporarily unavailable.*ulimit -u"):
        Feeders(Decoder(), 1, weigh=lambda task: 1.0, ahead=1.0)


@pytest.mark.parametrize("options", ["size=1m", "ro"])
def test_a_small_or_useless_dev_shm_is_no_hindrance(tmp_path, options):
    program = tmp_path / "feed.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(TESTS)!r})\n"
        "from support.work import Decoder\nfrom sharmill.engine.feeders import Feeders\n"
        "feeders = Feeders(Decoder(), 2, weigh=lambda task: 50.0, ahead=500.0)\n"
        "print(sum(len(found[0]) for (found,) in feeders.feed([('array', 10**7)] * 12)))\nfeeders.close()\n"
    )
    done = run_with_shm(options, program)
    assert done.stdout == f"{12 * 10**7}\n", done.stderr
