"""Progress in terminals of 80 and more columns, and as lines where the output is no terminal."""

from __future__ import annotations

import io
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from sharmill.cli.console import describe_cost, describe_time
from sharmill.cli.progress import ProgressListener

STAGES = ("prepare", "match", "write", "encode/nanocodec")


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def stage_of(name):
    return SimpleNamespace(
        name=name,
        resource="gpu" if name.startswith(("match", "encode")) else "cpu",
        cost_unit="records" if name == "prepare" else "seconds of audio",
    )


def units_of(costs):
    return [SimpleNamespace(index=index, cost=cost) for index, cost in enumerate(costs)]


def commit_of(unit, rejects=0):
    return SimpleNamespace(index=unit.index, num_rejected=rejects)


def ended(rejects=0):
    return SimpleNamespace(totals=SimpleNamespace(num_rejected=rejects))


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def listener(clock):
    """Returns a function: width -> listener of a terminal without colours that is not drawn by itself."""

    def make(width, names=(), expected=None):
        console = Console(width=width, force_terminal=True, color_system=None, file=io.StringIO(), highlight=False)
        return ProgressListener(console, clock=clock, names=names, expected=expected)

    return make


def drawn(listener, width) -> list[str]:
    console = Console(width=width, force_terminal=True, color_system=None, file=io.StringIO(), highlight=False)
    with console.capture() as capture:
        console.print(listener.render())
    return [line.rstrip() for line in capture.get().splitlines()]


@pytest.mark.parametrize(
    ("expected", "loading", "under_way"),
    [
        ({}, "", "run: at least 0:00:10 left"),
        ({"write": 60.0}, "run: at least 0:01:00 left", "run: at least 0:01:10 left"),
        ({"match": 100.0, "write": 60.0, "encode/nanocodec": 3600.0}, "run: 1:02:30 left", "run: 1:01:10 left"),
    ],
)  # fmt: skip
def test_the_time_left_of_the_whole_run_is_shown_as_far_as_it_is_known(listener, clock, expected, loading, under_way):
    shown = listener(120, names=STAGES, expected=expected)
    shown.stage_started(stage_of("prepare"), units_of([1.0]), [])
    shown.stage_ended(stage_of("prepare"), ended())
    units = units_of([60.0, 60.0])
    shown.stage_started(stage_of("match"), units, [])
    clock.now += 10
    assert drawn(shown, 120)[0].partition(", ")[2].strip() == loading
    shown.unit_done(units[0], commit_of(units[0]))
    assert drawn(shown, 120)[0].partition(", ")[2].strip() == under_way


def test_the_last_stage_has_no_other_time_than_its_own(listener, clock):
    shown = listener(120, names=STAGES, expected=dict.fromkeys(STAGES, 60.0))
    show_large_run(shown, clock)
    assert "stage 4 of 4" in drawn(shown, 120)[0]
    assert "run:" not in "".join(drawn(shown, 120))


def show_large_run(listener, clock):
    """Four stages over ten million records and 600 hours, of which the last is under way."""
    for name in STAGES:
        units = units_of([10_000.0 if name == "prepare" else 2160.0] * 1000)
        listener.stage_started(stage_of(name), units, [])
        for unit in units[: 600 if name == STAGES[-1] else 1000]:
            clock.now += 4.0
            listener.unit_done(unit, commit_of(unit, rejects=unit.index % 2))
        if name != STAGES[-1]:
            listener.stage_ended(stage_of(name), ended(rejects=500))


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_bars_have_room_and_nothing_is_cut(listener, clock, width):
    shown = listener(width)
    show_large_run(shown, clock)
    lines = drawn(shown, width)
    assert not [line for line in lines if "…" in line or len(line) > width]
    assert all(line.count("━") + line.count("╸") >= 8 for line in lines[2:5])
    assert lines[-1].startswith("encode/nanocodec ")
    assert "600/1000" in lines[-1]
    assert "360.0/600.0 h" in lines[-1]
    assert lines[-1].endswith("300  0:26:40 left")
    assert ("540 x real time" in lines[-1]) == (width > 100)
    assert lines[2].endswith("in 1:06:40")


def test_wider_terminals_have_longer_bars(listener, clock):
    lengths = []
    for width in (80, 120, 200):
        shown = listener(width)
        show_large_run(shown, clock)
        lengths.append(drawn(shown, width)[3].count("━"))
    assert lengths[0] < lengths[2]


def test_a_stage_that_loads_its_model_says_so(listener, clock):
    shown = listener(80)
    units = units_of([60.0, 60.0])
    shown.stage_started(stage_of("match"), units, [])
    for ranks in (1, 2):
        shown.loading(ranks)
        assert drawn(shown, 80)[-1].endswith("loading")
    clock.now += 100
    shown.loading(1)
    assert drawn(shown, 80)[-1].endswith("for 0:01:40")
    clock.now += 10
    shown.unit_done(units[0], commit_of(units[0]))
    assert drawn(shown, 80)[-1].endswith("0:00:10 left")


