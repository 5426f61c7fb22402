"""The fate of units under any order of steps of ranks and drivers, on hosts that see each other's files late.

The functions of the engine run unchanged on a real folder; ``engine.simulated_run`` simulates what each host sees of
it. To prove that the search for a bad order works, some mistakes are made on purpose. Tests of bad slots come last.
"""

import math
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from engine.simulated_run import Fault, Host, simulate
from greenlet import getcurrent
from hypothesis import Phase, given, settings, strategies as st
from support.project import examples

from sharmill.engine.attempts import is_among
from sharmill.engine.claims import Claims
from sharmill.engine.lead import Leader
from sharmill.engine.plan import find_outstanding, read_ledger
from sharmill.engine.stage import RunOptions
from sharmill.engine.unit import Commit
from sharmill.errors import SharmillError
from sharmill.files.checksums import checksum
from sharmill.files.record_log import RecordLog
from sharmill.files.staging import PublishedFile, Staging

MOST_LATE = 55.0
FOLDERS = ("claims", "progress", "ledger", "state.json", "first", "last")
# A rank that hangs for longer may be taken for dead: a lease, less the time between heartbeats.
MOST_UNNOTICED = RunOptions().lease_seconds - 20.0
MOST_EXAMPLES = 200

DURATIONS = [(20.0, False), (200.0, False), (200.0, True), (400.0, True), (math.inf, True), (math.inf, True)]
FAULTS = [
    Fault(folder, nth, *duration)
    for folder in FOLDERS
    for nth in range(4 if folder == "progress" else 2)
    for duration in DURATIONS
]
CLOCKS = st.sampled_from([-3600.0, 0.0, 3600.0])


@st.composite
def courses(draw):
    """Draw the arguments of ``follow``.

    The first rank fails only with bad units, and always comes back. If other ranks are bad, it has no faults, because
    units that only bad slots have tried would be given up.
    """
    good_for = [math.inf, *draw(st.lists(st.sampled_from([math.inf, math.inf, math.inf, 0, 2]), max_size=3))]
    most_faults = draw(st.sampled_from([0, 2, 2]))
    faults = [draw(st.lists(st.sampled_from(FAULTS), max_size=most_faults)) for _ in good_for]
    faults[0] = [fault for fault in faults[0] if max(good_for) == min(good_for) and fault.seconds < math.inf]
    hosts = draw(st.integers(1, 4))
    ranks = [
        Host(
            f"h{number % hosts}/rank {number}",
            draw(CLOCKS),
            tuple(faults[number]),
            good,
        )
        for number, good in enumerate(good_for)
    ]
    delays = [0.0, *(draw(st.floats(0.0, 100.0)) for _ in ranks[1:])]
    num_units = draw(st.integers(1, 6))
    bad_units = draw(st.sampled_from([frozenset(), frozenset(), frozenset({0}), frozenset({0, num_units - 1})]))
    late, second = draw(st.sampled_from([0.0, MOST_LATE])), draw(st.floats(0.0, 300.0))
    return ranks, delays, num_units, bad_units, late, second, draw(st.booleans()), draw(st.integers(0, 2**32))


def follow(folder, ranks, delays, num_units, bad_units, late, second, is_led, seed):
    """Simulate a run, and check its output."""
    drivers = [0.0] if bad_units else [0.0, second]
    run = simulate(
        folder,
        ranks,
        delays,
        units=num_units,
        bad_units=bad_units,
        late=late,
        seed=seed,
        drivers=drivers,
        is_led=is_led,
    )
    commits = run.commits()
    assert commits.keys() == set(range(num_units)) - bad_units, "a unit is lost"
    for found in commits.values():
        assert all(commit.files == found[0].files for commit in found), "a unit has two results"
    assert max(map(len, run.begun.values())) == 1, "two ranks hold one claim"
    if bad_units:
        assert run.results[0].failures.keys() == bad_units, "a unit is neither done nor given up"
        # Failures on slots without a commit do not count, and the end of an attempt may be noted late.
        assert all(len(run.attempts().failures(index)) <= 3 + 2 * len(ranks) for index in bad_units)
    else:
        assert [result.ok for result in run.results] == [True, True], "a driver does not see that all is done"
        assert run.finished == run.outcome_files(), "a finished stage is changed"
    if late == 0.0:
        long = [[fault for fault in rank.faults if fault.seconds > MOST_UNNOTICED] for rank in ranks]
        for found in commits.values():
            assert len(found) == 1 or any(long[commit.rank] for commit in found), "a unit is done twice"
        is_calm = not any(long) and not bad_units and all(rank.good_for > 0 for rank in ranks)
        assert not is_calm or len(run.begun) == num_units, "a unit is taken from a rank that is alive"


