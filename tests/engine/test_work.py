"""What ranks make of units, whatever ranks and units do: the real functions on a real folder, in any order of steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.toy_stage import ToyStage

from sharmill.engine.attempts import AttemptLog, Note
from sharmill.engine.fence import make_fence
from sharmill.engine.ledger import LedgerWriter, read_ledger
from sharmill.engine.plan import load_plan, read_or_make_plan
from sharmill.engine.progress import RankProgress
from sharmill.engine.rejects import RejectLimit
from sharmill.engine.state import StageState, begin_round
from sharmill.engine.unit import Commit
from sharmill.engine.work import Rank, Taken, Units, end_attempt

LEASE_SECONDS = ToyStage.lease_seconds
# Rounds of a second in which every rank that is alive does one step.
MOST_ROUNDS = 3000


@dataclass
class Clock:
    """The time of all ranks; the clocks of hosts are up to an hour from it."""

    now: float = 0.0


@dataclass
class FakeRank:
    """A rank of which each step is called by the test. ``good_for`` is how many attempts its slot does well."""

    stage: ToyStage
    number: int
    slot: str
    clock: Clock
    offset: float
    good_for: float
    bad_units: frozenset[int]
    life: int = 0
    taken: Taken | None = None
    has_left: bool = False
    is_frozen: bool = False
    done: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """A fresh process in the same slot."""
        self.life += 1
        self.owner = f"{self.number}-{self.life}"
        self.record = RankProgress(
            rank=self.number, slot=self.slot, owner=self.owner, pid=1, host="elsewhere", started=self.now(), ready=True
        )
        self.beat()
        self.notes = AttemptLog(self.stage.dir.attempts)
        self.state = StageState(self.stage, now=self.now, join_seconds=LEASE_SECONDS)
        rank = Rank(self.number, self.slot, "cpu", self.owner)
        self.units = Units(self.state, rank, self.owner, self.notes)
        self.taken, self.has_left = None, False

    def now(self) -> float:
        return self.clock.now + self.offset

    def beat(self) -> None:
        self.record.updated = self.now()
        self.stage.dir.rank_progress(self.owner).write_bytes(msgspec.json.encode(self.record))

    def step(self) -> None:
        """Begin an attempt or end one; or leave."""
        if self.has_left or self.is_frozen:
            return
        self.beat()
        if self.taken is not None:
            self._end()
        elif self.units.are_over():
            self.record.ended = self.has_left = True
            self.beat()
        elif (taken := self.units.take()) is not None:
            self.taken = taken
            self.notes.add(self._begun())

    def die(self, *, noted: bool) -> None:
        """SIGKILL. If the supervisor lives it notes the end, and starts another process unless the slot is out."""
        if self.has_left or self.is_frozen:
            return
        if noted:
            if self.taken is not None:
                end_attempt(self.notes, self.state.attempts, self._begun(), "failed", "killed", "killed")
            self.record.ended = True
            self.beat()
            self.start()
        else:
            self.has_left = True

    def _begun(self) -> Note:
        assert self.taken is not None
        unit, generation, _ = self.taken
        return Note(kind="begun", slot=self.slot, owner=self.owner, unit=unit.index, generation=generation)

    def _end(self) -> None:
        assert self.taken is not None
        unit, begun = self.taken.unit, self._begun()
        self.taken = None
        self.good_for -= 1
        if unit.index in self.bad_units or self.good_for < 0:
            end_attempt(self.notes, self.state.attempts, begun, "failed", "an error", "an error")
            return
        self.state.look()
        if unit.index not in self.state.missing:
            end_attempt(self.notes, self.state.attempts, begun, "released")
            return
        commit = Commit(
            token=self.stage.token, index=unit.index, id=unit.id, files=[], num_in=unit.size, num_out=unit.size,
            rejects={}, stats={}, seconds=0.0, rank=self.number,
        )  # fmt: skip
        LedgerWriter(self.stage.dir.ledger).append(commit)
        end_attempt(self.notes, self.state.attempts, begun, "done")
        self.done.append(unit.index)


def begin(folder, num_units, num_ranks):
    stage = ToyStage(folder, units=num_units)
    units = read_or_make_plan(stage, restart=False)
    make_fence(stage)
    begin_round(stage, units, num_ranks, RejectLimit("toy", folder, 3 * num_units, 1.0))
    return stage


def finish(stage, ranks, clock):
    """Let the ranks that are left come to their end, and return the state of the stage."""
    for _ in range(MOST_ROUNDS):
        if all(rank.has_left or rank.is_frozen for rank in ranks):
            break
        clock.now += 1.0
        for rank in ranks:
            rank.step()
    state = StageState(stage)
    state.look()
    return state


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_no_bad_slot_or_host_costs_a_unit_and_each_stage_ends(tmp_path_factory, seed):
    """Some ranks are frozen, killed with or without their supervisor, or bad from the start; one turns bad later."""
    random = Random(seed)
    clock = Clock()
    slots = [f"h{host}/rank {n}" for host in range(random.randint(1, 3)) for n in range(random.randint(1, 3))]
    num_units = random.randint(1, 9)
    bad_units = frozenset(index for index in range(num_units) if random.random() < 0.2)
    stage = begin(tmp_path_factory.mktemp("run"), num_units, len(slots))
    good, turns_bad = random.randrange(len(slots)), random.randrange(len(slots))
    ranks = []
    for number, slot in enumerate(slots):
        good_for = 1e9 if number == good or random.random() < 0.6 else 0
        if number == turns_bad and number != good:
            good_for = random.randint(0, 3)
        offset = random.uniform(-3600, 3600)
        ranks.append(FakeRank(stage, number, slot, clock, offset, good_for, bad_units))
    for _ in range(random.randint(0, 60)):
        rank = random.choice(ranks)
        what = random.random()
        if what < 0.85 or rank.number == good:
            rank.step()
        elif what < 0.92:
            rank.die(noted=random.random() < 0.5)
        elif what < 0.96:
            rank.is_frozen = not rank.is_frozen
        clock.now += random.choice([0.0, 0.1, 5.0])
    state = finish(stage, ranks, clock)
    assert ranks[good].has_left
    committed = set(read_ledger(stage.dir, load_plan(stage)))
    assert committed == set(range(num_units)) - bad_units
    assert ranks[good].state.has_ended()
    for index in bad_units:
        # Slots that had done nothing before count for nothing, and a late end of a killed attempt comes on top.
        assert state.attempts.num_failures(index) <= 3 + 2 * len(slots)


@pytest.mark.parametrize("num_units", [1, 7, 25])
def test_where_every_slot_is_bad_the_stage_ends(tmp_path, num_units):
    clock = Clock()
    stage = begin(tmp_path, num_units, 2)
    ranks = [FakeRank(stage, number, f"h/rank {number}", clock, 0.0, 0, frozenset()) for number in range(2)]
    state = finish(stage, ranks, clock)
    assert all(rank.has_left for rank in ranks)
    assert read_ledger(stage.dir, load_plan(stage)) == {}
    # Ten different units tell that a slot is bad; fewer are given up, since nothing else could tell.
    assert (len(state.attempts.slots_out()) == 2) == (num_units >= 20)
    assert state.has_ended() == (num_units < 20)


@pytest.mark.parametrize("is_useful", [False, True])
def test_a_host_with_three_bad_slots_is_taken_out_unless_others_of_it_work(tmp_path, is_useful):
    clock = Clock()
    stage = begin(tmp_path, 40, 5)
    ranks = [FakeRank(stage, n, f"bad/rank {n}", clock, 0.0, 0, frozenset()) for n in range(3)]
    if is_useful:
        ranks += [FakeRank(stage, 3, "bad/rank 3", clock, 0.0, 1e9, frozenset())]
    ranks += [FakeRank(stage, 4, "good/rank 4", clock, 0.0, 1e9, frozenset())]
    state = finish(stage, ranks, clock)
    assert state.attempts.is_out("bad/rank 0")
    assert state.attempts.is_out("bad/rank 3") is not is_useful
    assert not state.attempts.is_out("good/rank 4")
    assert state.missing == set()


def test_a_frozen_rank_holds_its_unit_for_a_lease_and_no_longer(tmp_path):
    clock = Clock()
    stage = begin(tmp_path, 2, 2)
    ranks = [FakeRank(stage, number, f"h{number}/rank", clock, 0.0, 1e9, frozenset()) for number in range(2)]
    ranks[0].step()
    ranks[0].is_frozen = True
    ranks[1].step()
    ranks[1].step()
    ranks[1].step()
    began = clock.now
    finish(stage, ranks, clock)
    assert sorted(ranks[1].done) == [0, 1]
    assert LEASE_SECONDS <= clock.now - began <= LEASE_SECONDS + 5
    # It goes on, finds its unit done, and publishes nothing.
    ranks[0].is_frozen = False
    ranks[0].step()
    assert ranks[0].done == []


def test_releases_do_not_count_up_to_ten(tmp_path):
    clock = Clock()
    stage = begin(tmp_path, 1, 1)
    rank = FakeRank(stage, 0, "h/rank 0", clock, 0.0, 1e9, frozenset())
    for _ in range(11):
        rank.step()
        assert rank.taken is not None
        end_attempt(rank.notes, rank.state.attempts, rank._begun(), "released", "told to leave")
        rank.taken = None
    assert rank.state.attempts.num_failures(0) == 1
