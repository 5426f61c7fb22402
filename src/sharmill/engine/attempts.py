"""Attempts of ranks that no driver watches: the ranks note them, and the next driver reads the notes.

So a unit that kills its rank each time is given up in the end. Like the ledger, one file of JSON lines per process.
Nothing here says that a unit is done; only the ledger does.
"""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from uuid import uuid4

import msgspec

from sharmill.engine.outcomes import FailedAttempt
from sharmill.engine.stored import NOT_JSON, decode_stored, read_stored, read_stored_lines
from sharmill.errors import CODES, SharmillError
from sharmill.storage import open_stored, stopping_errors, write_atomic

log = logging.getLogger(__name__)

# A unit that has failed so often is given up.
MAX_ATTEMPTS = 3
_NO_UNIT = -1
# A unit that takes its node down each time has to come to an end; no other is interrupted this often.
MOST_INTERRUPTIONS = 10


class _Note(msgspec.Struct, omit_defaults=True):
    unit: int
    given_up: bool = False
    of_node: bool = False
    message: str = ""
    traceback: str = ""


_decoder = msgspec.json.Decoder(_Note)


class AttemptLog:
    """The notes of one process."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{uuid4().hex}.jsonl"
        self._stopped = _stopped_path(folder)

    def begin(self, unit: int) -> None:
        """Note that an attempt begins; it counts from here on, however it ends."""
        self._append(_Note(unit))

    def give_up(self, unit: int, *, of_node: bool = False) -> None:
        """Note that the attempt was broken off for no fault of the unit, and does not count.

        ``of_node``: it is the node that cannot do any.
        """
        self._append(_Note(unit, given_up=True, of_node=of_node))

    def fail(self, error: FailedAttempt) -> None:
        """Note that the attempt that was begun has failed with an error."""
        self._append(_Note(error.index, message=error.message, traceback=error.traceback))

    def fail_setup(self, message: str) -> None:
        """Note that this rank cannot work; others perhaps can."""
        self._append(_Note(_NO_UNIT, message=message))

    def stop(self, error: SharmillError) -> None:
        """Note that no rank can go on with this stage."""
        data = msgspec.json.encode({"code": error.code, "message": str(error)})
        write_atomic(self._stopped, data, parents=False)

    @property
    def stopped(self) -> bool:
        """Return True if any rank has noted that."""
        return self._stopped.exists()

    def _append(self, note: _Note) -> None:
        with stopping_errors(self._path), open_stored(self._path, append=True) as stream:
            stream.write(msgspec.json.encode(note) + b"\n")


class Attempts:
    """The attempts of all ranks: how often each unit was begun, and the last error of those that failed with one.

    Attributes:
        interruptions: how often the attempts at each unit were broken off for no fault of its own; the first ten of
            these are not in ``counts``.
        broken_nodes: how many attempts were broken off since the rank's node, or its device, can do none.
        stopped: the reason why no rank can go on, or nothing; ``stopped_code`` is the error's code.
        setup_error: the reason why one of the ranks could not work, or nothing.
    """

    def __init__(self, folder: Path) -> None:
        self.counts: Counter[int] = Counter()
        self.interruptions: Counter[int] = Counter()
        self.broken_nodes = 0
        self.errors: dict[int, FailedAttempt] = {}
        self.setup_error = ""
        self.stopped, self.stopped_code = _read_stopped(_stopped_path(folder))
        for path in sorted(folder.glob("*.jsonl")):
            for line in read_stored_lines(path):
                if line.endswith(b"\n"):
                    self._add(path, line)

    def _add(self, path: Path, line: bytes) -> None:
        try:
            note = _decoder.decode(line)
        except NOT_JSON as error:
            # As in the ledger: a file system that lost its power may leave such lines.
            log.warning("a line of %s is no note: %s", path, error)
            return
        if note.unit == _NO_UNIT:
            self.setup_error = note.message
        elif note.message:
            self.errors[note.unit] = FailedAttempt(note.unit, note.message, note.traceback)
        else:
            self.interruptions[note.unit] += note.given_up
            self.broken_nodes += note.of_node
            is_excused = note.given_up and self.interruptions[note.unit] <= MOST_INTERRUPTIONS
            self.counts[note.unit] += -1 if is_excused else not note.given_up


def _stopped_path(folder: Path) -> Path:
    return folder / "stopped.json"


def _read_stopped(path: Path) -> tuple[str, str]:
    if not path.exists():
        return "", "unspecified"
    stored = decode_stored(path, read_stored(path), dict[str, str])
    code = stored.get("code", "unspecified")
    return stored.get("message") or "a rank has stopped the stage", code if code in CODES else "unspecified"
