"""Curves are written where they are asked for, and never cost a run."""

from __future__ import annotations

import sys

import pytest

from sharmill.config import MetricsConfig
from sharmill.engine.metrics import MetricsLog
from sharmill.engine.rundir import StageDir
from sharmill.engine.unit import Commit, make_unit


def commit_of(unit, rejects):
    return Commit(index=unit.index, id=unit.id, files=[], num_in=unit.size, num_out=0, rejects=rejects, stats={},
                  seconds=0.5, rank=0)  # fmt: skip


def tell(config, folder):
    metrics = MetricsLog(config, "match", StageDir(folder), 3)
    for index, rejects in enumerate(({}, {"too_short": 2})):
        unit = make_unit(index, cost=1800.0, size=2, params={})
        metrics.commit(unit, commit_of(unit, rejects))
    metrics.close()


def test_off_by_default_and_then_nothing_is_written(tmp_path):
    tell(MetricsConfig(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_files_have_the_values(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tell(MetricsConfig(tensorboard=True), tmp_path)
    events = accumulator.EventAccumulator(str(tmp_path / "metrics/rank-003")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("audio_hours")] == [(1, 0.5), (2, 1.0)]
    assert [event.value for event in events.Scalars("rejects")] == [0.0, 2.0]
    assert [event.value for event in events.Scalars("unit_seconds")] == [0.5, 0.5]


def test_wandb_without_network_keeps_its_files(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tell(MetricsConfig(wandb_project="speech"), tmp_path)
    assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 1


@pytest.mark.parametrize("config", [MetricsConfig(tensorboard=True), MetricsConfig(wandb_project="speech")])
def test_a_missing_package_costs_the_curve_only(config, tmp_path, monkeypatch, caplog):
    for package in ("wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, package, None)
    tell(config, tmp_path)
    assert "is off for this rank" in caplog.text


def test_a_sink_that_fails_is_dropped_after_one_warning(tmp_path, caplog):
    metrics = MetricsLog(MetricsConfig(), "match", StageDir(tmp_path), 0)

    def broken(values, step):
        raise OSError("no space")

    metrics._sinks.append(broken)
    for index in range(3):
        unit = make_unit(index, cost=1.0, size=0, params={})
        metrics.commit(unit, commit_of(unit, {}))
    assert caplog.text.count("no space") == 1
