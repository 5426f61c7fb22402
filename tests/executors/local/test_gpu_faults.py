"""The local executor on GPUs that break: ranks are replaced, devices given up, and units that are to blame named."""

from __future__ import annotations

import os

import pytest
from support.errors import raises
from support.gpu_faults import ECC, FULL, BadDevices, BreakingStage, FaultyStage, FullStage, LookingAhead
from support.toy_stage import GpuStage, ToyStage, output_bytes, run

from sharmill.engine.host import usable_cores
from sharmill.errors import DeviceError, FatalError


@pytest.fixture
def gpus(monkeypatch):
    """Returns a function that says how many GPUs there seem to be."""

    def set_number(number):
        names = tuple(str(index) for index in range(number))
        monkeypatch.setattr("sharmill.executors.devices.visible_gpus", lambda: names)

    return set_number


@pytest.fixture
def whole(tmp_path):
    stage = ToyStage(tmp_path / "whole")
    run(stage)
    return output_bytes(stage)


def test_a_broken_context_costs_a_rank_and_no_attempt_of_a_unit(tmp_path, gpus, whole):
    gpus(1)
    stage = BreakingStage(tmp_path, once=(2,))
    result, heard = run(stage, "auto")
    assert result.ok
    assert heard.failed == {}
    assert stage.attempts() == {0: 1, 1: 1, 2: 2, 3: 1, 4: 1, 5: 1}
    # One GPU has a process of its own, which is replaced.
    assert len(stage.pids() - {os.getpid()}) == 2
    assert output_bytes(stage) == whole


@pytest.mark.slow
def test_a_unit_that_always_breaks_the_context_is_named_and_the_others_are_done(tmp_path, gpus):
    gpus(1)
    stage = BreakingStage(tmp_path, always=(2,))
    result, heard = run(stage, "auto")
    assert list(result.failures) == [2]
    assert result.failures[2].message.startswith("RuntimeError: CUDA error: device-side assert triggered")
    assert sorted(heard.done) == [0, 1, 3, 4, 5]
    assert stage.attempts() == {0: 1, 1: 1, 2: 3, 3: 1, 4: 1, 5: 1}


@pytest.mark.slow
def test_a_bad_gpu_is_given_up_and_the_others_go_on_and_the_end_says_so(tmp_path, gpus, whole):
    gpus(3)
    stage = BadDevices(tmp_path, bad=("1",))
    result, _ = run(stage, "auto")
    assert result.ok
    assert output_bytes(stage) == whole
    assert stage.marked("bad") == ["1"] * 3
    [sentence] = result.given_up
    assert "GPU 1 of rank 1 was taken out of work: toy: a rank cannot be set up on GPU 1 of " in sentence
    assert ECC in sentence


def test_a_gpu_that_fails_once_at_set_up_is_tried_again(tmp_path, gpus):
    gpus(1)
    stage = GpuStage(tmp_path, setup_does="device_once")
    result, _ = run(stage, "auto")
    assert result.ok
    assert result.given_up == []


@pytest.mark.slow
def test_a_stage_whose_gpus_are_all_bad_ends_with_their_reason(tmp_path, gpus):
    gpus(2)
    stage = BadDevices(tmp_path, bad=("0", "1"))
    with raises(DeviceError, "device_failed", "cannot be set up on GPU", ECC):
        run(stage, "auto")
    assert sorted(stage.marked("bad")) == ["0"] * 3 + ["1"] * 3
    assert stage.attempts() == {}


def test_another_error_at_set_up_ends_the_stage_at_once(tmp_path, gpus):
    gpus(2)
    stage = GpuStage(tmp_path, setup_does="raise:no such voice")
    with raises(Exception, "setup_failed", "ValueError: no such voice"):
        run(stage, "auto")


@pytest.mark.slow
@pytest.mark.parametrize("faults", [(0, 1), (2, 3), (4,)])
def test_every_fault_costs_one_attempt_in_a_pool(tmp_path, gpus, faults):
    gpus(2)
    stage = FaultyStage(tmp_path, faults=faults)
    result, heard = run(stage, "auto")
    assert result.ok
    assert heard.failed == {}
    stage.assert_done(tmp_path / "clean")


def test_every_lack_of_memory_costs_one_attempt_inline_and_the_process_goes_on(tmp_path):
    stage = FaultyStage(tmp_path, faults=(0, 1, 2), dead=False)
    result, heard = run(stage, 1)
    assert result.ok
    assert heard.failed == {}
    assert stage.pids() == {os.getpid()}
    stage.assert_done(tmp_path / "clean")


@pytest.mark.parametrize("number", [0, 1])
def test_where_nothing_fits_the_stage_ends_at_its_second_unit(tmp_path, gpus, number):
    """Inline on the CPU, and in the process of a rank on a GPU."""
    gpus(number)
    stage = FullStage(tmp_path)
    with raises(FatalError, "out_of_memory", FULL):
        run(stage, 1)
    assert stage.attempts().total() == 2


def test_a_rank_has_its_next_unit_while_it_does_one(tmp_path, gpus, whole):
    gpus(1)
    stage = LookingAhead(tmp_path)
    assert run(stage, "auto")[0].ok
    order = [int(line.split()[0]) for line in stage.marked("attempts")]
    assert stage.marked("expected") == [*map(str, order[1:]), "none"]
    assert output_bytes(stage) == whole


def test_the_unit_that_is_set_aside_for_a_rank_that_dies_is_done_by_another(tmp_path, gpus, whole):
    gpus(1)
    stage = LookingAhead(tmp_path, behaviour={3: "kill_once"})
    assert run(stage, "auto")[0].ok
    assert stage.attempts() == {0: 1, 1: 1, 2: 1, 3: 2, 4: 1, 5: 1}
    assert output_bytes(stage) == whole


@pytest.mark.parametrize("number", [1, 2])
def test_ranks_share_the_cores_of_the_machine(tmp_path, gpus, number):
    gpus(number)
    stage = LookingAhead(tmp_path, units=4)
    assert run(stage, "auto")[0].ok
    assert set(stage.marked("cores")) == {str(max(1, usable_cores() // number))}
