"""The Ray executor on GPUs that break. The nodes have GPUs in name only."""

from __future__ import annotations

import pytest
from support.errors import raises
from support.gpu_faults import ECC, FULL, BadDevices, FaultyStage, FullStage, LookingAhead

from sharmill.errors import DeviceError, FatalError


def test_every_fault_costs_one_attempt(tmp_path, on_ray, add_node):
    add_node(num_cpus=1, num_gpus=1)
    stage = FaultyStage(tmp_path)
    result, heard = on_ray(stage, 1)
    assert result.ok
    assert heard.failed == {}
    stage.assert_done(tmp_path / "clean")


def test_where_nothing_fits_the_stage_ends_at_its_second_unit(tmp_path, on_ray, add_node):
    add_node(num_cpus=1, num_gpus=1)
    stage = FullStage(tmp_path)
    with raises(FatalError, "out_of_memory", FULL):
        on_ray(stage, 1)
    assert stage.attempts().total() == 2


@pytest.mark.slow
def test_a_bad_gpu_is_kept_from_others_and_the_end_says_so(tmp_path, on_ray, add_node):
    add_node(num_cpus=2, num_gpus=2)
    stage = BadDevices(tmp_path, bad=("1",))
    result, _ = on_ray(stage)
    assert result.ok
    assert stage.marked("bad") == ["1"] * 3
    [sentence] = result.given_up
    assert "cannot be set up on GPU 1 of " in sentence
    assert ECC in sentence


@pytest.mark.slow
def test_a_cluster_whose_gpus_are_all_bad_ends_the_stage_with_their_reason(tmp_path, on_ray, add_node):
    add_node(num_cpus=1, num_gpus=1)
    stage = BadDevices(tmp_path, bad=("0",))
    with raises(DeviceError, "device_failed", "GPU 0 of ", ECC):
        on_ray(stage, 1)
    assert stage.marked("bad") == ["0"] * 3


def test_an_actor_has_its_next_unit_while_it_does_one_and_the_cores_that_are_set_aside(tmp_path, on_ray, add_node):
    add_node(num_cpus=1, num_gpus=1)
    stage = LookingAhead(tmp_path, units=4)
    assert on_ray(stage, 1)[0].ok
    order = [line.split()[0] for line in stage.marked("attempts")]
    assert stage.marked("expected") == [*order[1:], "none"]
    assert stage.marked("cores") == ["1"]
