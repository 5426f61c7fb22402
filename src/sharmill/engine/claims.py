"""Claims of a rank on units: which unit is the next, and that no other rank takes it."""

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

# A rank that has lost so many claims to others lists those that there are, after a pause.
_MOST_LOSSES = 2
# That pause grows with each, and with the number of ranks, which may all be at that.
_SECONDS_OF_RANK = 0.005


class Claims:
    """The units of a stage as one rank takes them: which is the next, and the claims on it.

    The claim on a unit is the file ``<unit>.<generation>``, whose content names its owner; that of the highest
    generation holds. Where an attempt has ended without a commit, the leader offers the next generation; it also ends
    the attempts of ranks that are dead. Of two that try, one succeeds, and neither can push a newer owner out: that one
    has created a later name. A claim is no guard. A rank that was taken for dead may go on with its unit; both bring
    the same bytes then.

    A rank does the units of its own bin first, without a look at anybody, then those that the state offers, then one of
    the bins with most cost left (work stealing, Blumofe and Leiserson 1999, doi:10.1145/324133.324234). These are drawn
    with a weight, so that many that steal do not all try the same unit.

    Args:
        stage: its plan is the present one.
        rank: the rank that takes them.
        parent: what has started it.
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
        # Units that nobody had claimed when claims were listed last, by their bins; None if they are to be listed.
        self._free: list[list[int]] | None = None
        self._random = Random(rank.owner)
        self._tried: set[tuple[int, int]] = set()

    def next(self) -> tuple[Unit, int, Unit | None] | None:
        """Return the next unit as soon as there is one, or None if nothing is left for this rank.

        Returned with it are the generation of its claim, and the unit that will probably come after it.
        """
        pause = max(0.05, _SECONDS_OF_RANK * len(self.launch.bins))
        while not self.are_over():
            claim = self._claim_own() or self._claim_offered() or self._steal()
            if claim is not None:
                return self._units[claim[0]], claim[1], self._units[self._own[-1]] if self._own else None
            pause = min(2 * pause, self.rank.most_pause)
            self._parent.wait(self._random.uniform(0.5, 1.0) * pause)
        return None

    def are_over(self) -> bool:
        """Return True if nothing is left for this rank: the stage has ended, or its slot is taken out of work.

        Raises:
            FatalError: the plan has been replaced or finished by another process.
        """
        try:
            state = self._file.read()
        except FileNotFoundError:
            require_current(self._stage)
            raise
        if is_among(self.rank.slot, state.out):
            log.error("rank %d: %s is taken out of work", self.rank.number, self.rank.slot)
            return True
        return state.ended

    def make(self, unit: int, generation: int) -> bool:
        """Claim a unit; return False if another rank has this generation of the claim."""
        return make_claim(self._stage, f"{unit}.{generation}", Claim(owner=self.rank.owner, slot=self.rank.slot))

    def is_taken(self, unit: int, generation: int) -> bool:
        """Return True if another rank has taken over a unit that this rank had claimed."""
        return (self._stage.ranks.claims / f"{unit}.{generation + 1}").exists()

    def _claim_own(self) -> tuple[int, int] | None:
        while self._own:
            if (claim := self._claim_first(self._own.pop())) is not None:
                return claim
            # Others are at this bin: what they have is known after one look.
            free = {index for part in self._list_free() for index in part}
            self._own = [index for index in self._own if index in free]
        return None

    def _claim_offered(self) -> tuple[int, int] | None:
        """Claim a unit whose last attempt has failed or was given back, unless others are to try it first."""
        # As long as the leader has not seen a claim, the offer stands.
        offered = [
            (index, offer.generation) for index, offer in self._file.state.offers.items()
            if self.rank.slot not in offer.avoid and (index, offer.generation) not in self._tried
        ]  # fmt: skip
        # Of the first, which have failed least often, any: else all ranks would try the same.
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
        """Claim a unit of another bin, the last of one that was drawn by the cost that is left in it."""
        if self._free is None:
            self._free = self._list_free()
        # To try units that others have claimed is work for the file system, and so is a list of all claims.
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
        """Return which units nobody has claimed, by their bins; once there are none, there will be no more of them."""
        claimed = latest_claims(self._stage)
        parts = ([index for index in part if index not in claimed] for part in self.launch.bins)
        return [part for part in parts if part]
