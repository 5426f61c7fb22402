"""Every row of the benchmarks runs, at a size at which its figures mean nothing."""

from __future__ import annotations

import pytest

from bench import ALL_ROWS
from bench.rows import measure


@pytest.mark.parametrize("name", ALL_ROWS)
def test_row_does_its_work_both_ways(name, tmp_path):
    found = measure(ALL_ROWS[name], tmp_path, repeats=1, warm_up=0, tiny=True)
    assert found["amount"] > 0
    assert ("baseline" in found) == bool(ALL_ROWS[name].baseline)
    for way in found.keys() & {"ours", "baseline"}:
        assert len(found[way]["runs"]["wall"]) == 1