def test_progress_within_a_unit_counts(listener, clock):
    shown = listener(80)
    units = units_of([3600.0])
    shown.stage_started(stage_of("encode/mimi"), units, [])
    for seconds in (900.0, 1800.0):
        clock.now += 10
        shown.unit_advanced(units[0], seconds)
    assert "0.50/1.00 h" in drawn(shown, 80)[-1]
    assert drawn(shown, 80)[-1].endswith("0:00:20 left")
    shown.unit_advanced(units[0], 0.0)
    assert "0.00/1.00 h" in drawn(shown, 80)[-1]
    shown.unit_done(units[0], commit_of(units[0]))
    assert "1.00/1.00 h" in drawn(shown, 80)[-1]


def test_units_of_an_earlier_run_do_not_count_for_the_time_left(listener, clock):
    shown = listener(80)
    units = units_of([60.0] * 10)
    shown.stage_started(stage_of("write"), units, [commit_of(unit) for unit in units[:5]])
    clock.now += 10
    assert drawn(shown, 80)[-1].endswith("for 0:00:10")
    shown.unit_done(units[5], commit_of(units[5]))
    assert drawn(shown, 80)[-1].endswith("0:00:40 left")


def test_a_failed_stage_is_marked(listener):
    shown = listener(80)
    shown.stage_started(stage_of("write"), units_of([60.0]), [])
    shown.stage_ended(stage_of("write"), SimpleNamespace(totals=None))
    assert drawn(shown, 80)[-1].endswith("failed")


def lines_of(console) -> list[str]:
    return console.file.getvalue().splitlines()


def test_without_a_terminal_each_stage_has_a_line_at_its_start_and_at_its_end(clock):
    console = Console(width=80, file=io.StringIO(), highlight=False)
    units = units_of([1800.0, 1800.0])
    with ProgressListener(console, clock=clock) as listener:
        listener.stage_started(stage_of("encode/mimi"), units, [])
        for unit in units:
            clock.now += 30
            listener.unit_done(unit, commit_of(unit, rejects=1))
        listener.stage_ended(stage_of("encode/mimi"), ended(rejects=2))
    assert lines_of(console) == [
        "encode/mimi: 2 units, 1.00 h",
        "encode/mimi: 2/2 units, 1.00/1.00 h, 60 x real time, 2 rejects, in 0:01:00",
    ]


def test_without_a_terminal_lines_come_by_the_clock(clock):
    console = Console(width=80, file=io.StringIO(), highlight=False)
    units = units_of([1800.0, 1800.0])
    with ProgressListener(console, clock=clock, seconds_between_lines=0.01) as listener:
        listener.stage_started(stage_of("match"), units, [])
        listener.loading(1)
        wait_for(console, "match: 0/2 units, 0.00/1.00 h, 0 rejects, loading")
        assert lines_of(console)[:2] == ["match: 2 units, 1.00 h", "match: loading the model"]
        listener.loading(0)
        clock.now += 60
        listener.unit_done(units[0], commit_of(units[0]))
        wait_for(console, "match: 1/2 units, 0.50/1.00 h, 30 x real time, 0 rejects, 0:01:00 left")


def wait_for(console, line):
    deadline = time.monotonic() + 60
    while line not in lines_of(console):
        assert time.monotonic() < deadline, lines_of(console)
        time.sleep(0.01)


def test_a_stage_that_was_done_before_has_one_line(clock):
    console = Console(width=80, file=io.StringIO(), highlight=False)
    units = units_of([1800.0])
    with ProgressListener(console, clock=clock) as listener:
        listener.stage_started(stage_of("write"), units, [commit_of(units[0])])
        listener.stage_ended(stage_of("write"), ended())
    assert lines_of(console) == ["write: 1/1 unit, 0.500/0.500 h, 0 rejects, done before"]


@pytest.mark.parametrize(
    ("costs", "records", "text"),
    [
        ((0.0,), False, "0.000 h"),
        ((36.0, 1940.0), False, "0.010/0.539 h"),
        ((36_000.0, 360_000.0), False, "10.0/100.0 h"),
        ((0.0, 36_000_000.0), False, "0/10000 h"),
        ((1.0,), True, "1 record"),
        ((0.0, 1.0), True, "0/1 record"),
        ((999_999,), True, "999999 records"),
        ((120_000, 10_000_000), True, "0.12M/10.00M records"),
    ],
)
def test_costs_in_words(costs, records, text):
    assert describe_cost(*costs, records=records) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00:00"), (59.6, "0:01:00"), (360_000, "100:00:00")])
def test_times_in_words(seconds, text):
    assert describe_time(seconds) == text
