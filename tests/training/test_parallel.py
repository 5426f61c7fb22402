"""Tests of ``parallel_map``: order, prefetching limits, errors in order, and the end of workers."""

import itertools
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading

import pytest
import torch
from support.project import TESTS, raises
from support.toy_stage import is_running, wait_until
from support.work import (
    NotHere,
    end,
    family,
    half,
    inverse,
    killed_at_2,
)

from sharmill.errors import ConfigError, DamagedShard, FatalError
from sharmill.shar import open_shar
from sharmill.training import parallel_map


def workers():
    """Return the threads and processes of maps, including those of earlier tests that are still ending."""
    threads = {thread for thread in threading.enumerate() if thread.name.startswith("sharmill-")}
    return threads | set(multiprocessing.active_children())


@pytest.fixture(autouse=True)
def _nothing_is_left():
    before = workers()
    yield
    assert workers() <= before


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_results_come_in_order_as_often_as_asked(kind):
    mapped = parallel_map(range(40), half, 3, kind=kind)
    assert list(mapped) == [n / 2 for n in range(40)]
    assert list(mapped) == [n / 2 for n in range(40)]
    assert len(mapped) == 40


def test_no_more_is_read_than_may_be_ahead():
    read = []
    room = threading.Semaphore(0)

    def items():
        for number in itertools.count():
            read.append(number)
            room.release()
            yield number

    results = iter(parallel_map(items(), half, 2, prefetch=5))
    assert next(results) == 0.0
    # One result was delivered, and five more may be read ahead.
    for _ in range(6):
        assert room.acquire(timeout=30)
    assert not room.acquire(timeout=0.2)
    assert read == list(range(6))
    assert next(results) == 0.5
    assert room.acquire(timeout=30)
    results.close()
    assert read == list(range(7))


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_an_error_comes_in_the_place_of_its_item(kind):
    results = iter(parallel_map([4, 2, 0, 1], inverse, 2, kind=kind))
    assert [next(results), next(results)] == [0.25, 0.5]
    with pytest.raises(ZeroDivisionError) as raised:
        next(results)
    assert kind == "thread" or "return 1 / number" in str(raised.value.__cause__)
    assert list(results) == []


def test_an_error_of_the_items_comes_in_its_place():
    def items():
        yield from (1, 2)
        raise DamagedShard("shard 1: cut short")

    results = iter(parallel_map(items(), half, 2))
    assert [next(results), next(results)] == [0.5, 1.0]
    with raises(DamagedShard, "damaged_shard", "shard 1"):
        next(results)


def test_a_worker_that_dies_is_an_error_in_the_place_of_its_item(many):
    results = iter(parallel_map(range(9), killed_at_2, 2, kind="process"))
    assert [next(results), next(results)] == [0, 1]
    with raises(FatalError, "process_ended", "SIGKILL", "2"):
        next(results)
    (cut,) = open_shar(many.dataset, []).subset(first=1)
    with raises(FatalError, "process_ended", "3", f"'{cut.id}'"):
        list(parallel_map([cut], end, 1, kind="process"))


@pytest.mark.parametrize(
    ("function", "error", "told"),
    [
        (NotHere(), ModuleNotFoundError, "sharmill_no_such_module"),
        (lambda number: number, pickle.PicklingError, "lambda"),
    ],
    ids=["not imported", "not sent"],
)
def test_a_function_that_no_worker_can_have_is_an_error(function, error, told):
    with pytest.raises(error, match=told):
        list(parallel_map(range(3), function, 2, kind="process"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["thread", "process"])
def test_an_unfinished_iteration_does_not_keep_the_program(program, kind):
    with program(f"results = iter(parallel_map(range(99), slow, 2, kind='{kind}'))", "print(next(results))") as running:
        assert running.communicate(timeout=120) == ("0\n", "")
    assert running.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("send", [os.kill, os.killpg])
def test_an_interrupt_ends_everything_quietly(program, send):
    """Ctrl-C interrupts the whole process group; a launcher's SIGINT may reach only the parent."""
    with program("for n in parallel_map(range(9999), slow, 2, kind='process'):", "    print(n, flush=True)") as running:
        assert running.stdout.readline() == "0\n"
        send(running.pid, signal.SIGINT)
        _, errors = running.communicate(timeout=60)
    assert errors.endswith("KeyboardInterrupt\n")
    assert errors.count("Traceback") == 1


@pytest.fixture
def program(tmp_path):
    """Returns a function that starts a program with these lines in its own process group."""

    def start(*lines):
        script = tmp_path / "program.py"
        main = "".join(f"    {line}\n" for line in lines)
        script.write_text(
            "import torch\n"
            "from support.work import slow\n"
            "from sharmill.training import parallel_map\n"
            f"if __name__ == '__main__':\n{main}"
        )
        return subprocess.Popen(
            [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        )  # fmt: skip

    return start


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_workers_end_where_iteration_is_given_up(kind):
    closed = threading.Event()

    def items():
        try:
            yield from itertools.count()
        finally:
            closed.set()

    for result in parallel_map(items(), half, 2, kind=kind):
        if result == 3.0:
            break
    del result
    assert closed.wait(30)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"num_workers": 0}, "at least 1"),
        ({"num_workers": 2, "prefetch": 4.5}, "prefetch is 4.5: it must be an integer"),
        ({"num_workers": 4, "prefetch": 3}, "prefetch is 3: it must be an integer of at least 4"),
        ({"kind": "fiber"}, "'thread' or 'process'"),
    ],
)
def test_invalid_options_are_refused(options, what):
    with raises(ConfigError, "bad_config_value", what):
        parallel_map([], half, **options)


class Families(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(parallel_map(range(6), family, 2, kind="process"))


def test_processes_of_loader_workers_end_with_the_workers():
    """multiprocessing forbids child processes of daemons, such as the workers."""
    families = list(torch.utils.data.DataLoader(Families(), batch_size=None, num_workers=2))
    own, parents = {own for own, _ in families}, {parent for _, parent in families}
    assert len(families) == 12
    assert len(parents) == 2
    assert os.getpid() not in parents | own
    assert 2 <= len(own) <= 4
    wait_until(lambda: not any(map(is_running, own)))


def _kill_and_read(process, loader):
    os.kill(process, signal.SIGKILL)  # torch may notice at any moment from here on
    list(loader)


def test_processes_end_where_the_worker_of_a_loader_is_killed():
    loader = iter(torch.utils.data.DataLoader(Families(), batch_size=None, num_workers=1))
    own, parent = next(loader)
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        _kill_and_read(parent, loader)
    wait_until(lambda: not is_running(own))
