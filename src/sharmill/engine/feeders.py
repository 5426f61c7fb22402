"""Feeders: processes of a rank that read and decode ahead of its model.

In threads, decoding would hold Python's lock, for which what keeps the device busy would wait. A feeder gets bundles of
tasks through a pipe and answers them in their order, and notes on a board, which is shared memory, which task it has at
hand: if it ends, that one is to blame.
"""

import mmap
import os
import pickle
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
from typing import Any, Final, Generic, TypeVar

from sharmill.errors import DeviceError, UnitFailed, one_line
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
    """A task, its seconds of audio, and what has come of it so far: parts of its result, an error and its traceback."""

    task: Task
    seconds: float
    is_done: bool = False
    parts: deque[Result] = field(default_factory=deque)
    error: Exception | None = None
    traceback: str = ""


@dataclass(eq=False, slots=True)
class _Feeder:
    """A feeder, and the bundles that it has not answered, the first of which it has had since ``since``.

    It is lost if it is no longer known which it has answered. ``seconds`` are those of audio in the bundles,
    ``cpu_seconds`` those that its answers have taken.
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
        try:
            self._feeders += [self._start() for _ in range(number)]
        except BaseException:
            self.close()
            raise

    def feed(self, tasks: Iterable[Task]) -> "Feed[Task, Result]":
        """Give out tasks, as far ahead as may be, and return an iterator over their results."""
        return Feed(self, tasks)

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
            finally:
                os.close(file)
                its.close()
        except (OSError, EOFError) as error:
            raise self._refused("cannot be started", error) from error
        return _Feeder(process, Line(pipe, board[2:]), board)

    def _refused(self, what: str, error: Exception) -> DeviceError:
        host = socket.gethostname()
        return DeviceError(
            f"a process that decodes audio {what} on {host} ({one_line(error) or 'it ends at once'}): raise the limits "
            "on processes (ulimit -u), open files (-n) and memory (-v), or set executor.feeders to less",
            place=host,
            code="setup_failed",
        )

    def _give_to(self, feeder: _Feeder, bundle: list["_Errand[Task, Result]"]) -> None:
        # If it has ended, that is seen where it is listened to.
        with suppress(BrokenPipeError, ConnectionError):
            feeder.line.send([errand.task for errand in bundle])
        if not feeder.bundles:
            feeder.since = time.monotonic()
        feeder.bundles.append(bundle)
        feeder.seconds += sum(errand.seconds for errand in bundle)

    def _take_answer(self, feeder: _Feeder) -> None:
        """Take the next answer of a feeder that has one, or has ended."""
        try:
            if feeder.is_lost:
                raise EOFError
            answers, is_last, cpu_seconds = feeder.line.receive()
        except (EOFError, ConnectionError):
            self._replace(feeder, describe_exit(feeder.process.wait(_SECONDS_TO_END)))
            return
        except OSError as error:
            # Too many open files, or no memory: an answer is lost, and no recording is to blame.
            feeder.process.kill()
            feeder.is_lost, feeder.board[0] = True, _NOTHING
            raise self._refused("cannot be heard", error) from error
        for number, part, failure, trace in answers:
            errand = feeder.bundles[0][number]
            if failure is None:
                errand.parts.append(part)
            errand.error, errand.traceback = failure, trace
        if is_last:
            for errand in feeder.bundles.popleft():
                errand.is_done = True
                feeder.seconds -= errand.seconds
            feeder.num_answered += 1
        feeder.since = time.monotonic()
        self._cpu_seconds += cpu_seconds - feeder.cpu_seconds
        feeder.cpu_seconds = cpu_seconds

    def _replace(self, feeder: _Feeder, how: str) -> None:
        """Put another in the place of a feeder that has ended. The task that it had at hand has failed."""
        at_hand, bundle = feeder.board[:2]
        # If none can be started, the next look at this one tries again.
        fresh = self._start()
        feeder.line.close()
        self._feeders[self._feeders.index(feeder)] = fresh
        # It may have answered all that it had begun.
        if feeder.bundles and bundle == feeder.num_answered % 256 and at_hand < len(feeder.bundles[0]):
            failed = feeder.bundles[0].pop(at_hand)
            failed.error = UnitFailed(f"the process that decoded {failed.task} {how}", code="process_ended")
            failed.is_done = True
        for left in filter(None, feeder.bundles):
            for errand in left:
                errand.parts.clear()
            self._give_to(fresh, left)


class Feed(Generic[Task, Result]):
    """The results of tasks, in their order, each an iterable of its parts; in it an error is raised.

    Attributes:
        all_given: no task is left that has not been given out.
    """

    def __init__(self, feeders: Feeders[Task, Result], tasks: Iterable[Task]) -> None:
        self.all_given = False
        self._feeders = feeders
        self._errands = self._make_errands(tasks)
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

    def _make_errands(self, tasks: Iterable[Task]) -> Iterator[_Errand[Task, Result]]:
        for task in tasks:
            yield _Errand(task, self._feeders.weigh(task))
        self.all_given = True


class _Inherited:
    """An open file of this process, for a process that is forked from a server."""

    def __init__(self, file: int) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _detach, (reduction.DupFd(self._file),)  # type: ignore[attr-defined]


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
    with suppress(EOFError, ConnectionError):
        for bundle in count():
            tasks = line.receive()
            board[0], board[1] = _NOTHING, bundle % 256
            answers: list[tuple[int, Any, Exception | None, str]] = []
            for number, task in enumerate(tasks):
                board[0] = number
                for place, answer in enumerate(_attempt(do, task)):
                    # Of a long recording what came before, so that it is nowhere in memory as a whole.
                    if place:
                        line.send((answers, False, time.process_time()), keep=True)
                        answers = []
                    answers.append((number, *answer))
            line.send((answers, True, time.process_time()), keep=True)
    os._exit(0)


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
