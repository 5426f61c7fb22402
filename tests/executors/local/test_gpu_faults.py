"""The local executor on GPUs that break: ranks are replaced, devices given up, and units that are to blame named."""

from __future__ import annotations

import os

import pytest
from support.errors import raises
from support.gpu_faults import ECC, FULL, BadDevices, BreakingStage, FaultyStage, FullStage, LookingAhead
from support.toy_stage import ToyStage, output_bytes, run

from sharmill.errors import DeviceError, FatalError
from sharmill.files.host import usable_cores


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


@pytest.mark.slow
def test_a_stage_whose_gpus_are_all_bad_ends_with_their_reason(tmp_path, gpus):
    gpus(2)
    stage = BadDevices(tmp_path, bad=("0", "1"))
    with raises(DeviceError, "device_failed", "cannot be set up on GPU", ECC):
        run(stage, "auto")
    assert sorted(stage.marked("bad")) == ["0"] * 3 + ["1"] * 3
    assert stage.attempts() == {}


@pytest.mark.parametrize(
    ("number", "faults", "dead"),
    [
        (0, (0, 1, 2), False),
        (1, (3,), True),
        pytest.param(2, (0, 1), True, marks=pytest.mark.slow),
        pytest.param(2, (2, 3), True, marks=pytest.mark.slow),
        pytest.param(2, (4,), True, marks=pytest.mark.slow),
    ],
)
def test_every_fault_costs_one_attempt(tmp_path, gpus, number, faults, dead):
    """Inline, where lack of memory leaves the process as it is, and in ranks, whose first GPU fails at set-up too."""
    gpus(number)
    stage = FaultyStage(tmp_path, faults=faults, dead=dead)
    result, heard = run(stage, number or 1)
    assert (result.ok, result.given_up, heard.failed) == (True, [], {})
    assert (os.getpid() in stage.pids()) == (number == 0)
    stage.assert_done(tmp_path / "clean")


@pytest.mark.parametrize("number", [0, 1])
def test_where_nothing_fits_the_stage_ends_at_its_second_unit(tmp_path, gpus, number):
    """Inline on the CPU, and in the process of a rank on a GPU."""
    gpus(number)
    stage = FullStage(tmp_path)
    with raises(FatalError, "out_of_memory", FULL):
        run(stage, 1)
    assert stage.attempts().total() == 2


@pytest.mark.parametrize("behaviour", [{}, {3: "kill_once"}])
def test_a_rank_has_its_next_unit_while_it_does_one_and_another_does_it_if_it_dies(tmp_path, gpus, whole, behaviour):
    gpus(1)
    stage = LookingAhead(tmp_path, behaviour=behaviour)
    assert run(stage, "auto")[0].ok
    assert stage.attempts() == {index: 1 + (index in behaviour) for index in range(6)}
    order = [int(line.split()[0]) for line in stage.marked("attempts")]
    if not behaviour:
        assert stage.marked("expected") == [*map(str, order[1:]), "none"]
    assert output_bytes(stage) == whole


@pytest.mark.parametrize("number", [1, 2])
def test_ranks_share_the_cores_of_the_machine(tmp_path, gpus, number):
    gpus(number)
    stage = LookingAhead(tmp_path, units=4)
    assert run(stage, "auto")[0].ok
    assert set(stage.marked("cores")) == {str(max(1, usable_cores() // number))}
