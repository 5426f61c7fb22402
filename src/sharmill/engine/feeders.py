"""Feeders: processes of a rank that read and decode ahead of its model.

In threads, decoding would hold Python's lock, for which what keeps the device busy would wait. A feeder gets bundles of
tasks through a pipe and answers them in their order, and notes on a board, which is shared memory, which task it has at
hand: if it ends, that one is to blame.
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
from sharmill.files.messages import Line, RemoteTraceback, anonymous_file, portable

Task = TypeVar("Task")
Result = TypeVar("Result")

# Batches of a model that are loaded while it computes.
BATCHES_AHEAD: Final = 2
# A bundle takes some 20 ms, beside which a message is cheap.
_BUNDLE_SECONDS: Final = 40.0
# Bundles that a feeder has without a look of the rank. All fit into a pipe, so that neither end waits for the other.
_BUNDLES_AHEAD: Final = 8
_MOST_BUNDLES: Final = 2 * _BUNDLES_AHEAD
# Feeders in a row that may end without a task at hand: more would end as well.
_MOST_LOST: Final = 3
# Parts of a long recording, each of some megabytes and a file, that wait to be used.
_MOST_PARTS: Final = 100
# Beside the seconds of audio. Shorter than the limit of a unit, so that the recording is named; a server may stall.
_HANG_SECONDS: Final = 1800.0
_SECONDS_TO_END: Final = 2.0
_ENVIRONMENT: Final = {
    # Threads of numpy's libraries would take memory, and a place among the processes of the user.
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    # glibc gives no memory back between two recordings, so that the kernel need not clear it again.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}
# Bytes of a board: the number of the task at hand, that of its bundle, and which files of answers are in use.
_BOARD_BYTES: Final = 256
# The number that a feeder notes that has no task at hand.
_NOTHING: Final = 255


@dataclass(eq=False, slots=True)
class _Errand(Generic[Task, Result]):
    """A task, its seconds of audio, and what has come of it so far: parts of its result, an error and its traceback.

    Attributes:
        feed: the number of the feed that it is of.
        num_parts: how many have come.
        num_known: how many come once more, where it was given to a second feeder.
        is_dropped: nobody waits for it any more.
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
        """Add a part that has come, unless it is known, or nobody waits for it."""
        if self.num_known:
            self.num_known -= 1
        elif not self.is_dropped:
            self.parts.append(part)
            self.num_parts += 1

    def end(self, error: Exception | None = None, traceback: str = "") -> None:
        """Note that no more parts come."""
        self.is_done, self.error, self.traceback = True, error, traceback


@dataclass(eq=False, slots=True)
class _Feeder:
    """A feeder, and the bundles that it has not answered, the first of which it has had since ``since``.

    It is lost if it is no longer known which it has answered. ``seconds`` are those of audio in the bundles,
    ``cpu_seconds`` those that its answers have taken, and ``memory_mb`` is the most that it has held.
    """

    process: ForkedProcess
    line: Line
    board: memoryview
    bundles: deque[list[_Errand]] = field(default_factory=deque)
    num_answered: int = 0
    is_lost: bool = False
    seconds: float = 0.0
    since: float = 0.0
    cpu_seconds: float = 0.0
    memory_mb: float = 0.0

    @property
    def is_far_ahead(self) -> bool:
        """True if many parts of a long recording wait to be used."""
        return bool(self.bundles) and sum(len(errand.parts) for errand in self.bundles[0]) > _MOST_PARTS

    def has(self, errand: "_Errand") -> bool:
        """Return True if an errand is with this feeder."""
        return any(errand in bundle for bundle in self.bundles)


