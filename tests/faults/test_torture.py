"""The command over all faults: what one finds does not keep the others from running, and the table has all of them."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from support.fault_rows import FaultRow, read_rows, write_rows
from support.paths import TESTS

_WRITES = """
import argparse, sys
from collections import Counter
from pathlib import Path
from support.fault_rows import FaultRow, write_rows
parser = argparse.ArgumentParser()
for name in ("seed", "minutes", "runs", "rows"):
    parser.add_argument(f"--{name}")
options = parser.parse_args()
"""


@pytest.fixture
def torture(monkeypatch):
    specification = importlib.util.spec_from_file_location("sharmill_torture", TESTS / "faults/torture.py")
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, specification.name, module)
    specification.loader.exec_module(module)
    return module


def test_all_kinds_run_and_share_the_time_and_what_goes_wrong_is_told_at_the_end(
    torture, tmp_path, monkeypatch, capsys
):
    scripts = {
        "finds": _WRITES + "write_rows(Path(options.rows), [FaultRow('a', 2, {'well': 1}, 1, 1)]); sys.exit(1)",
        "breaks": "raise SystemExit('broken')",
        "passes": _WRITES + "write_rows(Path(options.rows), [FaultRow(f'{options.seed} {options.runs} '"
        "f'{float(options.minutes) < 60}', 3, {}, None)])",
    }
    for name, text in scripts.items():
        (tmp_path / f"{name}.py").write_text(text)
    kinds = tuple(torture.Kind(name, str(tmp_path / f"{name}.py"), ("runs",), 1.0) for name in scripts)
    monkeypatch.setattr(torture, "KINDS", kinds)
    options = ["--seed", "7", "--minutes", "60", "--runs", "5", "--output", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["torture.py", *options])
    assert torture.main() == 1
    table = (tmp_path / "out/table.md").read_text()
    assert table in capsys.readouterr().out
    assert [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| ")] == [
        "| fault", "| a", "| 7 5 True"
    ]  # fmt: skip
    assert "finds ended with status 1\n" in table
    assert "breaks ended with status 1, without rows" in table
    assert "passes" not in table


def test_rows_are_read_as_they_were_written(tmp_path):
    row = FaultRow("a fault")
    row.add("well", 1.5, is_equal=True, is_problem=False)
    row.add("with one line", 2.0, is_equal=False, is_problem=True)
    write_rows(tmp_path / "rows.jsonl", [row])
    assert read_rows(tmp_path / "rows.jsonl") == [
        FaultRow("a fault", 2, {"well": 1, "with one line": 1}, equal=1, problems=1, seconds=3.5)
    ]
