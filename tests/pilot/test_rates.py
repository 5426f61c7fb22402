"""Rates of a run and of a pilot, and the predictions of ``sharmill plan`` from them."""

import pytest
from support.project import Project, raises, run, stage_of
from support.reported import note_pilot

from sharmill.cli.plan import print_plan
from sharmill.engine.order import make_stages
from sharmill.engine.unit import Unit
from sharmill.errors import ConfigError
from sharmill.rates import StageRate, expect_seconds, find_rates, predict, ranks_of_use

GPU = "NVIDIA H200, capability 9.0"


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path).add_voices([0.5] * 6, "utt{}.wav")


def rate(name="match", **changes) -> StageRate:
    values = {
        "name": name, "device": "cpu", "seconds_per_cost": 0.1, "seconds_to_start": 5.0, "bytes_per_cost": 100.0,
        "cost_per_record": 10.0, "records_per_record": 0.9, "records_per_unit": 50.0,
    }  # fmt: skip
    return StageRate(**(values | changes))


def planned(costs, size=1):
    return [Unit(index=number, id=str(number), size=size, cost=cost, params={}) for number, cost in enumerate(costs)]


@pytest.mark.parametrize(
    ("kind", "changes", "ranks", "num_records", "costs", "done", "expected"),
    [
        # Planned units are packed over the ranks, with 40 s for the busier of two.
        ("match", {}, 2, 6, [30.0, 20.0, 20.0], (), (2, 5 + 4.0, 7 + 2 * 5, 7000.0, True, False)),
        ("match", {}, 2, 6, [30.0, 20.0, 20.0], (0,), (2, 5 + 2.0, 4 + 2 * 5, 4000.0, True, False)),
        ("match", {}, 2, 6, [30.0], (0,), (0, 0.0, 0.0, 0.0, True, False)),
        ("match", {"device": GPU}, 1, 1, [1.0], (), (1, 5.1, 5.1, 100.0, True, True)),
        # Not planned yet: 100,000 s in 83 units of at most 20 minutes, 21 of them for the busiest rank.
        ("match", {}, 4, 10_000, None, (), (4, 5 + 10_000 * 21 / 83, 10_000 + 4 * 5, 1e7, False, False)),
        # 900 of 1,000 records are left, in nine shards.
        ("write", {}, 12, 1000, None, (), (9, 5 + 1000 / 9, 1000 + 9 * 5, 1e6, False, False)),
    ],
)
def test_a_stage_is_predicted(project, kind, changes, ranks, num_records, costs, done, expected):
    config = project.configure(write={"shard_size": 100}, executor={"workers": ranks})
    units = {"prepare": (planned([1.0], num_records), ())}
    if costs is not None:
        units[kind] = planned(costs), done
    (found,) = predict(config, make_stages(config), {kind: rate(kind, **changes)}, units)
    assert (found.name, found.ranks, found.is_planned, found.on_gpu) == (kind, expected[0], *expected[4:])
    assert (found.wall_seconds, found.rank_seconds, found.num_bytes) == pytest.approx(expected[1:4])


def test_unplannable_stages_are_predicted_from_a_planned_one(project):
    config = project.configure(executor={"workers": 1})
    rates = {
        "match": rate(),
        "write": rate("write", cost_per_record=4.0),
        "encode.shards/builtin": rate("encode.shards/builtin", cost_per_record=1.0),
    }
    units = {"prepare": (planned([1.0], 10), ()), "match": (planned([20.0, 30.0]), ())}
    _, write, shards = predict(config, make_stages(config), rates, units)
    assert (write.num_bytes, shards.num_bytes) == (100.0 * 4.0 * 10 * 0.5, 100.0 * 10)


@pytest.mark.parametrize(
    ("rates", "least", "expected"),
    # 770 s of work; the least work per rank is four starts of 5 s, or the given seconds, or has no known pace.
    [([rate()], None, 3), ([rate()], 30.0, 2), ([rate()], 0.0, 10), ([], None, 10)],
)
def test_the_number_of_ranks_is_limited_by_the_work(project, rates, least, expected):
    config = project.configure(executor={"least_seconds_per_rank": least})
    note_pilot(project.run_dir, rates=rates)
    stage = next(stage for stage in make_stages(config) if stage.kind == "match")
    assert ranks_of_use(config, stage, planned([77.0] * 10)) == expected


@pytest.fixture
def printed(capsys, monkeypatch):
    """Return a function: configuration and options -> the output of ``sharmill plan``."""
    monkeypatch.setenv("COLUMNS", "90")

    def show(config, **options):
        print_plan(config, **options)
        return capsys.readouterr().out

    return show


def test_rates_come_from_the_run_and_from_its_pilot_otherwise(project, tmp_path, printed):
    config = project.configure()
    assert expect_seconds(config, make_stages(config)) == {}
    assert "sharmill calibrate" in printed(config)
    with raises(ConfigError, "no_run_dir", "nothing"):
        find_rates(config, str(tmp_path / "nothing"))
    assert run(stage_of(config, "prepare")).ok
    note_pilot(project.run_dir, rates=[rate("prepare"), rate(seconds_per_cost=0.5, cost_per_record=2.0, device=GPU)])
    found, source = find_rates(config, None)
    assert (found["prepare"].cost_per_record, found["match"].cost_per_record) == (1, 2)
    assert "calibration.json and finished units in" in source
    # Prepare is done; match begins, and then has two seconds of audio for each of six records.
    assert expect_seconds(config, make_stages(config)) == {"prepare": 0.0, "match": pytest.approx(5 + 0.5 * 12)}
    output = printed(config, gpu_hour=2.5)
    assert "predicted for the remaining work" in output
    assert "price" in output
    assert "workers that share a GPU are counted separately" in output
    assert found["prepare"].seconds_per_cost > 0
