"""``sharmill plan``: ranks of the configuration, in a table that fits a terminal of 80 columns."""

import pytest
from support.project import make_record, snapshot, write_config, write_lines, write_tone


@pytest.fixture
def config(tmp_path):
    """The configuration of a dataset of three records, each of which is a unit."""
    write_tone(tmp_path / "audio/a.wav")
    manifest = write_lines(tmp_path / "m.json", [make_record(offset=0.5 * n, duration=0.5) for n in range(3)])
    return write_config(tmp_path, manifest, tmp_path / "audio", prepare={"unit_records": 1})


@pytest.mark.parametrize(
    ("workers", "cells"), [(1, "prepare 0/3 3 records 1 3 records 100%"), (2, "prepare 0/3 3 records 2 2 records 75%")]
)
def test_ranks_are_those_of_the_configuration(call, config, monkeypatch, workers, cells):
    monkeypatch.setenv("COLUMNS", "80")
    table = call("plan", config, f"executor.workers={workers}")[1].partition("not yet planned")[0].splitlines()
    assert max(len(line.rstrip()) for line in table) <= 80
    assert table[1].split() == ["stage", "units", "to", "process", "workers", "largest", "balance"]
    assert " ".join(table[3].split()) == cells


@pytest.mark.parametrize("begun", [False, True])
def test_nothing_is_written_into_the_run_directory(call, config, tmp_path, begun):
    if begun:
        assert call("run", config, "prepare", "executor.workers=1")[0] == 0
    before = snapshot(tmp_path)
    assert call("plan", config, "executor.workers=1")[0] == 0
    assert snapshot(tmp_path) == before


def test_of_what_is_done_there_is_one_line(call, config):
    assert call("run", config, "prepare", "executor.workers=1")[0] == 0
    first, *others = call("plan", config)[1].splitlines()
    assert first.endswith(": nothing left to do for prepare")
    assert [line for line in others if line.startswith("prepare")] == []


def test_other_input_in_the_same_run_directory_is_refused(call, config, tmp_path):
    assert call("run", config, "prepare", "executor.workers=1")[0] == 0
    other = write_lines(tmp_path / "other.json", [make_record(offset=0.5, duration=0.25)])
    status, _, err = call("plan", config, f"sources.0.manifest={other}")
    assert (status, "prepare was started with other settings, inputs or versions" in err) == (2, True)
    # As `run` refuses it.
    assert call("run", config, "prepare", f"sources.0.manifest={other}")[0] == 2
