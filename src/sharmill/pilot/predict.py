"""Predictions of a run: time, GPU hours and disk of each stage, from rates that were measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sharmill.config import Config
from sharmill.engine.balance import pack
from sharmill.engine.ledger import read_ledger
from sharmill.engine.plan import load_plan
from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Unit
from sharmill.executors.devices import plan_devices, usable_gpus
from sharmill.files.host import usable_cores
from sharmill.files.stored import decode_stored, read_stored
from sharmill.pilot.calibrate import Calibration
from sharmill.pilot.known_rates import find_rates
from sharmill.pilot.rates import StageRate
from sharmill.write.config import WriteConfig

# A rank is to work so many times as long as it takes to start.
_STARTS_PER_RANK = 4.0


@dataclass(frozen=True, kw_only=True)
class StagePrediction:
    """The rest of a stage, and its cost.

    Attributes:
        wall_seconds: from its start to its end.
        rank_seconds: of all ranks together: on GPUs where ``on_gpu``, which ranks may share, on cores otherwise.
        num_bytes: that it will publish.
        is_planned: the units are known; where they are not, cost and balance follow from the size of the input.
    """

    name: str
    ranks: int
    wall_seconds: float
    rank_seconds: float
    on_gpu: bool
    num_bytes: float
    is_planned: bool


def predict_stage(
    config: Config, stage: Stage, rate: StageRate, *, ranks: int, num_records: int, costs: list[float] | None,
    audio_ratio: float = 1.0,
) -> StagePrediction:  # fmt: skip
    """Return the prediction for a stage.

    Args:
        ranks: on how many it runs.
        num_records: of the input.
        costs: of the units that are left; None where it cannot be planned yet.
        audio_ratio: what ``compare_audio`` returned for a stage that is planned.
    """
    is_planned = costs is not None
    if costs is None:
        total = rate.cost_per_record * num_records * (1.0 if stage.cost_unit == "records" else audio_ratio)
        count = _count_units(config, stage, rate, num_records, total)
        costs = [total / count] * count
    # A rank that has nothing to do is not started.
    used = min(ranks, len(costs))
    busiest = max((sum(costs[unit] for unit in units) for units in pack(costs, used)), default=0.0) if used else 0.0
    work = sum(costs) * rate.seconds_per_cost
    return StagePrediction(
        name=stage.name,
        ranks=used,
        wall_seconds=busiest * rate.seconds_per_cost + (rate.seconds_to_start if used else 0.0),
        rank_seconds=work + used * rate.seconds_to_start,
        on_gpu=stage.resource == "gpu" and rate.device not in ("", "cpu"),
        num_bytes=sum(costs) * rate.bytes_per_cost,
        is_planned=is_planned,
    )


def compare_audio(rate: StageRate, costs: Sequence[float], num_records: int) -> float:
    """Return how long the audio of a record is, beside that of the input from which a rate is.

    Args:
        costs: of all units of a stage that is planned, and counts seconds of audio.
    """
    expected = rate.cost_per_record * num_records
    return sum(costs) / expected if expected else 1.0


def _count_units(config: Config, stage: Stage, rate: StageRate, num_records: int, cost: float) -> int:
    """Return into how many units a stage of a cost would be divided."""
    if (units := stage.expect_units(num_records, cost)) is not None:
        return units
    # The others have a unit for each shard.
    records = rate.records_per_record * num_records
    write = config.section(WriteConfig)
    return write.num_shards or max(1, math.ceil(records / (write.shard_size or rate.records_per_unit)))


def expect_seconds(config: Config, stages: Sequence[Stage]) -> dict[str, float]:
    """Return the time that the rest of each stage will take on this machine, by its name, of those whose rate is known.

    Rates are those of the pilot, and of what the run has done before.

    Args:
        stages: all stages of the run, in their order.
    """
    rates, _ = find_rates(config, None)
    calibration = RunDir(Path(config.run_dir)).calibration
    if stages[0].dir.units.exists():
        num_records = sum(unit.size for unit in load_plan(stages[0]))
    elif calibration.exists():
        num_records = decode_stored(calibration, read_stored(calibration), Calibration).num_records
    else:
        return {}
    expected, audio_ratio = {}, 1.0
    for stage in stages:
        if (rate := rates.get(stage.name)) is None:
            continue
        costs = None
        if stage.dir.units.exists():
            units = load_plan(stage)
            done = read_ledger(stage.dir, units)
            costs = [unit.cost for unit in units if unit.index not in done]
            if stage.cost_unit != "records":
                audio_ratio = compare_audio(rate, [unit.cost for unit in units], num_records)
        found = predict_stage(
            config, stage, rate, ranks=count_ranks(config, stage), num_records=num_records, costs=costs,
            audio_ratio=audio_ratio,
        )  # fmt: skip
        expected[stage.name] = found.wall_seconds
    return expected


def ranks_of_use(config: Config, stage: Stage, units: Sequence[Unit]) -> int:
    """Return for how many ranks units are enough by ``executor.least_seconds_per_rank``; all where no pace is known."""
    rate = find_rates(config, None)[0].get(stage.name)
    if rate is None or not units:
        return len(units)
    least = config.executor.least_seconds_per_rank
    least = _STARTS_PER_RANK * rate.seconds_to_start if least is None else least
    seconds = sum(unit.cost for unit in units) * rate.seconds_per_cost
    return max(1, min(len(units), int(seconds / least))) if least else len(units)


def count_ranks(config: Config, stage: Stage) -> int:
    """Return on how many ranks the executor of the configuration would run a stage if it ran on this machine."""
    workers = config.executor.workers
    gpus = usable_gpus(config.executor.device) if stage.resource == "gpu" and workers == "auto" else ()
    return len(plan_devices(workers, uses_gpu=stage.resource == "gpu", gpus=gpus, cores=usable_cores()))
