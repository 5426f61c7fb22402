"""Claims of a rank on units: the choice of its next unit, and the exclusion of other ranks from that unit."""

import logging
from random import Random

from sharmill.engine.attempts import Claim, is_among
from sharmill.engine.fence import require_current
from sharmill.engine.launch import Launch, latest_claims, make_claim
from sharmill.engine.parent import Parent, Rank
from sharmill.engine.stage import StageRun
from sharmill.engine.state import StateFile
from sharmill.engine.unit import Unit
from sharmill.files.stored import load_record

log = logging.getLogger(__name__)

# Number of claims that a rank may lose to other ranks before it pauses and lists the existing claims again.
_MOST_LOSSES = 2
# Length of the first pause, in seconds per rank. The pause grows with the number of ranks, since all of them may list
# the claims at the same time.
_PAUSE_PER_RANK = 0.005


class Claims:
    """The claims of one rank on the units of a stage, and the choice of its next unit.

    The claim on a unit is the file ``<unit>.<generation>``, whose content names its owner. The claim with the highest
    generation is valid. If an attempt has ended without a commit, the leader offers the unit again with the next
    generation; it also ends the attempts of dead ranks. If two ranks try to create the same claim, one succeeds. An
    older owner cannot displace a newer one, because the newer claim has another name. A claim is not a lock: a rank
    that was wrongly taken for dead may continue with its unit, but both ranks then produce the same bytes.

    A rank first processes the units of its own bin, independently of other ranks. Then it takes units that the leader
    offers again. Finally it takes units from other bins, preferring the bins with the most cost left (work stealing,
    Blumofe and Leiserson 1999, doi:10.1145/324133.324234). The choice is random, so that ranks do not all try the same
    unit.

    Args:
        stage: the stage, with its current plan.
        rank: the rank that claims units.
        parent: the process that has started the rank.
    """

    def __init__(self, stage: StageRun, rank: Rank, parent: Parent) -> None:
        self.launch = load_record(stage.ranks.launch, Launch)
        self._stage = stage
        self.rank = rank
        self._parent = parent
        self._file = StateFile(stage.ranks.state)
        self._file.read()
        self._units = stage.dir.read_units()
        bins = self.launch.bins
        self._own = bins[rank.number][::-1] if rank.number < len(bins) else []
        # Units without a claim at the last listing, by bin; None if the claims must be listed again.
        self._free: list[list[int]] | None = None
        self._random = Random(rank.owner)
        self._tried: set[tuple[int, int]] = set()

    def next(self) -> tuple[Unit, int, Unit | None] | None:
        """Wait for the next unit and claim it.

        Returns:
            The unit, the generation of its claim, and the unit that will probably come after it; None if this rank has
            nothing left to do.
        """
        pause = max(0.05, _PAUSE_PER_RANK * len(self.launch.bins))
        while not self.is_finished():
            claim = self._claim_own() or self._claim_offered() or self._steal()
            if claim is not None:
                return self._units[claim[0]], claim[1], self._units[self._own[-1]] if self._own else None
            pause = min(2 * pause, self.rank.most_pause)
            self._parent.wait(self._random.uniform(0.5, 1.0) * pause)
        return None

    def is_finished(self) -> bool:
        """Return True if this rank has nothing left to do, because the stage ended or its slot was excluded.

        Raises:
            FatalError: the plan has been replaced or finished by another process.
        """
        try:
            state = self._file.read()
        except FileNotFoundError:
            require_current(self._stage)
            raise
        if is_among(self.rank.slot, state.out):
            log.error("rank %d: slot %s is excluded after repeated failures", self.rank.number, self.rank.slot)
            return True
        return state.ended

    def make(self, unit: int, generation: int) -> bool:
        """Create a claim on a unit; return False if another rank has claimed this generation already."""
        return make_claim(self._stage, f"{unit}.{generation}", Claim(owner=self.rank.owner, slot=self.rank.slot))

    def is_taken(self, unit: int, generation: int) -> bool:
        """Return True if another rank has taken over a unit that this rank has claimed."""
        return (self._stage.ranks.claims / f"{unit}.{generation + 1}").exists()

    def _claim_own(self) -> tuple[int, int] | None:
        while self._own:
            if (claim := self._claim_first(self._own.pop())) is not None:
                return claim
            # Another rank is taking units from this bin: drop all units that other ranks have claimed.
            free = {index for part in self._list_free() for index in part}
            self._own = [index for index in self._own if index in free]
        return None

    def _claim_offered(self) -> tuple[int, int] | None:
        """Claim a unit that the leader offers to be tried again, unless this slot must avoid that unit."""
        # Remember the attempted claims, because an offer remains until the leader has seen a claim.
        offered = [
            (index, offer.generation) for index, offer in self._file.state.offers.items()
            if self.rank.slot not in offer.avoid and (index, offer.generation) not in self._tried
        ]  # fmt: skip
        # Choose at random among the first offers, whose units have failed least often, so that ranks try different
        # units.
        first = offered[: max(8, len(offered) // 4)]
        for claim in self._random.sample(first, min(_MOST_LOSSES, len(first))):
            self._tried.add(claim)
            if self.make(*claim):
                return claim
        return None

    def _claim_first(self, unit: int) -> tuple[int, int] | None:
        """Claim a unit that nobody has claimed in this launch."""
        claim = unit, self.launch.first.get(unit, 0)
        return claim if self.make(*claim) else None

    def _steal(self) -> tuple[int, int] | None:
        """Claim the last unit of a random bin; a bin's probability is proportional to the cost left in it."""
        if self._free is None:
            self._free = self._list_free()
        # Both lost claims and listings put load on the file system, so stop after a few losses.
        for _ in range(_MOST_LOSSES):
            if not self._free:
                return None
            costs = [sum(max(self._units[index].cost, 1e-9) for index in part) for part in self._free]
            (part,) = self._random.choices(self._free, costs)
            index = part.pop()
            self._free = [part for part in self._free if part]
            if (claim := self._claim_first(index)) is not None:
                return claim
        self._free = None
        return None

    def _list_free(self) -> list[list[int]]:
        """Return the units without a claim, by bin, omitting empty bins. A claimed unit never returns to this list."""
        claimed = latest_claims(self._stage)
        parts = ([index for index in part if index not in claimed] for part in self.launch.bins)
        return [part for part in parts if part]
