"""A unit that hangs on an actor."""

from __future__ import annotations

from support.toy_stage import ToyStage


def test_a_unit_that_hangs_is_tried_three_times_and_given_up(on_ray, tmp_path):
    stage = ToyStage(tmp_path, units=4, behaviour={0: "hold_gil"}, setup_does="meet:2")
    stage.unit_time_limit = 2.0
    result, _ = on_ray(stage)
    assert "it took longer than executor.unit_time_limit of 2 s" in result.failures[0].message
    assert stage.attempts() == {0: 3, 1: 1, 2: 1, 3: 1}
