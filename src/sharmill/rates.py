"""Processing rates of stages, measured in a run or a pilot, and predictions of time, GPU hours and disk space."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import msgspec

from sharmill.config import Config
from sharmill.engine.balance import pack
from sharmill.engine.order import config_of_run, make_stages
from sharmill.engine.plan import read_ledger
from sharmill.engine.progress import read_progress
from sharmill.engine.run_dir import RunDir
from sharmill.engine.stage import EstimatesUnits, StageRun
from sharmill.engine.unit import Commit, Unit
from sharmill.errors import refuse
from sharmill.executors.supervisor import plan_devices, usable_gpus
from sharmill.files.host import usable_cores
from sharmill.files.stored import read_record


class StageRate(msgspec.Struct, frozen=True, kw_only=True):
    """Processing rate of a stage on one rank, and the size of its output.

    Costs are in the stage's unit of cost: seconds of audio, or records.

    Attributes:
        name: the key of the stage, such as ``encode/mimi``.
        device: the kind of device of the ranks; "" if the stage needs only a core.
        seconds_per_cost: rank seconds per unit of cost.
        seconds_to_start: additional seconds for starting ranks, loading models, planning and finishing.
        bytes_per_cost: bytes of published files per unit of cost.
        cost_per_record: cost per record of the input, from which the cost of an unplanned stage is estimated.
        records_per_record: number of records that enter the stage per record of the input.
        records_per_unit: mean number of records in a unit.
        decoding_per_cost: core seconds of decoding outside the model, per unit of cost.
        model_per_cost: device seconds of the model, per unit of cost.
    """

    name: str
    device: str
    seconds_per_cost: float
    seconds_to_start: float
    bytes_per_cost: float
    cost_per_record: float
    records_per_record: float
    records_per_unit: float
    decoding_per_cost: float = 0.0
    model_per_cost: float = 0.0

    @property
    def cores_per_gpu(self) -> int | None:
        """Number of cores needed to keep one GPU busy, including one for the rank itself; None if unknown."""
        if self.device in ("", "cpu") or not self.model_per_cost:
            return None
        return 1 + math.ceil(self.decoding_per_cost / self.model_per_cost)


class _Pilot(msgspec.Struct):
    """The part of a calibration that contains rates."""

    num_records: int
    rates: list[StageRate]


def measure_rates(stages: Sequence[StageRun], num_records: int) -> list[StageRate]:
    """Return the rates of all stages that have finished units; ``num_records`` is the number of input records."""
    found = []
    for stage in stages:
        if not stage.dir.units.exists():
            continue
        units = {unit.index: unit for unit in stage.dir.read_units()}
        commits = read_ledger(stage.dir, units.values())
        done = sum(units[index].cost for index in commits)
        if not done:
            continue
        found.append(StageRate(
            name=stage.key,
            device=max((commit.device_kind for commit in commits.values()), default=""),
            seconds_per_cost=sum(commit.seconds for commit in commits.values()) / done,
            seconds_to_start=_seconds_to_start(stage, commits),
            bytes_per_cost=sum(file.size for commit in commits.values() for file in commit.files) / done,
            cost_per_record=sum(unit.cost for unit in units.values()) / num_records,
            records_per_record=sum(unit.size for unit in units.values()) / num_records,
            records_per_unit=fmean(unit.size for unit in units.values()),
            decoding_per_cost=sum(map(decoding_seconds, commits.values())) / done,
            model_per_cost=sum(commit.delays.get("model", 0.0) for commit in commits.values()) / done,
        ))  # fmt: skip
    return found


def decoding_seconds(commit: Commit) -> float:
    """Return the core seconds that decoding took for a unit, in feeders or in the rank itself."""
    return commit.stats.get("feeder_seconds") or commit.delays.get("decoding", 0.0)


def _seconds_to_start(stage: StageRun, commits: dict[int, Commit]) -> float:
    """Return how many seconds a stage took beyond its busiest rank; 0 if it is unfinished or was interrupted.

    A stage's time is measured by the file system's clock, from the stage's first file, which is the plan, to the file
    that records its end.
    """
    started = [rank.started for rank in read_progress(stage.ranks.progress)]
    if not stage.dir.done.exists() or not started:
        return 0.0
    planned, ended = stage.dir.units.stat().st_mtime, stage.dir.done.stat().st_mtime
    if any(path.stat().st_mtime < min(started) for path in stage.ranks.ledger.glob("*.jsonl")):
        return 0.0
    busy: Counter[int] = Counter()
    for commit in commits.values():
        busy[commit.rank] += commit.seconds  # type: ignore[assignment]
    return max(0.0, ended - planned - max(busy.values()))


def find_rates(config: Config, earlier: str | None) -> tuple[dict[str, StageRate], str]:
    """Return rates by stage key, and a description of their origin.

    Args:
        earlier: the run directory of another run, the only source of rates if given. By default, the rates come from
            the run of the configuration, and from its pilot for stages that have not run.

    Raises:
        ConfigError: ``earlier`` is not a run directory, or has no finished units.
    """
    if earlier is not None:
        rates = _rates_of_run(config_of_run(earlier))
        refuse((not rates, f"{earlier} has no finished units to measure rates: name another run"), code="no_run_dir")
        return rates, earlier
    run_dir = RunDir(Path(config.run_dir))
    pilot = read_record(run_dir.calibration, _Pilot)
    piloted = {rate.name: rate for rate in pilot.rates} if pilot else {}
    own = _rates_of_run(config)
    sources = [str(run_dir.calibration)] if piloted.keys() - own.keys() else []
    return piloted | own, " and ".join(sources + [f"finished units in {config.run_dir}"] * bool(own))


def _rates_of_run(config: Config) -> dict[str, StageRate]:
    stages = make_stages(config)
    if not stages[0].dir.units.exists():
        return {}
    num_records = sum(unit.size for unit in stages[0].dir.read_units())
    return {rate.name: rate for rate in measure_rates(stages, num_records)} if num_records else {}


@dataclass(frozen=True, kw_only=True)
class StagePrediction:
    """Predicted cost of the remaining work of a stage.

    Attributes:
        wall_seconds: time from start to end.
        rank_seconds: total time of all ranks.
        on_gpu: True if the ranks use GPUs, each of which several ranks may share; False if they use cores.
        num_bytes: bytes of published files.
        is_planned: the units are known; otherwise the cost is estimated from the size of the input.
        cores_per_gpu: see ``StageRate``.
    """

    name: str
    ranks: int
    wall_seconds: float
    rank_seconds: float
    on_gpu: bool
    num_bytes: float
    is_planned: bool
    cores_per_gpu: int | None


def predict(
    config: Config,
    stages: Sequence[StageRun],
    rates: Mapping[str, StageRate],
    planned: Mapping[str, tuple[Sequence[Unit], Collection[int]]],
) -> list[StagePrediction]:
    """Return predictions for the remaining work on this machine, for each stage with a known rate, in order.

    The cost of a stage that cannot be planned yet is estimated from the number of input records. If its cost is audio,
    the estimate is corrected by the ratio of actual to expected audio in the last planned stage before it.

    Args:
        stages: all stages of the run.
        planned: the units of planned stages and the indices of finished units, by stage key.
    """
    first = planned.get(stages[0].key)
    pilot = read_record(RunDir(Path(config.run_dir)).calibration, _Pilot) if first is None else None
    num_records = sum(unit.size for unit in first[0]) if first else pilot.num_records if pilot else 0
    found, audio_ratio = [], 1.0
    for stage in stages:
        if (rate := rates.get(stage.key)) is None:
            continue
        expected = rate.cost_per_record * num_records
        if stage.key in planned:
            units, done = planned[stage.key]
            costs = [unit.cost for unit in units if unit.index not in done]
            if stage.cost_unit != "records" and expected and units:
                audio_ratio = sum(unit.cost for unit in units) / expected
        else:
            expected *= 1.0 if stage.cost_unit == "records" else audio_ratio
            count = _count_units(config, stage, rate, num_records, expected)
            costs = [expected / count] * count
        # There are never more ranks than units.
        used = min(count_ranks(config, stage), len(costs))
        busiest = max((sum(costs[unit] for unit in units) for units in pack(costs, used)), default=0.0) if used else 0.0
        found.append(StagePrediction(
            name=stage.name,
            ranks=used,
            wall_seconds=busiest * rate.seconds_per_cost + (rate.seconds_to_start if used else 0.0),
            rank_seconds=sum(costs) * rate.seconds_per_cost + used * rate.seconds_to_start,
            on_gpu=stage.resource == "gpu" and rate.device not in ("", "cpu"),
            num_bytes=sum(costs) * rate.bytes_per_cost,
            is_planned=stage.key in planned,
            cores_per_gpu=rate.cores_per_gpu,
        ))  # fmt: skip
    return found


def _count_units(config: Config, stage: StageRun, rate: StageRate, num_records: int, cost: float) -> int:
    """Return the expected number of units of a stage with this cost."""
    declaration = stage.declaration
    if isinstance(declaration, EstimatesUnits):
        return declaration.expect_units(stage, num_records, cost)
    # All other stages have one unit per shard.
    records = rate.records_per_record * num_records
    write = config.sections["write"]
    number: int | None = write.num_shards
    return number or max(1, math.ceil(records / (write.shard_size or rate.records_per_unit)))


def expect_seconds(config: Config, stages: Sequence[StageRun]) -> dict[str, float]:
    """Return, by stage name, the expected seconds of the remaining work on this machine, for stages with a known rate.

    The rates come from finished units of the run, or from its pilot.

    Args:
        stages: all stages of the run, in order.
    """
    planned = {}
    for stage in stages:
        if stage.dir.units.exists():
            units = stage.dir.read_units()
            planned[stage.key] = units, read_ledger(stage.dir, units)
    seconds: Counter[str] = Counter()
    for one in predict(config, stages, find_rates(config, None)[0], planned):
        seconds[one.name] += one.wall_seconds  # type: ignore[assignment]
    return dict(seconds)


def ranks_of_use(config: Config, stage: StageRun, units: Sequence[Unit]) -> int:
    """Return the largest number of ranks that each get at least ``executor.least_seconds_per_rank`` of work.

    If no rate is known, this is the number of units.
    """
    rate = find_rates(config, None)[0].get(stage.key)
    if rate is None or not units:
        return len(units)
    least = config.executor.least_seconds_per_rank
    # By default, a rank should work at least four times as long as it takes to start.
    least = 4.0 * rate.seconds_to_start if least is None else least
    seconds = sum(unit.cost for unit in units) * rate.seconds_per_cost
    return max(1, min(len(units), int(seconds / least))) if least else len(units)


def count_ranks(config: Config, stage: StageRun) -> int:
    """Return the number of ranks that the configured executor would use for a stage on this machine."""
    workers = config.executor.workers
    gpus = usable_gpus(config.executor.device) if stage.resource == "gpu" and workers == "auto" else ()
    return len(plan_devices(workers, uses_gpu=stage.resource == "gpu", gpus=gpus, cores=usable_cores()))
