"""Incremental reading of the logs and heartbeats of a stage's ranks: each call reads only what has changed."""

from collections import Counter
from collections.abc import Iterator

from sharmill.engine.attempts import Attempts, Note
from sharmill.engine.launch import Launch
from sharmill.engine.plan import counts, ledger_records
from sharmill.engine.progress import Heartbeat, RankProgress, list_heartbeats, read_heartbeat
from sharmill.engine.stage import StageRun
from sharmill.engine.unit import Commit
from sharmill.files.stored import load_record


class Notes:
    """The logs and heartbeats of the ranks of a plan.

    Args:
        stage: the stage, with the plan's token.
        for_people: True if people watch the stage, so that the progress within units is read too.

    Attributes:
        heartbeats: the last heartbeat of each rank, by owner.
        ranks: the latest known progress of each rank, by owner.
    """

    def __init__(self, stage: StageRun, *, for_people: bool) -> None:
        self.stage = stage
        self.heartbeats: dict[str, Heartbeat] = {}
        self.ranks: dict[str, RankProgress] = {}
        self._for_people = for_people
        self._heard: set[str] = set()
        self._tail = ledger_records(stage.dir)
        self._has_looked = False

    def new_records(self) -> Iterator[Commit | Note]:
        """Yield the records that were added since the last call."""
        self._look_at_heartbeats()
        # The first call reads all logs, since the logs of leaders and of earlier launches have no heartbeat.
        grown = [f"{one.owner}.jsonl" for one in self.heartbeats.values() if self._has_grown(one)]
        yield from self._tail.records(grown if self._has_looked else None)
        self._has_looked = True

    def hear(self, progress: RankProgress) -> None:
        """Take note of the progress of a rank that reports to this process directly."""
        self._heard.add(progress.owner)
        self.ranks[progress.owner] = progress

    def _has_grown(self, heartbeat: Heartbeat) -> bool:
        return heartbeat.size > self._tail.offset(f"{heartbeat.owner}.jsonl")

    def _look_at_heartbeats(self) -> None:
        folder = self.stage.ranks.progress
        # A heartbeat whose new name is not visible yet looks unchanged.
        for owner, heartbeat in list_heartbeats(folder).items():
            before, self.heartbeats[owner] = self.heartbeats.get(owner), heartbeat
            known = self.ranks.get(owner)
            if known is not None and heartbeat.has_ended:
                known.ended, known.unit = True, None
            # Do not read the files of ranks that report to this process directly. If nobody watches, only ``ready``
            # matters.
            elif owner not in self._heard and (
                known is None or (before != heartbeat and (self._for_people or not known.ready))
            ):
                found = read_heartbeat(folder, heartbeat)
                if found is not None:
                    self.ranks[owner] = found


class StageNotes(Notes):
    """The commits and attempts by the ranks of a stage since the launch of these ranks.

    Args:
        stage: the stage, with its current plan.
        for_people: see ``Notes``.

    Attributes:
        launch: the launch of the ranks.
        missing: the indices of the launch's units without a commit.
        attempts: the attempts of the launch.
        expected_in: number of records in all units.
        rejects: number of rejected records by reason.
        num_in: number of records in the committed units.
    """

    def __init__(self, stage: StageRun, *, for_people: bool) -> None:
        super().__init__(stage, for_people=for_people)
        units = stage.dir.read_units()
        self.launch = load_record(stage.ranks.launch, Launch)
        self.missing = {index for part in self.launch.bins for index in part}
        self.attempts = Attempts(self.launch.id)
        self.expected_in = sum(unit.size for unit in units)
        self.rejects: Counter[str] = Counter()
        self.num_in = 0
        self._uncommitted = {unit.index: unit.id for unit in units}

    def look(self) -> list[Commit]:
        """Read the new records, and return the commits of units that were missing."""
        new = []
        for record in self.new_records():
            self.attempts.add(record)
            # Ignore a second commit of a unit.
            if counts(record, self.stage.token) and self._uncommitted.get(record.index) == record.id:
                del self._uncommitted[record.index]
                self.rejects.update(record.rejects)
                self.num_in += record.num_in
                if record.index in self.missing:
                    self.missing.remove(record.index)
                    new.append(record)
        return new
