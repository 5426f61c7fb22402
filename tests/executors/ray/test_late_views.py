"""Ranks on Ray are on other nodes than their driver: each side may see late what the other has written."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from support.toy_stage import ToyStage

import sharmill
from sharmill.engine.listener import Listener
from sharmill.engine.plan import read_or_make_plan
from sharmill.engine.rejects import RejectLimit
from sharmill.executors.driven_rank import Ready
from sharmill.executors.ray import actor
from sharmill.executors.ray import executor as ray_executor


@pytest.fixture
def stage(tmp_path):
    stage = ToyStage(tmp_path, units=2)
    stage.seconds_until_seen = 30.0
    read_or_make_plan(stage, restart=False)
    return stage


def test_an_actor_waits_for_what_its_node_sees_late(stage, monkeypatch):
    waits = []

    def make_worker(stage, number, device, seconds_until_seen=0.0):
        waits.append(seconds_until_seen)
        return nullcontext()

    monkeypatch.setattr(actor, "Worker", make_worker)
    # Ray itself would start a cluster to say which.
    monkeypatch.setattr("sharmill.executors.ray.actors.this_node", lambda: "node-1")
    for name in ("limit_cores", "redirect_output"):
        monkeypatch.setattr(actor, name, lambda value: None)
    start = actor.ActorStart(
        pickle.dumps(stage), 0, "cuda", 1, folder=None, must_exist=(), log=stage.dir.rank_log(0),
        version=sharmill.__version__,
    )  # fmt: skip
    assert actor.RankActor(start).set_up() == Ready()
    assert waits == [30.0]


def test_the_driver_is_told_that_ranks_were_on_other_nodes(stage, monkeypatch):
    monkeypatch.setattr(ray_executor, "connect", lambda address: None)
    monkeypatch.setattr(ray_executor.RayExecutor, "_needs", lambda self, stage: None)
    monkeypatch.setattr(ray_executor, "_Pool", lambda *arguments: SimpleNamespace(run=lambda: None, given_up={}))
    rejects = RejectLimit(stage.name, stage.dir.unit_rejects(0).parent, 6, 1.0)
    assert ray_executor.RayExecutor().run(stage, [], rejects, Listener()).on_other_nodes
