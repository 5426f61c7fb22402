"""Launches: the start of ranks for what is missing of a stage, and who is at work on a run."""

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
    """The start of ranks, frozen until all of them have ended.

    Attributes:
        id: a random name, by which notes of attempts are known to be of these ranks.
        bins: the indices of the units of each rank, none for ranks that came later.
        join_seconds: so long ranks may take to join that could do what those which are there cannot.
        begun: how many attempts had ended each time that ranks were started, last at these ranks.
        first: the generation of the first claim on units of which attempts have ended before; 0 of all others.
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
    goes_on: bool = False,
    joins: bool = False,
) -> range:
    """Divide units among ranks by their cost, and return the numbers of the ranks; or add ranks to those at work.

    Of ranks that have all ended the claims are forgotten. The caller holds the lock of the run directory.

    Args:
        missing: the units that are to be done.
        join_seconds: as that of ``Launch``.
        goes_on: the attempts of ranks that have ended count on; else they are forgotten too.
        joins: other ranks are there, or about to begin.
    """
    ranks = stage.ranks
    if joins:
        launch = load_record(ranks.launch, Launch)
        numbers = range(len(launch.bins), len(launch.bins) + num_ranks)
        launch.bins += [[] for _ in numbers]
    else:
        before = read_record(ranks.launch, Launch) if goes_on else None
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
    stage: StageRun, missing: Sequence[Unit], num_ranks: int, *, join_seconds: float = 0.0, goes_on: bool = False
) -> Iterator[range]:
    """Begin a launch, or join that of ranks at work, and give heartbeats until all have ended; see ``begin_launch``.

    An error ends the context alone if another process has finished the stage, or begun it anew.
    """
    joins = bool(find_live(stage.dir, stage.options.lease_seconds))
    numbers = begin_launch(stage, missing, num_ranks, join_seconds=join_seconds, goes_on=goes_on, joins=joins)
    record = RankProgress.this(rank=-1, slot="", owner=uuid4().hex, started=0.0)
    interval = stage.options.lease_seconds / BEATS_PER_LEASE
    with ProgressWriter(stage.ranks.progress, record, interval=interval, kind="driver"):
        try:
            yield numbers
        except (FatalError, FileNotFoundError):
            # Another process may have finished the stage, or begun it anew.
            if is_current(stage):
                raise


def pack_units(units: Sequence[Unit], num_ranks: int) -> list[list[Unit]]:
    """Return the units of each rank, balanced by cost; never more ranks than units, and no rank without one."""
    # Units without cost would all be packed into one bin.
    costs = [max(unit.cost, 1e-3) for unit in units]
    return [[units[index] for index in part] for part in pack(costs, min(num_ranks, len(units))) if part]


def read_attempts(stage: StageRun) -> Attempts:
    """Return the attempts of the last launch of a stage, by the logs of all its ranks."""
    launch = read_record(stage.ranks.launch, Launch)
    attempts = Attempts(launch.id if launch is not None else "")
    for record in ledger_records(stage.dir).records():
        attempts.add(record)
    return attempts


def end_attempts(stage: StageRun, missing: Container[int]) -> Attempts:
    """Note the end of attempts whose ranks could not do so, all of which have ended; return all attempts.

    ``missing`` are the units without a commit.
    """
    attempts, log = read_attempts(stage), RecordLog(stage.ranks.log(uuid4().hex))
    for unit, generation in latest_claims(stage).items():
        if unit in missing and not attempts.has_ended(unit, generation):
            claim = read_claim(stage, f"{unit}.{generation}")
            words = f"its rank on {claim.slot} ended in the middle of it; see {stage.dir.logs}"
            note = Note(kind="failed", slot=claim.slot, launch=attempts.launch, unit=unit, generation=generation,
                        message=words)  # fmt: skip
            log.append(note)
            attempts.add(note)
    return attempts


def has_seen_ends(stage: StageRun) -> bool:
    """Return True if all ranks that have begun have told their end, and all that they had noted by then is seen here.

    Of one that was killed together with its supervisor nobody tells that.
    """
    # It brings the names of others up to date.
    time_of_folder(stage.ranks.progress)
    ends = list_heartbeats(stage.ranks.progress).values()
    logs = [(end, stage.ranks.log(end.owner)) for end in ends]
    return bool(logs) and all(
        end.has_ended and (path.stat().st_size if path.exists() else 0) >= end.size for end, path in logs
    )


def latest_claims(stage: StageRun) -> dict[int, int]:
    """Return the highest generation of the claims on each unit; it takes one listing."""
    found: dict[int, int] = {}
    for path in stage.ranks.claims.iterdir():
        unit, _, generation = path.name.partition(".")
        if unit.isdecimal() and generation.isdecimal():
            found[int(unit)] = max(found.get(int(unit), 0), int(generation))
    return found


def make_claim(stage: StageRun, name: str, claim: Claim) -> bool:
    """Make a claim of a name that has none; return False if another process was faster."""
    path = stage.ranks.claims / name
    with stopping_errors(path):
        try:
            with path.open("xb") as stream:
                stream.write(msgspec.json.encode(claim))
        except FileExistsError:
            # The server's answer may have been lost, and the client have asked it again.
            return read_claim(stage, name).owner == claim.owner
    return True


def read_claim(stage: StageRun, name: str) -> Claim:
    """Return a claim; one without an owner if its rank was killed while it wrote the claim."""
    try:
        return msgspec.json.decode(read_stored(stage.ranks.claims / name), type=Claim)
    except (*NOT_JSON, FileNotFoundError):
        return Claim()


def find_workers(run_dir: RunDir, *, ranks: bool = True) -> list[str]:
    """Return a few words about each process that may be at work on a run; ``ranks`` as that of ``find_live``."""
    # Unlike the method of a path, this passes over folders that another process removes meanwhile.
    names = [*glob("*/ranks", root_dir=run_dir.path), *glob("*/*/ranks", root_dir=run_dir.path)]  # noqa: PTH207
    folders = sorted((run_dir.path / name).parent for name in names)
    return [words for folder in folders for words in find_live(StageDir(folder), ranks=ranks)]


def describe_workers(live: Sequence[str]) -> str:
    """Return words that name processes which are at work on a run, whatever their number."""
    more = f" and {len(live) - 3} more" if len(live) > 3 else ""
    return f"{', '.join(live[:3])}{more}"


def find_live(paths: StageDir, lease_seconds: float = RunOptions.lease_seconds, *, ranks: bool = True) -> list[str]:
    """Return a few words about each process that may be at work on the plan of a stage that is not finished.

    Args:
        ranks: also ranks, rather than their drivers alone; a scheduler's queue knows better than heartbeats which ranks
            are alive.
    """
    found = paths.ranks
    if paths.done.exists() or not found.launch.exists():
        return []
    # By the clock of the file system, as what is written there; what others have just made is seen from here on.
    now = time_of_folder(found.path)
    records = [one for kind in ("driver", *(["rank"] if ranks else [])) for one in read_progress(found.progress, kind)]
    live = [one for one in records if one.is_alive(now, lease_seconds)]
    return [f"{f'rank {one.rank}' if one.slot else f'process {one.pid}'} on {one.host}" for one in live]
