"""The worker loop: the same in a local process, in a task of a SLURM array and in a Ray actor."""

from __future__ import annotations

import logging
import os
import socket
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from sharmill.engine.delays import spent_on, take_delays
from sharmill.engine.device_kind import claim_device_kind
from sharmill.engine.fence import require_current, superseded
from sharmill.engine.ledger import LedgerWriter
from sharmill.engine.metrics import MetricsLog
from sharmill.engine.outcomes import BrokenDevice, FailedAttempt, Overtaken
from sharmill.engine.patience import Patience
from sharmill.engine.progress import ProgressWriter, peak_memory_mb
from sharmill.engine.stage import Advance, Processor, Stage
from sharmill.engine.unit import Commit, Output, Unit
from sharmill.errors import REASONS_OF_NODES, ConfigError, DeviceError, FatalError, is_device_error
from sharmill.staging import Staging
from sharmill.storage import WRITE_ERRNOS, write_atomic

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_SECONDS_BETWEEN_REPORTS = 1.0


class Worker:
    """One rank: loads the stage once and commits units one after the other.

    ``report`` is called about once a second with the cost of the unit in flight that is done so far. ``may_publish``
    is asked before a unit is published, which another rank may have done as well.
    """

    def __init__(
        self,
        stage: Stage,
        rank: int,
        device: str,
        progress: ProgressWriter,
        report: Callable[[Unit, float], object],
        may_publish: Callable[[Unit], bool],
    ) -> None:
        self.stage = stage
        self.rank = rank
        self.device = device
        self._report = report
        self._may_publish = may_publish
        asked = os.environ.get("SLURM_MEM_PER_NODE", "")
        self._memory_asked_mb = float(asked) if asked.isdecimal() else 0.0
        self._patience = Patience(stage.seconds_until_seen)
        self._ledger = LedgerWriter(stage.dir.ledger)
        self._progress = progress
        self._staging = Staging(stage.root, stage.token, scratch_folder(stage.scratch))
        self._closing = ExitStack()

    def __enter__(self) -> Worker:
        """Load the model.

        Raises:
            DeviceError: it cannot be loaded on this device; others may do.
            ConfigError, FatalError: it cannot be loaded, or the plan is not the present one; other ranks would fare no
                better.
        """
        started = time.monotonic()
        with ExitStack() as stack:
            stack.enter_context(self._staging)
            self._processor = stack.enter_context(closing(self._open()))
            self._keep_to_one_kind()
            self._metrics = MetricsLog(self.stage.metrics, self.stage.name, self.stage.dir.metrics, self.rank)
            stack.callback(self._metrics.close)
            self._closing = stack.pop_all()
        log.info("rank %d is ready for %s on %s after %.1f s", self.rank, self.stage.name, self.device,
                 time.monotonic() - started)  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closing.close()

    def _open(self) -> Processor:
        try:
            self.stage.check_node()
            self._patience.wait_until(self.stage.sees_input, f"{self.stage.name}: its input, as it was planned,")
            return self._once_seen(lambda: self.stage.open(self.device))
        except DeviceError as error:
            raise self._device_error(str(error), error.code, error.place) from error
        except (ConfigError, FatalError):
            raise
        except ImportError as error:
            raise self._missing_package(error) from error
        except (Exception, SystemExit) as error:
            log.warning("rank %d cannot be set up", self.rank, exc_info=True)
            # What torch says of a device is a RuntimeError; whether the device or the model is to blame, the other
            # ranks find out.
            if self.device != "cpu" and isinstance(error, RuntimeError):
                raise self._device_error(_one_line(error)) from error
            raise FatalError(
                f"{self.stage.name}: a rank cannot be set up on {self.device}: {_one_line(error)}; "
                f"see {self.stage.dir.rank_log(self.rank)}",
                code="setup_failed",
            ) from error

    def _missing_package(self, error: ImportError) -> FatalError:
        message = f"{self.stage.name}: what every unit needs is not installed on {socket.gethostname()}"
        return FatalError(f"{message}: {_one_line(error)}", code="missing_package")

    def _keep_to_one_kind(self) -> None:
        kind = self._processor.device_kind
        if not kind:
            return
        if (first := claim_device_kind(self.stage, kind)) != kind:
            reason = (
                f"the stage keeps to the kind of device of its beginning, {first}, and this is {kind}, whose output "
                "has other bits: run it there, or begin it anew with --restart"
            )
            raise self._device_error(reason, code="other_device")

    def _device_error(self, reason: str, code: str | None = None, place: str = "") -> DeviceError:
        device = "the CPU" if self.device == "cpu" else f"GPU {os.environ.get('CUDA_VISIBLE_DEVICES', '0')}"
        place = place or f"{device} of {socket.gethostname()}"
        log = self.stage.dir.rank_log(self.rank)
        message = f"{self.stage.name}: a rank cannot be set up on {place}: {reason}; see {log}"
        return DeviceError(message, place=place, code=code)

    def run(self, unit: Unit, following: Unit | None = None) -> Commit | FailedAttempt:
        """Try a unit once and return its commit record, or the failed attempt.

        ``following`` is the unit that will probably be next. After a ``BrokenDevice`` this process can do nothing more
        on its device.

        Raises:
            DeviceError: this node does not see the input any more, or its scratch disk is full; others may do.
            ConfigError, FatalError: going on with other units makes no sense.
        """
        log.info("unit %d begins: %d records, %.1f s of audio", unit.index, unit.size, unit.cost)
        # That of the plan's token goes before all else where the plan is replaced.
        if not self._staging.folder.is_dir():
            raise superseded(self.stage)
        self._progress.begin(unit.index, self.stage.time_limit(unit))
        self._processor.expect(following)
        try:
            commit = self._once_seen(lambda: self._attempt(unit))
        except (ConfigError, FatalError):
            raise
        except ImportError as error:
            raise self._missing_package(error) from error
        except (Exception, SystemExit) as error:
            log.warning("unit %d failed", unit.index, exc_info=True)
            # What was removed with the plan fails in as many ways as there are files.
            require_current(self.stage)
            self._progress.give_up()
            kind = BrokenDevice if is_device_error(error) else FailedAttempt
            return kind(unit.index, _one_line(error), _format(error))
        if commit is None:
            log.info("unit %d was published by another rank", unit.index)
            self._progress.give_up()
            return Overtaken(unit.index, "another rank has published it", "")
        self._progress.end(unit.cost)
        self._metrics.commit(unit, commit)
        log.info("unit %d is done in %.1f s: %d out, rejects %s", unit.index, commit.seconds, commit.num_out,
                 commit.rejects)  # fmt: skip
        return commit

    def _once_seen(self, work: Callable[[], Result]) -> Result:
        """Do what other nodes' files are needed for, again as long as these may not be seen yet."""

        def try_it() -> Result:
            try:
                return work()
            except OSError:
                # What was seen is missed as soon as the plan is replaced.
                require_current(self.stage)
                raise

        return self._patience.once_seen(try_it)

    def _follow(self, unit: Unit) -> Advance:
        """Return what the processor calls as it gets on with the unit."""
        done = 0.0
        reported = time.monotonic()

        def advance(cost: float) -> None:
            nonlocal done, reported
            done = min(done + cost, unit.cost)
            self._progress.advance(done)
            if time.monotonic() - reported >= _SECONDS_BETWEEN_REPORTS:
                reported = time.monotonic()
                self._report(unit, done)

        return advance

    def _attempt(self, unit: Unit) -> Commit | None:
        """Return the commit, or None where another rank has published the unit."""
        started = time.monotonic()
        take_delays()  # those of an attempt that failed
        try:
            with self._staging.write_errors(WRITE_ERRNOS):
                output = self._processor.process(unit, self._staging, self._follow(unit))
            output.check_accounts(unit)
            if REASONS_OF_NODES & {reject.reason for reject in output.rejects}:
                self.stage.check_node()
            if not self._may_publish(unit):
                return None
            with spent_on("disk"):
                files = self._staging.publish(output.files)
        finally:
            self._staging.clear()
        if output.rejects:
            lines = b"".join(reject.to_json() + b"\n" for reject in output.rejects)
            write_atomic(self.stage.dir.unit_rejects(unit.index), lines, parents=False)
        commit = Commit(
            token=self.stage.token,
            index=unit.index,
            id=unit.id,
            files=files,
            num_in=unit.size,
            num_out=output.num_out,
            rejects=_count_reasons(output),
            stats=output.stats,
            seconds=round(time.monotonic() - started, 3),
            rank=self.rank,
            device_kind=self._processor.device_kind,
            delays=take_delays(),
            host=socket.gethostname(),
            memory_mb=round(peak_memory_mb()),
            memory_asked_mb=self._memory_asked_mb,
        )
        self._ledger.append(commit)
        return commit


def scratch_folder(scratch: str | None) -> Path | None:
    """Return the folder that ``executor.scratch`` names on this machine.

    Raises:
        DeviceError: there is none; other machines may have one.
    """
    if scratch is None:
        return None
    path = Path(os.path.expandvars(scratch))
    if not path.is_absolute() or not path.is_dir():
        host = socket.gethostname()
        message = f"executor.scratch {scratch} is no folder on {host}: it is {path}; name one that every node has"
        raise DeviceError(message, place=host, code="disk")
    return path


def _count_reasons(output: Output) -> dict[str, int]:
    return dict(sorted(Counter(reject.reason for reject in output.rejects).items()))


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _format(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
