"""Decisions of a leader: the state derived from attempts at units, mostly without a disk or a clock."""

import msgspec
import pytest
from support.toy_stage import ToyStage

from sharmill.engine.attempts import SETUP, Attempts, Note
from sharmill.engine.fence import make_fence
from sharmill.engine.launch import begin_launch, read_attempts
from sharmill.engine.lead import decide
from sharmill.engine.parent import Rank
from sharmill.engine.plan import read_or_make_plan
from sharmill.engine.progress import ENDED
from sharmill.engine.unit import Commit
from sharmill.engine.watch import Watcher
from sharmill.files.record_log import RecordLog

A, B, C, D = "h0/rank 0", "h1/rank 1", "h2/rank 2", "h3/rank 3"


def failed(unit, generation, slot, kind="failed", **error):
    return Note(kind=kind, slot=slot, launch="x", unit=unit, generation=generation, message="no", time=1.0, **error)


def done(unit, slot):
    return Commit(
        token="t", index=unit, id="", files=[], num_in=1, num_out=1, rejects={}, stats={}, seconds=1.0, rank=0,
        launch="x", slot=slot, time=0.5,
    )  # fmt: skip


def decided(*records, num_units, live, claimed=(), **options):
    attempts = Attempts("x")
    for record in records:
        attempts.add(record)
    missing = set(range(num_units)) - {record.index for record in records if isinstance(record, Commit)}
    return decide(attempts, missing, dict(claimed), live, **options)


ALL_DID = [done(1, A), done(2, B), done(3, C)]
OFFERS = {
    "no untried units, which ranks claim by themselves": ([], {}),
    "a failed unit, first to slots that have not tried it": ([failed(0, 0, A)], {0: (1, [A])}),
    "a released unit, to all": ([failed(0, 0, A, "released")], {0: (1, [])}),
    "a unit released eleven times, as a failed one": (
        [failed(0, number, A, "released") for number in range(11)],
        {0: (11, [A])},
    ),
    "units with the fewest failures first": (
        [failed(0, 0, A), failed(0, 1, B), failed(3, 0, A)],
        {3: (1, [A]), 0: (2, [A, B])},
    ),
    "an end that was noted twice, only once": ([failed(0, 0, A), failed(0, 0, A)], {0: (1, [A])}),
}


@pytest.mark.parametrize(("records", "offers"), OFFERS.values(), ids=OFFERS)
def test_units_are_offered_again(records, offers):
    state = decided(*records, num_units=4, live=[A, B, C])
    assert {index: (offer.generation, offer.avoid) for index, offer in state.offers.items()} == offers
    assert list(state.offers) == list(offers)
    assert (state.ended, state.out, state.num_missing) == (False, [], 4)


def test_a_unit_is_offered_to_all_where_all_have_tried_it():
    state = decided(failed(0, 0, A), failed(0, 1, B), num_units=1, live=[A, B])
    assert (state.offers[0].generation, state.offers[0].avoid) == (2, [])


def test_a_unit_is_not_offered_while_a_rank_has_it():
    assert decided(failed(0, 0, A), num_units=1, live=[A, B], claimed={0: 1}).offers == {}


GIVEN_UP = [failed(0, 0, A), failed(0, 1, B), failed(0, 2, C)]


def test_a_unit_is_given_up_after_three_attempts_on_good_slots():
    state = decided(*ALL_DID, *GIVEN_UP, num_units=4, live=[A, B, C])
    assert (state.offers, state.ended, state.out) == ({}, True, [])


def test_a_unit_that_failed_on_unproven_slots_waits_for_others():
    assert not decided(*GIVEN_UP, num_units=1, live=[A, B, C], has_waited=False).ended
    assert decided(*GIVEN_UP, num_units=1, live=[A, B, C]).ended


def test_a_further_slot_tries_it_first():
    state = decided(*GIVEN_UP, num_units=1, live=[A, B, C, D])
    assert (state.offers[0].avoid, state.ended) == ([A, B, C], False)


def test_a_slot_is_out_that_has_failed_with_what_others_did():
    state = decided(*(failed(unit, 0, D) for unit in (0, 1, 2)), *ALL_DID, num_units=4, live=[A, B, C, D])
    assert (state.out, state.ended) == ([D], False)
    assert (state.offers[0].generation, state.offers[0].avoid) == (1, [D])


def test_a_host_is_out_with_three_of_its_slots():
    slots = [f"h9/rank {number}" for number in range(4, 7)]
    records = [failed(unit, slots.index(slot), slot) for slot in slots for unit in (0, 1, 2)]
    assert decided(*records, *ALL_DID, num_units=4, live=[A, *slots]).out == ["h9", *slots]


@pytest.mark.parametrize(
    ("code", "times", "out"), [("setup_failed", 2, []), ("setup_failed", 3, [D]), ("disk", 1, [D])]
)
def test_a_slot_is_out_that_cannot_be_set_up(code, times, out):
    assert decided(*[failed(SETUP, 0, D, code=code)] * times, num_units=1, live=[A]).out == out


def test_a_stage_ends_when_all_is_done_or_an_error_stops_it():
    assert decided(*ALL_DID, done(0, A), num_units=4, live=[]).ended
    stopped = decided(failed(SETUP, 0, A, "stopped", code="accounts"), num_units=4, live=[A])
    assert (stopped.ended, stopped.stopped.code) == (True, "accounts")


def test_notes_of_an_older_launch_count_for_nothing():
    note = failed(0, 0, A)
    note.launch = "older"
    assert decided(note, num_units=1, live=[A]).offers == {}


@pytest.mark.parametrize(("beat", "ended"), [("1", True), (ENDED, False)], ids=["at work", "requeued"])
def test_units_are_kept_for_a_rank_that_has_left_a_bad_slot(tmp_path, beat, ended):
    stage, units = read_or_make_plan(ToyStage(tmp_path, units=2).in_run, restart=False)
    make_fence(stage)
    begin_launch(stage, units, 2, join_seconds=100.0)
    log = RecordLog(stage.ranks.log("first"))
    for note in (failed(SETUP, 0, B, code="disk"), *(failed(index % 2, index // 2, A) for index in range(6))):
        note.launch = read_attempts(stage).launch
        log.append(note)
    for rank, its in ((Rank(0, A, "cpu"), "1"), (Rank(1, B, "cpu"), beat)):
        (stage.ranks.progress / f"rank-{rank.owner}.{its}.0.json").write_bytes(msgspec.json.encode(rank.progress()))
    assert Watcher(stage).look() is ended
