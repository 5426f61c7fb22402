"""Scratch folders of nodes."""

from __future__ import annotations

from support.full_scratch import WatchedStage


def test_an_actor_that_finds_it_full_is_given_up_alone(on_ray, tmp_path):
    stage = WatchedStage(tmp_path, units=4)
    stage.scratch, stage.full, stage.once = str(tmp_path), 2, True
    result, heard = on_ray(stage)
    assert (result.ok, heard.failed) == (True, {})
    assert stage.attempts() == {0: 1, 1: 1, 2: 1, 3: 1}
    [sentence] = result.given_up
    assert "No space left on device" in sentence
