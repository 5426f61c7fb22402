"""``sharmill plan``: units, hours, balance and disk of a run, without running it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from sharmill.cli.arguments import split_arguments
from sharmill.cli.console import describe_cost, json_option, make_console, make_table, plain, print_json
from sharmill.cli.exit_status import OK
from sharmill.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from sharmill.config import Config
    from sharmill.engine.stage import Stage
    from sharmill.models.measure import Measurement
    from sharmill.pilot.predict import StagePrediction

# Speech as FLAC at 16 to 24 kHz takes 15 to 35 kB a second; codes add little. A round figure on the safe side.
_BYTES_PER_SECOND = 40_000
_MEANING_OF_COLUMNS = (
    "units: done and all; to process: all audio that is left, contexts included; largest: the load of the busiest rank"
)


@click.command()
@click.argument("arguments", nargs=-1, required=True, metavar="CONFIG... [KEY=VALUE...]")
@click.option("--rates", "earlier", metavar="RUN_DIR", help="Predict from the rates of this earlier run.")
@click.option("--gpu-hour", type=click.FloatRange(0), metavar="PRICE", help="Price of an hour of a GPU.")
@json_option
@click.option("--measure", is_flag=True, help="Run the models on made-up audio, and print the batch sizes to set.")
def plan(arguments: tuple[str, ...], earlier: str | None, gpu_hour: float | None, measure: bool, as_json: bool) -> int:
    """Show what would run, and what it would cost.

    Nothing of it is run. Units, hours, balance and disk are those of each stage whose input is there already; time, GPU
    hours, core hours and disk those of all stages, once rates are known: from sharmill calibrate, or from an
    earlier run.
    """
    from sharmill.config import load_config

    paths, overrides, names = split_arguments(arguments)
    if names:
        raise ConfigError(f"'plan' takes no stage names: {', '.join(names)}", code="bad_usage")
    console = make_console()
    for path in paths:
        config = load_config(path, overrides)
        found = print_plan(console, config, earlier=earlier, gpu_hour=gpu_hour)
        if as_json:
            print_json(found)
        if measure:
            _print_measurements(console, config)
    return OK


def _print_measurements(console: Console, config: Config) -> None:
    """Print speed and memory of the models on the device of this machine, and the values for the configuration."""
    from sharmill.encode.config import EncodeConfig
    from sharmill.encode.stage import UNIT_SECONDS, EncodeStage
    from sharmill.executors.devices import visible_gpus
    from sharmill.match.config import MatchConfig
    from sharmill.match.stage import MatchStage
    from sharmill.models import load_codec, load_speaker_encoder, make_deterministic
    from sharmill.models.measure import measure_canonical, measure_model
    from sharmill.prepare.config import PrepareConfig
    from sharmill.training.buckets.batch_size import make_budget

    device = "cuda" if visible_gpus() else "cpu"
    make_deterministic(device)
    memory = make_budget("cuda:0" if device == "cuda" else device, 1.0, None).size
    found: dict[str, list[Measurement]] = {}
    columns = ("model", "MiB per second", "fits at once", "seconds of audio per second, by batch")
    table = make_table(f"on one {device} of {memory / 2**30:.1f} GiB", columns, left=("model",))

    def add(key: str, name: str, measured: Measurement) -> None:
        found.setdefault(key, []).append(measured)
        speeds = ", ".join(f"{size:g} s: {speed:.0f}" for size, speed in measured.speeds.items()) or "none fits"
        row = (name, f"{measured.bytes_per_second / 2**20:.1f}", f"{measured.most_seconds:.0f} s", speeds)
        table.add_row(*(plain(cell) for cell in row))

    if (match := config.find(MatchConfig)) is not None:
        encoder = load_speaker_encoder(match.encoder, device, precision=match.precision, **match.options)
        add(MatchStage.kind, match.encoder, measure_model(encoder, device, memory))
    encode = config.section(EncodeConfig)
    unit_seconds = encode.unit_seconds or UNIT_SECONDS[1]
    for codec in encode.codecs:
        model = load_codec(codec.model, device, precision=encode.precision, **codec.options)
        if encode.canonical_shapes:
            add(EncodeStage.kind, codec.name, measure_canonical(model, device, memory, unit_seconds))
        else:
            add(EncodeStage.kind, codec.name, measure_model(model, device, memory))
    console.print(table)
    if encode.canonical_shapes:
        console.print(plain(_describe_canonical(found[EncodeStage.kind], device, unit_seconds), style="dim"))
    for key, measurements in found.items():
        # Of those of one row, any size is as good.
        sizes = [measured.best_size for measured in measurements if not measured.one_row]
        if sizes and None not in sizes:
            console.print(plain(f"{key}.batch_seconds={min(size for size in sizes if size is not None):g}"))
    most = min(measured.most_seconds for measurements in found.values() for measured in measurements)
    longest = config.section(PrepareConfig).max_duration
    if longest is None or longest > most:
        advice = f"prepare.max_duration={most:.0f}: longer segments do not fit on this {device}"
        console.print(plain(advice, style="yellow"))


def _describe_canonical(measurements: list[Measurement], device: str, unit_seconds: float) -> str:
    """Return how codecs were measured where the configuration has canonical shapes."""
    how = "codecs: measured at canonical lengths, in batches of canonical size"
    if not all(measured.one_row for measured in measurements):
        how += f"; silence that fills up the batches of a unit of {unit_seconds:g} s is not counted as audio"
    if any(measured.one_row for measured in measurements):
        which = "codecs take" if device == "cpu" else "codecs whose codes depend on padding take"
        how += f"; on a {device}, {which} segments one by one, whatever encode.batch_seconds is"
    return how


def print_plan(
    console: Console, config: Config, *, earlier: str | None = None, gpu_hour: float | None = None
) -> list[StagePrediction]:
    """Print a row per stage that can be planned now, and a line for each that depends on what comes before it.

    Below it come time and cost, predicted from the rates of the run directory ``earlier`` or of the configuration's
    own; they are returned.
    """
    from sharmill.cli.prediction import print_prediction
    from sharmill.cli.stage_status import read_or_preview_units
    from sharmill.engine.balance import pack
    from sharmill.pilot.known_rates import find_rates
    from sharmill.pilot.predict import compare_audio, count_ranks, predict_stage
    from sharmill.pipeline import check_config, make_stages

    check_config(config, stages=())
    rates, source = find_rates(config, earlier)
    predictions: list[StagePrediction] = []
    num_records, audio_ratio = 0, 1.0
    columns = ("stage", "units", "to process", "ranks", "largest", "balance", "disk")
    table = make_table(config.name, columns, no_wrap=True)
    not_yet = []
    for stage in make_stages(config):
        ranks, left = count_ranks(config, stage), None
        rate = rates.get(stage.name)
        try:
            units, done = read_or_preview_units(stage)
            left = [unit.cost for unit in units if unit.index not in done]
            loads = [sum(left[item] for item in items) for items in pack(left, ranks)]
            table.add_row(*_row(stage, loads, len(units), left))
            num_records = num_records or sum(unit.size for unit in units)
            if rate is not None and stage.cost_unit != "records":
                audio_ratio = compare_audio(rate, [unit.cost for unit in units], num_records)
        except ConfigError as error:
            not_yet.append(plain(f"{stage.name}: not yet: {error}"))
        if rate is not None:
            predictions.append(predict_stage(
                config, stage, rate, ranks=ranks, num_records=num_records, costs=left, audio_ratio=audio_ratio
            ))  # fmt: skip
    console.print(table)
    for line in not_yet:
        console.print(line)
    console.print(plain(_MEANING_OF_COLUMNS, style="dim"))
    if predictions:
        print_prediction(console, predictions, source, gpu_hour)
    else:
        advice = "no rates are known yet: sharmill calibrate measures them, --rates takes those of an earlier run"
        console.print(plain(advice, style="dim"))
    return predictions


def _row(stage: Stage, loads: list[float], num_units: int, left: list[float]) -> list[Text]:
    largest, mean = max(loads), sum(loads) / len(loads)
    records = stage.cost_unit == "records"
    cells = (
        stage.name,
        f"{num_units - len(left)}/{num_units}",
        describe_cost(sum(left), records=records),
        str(len(loads)),
        describe_cost(largest, records=records),
        f"{mean / largest:.0%}" if largest else "",
        f"{sum(left) * _BYTES_PER_SECOND / 1e9:.1f} GB" if left and stage.replaces_root else "",
    )
    return [plain(cell) for cell in cells]