class Feeders(Generic[Task, Result]):
    """Processes that do tasks for this one, ahead of their use.

    Args:
        do: yields the parts of the result of a task; it, tasks and parts can be pickled, and it imports no torch.
        number: of processes. With 0 a task is done in this process, when its result is asked for.
        weigh: returns the seconds of audio of a task.
        ahead: seconds of audio that wait, or are at work.

    Raises:
        DeviceError: the processes cannot be started; they could be elsewhere.
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
        # Also where what has made them fails before it can close them.
        self._end = weakref.finalize(self, self._server.end)
        self._feeders: list[_Feeder] = []
        self._num_feeds = 0
        # Feeders that have ended one after the other without an answer or a task at hand.
        self._num_lost = 0
        try:
            self._feeders += [self._start() for _ in range(number)]
        except BaseException:
            self.close()
            raise

    def feed(self, tasks: Iterable[Task]) -> "Feed[Task, Result]":
        """Give out tasks, as far ahead as may be, and return an iterator over their results."""
        self._num_feeds += 1
        return Feed(self, tasks, self._num_feeds)

    def drop_earlier(self) -> None:
        """Drop what is left of all feeds but the last: of units that have failed or were done by others."""
        for feeder in self._feeders:
            for errand in (errand for bundle in feeder.bundles for errand in bundle):
                if errand.feed != self._num_feeds:
                    errand.is_dropped = True
                    errand.parts.clear()

    @property
    def memory_mb(self) -> float:
        """The most memory that the processes have held."""
        return sum(feeder.memory_mb for feeder in self._feeders)

    def close(self) -> None:
        """End the processes."""
        self._end()
        for feeder in self._feeders:
            feeder.line.close()
        self._feeders.clear()

    def take_cpu_seconds(self) -> float:
        """Return the processor time of the processes since the last call, as far as they have answered."""
        seconds, self._cpu_seconds = self._cpu_seconds, 0.0
        return seconds

    def give(self, errands: "Iterator[_Errand[Task, Result]]", waiting: float) -> list["_Errand[Task, Result]"]:
        """Give out errands while less than what may be ahead is waiting, and return those that were given."""
        given: list[_Errand[Task, Result]] = []
        while waiting < self.ahead:
            feeder = min(self._feeders, key=lambda feeder: feeder.seconds)
            if len(feeder.bundles) >= _MOST_BUNDLES:
                break
            bundle: list[_Errand[Task, Result]] = []
            seconds = 0.0
            while (
                seconds < self._bundle_seconds and len(bundle) < _NOTHING
                and (errand := next(errands, None)) is not None
            ):  # fmt: skip
                bundle.append(errand)
                seconds += errand.seconds
            if not bundle:
                break
            self._give_to(feeder, bundle)
            given += bundle
            waiting += seconds
        return given

    def parts_of(self, errand: "_Errand[Task, Result]") -> Iterator[Result]:
        """Yield the parts of the result of an errand that was given, as they come; raise its error."""
        while not errand.is_done or errand.parts:
            if errand.parts:
                yield errand.parts.popleft()
            else:
                self.listen(errand)
        if errand.error is not None:
            raise errand.error from (RemoteTraceback(errand.traceback) if errand.traceback else None)

    def listen(self, errand: "_Errand[Task, Result] | None" = None) -> None:
        """Wait for answers, a second at most, and take them; end what hangs.

        A feeder that is far ahead of an ``errand`` has to wait, unless it has the errand itself.
        """
        heard = {
            one.line.pipe: one
            for one in self._feeders if errand is None or not one.is_far_ahead or one.has(errand)
        }  # fmt: skip
        for pipe in wait(list(heard), timeout=1.0):
            self._take_answer(heard[pipe])  # type: ignore[index]
        for feeder in [*heard.values()]:
            limit = self._hang_seconds + sum(errand.seconds for errand in (feeder.bundles or [[]])[0])
            if feeder in self._feeders and feeder.bundles and time.monotonic() - feeder.since > limit:
                feeder.process.kill()
                self._replace(feeder, f"has given nothing for {limit:.0f} s")

    def _start(self) -> _Feeder:
        try:
            do = pickle.dumps(self.do, pickle.HIGHEST_PROTOCOL)
            pipe, its = Pipe()
            file = anonymous_file(_BOARD_BYTES)
            try:
                board = _map_board(file)
                process = ForkedProcess(self._server, _feed, (its, _Inherited(file), do), "sharmill-feeder")
                return _Feeder(process, Line(pipe, board[2:]), board)
            finally:
                os.close(file)
                its.close()
        except (OSError, EOFError) as error:
            raise self._refused("cannot be started", str(error)) from error

    def _refused(self, what: str, why: str) -> DeviceError:
        host = socket.gethostname()
        return DeviceError(
            f"a process that decodes audio {what} on {host} ({why or 'it ends at once'}): see the log of the rank, and "
            "raise the limits on processes (ulimit -u), open files (-n) and memory (-v), or set executor.feeders lower",
            place=host,
            code="setup_failed",
        )

    def _give_to(self, feeder: _Feeder, bundle: list["_Errand[Task, Result]"]) -> None:
        # If it has ended, that is seen where it is listened to.
        try:
            with suppress(ConnectionError):
                feeder.line.send([errand.task for errand in bundle], wait=self.listen)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            raise self._refused("cannot be given its tasks", str(error)) from error
        if not feeder.bundles:
            feeder.since = time.monotonic()
        feeder.bundles.append(bundle)
        feeder.seconds += sum(errand.seconds for errand in bundle)

    def _take_answer(self, feeder: _Feeder) -> None:
        """Take the next answer of a feeder that has one, or has ended."""
        try:
            if feeder.is_lost:
                raise EOFError
            answers: _Answers = feeder.line.receive()
        except (EOFError, ConnectionError):
            self._replace(feeder, describe_exit(feeder.process.wait(_SECONDS_TO_END)))
            return
        except OSError as error:
            # Too many open files, or no memory: an answer is lost, and no recording is to blame.
            feeder.process.kill()
            feeder.is_lost, feeder.board[0] = True, _NOTHING
            raise self._refused("cannot be heard", str(error)) from error
        bundle = feeder.bundles[0]
        for number, part, failure, trace in answers.parts:
            if failure is None:
                bundle[number].add(part)
            else:
                bundle[number].end(failure, trace)
        for errand in bundle[: answers.at_hand]:
            if not errand.is_done:
                errand.end(*answers.failure)
        if answers.at_hand is None:
            feeder.bundles.popleft()
            feeder.seconds -= sum(errand.seconds for errand in bundle)
            feeder.num_answered += 1
        feeder.since, self._num_lost = time.monotonic(), 0
        self._cpu_seconds += answers.cpu_seconds - feeder.cpu_seconds
        feeder.cpu_seconds, feeder.memory_mb = answers.cpu_seconds, answers.memory_mb

    def _replace(self, feeder: _Feeder, how: str) -> None:
        """Put another in the place of a feeder that has ended. The task that it had at hand has failed."""
        at_hand, bundle = feeder.board[:2]
        is_blamed = bool(
            # It may have answered all that it had begun.
            feeder.bundles and bundle == feeder.num_answered % 256 and at_hand < len(feeder.bundles[0])
        )  # fmt: skip
        self._num_lost = 0 if is_blamed else self._num_lost + 1
        if self._num_lost > _MOST_LOST:
            raise self._refused(how, "without a recording at hand")
        # If none can be started, the next look at this one tries again.
        fresh = self._start()
        feeder.line.close()
        self._feeders[self._feeders.index(feeder)] = fresh
        if is_blamed:
            failed = feeder.bundles[0][at_hand]
            failed.end(UnitFailed(f"the process that decoded {failed.task} {how}", code="process_ended"))
        for given in feeder.bundles:
            left = [errand for errand in given if not (errand.is_done or errand.is_dropped)]
            for errand in left:
                errand.num_known = errand.num_parts
            if left:
                self._give_to(fresh, left)


class Feed(Generic[Task, Result]):
    """The results of tasks, in their order, each an iterable of its parts; in it an error is raised.

    Attributes:
        all_given: no task is left that has not been given out.
    """

    def __init__(self, feeders: Feeders[Task, Result], tasks: Iterable[Task], number: int) -> None:
        self.all_given = False
        self._feeders = feeders
        self._errands = self._make_errands(tasks, number)
        self._given: deque[_Errand[Task, Result]] = deque()
        self._seconds = 0.0
        self._give()

    def __iter__(self) -> "Feed[Task, Result]":
        return self

    def __next__(self) -> Iterable[Result]:
        if not self._feeders.number:
            return self._feeders.do(next(self._errands).task)
        # The feeders may have all that they may have, of units that have failed.
        while not self._given and not self.all_given:
            self._feeders.listen()
            self._give()
        if not self._given:
            raise StopIteration
        errand = self._given.popleft()
        self._seconds -= errand.seconds
        self._give()
        return self._feeders.parts_of(errand)

    def _give(self) -> None:
        if self._feeders.number and self._seconds < self._feeders.ahead:
            given = self._feeders.give(self._errands, self._seconds)
            self._given.extend(given)
            self._seconds += sum(errand.seconds for errand in given)

    def _make_errands(self, tasks: Iterable[Task], number: int) -> Iterator[_Errand[Task, Result]]:
        for task in tasks:
            yield _Errand(number, task, self._feeders.weigh(task))
        self.all_given = True


class _Inherited:
    """An open file of this process, for a process that is forked from a server."""

    def __init__(self, file: int) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _detach, (reduction.DupFd(self._file),)


def _detach(handle: Any) -> int:
    return int(handle.detach())


def _feed(pipe: Connection, file: int, pickled: bytes) -> None:
    """Do tasks in a feeder until the rank ends, with which the kernel ends it too, whatever it does then."""
    # Ctrl-C, and the SIGTERM of a scheduler, which reach all processes of a job, are for the rank.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_server()
    do = pickle.loads(pickled)
    board = _map_board(file)
    line = Line(pipe, board[2:])
    started = time.process_time()

    def answer(parts: list[_Part], at_hand: int | None, failure: tuple[Exception | None, str] = (None, "")) -> None:
        memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        line.send(_Answers(parts, at_hand, failure, time.process_time() - started, memory_mb), keep=bool(parts))

    with suppress(EOFError, ConnectionError):
        for bundle in count():
            tasks = line.receive()
            board[0], board[1] = _NOTHING, bundle % 256
            parts: list[_Part] = []
            try:
                for number, task in enumerate(tasks):
                    board[0] = number
                    for place, part in enumerate(_attempt(do, task)):
                        # Of a long recording what came before, so that it is nowhere in memory as a whole.
                        if place:
                            answer(parts, number)
                            parts = []
                        parts.append((number, *part))
                answer(parts, None)
            except ConnectionError:
                raise
            except Exception as error:  # noqa: BLE001 - there is no room for the answer: no recording is to blame
                answer([], None, portable(error))
    os._exit(0)


# The number of a task in its bundle, and a part of its result, or an error and its traceback.
_Part = tuple[int, Any, Exception | None, str]


class _Answers(NamedTuple):
    """A message of a feeder.

    Attributes:
        parts: of the tasks of its bundle.
        at_hand: the number of the task that it has at hand, those before which are done; None if all are.
        failure: the error and the traceback of those of which it has answered nothing, if there is one.
        cpu_seconds, memory_mb: processor time since its start, and its most memory.
    """

    parts: list[_Part]
    at_hand: int | None
    failure: tuple[Exception | None, str]
    cpu_seconds: float
    memory_mb: float


def _attempt(do: Callable[[Any], Iterable[Any]], task: Any) -> Iterator[tuple[Any, Exception | None, str]]:
    """Yield the parts of the result of a task, and the error that ends it."""
    try:
        for part in do(task):
            yield part, None, ""
    except Exception as error:  # noqa: BLE001 - it is raised where the result would have come
        yield None, *portable(error)


def _map_board(file: int) -> memoryview:
    board = memoryview(mmap.mmap(file, _BOARD_BYTES))
    board[0] = _NOTHING
    return board
