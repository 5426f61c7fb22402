"""Launches of ranks for the missing units of a stage, claims on units, and the search for live processes of a run."""

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from glob import glob
from typing import Annotated
from uuid import uuid4

import msgspec

from sharmill.engine.attempts import Attempts, Claim, Note
from sharmill.engine.balance import pack
from sharmill.engine.fence import is_current
from sharmill.engine.plan import ledger_records
from sharmill.engine.progress import BEATS_PER_LEASE, ProgressWriter, RankProgress, list_heartbeats, read_progress
from sharmill.engine.run_dir import RunDir, StageDir
from sharmill.engine.stage import RunOptions, StageRun
from sharmill.engine.state import State
from sharmill.engine.unit import Unit
from sharmill.errors import FatalError
from sharmill.files.atomic import make_folder, remove, write_atomic
from sharmill.files.disk import stopping_errors
from sharmill.files.record_log import RecordLog
from sharmill.files.shared_disk import time_of_folder
from sharmill.files.stored import NOT_JSON, load_record, read_record, read_stored


class Launch(msgspec.Struct, kw_only=True):
    """The values with which the ranks of a stage are started; used until all of these ranks have ended.

    Attributes:
        id: a random id, which the notes and commits of these ranks repeat.
        bins: the indices of the units of each rank; empty for ranks that join later.
        join_seconds: seconds to wait for other ranks to join before giving up units that the present ranks cannot
            process.
        begun: for each start of ranks, the number of attempts that had ended by then; the last entry is for these
            ranks.
        first: the generation of the first claim in this launch on each unit with earlier attempts; 0 for all other
            units.
    """

    id: str
    bins: list[list[int]]
    join_seconds: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 0.0
    begun: list[int] = []
    first: dict[int, int] = {}


def begin_launch(
    stage: StageRun,
    missing: Sequence[Unit],
    num_ranks: int,
    *,
    join_seconds: float = 0.0,
    keeps_attempts: bool = False,
    is_joining: bool = False,
) -> range:
    """Divide units among ranks by cost, or add ranks to a running launch; return the numbers of the ranks.

    A new launch removes the claims of earlier ranks, all of which have ended. The caller holds the lock of the run
    directory.

    Args:
        missing: the units to be processed.
        join_seconds: see ``Launch``.
        keeps_attempts: True if the attempts of earlier ranks still count; otherwise they are forgotten.
        is_joining: True if other ranks are running or about to start.
    """
    ranks = stage.ranks
    if is_joining:
        launch = load_record(ranks.launch, Launch)
        numbers = range(len(launch.bins), len(launch.bins) + num_ranks)
        launch.bins += [[] for _ in numbers]
    else:
        before = read_record(ranks.launch, Launch) if keeps_attempts else None
        launch = Launch(id=before.id if before else uuid4().hex, bins=[], join_seconds=join_seconds)
        launch.bins = [[unit.index for unit in part] for part in pack_units(missing, num_ranks)]
        if before is not None:
            attempts = end_attempts(stage, {unit.index for unit in missing})
            launch.begun = [*before.begun, attempts.num_ended]
            launch.first = {
                unit.index: attempts.generation(unit.index) for unit in missing if unit.index in attempts.tried
            }
        else:
            launch.begun = [0]
        numbers = range(len(launch.bins))
        for folder in (ranks.claims, ranks.progress):
            remove(folder)
            make_folder(folder)
        write_atomic(ranks.state, msgspec.json.encode(State(num_missing=len(missing))), parents=False)
    write_atomic(ranks.launch, msgspec.json.encode(launch), parents=False)
    return numbers


@contextmanager
def driven_launch(
    stage: StageRun, missing: Sequence[Unit], num_ranks: int, *, join_seconds: float = 0.0, keeps_attempts: bool = False
) -> Iterator[range]:
    """Begin or join a launch, and send heartbeats as its driver until the context ends; see ``begin_launch``.

    Errors are suppressed if another process has finished or restarted the stage.
    """
    is_joining = bool(find_live(stage.dir, stage.options.lease_seconds))
    numbers = begin_launch(
        stage, missing, num_ranks, join_seconds=join_seconds, keeps_attempts=keeps_attempts, is_joining=is_joining
    )
    record = RankProgress.this(rank=-1, slot="", owner=uuid4().hex, started=0.0)
    interval = stage.options.lease_seconds / BEATS_PER_LEASE
    with ProgressWriter(stage.ranks.progress, record, interval=interval, kind="driver"):
        try:
            yield numbers
        except (FatalError, FileNotFoundError):
            # Another process may have finished or restarted the stage.
            if is_current(stage):
                raise


def pack_units(units: Sequence[Unit], num_ranks: int) -> list[list[Unit]]:
    """Return the units of each rank, balanced by cost; at most ``num_ranks`` non-empty lists."""
    # Use a minimum cost, because units without cost would all be packed into one bin.
    costs = [max(unit.cost, 1e-3) for unit in units]
    return [[units[index] for index in part] for part in pack(costs, min(num_ranks, len(units))) if part]


