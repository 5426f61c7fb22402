"""The rates that a prediction is made of: those of a finished run, of the run itself, or of its pilot."""

from __future__ import annotations

from pathlib import Path

from sharmill.config import Config
from sharmill.engine.plan import load_plan
from sharmill.engine.rundir import RunDir
from sharmill.errors import ConfigError
from sharmill.files.stored import decode_stored, read_stored
from sharmill.pilot.calibrate import Calibration
from sharmill.pilot.rates import StageRate, measure_rates
from sharmill.pipeline import config_of_run, make_stages


def find_rates(config: Config, earlier: str | None) -> tuple[dict[str, StageRate], str]:
    """Return rates by the names of stages, and where they are from.

    Args:
        earlier: the run directory of another run, whose rates are taken alone; by default those of stages that the run
            of the configuration itself has done, and of its pilot for the others.

    Raises:
        ConfigError: there is no run in ``earlier``, or nothing of it is done.
    """
    if earlier is not None:
        rates = _rates_of_run(config_of_run(earlier))
        if not rates:
            raise ConfigError(f"{earlier} has no finished units: there are no rates in it", code="no_run_dir")
        return rates, earlier
    path = RunDir(Path(config.run_dir)).calibration
    piloted: dict[str, StageRate] = {}
    if path.exists():
        piloted = {rate.name: rate for rate in decode_stored(path, read_stored(path), Calibration).rates}
    own = _rates_of_run(config)
    sources = [str(path)] if piloted.keys() - own.keys() else []
    return piloted | own, " and ".join(sources + [f"what is done in {config.run_dir}"] * bool(own))


def _rates_of_run(config: Config) -> dict[str, StageRate]:
    stages = make_stages(config)
    if not stages[0].dir.units.exists():
        return {}
    num_records = sum(unit.size for unit in load_plan(stages[0]))
    return {rate.name: rate for rate in measure_rates(stages, num_records)} if num_records else {}
