"""Curves are written where they are asked for, and never cost a run."""

from __future__ import annotations

import os
import pty
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sharmill.config import MetricsConfig
from sharmill.engine.metrics import MetricsLog
from sharmill.engine.unit import Commit, make_unit


def commit_of(unit, rejects):
    return Commit(token="", index=unit.index, id=unit.id, files=[], num_in=unit.size, num_out=0, rejects=rejects,
                  stats={}, seconds=0.5, rank=0)  # fmt: skip


def tell(config, folder, **options):
    curves = MetricsLog(config, "match", folder, 3, **options)
    for index, rejects in enumerate(({}, {"too_short": 2})):
        unit = make_unit(index, cost=1800.0, size=2, params={})
        curves.commit(unit, commit_of(unit, rejects))
    curves.close()


def test_off_by_default_and_then_nothing_is_written(tmp_path):
    tell(MetricsConfig(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_run_has_project_entity_name_and_values(tmp_path, monkeypatch):
    started, logged = [], []
    run = SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=lambda: logged.append("end"))
    stand_in = SimpleNamespace(Settings=dict, init=lambda **options: started.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    tell(MetricsConfig(wandb_project="speech", wandb_entity="team", wandb_name="first"), tmp_path)
    (options,) = started
    assert {name: options[name] for name in ("project", "entity", "name", "group")} == {
        "project": "speech", "entity": "team", "name": "first-match-rank-003", "group": "match",
    }  # fmt: skip
    (_, first), (step, last), end = logged
    assert (first["audio_hours"], last["audio_hours"], step, last["rejects"], end) == (0.5, 1.0, 2, 2.0, "end")


def test_wandb_without_network_keeps_its_files(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tell(MetricsConfig(wandb_project="speech"), tmp_path)
    assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 1


ELSEWHERE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_metrics
test_metrics.tell(test_metrics.MetricsConfig(wandb_project="speech"), Path(sys.argv[2]), timeout=2.0)
print("went on")
"""


@pytest.fixture
def tell_elsewhere(tmp_path):
    """Returns a function that does it in a process of its own, in a terminal at which nobody sits: what is printed."""
    pytest.importorskip("wandb")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    clean |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), "TERM": "xterm"}

    def start(**environment: str) -> str:
        command = [sys.executable, "-c", ELSEWHERE, str(Path(__file__).parent), str(tmp_path)]
        end, terminal = pty.openpty()
        try:
            options = {"stdin": terminal, "env": clean | environment, "timeout": 120, "check": False}
            done = subprocess.run(command, capture_output=True, text=True, **options)
        finally:
            os.close(end)
            os.close(terminal)
        return done.stdout + done.stderr

    return start


@pytest.mark.slow
def test_wandb_with_a_server_that_does_not_answer_costs_the_curve_only(tell_elsewhere):
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        said = tell_elsewhere(WANDB_API_KEY="0" * 40, WANDB_BASE_URL=f"http://127.0.0.1:{deaf.getsockname()[1]}")
    assert "wandb is off for this rank: CommError" in said
    assert "went on" in said


@pytest.mark.slow
def test_wandb_without_a_key_asks_nobody(tell_elsewhere):
    said = tell_elsewhere()
    assert "wandb is off for this rank: UsageError" in said
    assert "went on" in said


def test_a_missing_package_costs_the_curve_only(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    tell(MetricsConfig(wandb_project="speech"), tmp_path)
    assert "is off for this rank" in caplog.text


def test_a_curve_that_fails_is_dropped_after_one_warning(tmp_path, monkeypatch, caplog):
    def broken(values, step):
        raise OSError("no space")

    run = SimpleNamespace(log=broken, finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Settings=dict, init=lambda **options: run))
    tell(MetricsConfig(wandb_project="speech"), tmp_path)
    assert caplog.text.count("no space") == 1
