"""All that the ranks of a stage have noted, as one process has read it; a look reads only what has changed."""

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
        stage: the run of the stage with the plan.
        for_people: the progress within units is read too.

    Attributes:
        heartbeats: the last of each rank, by its owner.
        ranks: the progress of each rank, by its owner, as it was read last.
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
        """Yield the records that are new."""
        self._look_at_heartbeats()
        # Not every log has a heartbeat: of ranks of earlier launches, and of leaders.
        grown = [f"{one.owner}.jsonl" for one in self.heartbeats.values() if self._has_grown(one)]
        yield from self._tail.records(grown if self._has_looked else None)
        self._has_looked = True

    def hear(self, progress: RankProgress) -> None:
        """Take note of what a rank of this process has said of itself."""
        self._heard.add(progress.owner)
        self.ranks[progress.owner] = progress

    def _has_grown(self, heartbeat: Heartbeat) -> bool:
        return heartbeat.size > self._tail.offset(f"{heartbeat.owner}.jsonl")

    def _look_at_heartbeats(self) -> None:
        folder = self.stage.ranks.progress
        # A name that is seen late is taken for one that has not changed.
        for owner, heartbeat in list_heartbeats(folder).items():
            before, self.heartbeats[owner] = self.heartbeats.get(owner), heartbeat
            known = self.ranks.get(owner)
            if known is not None and heartbeat.has_ended:
                known.ended, known.unit = True, None
            # Ranks of this process tell more. Where nobody watches, it only matters whether a rank is ready.
            elif owner not in self._heard and (
                known is None or (before != heartbeat and (self._for_people or not known.ready))
            ):
                found = read_heartbeat(folder, heartbeat)
                if found is not None:
                    self.ranks[owner] = found


class StageNotes(Notes):
    """The commits and attempts of the ranks of a stage since a launch.

    Args:
        stage: its plan is the present one.
        for_people: as that of ``Notes``.

    Attributes:
        launch: the start of its ranks.
        missing: the indices of the units that no rank has committed.
        attempts: the attempts of the launch.
        expected_in: how many records all units have.
        rejects: how many records were rejected, by reason.
        num_in: how many records were read for that.
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
        """Read what is new, and return the commits of units that were missing."""
        new = []
        for record in self.new_records():
            self.attempts.add(record)
            # A second commit of a unit counts for nothing.
            if counts(record, self.stage.token) and self._uncommitted.get(record.index) == record.id:
                del self._uncommitted[record.index]
                self.rejects.update(record.rejects)
                self.num_in += record.num_in
                if record.index in self.missing:
                    self.missing.remove(record.index)
                    new.append(record)
        return new
