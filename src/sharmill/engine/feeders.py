"""Feeders: child processes of a rank that read and decode audio before its model needs it.

Decoding in threads would hold Python's global interpreter lock and delay the code that keeps the device busy. A feeder
receives bundles of tasks through a pipe and answers them in order. It also writes the number of its current task to a
board, a small block of shared memory. If the feeder dies, the task on the board is to blame.
"""

import errno
import mmap
import os
import pickle
import resource
import signal
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection, wait
from typing import Any, Final, Generic, NamedTuple, TypeVar

from sharmill.errors import DeviceError, UnitFailed
from sharmill.files.forks import ForkedProcess, ForkServer, end_with_server
from sharmill.files.host import describe_exit
from sharmill.files.messages import PipeEnd, RemoteTraceback, anonymous_file, portable

Task = TypeVar("Task")
Result = TypeVar("Result")

# Number of batches that are loaded in advance while the model computes.
BATCHES_AHEAD: Final = 2
# Seconds of audio in a bundle. Decoding a bundle takes about 20 ms, so the cost of a message is negligible.
_BUNDLE_SECONDS: Final = 40.0
# Number of bundles that a feeder usually has in advance, and the largest number that it may have. All of them fit into
# a pipe, so that neither side blocks.
_BUNDLES_AHEAD: Final = 8
_MOST_BUNDLES: Final = 2 * _BUNDLES_AHEAD
# Number of consecutive feeders that may end without a current task. If more do, replacements would probably end too.
_MOST_LOST: Final = 3
# Number of parts of a long recording that may wait to be used; each takes some megabytes and an open file.
_MOST_PARTS: Final = 100
# Time limit for a bundle, in addition to its seconds of audio. It is long, because a file server may stall, but shorter
# than the time limit of a unit, so that the error names the recording.
_HANG_SECONDS: Final = 1800.0
_SECONDS_TO_END: Final = 2.0
_ENVIRONMENT: Final = {
    # Threads of numpy's libraries would take memory, and count towards the user's limit on processes.
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    # Keep glibc from returning memory between two recordings, so that the kernel need not clear the pages again.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}
# Size of a board in bytes. The first byte is the number of the current task, the second is the number of its bundle,
# and each further byte belongs to one answer file and is nonzero while that file is in use.
_BOARD_BYTES: Final = 256
# The task number on the board if there is no current task.
_NOTHING: Final = 255


@dataclass(eq=False, slots=True)
class _Request(Generic[Task, Result]):
    """A task for a feeder, with the results so far.

    Attributes:
        feed: the number of the ``Feed`` that made the request.
        task: the task.
        seconds: seconds of audio in the task.
        is_done: True if no more parts will come.
        is_dropped: True if the result is no longer needed.
        parts: received parts of the result that are still to be used.
        num_parts: number of parts received.
        num_known: number of parts that were received before and that a replacement feeder will send again; they are
            ignored.
        error, traceback: the error that ended the task, if any.
    """

    feed: int
    task: Task
    seconds: float
    is_done: bool = False
    is_dropped: bool = False
    parts: deque[Result] = field(default_factory=deque)
    num_parts: int = 0
    num_known: int = 0
    error: Exception | None = None
    traceback: str = ""

    def add(self, part: Result) -> None:
        """Add a received part, unless it is a repetition or the request was dropped."""
        if self.num_known:
            self.num_known -= 1
        elif not self.is_dropped:
            self.parts.append(part)
            self.num_parts += 1

    def end(self, error: Exception | None = None, traceback: str = "") -> None:
        """Note that no more parts will come."""
        self.is_done, self.error, self.traceback = True, error, traceback


@dataclass(eq=False, slots=True)
class _Feeder:
    """A feeder as seen by the rank.

    Attributes:
        process, line, board: the process, the connection to it, and the shared memory.
        bundles: the bundles that it has not answered yet.
        num_answered: number of bundles that it has answered.
        is_lost: True if an answer was lost, so that the feeder must be replaced.
        seconds: seconds of audio in ``bundles``.
        since: the time, by ``time.monotonic``, of its last answer, or of its first bundle if it was idle before.
        cpu_seconds: processor time that it has reported so far.
        memory_mb: peak memory that it has reported so far, in MB.
    """

    process: ForkedProcess
    line: PipeEnd
    board: memoryview
    bundles: deque[list[_Request]] = field(default_factory=deque)
    num_answered: int = 0
    is_lost: bool = False
    seconds: float = 0.0
    since: float = 0.0
    cpu_seconds: float = 0.0
    memory_mb: float = 0.0

    @property
    def is_far_ahead(self) -> bool:
        """Return True if many parts of a long recording are waiting to be used."""
        return bool(self.bundles) and sum(len(request.parts) for request in self.bundles[0]) > _MOST_PARTS

    def has(self, request: "_Request") -> bool:
        """Return True if a request is in one of this feeder's bundles."""
        return any(request in bundle for bundle in self.bundles)


class Feeders(Generic[Task, Result]):
    """Processes that compute the results of tasks ahead of their use.

    Args:
        do: a function that yields the parts of a task's result. The function, the tasks and the parts must be
            picklable, and the module of the function must not import torch.
        number: number of processes; if 0, each task is done in this process when its result is requested.
        weigh: a function that returns the seconds of audio in a task.
        ahead: seconds of audio to send to the processes ahead of use.
        hang_seconds: time limit for a bundle of tasks, in addition to its seconds of audio.

    Raises:
        DeviceError: the processes cannot be started on this machine.
    """

    def __init__(
        self, do: Callable[[Task], Iterable[Result]], number: int, *, weigh: Callable[[Task], float], ahead: float,
        hang_seconds: float = _HANG_SECONDS,
    ) -> None:  # fmt: skip
        self.number = number
        self._cpu_seconds = 0.0
        self.do = do
        self.weigh = weigh
        self.ahead = max(ahead, 3 * _BUNDLE_SECONDS * number)
        self._bundle_seconds = max(_BUNDLE_SECONDS, self.ahead / (_BUNDLES_AHEAD * max(1, number)))
        self._hang_seconds = hang_seconds
        self._server = ForkServer([type(do).__module__], environment=_ENVIRONMENT, runs_main=False)
        # End the processes even if the caller fails before it can close this object.
        self._end = weakref.finalize(self, self._server.end)
        self._feeders: list[_Feeder] = []
        self._num_feeds = 0
        # Number of consecutive feeders that ended without an answer and without a current task.
        self._num_lost = 0
        try:
            self._feeders += [self._start() for _ in range(number)]
        except BaseException:
            self.close()
            raise

    def feed(self, tasks: Iterable[Task]) -> "Feed[Task, Result]":
        """Send tasks to the processes as far ahead as allowed, and return an iterator over their results."""
        self._num_feeds += 1
        return Feed(self, tasks, self._num_feeds)

    def drop_earlier(self) -> None:
        """Drop the requests of all feeds except the last; their units failed or were completed by other ranks."""
        for feeder in self._feeders:
            for request in (request for bundle in feeder.bundles for request in bundle):
                if request.feed != self._num_feeds:
                    request.is_dropped = True
                    request.parts.clear()

    @property
    def memory_mb(self) -> float:
        """The sum of the processes' peak memory, in MB."""
        return sum(feeder.memory_mb for feeder in self._feeders)

    def close(self) -> None:
        """End the processes."""
        self._end()
        for feeder in self._feeders:
            feeder.line.close()
        self._feeders.clear()

    def take_cpu_seconds(self) -> float:
        """Return the processor time of the processes since the last call, in seconds, as reported in their answers."""
        seconds, self._cpu_seconds = self._cpu_seconds, 0.0
        return seconds

    def give(self, requests: "Iterator[_Request[Task, Result]]", waiting: float) -> list["_Request[Task, Result]"]:
        """Send requests to the feeders until enough audio is waiting, and return the requests that were sent.

        Args:
            waiting: seconds of audio that are waiting already; the limit is ``ahead``.
        """
        given: list[_Request[Task, Result]] = []
        while waiting < self.ahead:
            feeder = min(self._feeders, key=lambda feeder: feeder.seconds)
            if len(feeder.bundles) >= _MOST_BUNDLES:
                break
            bundle: list[_Request[Task, Result]] = []
            seconds = 0.0
            while (
                seconds < self._bundle_seconds and len(bundle) < _NOTHING
                and (request := next(requests, None)) is not None
            ):  # fmt: skip
                bundle.append(request)
                seconds += request.seconds
            if not bundle:
                break
            self._give_to(feeder, bundle)
            given += bundle
            waiting += seconds
        return given

    def parts_of(self, request: "_Request[Task, Result]") -> Iterator[Result]:
        """Yield the parts of a request's result as they arrive, and raise its error, if any, after them."""
        while not request.is_done or request.parts:
            if request.parts:
                yield request.parts.popleft()
            else:
                self.listen(request)
        if request.error is not None:
            raise request.error from (RemoteTraceback(request.traceback) if request.traceback else None)

    def listen(self, request: "_Request[Task, Result] | None" = None) -> None:
        """Wait up to a second for answers, process them, and replace feeders that hang.

        While waiting for one ``request``, ignore feeders that are far ahead, unless they have this request.
        """
        heard = {
            one.line.pipe: one
            for one in self._feeders if request is None or not one.is_far_ahead or one.has(request)
        }  # fmt: skip
        for pipe in wait(list(heard), timeout=1.0):
            self._take_answer(heard[pipe])  # type: ignore[index]
        for feeder in [*heard.values()]:
            limit = self._hang_seconds + sum(request.seconds for request in (feeder.bundles or [[]])[0])
            if feeder in self._feeders and feeder.bundles and time.monotonic() - feeder.since > limit:
                feeder.process.kill()
                self._replace(feeder, f"has not answered for {limit:.0f} s")

    def _start(self) -> _Feeder:
        try:
            do = pickle.dumps(self.do, pickle.HIGHEST_PROTOCOL)
            pipe, its = Pipe()
            file = anonymous_file(_BOARD_BYTES)
            try:
                board = _map_board(file)
                process = ForkedProcess(self._server, _feed, (its, _Inherited(file), do), "sharmill-feeder")
                return _Feeder(process, PipeEnd(pipe, board[2:]), board)
            finally:
                os.close(file)
                its.close()
        except (OSError, EOFError) as error:
            raise self._refused("cannot be started", str(error)) from error

    def _refused(self, what: str, why: str) -> DeviceError:
        host = socket.gethostname()
        return DeviceError(
            f"a process that decodes audio {what} on {host} ({why or 'it exited at once'}): see the rank's log, and "
            "raise the limits on processes (ulimit -u), open files (-n) and memory (-v), or lower executor.feeders",
            place=host,
            code="setup_failed",
        )

    def _give_to(self, feeder: _Feeder, bundle: list["_Request[Task, Result]"]) -> None:
        # If the feeder has ended, ``listen`` will notice.
        try:
            with suppress(ConnectionError):
                feeder.line.send([request.task for request in bundle], wait=self.listen)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            raise self._refused("cannot receive its tasks", str(error)) from error
        if not feeder.bundles:
            feeder.since = time.monotonic()
        feeder.bundles.append(bundle)
        feeder.seconds += sum(request.seconds for request in bundle)

    def _take_answer(self, feeder: _Feeder) -> None:
        """Take the next answer from a feeder, or replace the feeder if it has ended."""
        try:
            if feeder.is_lost:
                raise EOFError
            answers: _Answers = feeder.line.receive()
        except (EOFError, ConnectionError):
            self._replace(feeder, describe_exit(feeder.process.wait(_SECONDS_TO_END)))
            return
        except OSError as error:
            # An answer is lost if this process has too many open files or no memory left. No recording is to blame for
            # that.
            feeder.process.kill()
            feeder.is_lost, feeder.board[0] = True, _NOTHING
            raise self._refused("cannot deliver its answer", str(error)) from error
        bundle = feeder.bundles[0]
        for number, part, failure, trace in answers.parts:
            if failure is None:
                bundle[number].add(part)
            else:
                bundle[number].end(failure, trace)
        for request in bundle[: answers.current]:
            if not request.is_done:
                request.end(*answers.failure)
        if answers.current is None:
            feeder.bundles.popleft()
            feeder.seconds -= sum(request.seconds for request in bundle)
            feeder.num_answered += 1
        feeder.since, self._num_lost = time.monotonic(), 0
        self._cpu_seconds += answers.cpu_seconds - feeder.cpu_seconds
        feeder.cpu_seconds, feeder.memory_mb = answers.cpu_seconds, answers.memory_mb

    def _replace(self, feeder: _Feeder, how: str) -> None:
        """Replace a feeder that has ended, and let its current task fail. Its other tasks go to the new feeder."""
        current, bundle = feeder.board[:2]
        is_blamed = bool(
            # The board may name a task whose result the feeder has already sent.
            feeder.bundles and bundle == feeder.num_answered % 256 and current < len(feeder.bundles[0])
        )  # fmt: skip
        self._num_lost = 0 if is_blamed else self._num_lost + 1
        if self._num_lost > _MOST_LOST:
            raise self._refused(how, "it was not decoding a recording")
        # If the new feeder cannot start, the old one stays in the list, and the next call of ``listen`` tries again.
        fresh = self._start()
        feeder.line.close()
        self._feeders[self._feeders.index(feeder)] = fresh
        if is_blamed:
            failed = feeder.bundles[0][current]
            failed.end(UnitFailed(f"the process that decoded {failed.task} {how}", code="process_ended"))
        for given in feeder.bundles:
            left = [request for request in given if not (request.is_done or request.is_dropped)]
            for request in left:
                request.num_known = request.num_parts
            if left:
                self._give_to(fresh, left)


class Feed(Generic[Task, Result]):
    """Iterator over the results of tasks, in order.

    Each result is an iterable of its parts. If the task has failed, the iterable raises the error after these parts.

    Attributes:
        all_given: True if all tasks have been sent to feeders.
    """

    def __init__(self, feeders: Feeders[Task, Result], tasks: Iterable[Task], number: int) -> None:
        self.all_given = False
        self._feeders = feeders
        self._requests = self._make_requests(tasks, number)
        self._given: deque[_Request[Task, Result]] = deque()
        self._seconds = 0.0
        self._give()

    def __iter__(self) -> "Feed[Task, Result]":
        return self

    def __next__(self) -> Iterable[Result]:
        if not self._feeders.number:
            return self._feeders.do(next(self._requests).task)
        # Requests of units that failed may have filled the feeders, so wait until there is room.
        while not self._given and not self.all_given:
            self._feeders.listen()
            self._give()
        if not self._given:
            raise StopIteration
        request = self._given.popleft()
        self._seconds -= request.seconds
        self._give()
        return self._feeders.parts_of(request)

    def _give(self) -> None:
        if self._feeders.number and self._seconds < self._feeders.ahead:
            given = self._feeders.give(self._requests, self._seconds)
            self._given.extend(given)
            self._seconds += sum(request.seconds for request in given)

    def _make_requests(self, tasks: Iterable[Task], number: int) -> Iterator[_Request[Task, Result]]:
        for task in tasks:
            yield _Request(number, task, self._feeders.weigh(task))
        self.all_given = True


class _Inherited:
    """An open file of this process, to be passed to a process that the forkserver starts."""

    def __init__(self, file: int) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _detach, (reduction.DupFd(self._file),)


def _detach(handle: Any) -> int:
    return int(handle.detach())


def _feed(pipe: Connection, file: int, pickled: bytes) -> None:
    """Until the rank ends, do the tasks that it sends; the kernel then ends this process too."""
    # Ctrl-C and a scheduler's SIGTERM reach all processes of a job, but only the rank must handle them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_server()
    do = pickle.loads(pickled)
    board = _map_board(file)
    line = PipeEnd(pipe, board[2:])
    started = time.process_time()

    def answer(parts: list[_Part], current: int | None, failure: tuple[Exception | None, str] = (None, "")) -> None:
        memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        line.send(_Answers(parts, current, failure, time.process_time() - started, memory_mb), keep=bool(parts))

    with suppress(EOFError, ConnectionError):
        for bundle in count():
            tasks = line.receive()
            board[0], board[1] = _NOTHING, bundle % 256
            parts: list[_Part] = []
            try:
                for number, task in enumerate(tasks):
                    board[0] = number
                    for place, part in enumerate(_attempt(do, task)):
                        # Send the parts of a long recording one by one, so that the whole recording is never in memory.
                        if place:
                            answer(parts, number)
                            parts = []
                        parts.append((number, *part))
                answer(parts, None)
            except ConnectionError:
                raise
            except Exception as error:  # noqa: BLE001 - sending the answer failed, so no recording is to blame
                answer([], None, portable(error))
    os._exit(0)


# The number of a task in its bundle, and either a part of the result or an error with its traceback.
_Part = tuple[int, Any, Exception | None, str]


class _Answers(NamedTuple):
    """A message from a feeder.

    Attributes:
        parts: parts of the results of tasks in the feeder's current bundle.
        current: the number of the current task; all tasks before it are done. None if the whole bundle is done.
        failure: an error and its traceback, which apply to all finished tasks without an error of their own.
        cpu_seconds, memory_mb: processor time since the start of the feeder, and its peak memory.
    """

    parts: list[_Part]
    current: int | None
    failure: tuple[Exception | None, str]
    cpu_seconds: float
    memory_mb: float


def _attempt(do: Callable[[Any], Iterable[Any]], task: Any) -> Iterator[tuple[Any, Exception | None, str]]:
    """Yield the parts of a task's result, and the error that ends it, if any."""
    try:
        for part in do(task):
            yield part, None, ""
    except Exception as error:  # noqa: BLE001 - it is raised when the result is used
        yield None, *portable(error)


def _map_board(file: int) -> memoryview:
    board = memoryview(mmap.mmap(file, _BOARD_BYTES))
    board[0] = _NOTHING
    return board