def search(tmp_path_factory, **options):
    """Simulate up to ``max_examples`` runs, until one breaks a property."""

    @settings(deadline=None, derandomize=True, report_multiple_bugs=False, **options)
    @given(courses())
    def search(course):
        follow(tmp_path_factory.mktemp("run"), *course)

    search()


def test_no_order_of_steps_loses_a_unit_or_changes_the_output(tmp_path_factory):
    search(tmp_path_factory, max_examples=examples(200))


def test_a_seed_gives_one_course_in_any_folder(tmp_path_factory):
    """Otherwise a run that broke a property could not be repeated."""

    def seconds_taken():
        ranks = [Host("h0/rank 0"), Host("h1/rank 1", good_for=2)]
        folder, drivers = tmp_path_factory.mktemp("run"), [0.0, 28.0]
        return simulate(folder, ranks, units=2, late=MOST_LATE, seed=39, drivers=drivers).disk.now

    assert len({seconds_taken() for _ in range(12)}) == 1


def take_over_without_asking(monkeypatch):
    """Let two ranks that find a claim stale both hold the next one."""
    make = Claims.make

    def make_again(claims, unit, generation):
        return make(claims, unit, generation) or generation > 0

    monkeypatch.setattr(Claims, "make", make_again)


def finish_without_lock(monkeypatch):
    lock = SimpleNamespace(released=nullcontext)
    monkeypatch.setattr("engine.simulated_run.locked", lambda *arguments, **options: nullcontext(lock))


def finish_before_all_is_seen(monkeypatch):
    def look_once(stage, units, given, failures):
        return find_outstanding(stage, units, read_ledger(stage.dir, units), check=given)

    monkeypatch.setattr("sharmill.engine.run.wait_for_units", look_once)


def count_leases_by_the_clock_of_others(monkeypatch):
    is_dead = Leader.is_dead

    def is_old(leader, owner, now):
        record = leader.notes.ranks.get(owner)
        is_late = record is not None and time.time() - record.updated >= RunOptions.lease_seconds
        return is_dead(leader, owner, now) or is_late

    monkeypatch.setattr(Leader, "is_dead", is_old)


def commit_before_publishing(monkeypatch):
    publish, clear, append = Staging.publish, Staging.clear, RecordLog.append
    later = {}

    def publish_later(staging, names):
        later[getcurrent()] = lambda: (publish(staging, names), clear(staging))
        paths = {name: staging.path(name) for name in names}
        return [PublishedFile(name, path.stat().st_size, checksum(path)) for name, path in paths.items()]

    def append_first(log, record, *, synced=False):
        append(log, record, synced=synced)
        if isinstance(record, Commit):
            later[getcurrent()]()

    monkeypatch.setattr(Staging, "publish", publish_later)
    monkeypatch.setattr(Staging, "clear", lambda staging: None)
    monkeypatch.setattr(RecordLog, "append", append_first)


@pytest.mark.parametrize(
    "mistake",
    [
        take_over_without_asking, finish_without_lock, finish_before_all_is_seen, count_leases_by_the_clock_of_others,
        commit_before_publishing,
    ],
)  # fmt: skip
def test_the_search_finds_a_mistake(tmp_path_factory, monkeypatch, mistake):
    mistake(monkeypatch)
    with pytest.raises((AssertionError, OSError, SharmillError)):
        search(tmp_path_factory, max_examples=MOST_EXAMPLES, phases=[Phase.generate])


@pytest.mark.parametrize("num_units", [1, 7])
def test_a_stage_ends_if_every_slot_is_bad(tmp_path, num_units):
    run = simulate(tmp_path, [Host(f"h/rank {number}", good_for=0) for number in range(2)], units=num_units)
    assert run.results[0].failures.keys() == set(range(num_units))
    assert run.commits() == {}
    # Only ten different units prove that a slot is bad; fewer units are given up, since there is no other evidence.
    assert run.attempts().excluded_slots() == {}


@pytest.mark.parametrize("is_useful", [False, True])
def test_a_host_with_three_bad_slots_is_excluded_if_none_works(tmp_path, is_useful):
    ranks = [Host(f"bad/rank {number}", good_for=0) for number in range(3)]
    ranks += [Host("bad/rank 3")] if is_useful else []
    run = simulate(tmp_path, [*ranks, Host("good/rank 4")], units=40)
    out = run.attempts().excluded()
    assert is_among("bad/rank 0", out)
    assert is_among("bad/rank 3", out) is not is_useful
    assert not is_among("good/rank 4", out)
    assert run.commits().keys() == set(range(40))
