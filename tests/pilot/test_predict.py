"""Predictions of stages: arithmetic on rates, and the table of ``sharmill plan``."""

from __future__ import annotations

import io
from unittest import mock

import pytest
from rich.console import Console
from support.errors import raises
from support.shar import Project, run, voice

from sharmill.cli.plan import print_plan
from sharmill.cli.prediction import describe_bytes, describe_hours
from sharmill.engine.unit import Unit
from sharmill.errors import ConfigError
from sharmill.pilot.known_rates import find_rates
from sharmill.pilot.predict import compare_audio, expect_seconds, predict_stage, ranks_of_use
from sharmill.pilot.rates import StageRate
from sharmill.pipeline import make_stages
from sharmill.prepare.stage import PrepareStage


@pytest.fixture
def project(tmp_path):
    project = Project(tmp_path)
    for number in range(6):
        project.add(f"utt{number}.wav", voice(0.5, seed=number))
    return project


def stage_of(config, kind):
    (stage,) = (stage for stage in make_stages(config) if stage.kind == kind)
    return stage


def rate(**changes) -> StageRate:
    values = {
        "name": "match", "device": "cpu", "seconds_per_cost": 0.1, "seconds_to_start": 5.0, "bytes_per_cost": 100.0,
        "cost_per_record": 10.0, "records_per_record": 0.9, "records_per_unit": 50.0,
    }  # fmt: skip
    return StageRate(**(values | changes))


def test_planned_units_are_packed_over_the_ranks(project):
    config = project.configure()
    found = predict_stage(config, stage_of(config, "match"), rate(), ranks=2, num_records=6, costs=[30.0, 20.0, 20.0])
    assert found.wall_seconds == pytest.approx(5 + 0.1 * 40)
    assert found.rank_seconds == pytest.approx(0.1 * 70 + 2 * 5)
    assert (found.num_bytes, found.ranks) == (7000.0, 2)
    # Of each rank, the folder and both files of a unit.
    assert found.is_planned
    assert not found.on_gpu


def test_a_stage_that_cannot_be_planned_follows_from_the_records(project):
    config = project.configure()
    found = predict_stage(config, stage_of(config, "match"), rate(), ranks=4, num_records=10_000, costs=None)
    # 100,000 s in 83 units of at most 20 minutes, 21 of them for the busiest rank.
    assert found.wall_seconds == pytest.approx(5 + 0.1 * 100_000 * 21 / 83)
    assert found.ranks == 4
    assert not found.is_planned


def test_stages_that_cannot_be_planned_follow_the_audio_of_one_that_can(project):
    config = project.configure()
    ratio = compare_audio(rate(cost_per_record=10.0), [20.0, 30.0], num_records=10)
    assert ratio == 0.5
    found = predict_stage(config, stage_of(config, "write"), rate(cost_per_record=4.0), ranks=1, num_records=10,
                          costs=None, audio_ratio=ratio)  # fmt: skip
    assert found.num_bytes == pytest.approx(100.0 * 4.0 * 10 * 0.5)
    assemble = stage_of(config, "assemble")
    records = predict_stage(config, assemble, rate(cost_per_record=1.0), ranks=1, num_records=10, costs=None,
                            audio_ratio=ratio)  # fmt: skip
    assert records.num_bytes == pytest.approx(100.0 * 10)


def test_shards_follow_from_the_configuration(project):
    config = project.configure(write={"shard_size": 100})
    found = predict_stage(config, stage_of(config, "write"), rate(), ranks=12, num_records=1000, costs=None)
    # 900 of the 1,000 records are left, in nine shards.
    assert found.ranks == 9


def test_rates_of_a_gpu_are_hours_of_gpus(project):
    config = project.configure()
    device = "NVIDIA H200, capability 9.0"
    assert predict_stage(
        config, stage_of(config, "match"), rate(device=device), ranks=1, num_records=1, costs=[1]
    ).on_gpu


def test_what_is_done_costs_nothing(project):
    config = project.configure()
    found = predict_stage(config, stage_of(config, "match"), rate(), ranks=4, num_records=10, costs=[])
    assert (found.wall_seconds, found.rank_seconds) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("rates", "least", "expected"),
    # 77 s of work: four starts of 5 s for each rank, as many seconds as are named, or a pace that nobody knows.
    [({"match": rate()}, None, 3), ({"match": rate()}, 30.0, 2), ({"match": rate()}, 0.0, 10), ({}, None, 10)],
)
def test_no_more_ranks_are_of_use_than_have_work_for_a_while(project, monkeypatch, rates, least, expected):
    monkeypatch.setattr("sharmill.pilot.predict.find_rates", lambda config, earlier: (rates, ""))
    config = project.configure(executor={"least_seconds_per_rank": least})
    units = [Unit(index=number, id=str(number), size=1, cost=77.0, params={}) for number in range(10)]
    assert ranks_of_use(config, stage_of(config, "match"), units) == expected


def test_a_run_gives_its_own_rates(project):
    config = project.configure()
    assert run(PrepareStage(config)).ok
    own, source = find_rates(config, None)
    assert own["prepare"].cost_per_record == 1
    assert own["prepare"].seconds_per_cost > 0
    assert own["prepare"].bytes_per_cost > 0
    assert str(project.run_dir) in source


def test_what_is_no_run_has_no_rates(project, tmp_path):
    with raises(ConfigError, "no_run_dir", "nothing"):
        find_rates(project.configure(), str(tmp_path / "nothing"))


def printed(config, **options) -> str:
    console = Console(width=90, file=io.StringIO(), highlight=False)
    print_plan(console, config, **options)
    return console.file.getvalue()


def test_without_rates_the_plan_says_how_to_get_them(project):
    assert "sharmill calibrate" in printed(project.configure())


def test_rates_of_the_run_itself_are_used(project):
    config = project.configure()
    assert run(PrepareStage(config)).ok
    output = printed(config, gpu_hour=2.5)
    assert "predicted, for what is left" in output
    assert "price" in output


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_hours_of_gpus_are_said_to_be_of_ranks(project, device):
    config = project.configure()
    assert run(PrepareStage(config)).ok
    rates = {"prepare": rate(name="prepare"), "match": rate(device=device)}
    with mock.patch("sharmill.pilot.known_rates.find_rates", return_value=(rates, "")):
        output = printed(config, gpu_hour=2.5)
    assert ("several that share a GPU count as if each had its own" in output) == (device == "cuda")


def test_without_rates_no_time_is_expected_of_any_stage(project):
    config = project.configure()
    assert expect_seconds(config, make_stages(config)) == {}


def test_what_is_left_of_a_run_is_expected_from_its_own_rates_and_its_pilot(project):
    config = project.configure()
    assert run(PrepareStage(config)).ok
    piloted = {"prepare": rate(name="prepare"), "match": rate(seconds_per_cost=0.5, cost_per_record=2.0)}
    with mock.patch("sharmill.pilot.predict.find_rates", return_value=(piloted, "")):
        found = expect_seconds(config, make_stages(config))
    # Prepare is done; match begins, and then has two seconds of audio for each of six records.
    assert found == {"prepare": 0.0, "match": pytest.approx(5 + 0.5 * 12)}


def test_numbers_are_short():
    assert [describe_bytes(size) for size in (12, 1200, 3.4e9)] == ["12 B", "1.2 kB", "3.4 GB"]
    assert [describe_hours(hours) for hours in (0, 0.01, 12.34, 10_000)] == ["", "0.010", "12.3", "10,000"]
