"""The benchmarks: every row runs on tiny data, and the framework measures and judges correctly."""

import pytest

from bench import ALL_ROWS
from bench.rows import Case, Row, measure, table_line

# These rows import NeMo or resemblyzer, or start processes.
SLOW = {"encode model", "encode codec", "encode published", "match model", "match published", "start rank"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in ALL_ROWS])
def test_row_does_its_work_both_ways(name, tmp_path):
    row = ALL_ROWS[name]
    found = measure(row, tmp_path, repeats=1, warm_up=0, tiny=True)
    assert found["amount"] > 0
    assert row.what
    assert ("baseline" in found) == bool(row.baseline)
    for way in found.keys() & {"ours", "baseline"}:
        assert len(found[way]["runs"]["wall"]) == 1
    assert found["targets"].keys() == row.targets.keys()


def test_rounds_alternate_after_one_that_is_not_counted(tmp_path):
    calls = []
    case = Case(
        amount=1, unit="things", ours=lambda: calls.append("ours") or {"passes": 1.5},
        baseline=lambda: calls.append("theirs"), before=lambda: calls.append("before"),
    )  # fmt: skip
    row = Row(
        name="x", what="work", make=lambda folder, tiny: case, group="reach", baseline="a loop",
        targets={"passes": "<= 1.02", "system share": "<= 2"}, inverse=False,
    )  # fmt: skip
    found = measure(row, tmp_path, repeats=2)
    assert calls == ["before", "ours", "before", "theirs"] * 3
    assert len(found["ours"]["runs"]["wall"]) == len(found["ratios"]) == 2
    met = {name: one["met"] for name, one in found["targets"].items()}
    assert met == {"passes": False, "system share": True}
    found["ratio"], found["ratios"] = 2.0, [1.5, 2.5]
    line = table_line(row, found)
    assert line.startswith("| **x**: work | a loop | 2.00 (1.50 to 2.50) |")
    assert "passes <= 1.02: not met (1.5)" in line