def read_attempts(stage: StageRun) -> Attempts:
    """Return the attempts of the last launch of a stage, read from the logs of all ranks."""
    launch = read_record(stage.ranks.launch, Launch)
    attempts = Attempts(launch.id if launch is not None else "")
    for record in ledger_records(stage.dir).records():
        attempts.add(record)
    return attempts


def end_attempts(stage: StageRun, missing: Container[int]) -> Attempts:
    """Note the failure of attempts whose ranks ended without a note, and return all attempts.

    The caller knows that all ranks have ended.

    Args:
        missing: the indices of the units without a commit.
    """
    attempts, log = read_attempts(stage), RecordLog(stage.ranks.log(uuid4().hex))
    for unit, generation in latest_claims(stage).items():
        if unit in missing and not attempts.has_ended(unit, generation):
            claim = read_claim(stage, f"{unit}.{generation}")
            words = f"the rank on {claim.slot} ended during the attempt; see {stage.dir.logs}"
            note = Note(kind="failed", slot=claim.slot, launch=attempts.launch, unit=unit, generation=generation,
                        message=words)  # fmt: skip
            log.append(note)
            attempts.add(note)
    return attempts


def has_seen_ends(stage: StageRun) -> bool:
    """Return True if all started ranks have sent their last heartbeat, and their complete logs are visible here.

    If a rank was killed together with its supervisor, its last heartbeat is missing, and the result stays False.
    """
    # This call makes the node refresh its view of the folder.
    time_of_folder(stage.ranks.progress)
    ends = list_heartbeats(stage.ranks.progress).values()
    logs = [(end, stage.ranks.log(end.owner)) for end in ends]
    return bool(logs) and all(
        end.has_ended and (path.stat().st_size if path.exists() else 0) >= end.size for end, path in logs
    )


def latest_claims(stage: StageRun) -> dict[int, int]:
    """Return the generation of the latest claim on each unit, by unit index, from a single listing of the folder."""
    found: dict[int, int] = {}
    for path in stage.ranks.claims.iterdir():
        unit, _, generation = path.name.partition(".")
        if unit.isdecimal() and generation.isdecimal():
            found[int(unit)] = max(found.get(int(unit), 0), int(generation))
    return found


def make_claim(stage: StageRun, name: str, claim: Claim) -> bool:
    """Create a claim with this name; return False if another process has created it before."""
    path = stage.ranks.claims / name
    with stopping_errors(path):
        try:
            with path.open("xb") as stream:
                stream.write(msgspec.json.encode(claim))
        except FileExistsError:
            # The claim may be from this very call, because an NFS client repeats a request whose answer was lost.
            return read_claim(stage, name).owner == claim.owner
    return True


def read_claim(stage: StageRun, name: str) -> Claim:
    """Return a claim. It has no owner if its file is missing, or incomplete because its rank was killed."""
    try:
        return msgspec.json.decode(read_stored(stage.ranks.claims / name), type=Claim)
    except (*NOT_JSON, FileNotFoundError):
        return Claim()


def find_workers(run_dir: RunDir, *, ranks: bool = True) -> list[str]:
    """Return a short description of each process that may be at work on a run; for ``ranks``, see ``find_live``."""
    # Unlike ``Path.glob``, this ignores folders that another process removes meanwhile.
    names = [*glob("*/ranks", root_dir=run_dir.path), *glob("*/*/ranks", root_dir=run_dir.path)]  # noqa: PTH207
    folders = sorted((run_dir.path / name).parent for name in names)
    return [words for folder in folders for words in find_live(StageDir(folder), ranks=ranks)]


def describe_workers(live: Sequence[str]) -> str:
    """Return the descriptions of the first three processes and the number of further ones, as one phrase."""
    more = f" and {len(live) - 3} more" if len(live) > 3 else ""
    return f"{', '.join(live[:3])}{more}"


def find_live(paths: StageDir, lease_seconds: float = RunOptions.lease_seconds, *, ranks: bool = True) -> list[str]:
    """Return a short description of each process that may be at work on an unfinished stage.

    Args:
        ranks: include ranks as well as drivers. Exclude ranks if a scheduler's queue shows more reliably than
            heartbeats which of them are alive.
    """
    found = paths.ranks
    if paths.done.exists() or not found.launch.exists():
        return []
    # Take the time from the file system, whose clock set the times of the records. This also refreshes this node's
    # listing of the folder.
    now = time_of_folder(found.path)
    records = [one for kind in ("driver", *(["rank"] if ranks else [])) for one in read_progress(found.progress, kind)]
    live = [one for one in records if one.is_alive(now, lease_seconds)]
    return [f"{f'rank {one.rank}' if one.slot else f'process {one.pid}'} on {one.host}" for one in live]
