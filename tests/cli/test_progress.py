"""Progress in terminals of 80 and more columns, and as lines without a terminal."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from sharmill.cli.progress import ProgressListener
from sharmill.engine.executor import StageResult
from sharmill.engine.progress import RankProgress
from sharmill.engine.unit import Commit, Totals, make_unit

STAGES = ("prepare", "match", "write", "encode/nanocodec")


class Clock:
    """A clock that the test moves; ranks and the file system have the same."""

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
    return [make_unit(index, cost=cost, size=1, params={}) for index, cost in enumerate(costs)]


def commit_of(unit, rejects=0):
    reasons = {"too_short": rejects}
    return Commit(token="t", index=unit.index, id=unit.id, files=[], num_in=1, num_out=1, rejects=reasons, stats={},
                  seconds=0.0, rank=0)  # fmt: skip


def rank_of(clock, began, **values):
    """The heartbeat of a rank that loaded in no time, unless ``values`` say otherwise."""
    values = {"ready": began} | values
    return RankProgress(rank=0, slot="", owner="a", pid=0, host="", started=began, updated=clock.now, written=clock.now,
                        **values)  # fmt: skip


def ended(rejects=0):
    return StageResult(Totals(num_in=1, num_out=1, rejects={"too_short": rejects}, hours=0.0))


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
)
def test_the_known_time_left_of_the_whole_run_is_shown(listener, clock, expected, loading, under_way):
    shown = listener(120, names=STAGES, expected=expected)
    shown.stage_started(stage_of("prepare"), units_of([1.0]), [])
    shown.stage_ended(stage_of("prepare"), ended())
    units = units_of([60.0, 60.0])
    shown.stage_started(stage_of("match"), units, [])
    began = clock.now
    clock.now += 10
    assert drawn(shown, 120)[0].partition(", ")[2].strip() == loading
    shown.unit_done(units[0], commit_of(units[0]))
    shown.looked([rank_of(clock, began, cost_done=60.0)])
    assert drawn(shown, 120)[0].partition(", ")[2].strip() == under_way


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_bars_have_room_and_nothing_is_cut(listener, clock, width):
    """Four stages over ten million records and 600 hours, of which the last is under way."""
    shown = listener(width, names=STAGES, expected=dict.fromkeys(STAGES, 60.0))
    for name in STAGES:
        units, began = units_of([10_000.0 if name == "prepare" else 2160.0] * 1000), clock.now
        shown.stage_started(stage_of(name), units, [])
        for unit in units[: 600 if name == STAGES[-1] else 1000]:
            clock.now += 4.0
            shown.unit_done(unit, commit_of(unit, rejects=unit.index % 2))
        if name != STAGES[-1]:
            shown.stage_ended(stage_of(name), ended(rejects=500))
    shown.looked([rank_of(clock, began, cost_done=600 * 2160.0)])
    lines = drawn(shown, width)
    assert lines[0].strip() == "stage 4 of 4"
    assert not [line for line in lines if "…" in line or len(line) > width]
    assert all(line.count("━") + line.count("╸") >= 8 for line in lines[3:6])
    assert lines[-1].startswith("encode/nanocodec ")
    assert "600/1000" in lines[-1]
    assert "360.0/600.0 h" in lines[-1]
    assert lines[-1].endswith("300  0:26:40 left")
    assert ("540x real time" in lines[-1]) == (width > 100)
    assert lines[3].endswith("in 1:06:40")


# For ten units of a minute each: units done before and units done now, seconds since the start, the heartbeat of the
# rank (None: not started), and the end of the row.
ROWS = [
    ("match", 0, 0, 10, None, "loading"),
    ("write", 0, 0, 10, None, "starting"),
    ("match", 0, 0, 10, {"ready": 0.0}, "loading"),
    ("match", 0, 0, 100, {"unit": 0}, "for 0:01:40"),
    ("match", 0, 1, 110, {"ready": 1100.0, "cost_done": 60.0}, "0:01:30 left"),
    ("match", 0, 0, 20, {"unit": 0, "unit_cost_done": 30.0}, "0:06:20 left"),
    ("write", 5, 0, 10, {"unit": 5}, "for 0:00:10"),
    ("write", 5, 1, 10, {"cost_done": 60.0}, "0:00:40 left"),
]


@pytest.mark.parametrize(("name", "before", "now", "seconds", "rank", "words"), ROWS)
def test_the_time_of_a_stage_is_told_as_far_as_it_is_known(listener, clock, name, before, now, seconds, rank, words):
    shown, units = listener(80), units_of([60.0] * 10)
    shown.stage_started(stage_of(name), units, [commit_of(unit) for unit in units[:before]])
    began = clock.now
    clock.now += seconds
    for unit in units[before : before + now]:
        shown.unit_done(unit, commit_of(unit))
    shown.looked([] if rank is None else [rank_of(clock, began, **rank)])
    assert drawn(shown, 80)[-1].endswith(words)


@pytest.mark.parametrize(
    ("done", "result", "line"),
    [
        (0, ended(2), "match: 2/2 units, 1.00/1.00 h, 60x real time, 2 rejects, in 0:01:00"),
        (2, ended(), "match: 2/2 units, 1.00/1.00 h, 0 rejects, done before"),
        (1, StageResult(), "match: 1/2 units, 0.50/1.00 h, 0 rejects, failed"),
    ],
)
def test_without_a_terminal_the_end_of_a_stage_is_a_line(clock, done, result, line):
    console, units = Console(width=80, file=io.StringIO(), highlight=False), units_of([1800.0, 1800.0])
    with ProgressListener(console, clock=clock) as listener:
        listener.stage_started(stage_of("match"), units, [commit_of(unit) for unit in units[:done]])
        clock.now += 60
        listener.stage_ended(stage_of("match"), result)
    assert console.file.getvalue().splitlines()[-1] == line


def test_without_a_terminal_lines_come_by_the_clock(clock, monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    console, units = Console(width=80, file=io.StringIO(), highlight=False), units_of([1800.0, 1800.0])
    with ProgressListener(console, clock=clock, names=["match", "write"]) as listener:
        listener.stage_started(stage_of("match"), units, [])
        began = clock.now
        for done in (0.0, 300.0, 600.0, 1200.0):
            clock.now += 15
            listener.looked([rank_of(clock, began, unit=0, unit_cost_done=done)])
    assert console.file.getvalue().splitlines() == [
        "match (stage 1 of 2): 2 units, 1.00 h",
        "match: loading the model",
        "match (stage 1 of 2): 0/2 units, 0.08/1.00 h, 10x real time, 0 rejects, 0:05:30 left, "
        "run: at least 0:05:30 left",
        "match (stage 1 of 2): 0/2 units, 0.33/1.00 h, 20x real time, 0 rejects, 0:02:00 left, "
        "run: at least 0:02:00 left",
    ]
