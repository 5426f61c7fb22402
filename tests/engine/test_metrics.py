"""Curves are written if requested, and never stop a run."""

import os
import pty
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from sharmill.config import MetricsConfig
from sharmill.engine.curves import MetricsLog
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


@pytest.mark.slow
@pytest.mark.parametrize(("key", "error"), [("0" * 40, "CommError"), ("", "UsageError")])
def test_wandb_without_a_server_or_a_key_only_stops_the_curve(tmp_path, key, error):
    """In its own process, on a terminal without a user, with a server that never answers."""
    pytest.importorskip("wandb")
    end, terminal = pty.openpty()
    with socket.create_server(("127.0.0.1", 0)) as deaf, os.fdopen(end), os.fdopen(terminal) as stdin:
        wandb = {"WANDB_BASE_URL": f"http://127.0.0.1:{deaf.getsockname()[1]}", "WANDB_API_KEY": key}
        clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        home = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), "TERM": "xterm"}
        done = subprocess.run(
            [sys.executable, "-c", ELSEWHERE, str(Path(__file__).parent), str(tmp_path)],
            stdin=stdin, env=clean | home | {name: value for name, value in wandb.items() if value},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert f"wandb is off for this rank: {error}" in done.stdout + done.stderr
    assert "went on" in done.stdout


@pytest.mark.parametrize("is_installed", [False, True])
def test_an_error_only_stops_the_curve_and_is_logged_once(tmp_path, monkeypatch, caplog, is_installed):
    broken = mock.Mock(**{"init.return_value.log.side_effect": OSError("no space")})
    monkeypatch.setitem(sys.modules, "wandb", broken if is_installed else None)
    tell(MetricsConfig(wandb_project="speech"), tmp_path)
    assert caplog.text.count("is off for this rank") == 1
