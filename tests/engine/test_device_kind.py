"""A stage keeps to the kind of device of its beginning."""

from __future__ import annotations

import pytest
from support.errors import raises
from support.gpu_faults import KindStage
from support.toy_stage import run

from sharmill.engine.ledger import read_ledger
from sharmill.engine.plan import load_plan
from sharmill.errors import DeviceError

# A rank on the CPU sees no GPU.
KINDS = {"": "cpu", "0": "A100", "1": "H200"}


def kinds_of(stage):
    return {commit.device_kind for commit in read_ledger(stage.dir, load_plan(stage)).values()}


@pytest.fixture
def gpus(monkeypatch):
    """Returns a function that names the GPUs there seem to be."""
    return lambda *names: monkeypatch.setattr("sharmill.executors.devices.visible_gpus", lambda: names)


def test_commits_have_the_kind(tmp_path, gpus):
    gpus()
    stage = KindStage(tmp_path, kinds=KINDS)
    assert run(stage)[0].ok
    assert kinds_of(stage) == {"cpu"}


def test_what_was_begun_on_the_cpu_does_not_go_on_on_a_gpu(tmp_path, gpus):
    gpus()
    run(KindStage(tmp_path, kinds=KINDS, behaviour={2: "raise"}))
    gpus("0")
    stage = KindStage(tmp_path, kinds=KINDS)
    with raises(DeviceError, "other_device", "GPU 0", "cpu", "A100", "--restart"):
        run(stage, "auto")
    assert stage.attempts()[2] == 3


def test_what_was_begun_on_a_gpu_does_not_go_on_on_the_cpu(tmp_path, gpus):
    gpus("0")
    run(KindStage(tmp_path, kinds=KINDS, behaviour={2: "raise"}), "auto")
    gpus()
    with raises(DeviceError, "other_device", "the CPU"):
        run(KindStage(tmp_path, kinds=KINDS))


def test_a_stage_of_which_nothing_is_done_may_begin_anywhere(tmp_path, gpus):
    gpus("0")
    assert not run(KindStage(tmp_path, kinds=KINDS, units=1, behaviour={0: "raise"}), "auto")[0].ok
    gpus()
    assert run(KindStage(tmp_path, kinds=KINDS, units=1))[0].ok


@pytest.mark.slow
def test_ranks_on_another_kind_are_given_up_at_once_and_the_others_go_on(tmp_path, gpus):
    gpus("0", "1")
    stage = KindStage(tmp_path, kinds=KINDS, setup_does="meet:2")
    result, _ = run(stage, "auto")
    assert result.ok
    assert len(kinds_of(stage)) == 1
    assert len(stage.pids()) == 2
    [sentence] = result.given_up
    assert "keeps to the kind of device of its beginning" in sentence
