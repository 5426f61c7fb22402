"""Commands to use before a run: ``plan`` shows its work and cost, ``calibrate`` runs a pilot on a sample."""

from collections.abc import Collection, Mapping, Sequence

import click
from rich.filesize import decimal

from sharmill.cli.command import (
    describe_cost,
    describe_time,
    echo,
    echo_all,
    json_option,
    load_configs,
    plain,
    print_json,
    print_table,
    verbose_option,
)
from sharmill.config import Config
from sharmill.encode.config import EncodeConfig
from sharmill.encode.stage import EncodeStage
from sharmill.engine.balance import pack
from sharmill.engine.order import make_stages
from sharmill.engine.stage import is_main
from sharmill.engine.unit import Unit
from sharmill.engine.view import read_or_preview_units
from sharmill.errors import ConfigError
from sharmill.executors.supervisor import usable_gpus, visible_gpus
from sharmill.match.config import MatchConfig
from sharmill.match.stage import MatchStage
from sharmill.models import load_codec, load_speaker_encoder, make_deterministic
from sharmill.models.memory import Measurement, measure_canonical, measure_model
from sharmill.pilot.advice import Advice
from sharmill.pilot.calibration import Calibration
from sharmill.pilot.sample import run_pilot
from sharmill.pipeline import check_config
from sharmill.prepare.check import PrepareConfig
from sharmill.rates import StagePrediction, count_ranks, find_rates, predict
from sharmill.training.buckets.batch_size import make_budget

# Error codes of stages whose input has not yet been written by an earlier stage.
_EARLIER_OUTPUT_MISSING = ("stage_not_run", "no_dataset")
# FLAC speech at 16 to 24 kHz takes 15 to 35 kB per second, and codes add little, so this estimate is on the safe side.
_BYTES_PER_SECOND = 40_000
# A calibration tries a hundred thresholds; only the recommended one and every fifth one are printed.
_PRINTED_STEP = 5


@click.command()
@click.argument("arguments", nargs=-1, required=True, metavar="CONFIG... [KEY=VALUE...]")
@click.option("--rates", "earlier", metavar="RUN_DIR", help="Use the processing rates of this earlier run.")
@click.option("--gpu-hour", type=click.FloatRange(0), metavar="PRICE", help="Price of one GPU hour.")
@json_option
@click.option("--measure", is_flag=True, help="Run the models on synthetic audio and recommend batch sizes.")
@verbose_option
def plan(arguments: tuple[str, ...], earlier: str | None, gpu_hour: float | None, measure: bool, verbose: bool) -> None:
    """Show the work that is left and its cost.

    No stage is run. Units, hours of audio, balance and disk space are shown for each stage whose input exists. Time,
    GPU hours, core hours and disk space of all stages are predicted if processing rates are known, from sharmill
    calibrate or from an earlier run.
    """
    for config in load_configs("plan", arguments):
        print_json(print_plan(config, earlier=earlier, gpu_hour=gpu_hour, verbose=verbose))
        if measure:
            _print_measurements(config)


def _print_measurements(config: Config) -> None:
    """Print the speed and memory of the models on this machine's device, and recommended configuration values."""
    device = "cuda" if visible_gpus() else "cpu"
    make_deterministic()
    memory = make_budget("cuda:0" if device == "cuda" else device, 1.0, None).size
    # For each model: the key of its section, its name, and its measurement.
    found: list[tuple[str, str, Measurement]] = []
    if (match := config.find(MatchConfig)) is not None:
        encoder = load_speaker_encoder(match.encoder, device, precision=match.precision, **match.options)
        found.append((MatchStage.kind, match.encoder, measure_model(encoder, device, memory)))
    encode = config.section(EncodeConfig)
    unit_seconds = encode.unit_seconds or EncodeStage.unit_limits[1]
    for codec in encode.codecs:
        model = load_codec(codec.model, device, precision=encode.precision, **codec.options)
        measured = (
            measure_canonical(model, device, memory, unit_seconds)
            if encode.canonical_shapes
            else measure_model(model, device, memory)
        )
        found.append((EncodeStage.kind, codec.name, measured))
    columns = ("model", "MiB per second", "largest batch", "speed (x real time) by batch size")
    rows = []
    for _, name, measured in found:
        speeds = ", ".join(f"{size:g} s: {speed:.0f}" for size, speed in measured.speeds.items()) or "none fits"
        rows.append((name, f"{measured.bytes_per_second / 2**20:.1f}", f"{measured.most_seconds:.0f} s", speeds))
    print_table(f"one {device} device with {memory / 2**30:.1f} GiB", columns, rows, left=("model",))
    of_codecs = [measured for kind, _, measured in found if kind == EncodeStage.kind]
    if encode.canonical_shapes:
        echo(_describe_canonical(of_codecs, device, unit_seconds), style="dim")
    for key in dict.fromkeys(kind for kind, *_ in found):
        # The batch size makes no difference to models that process one segment at a time.
        sizes = [measured.best_size for kind, _, measured in found if kind == key and not measured.one_row]
        if sizes and None not in sizes:
            echo(f"{key}.batch_seconds={min(size for size in sizes if size is not None):g}")
    most = min(measured.most_seconds for *_, measured in found)
    longest = config.section(PrepareConfig).max_duration
    if longest is None or longest > most:
        echo(f"prepare.max_duration={most:.0f}: longer segments do not fit into the {device} memory", style="yellow")


def _describe_canonical(measurements: list[Measurement], device: str, unit_seconds: float) -> str:
    """Return a description of how codecs were measured with canonical shapes."""
    how = "codecs: measured at canonical lengths, in batches of canonical size"
    if not all(measured.one_row for measured in measurements):
        how += f"; silence that fills the batches of a unit of {unit_seconds:g} s is not counted as audio"
    if any(measured.one_row for measured in measurements):
        which = "codecs process" if device == "cpu" else "codecs whose codes depend on padding process"
        how += f"; on {device}, {which} one segment at a time, regardless of encode.batch_seconds"
    return how


def print_plan(
    config: Config, *, earlier: str | None = None, gpu_hour: float | None = None, verbose: bool = False
) -> list[StagePrediction]:
    """Print a row for each stage that can be planned now, and a line for each stage whose input is missing.

    Then print the time and cost, predicted from the rates in the run directory ``earlier``, or in the configuration's
    own run directory by default. With ``verbose``, print a row for each round of a stage.

    Returns:
        the predictions.
    """
    check_config(config, stages=())
    rates, source = find_rates(config, earlier)
    stages = make_stages(config)
    planned: dict[str, tuple[Sequence[Unit], Collection[int]]] = {}
    rows, done_stages, waiting, not_yet = [], [], [], []
    for stage in stages:
        name, is_shown = stage.key if verbose else stage.name, verbose or is_main(stage.kind)
        try:
            units, done = read_or_preview_units(stage)
        except ConfigError as error:
            if error.code == "changed_plan":
                raise
            if is_shown and error.code in _EARLIER_OUTPUT_MISSING and not verbose:
                waiting.append(name)
            elif is_shown:
                not_yet.append(f"{name}: not yet: {error}")
            continue
        planned[stage.key] = units, done
        if not is_shown:
            continue
        left = [unit.cost for unit in units if unit.index not in done]
        if units and not left:
            done_stages.append(name)
            continue
        loads = [sum(left[item] for item in items) for items in pack(left, count_ranks(config, stage))]
        mean, largest, records = sum(loads) / len(loads), max(loads), stage.cost_unit == "records"
        rows.append([
            name, f"{len(units) - len(left)}/{len(units)}", describe_cost(sum(left), records=records),
            str(len(loads)), describe_cost(largest, records=records), f"{mean / largest:.0%}" if largest else "",
            f"{sum(left) * _BYTES_PER_SECOND / 1e9:.1f} GB" if left and stage.kind == "write" else "",
        ])  # fmt: skip
    predictions = predict(config, stages, rates, planned)
    columns = ("stage", "units", "to process", "workers", "largest", "balance", "disk")
    if done_stages:
        echo(f"{config.name}: nothing left to do for {', '.join(done_stages)}")
    if rows:
        print_table(config.name, columns, rows, no_wrap=columns)
    if waiting:
        echo(f"not yet planned, since they read the output of earlier stages: {', '.join(waiting)}")
    echo_all(not_yet)
    if rows:
        echo(
            "units: finished/total; to process: remaining audio with contexts; largest: load of the busiest worker",
            style="dim",
        )
    if expected := [one for one in predictions if one.wall_seconds]:
        _print_prediction(expected, source, gpu_hour)
    if line := describe_cores({one.name: one.cores_per_gpu for one in predictions}):
        echo(line)
    if not predictions:
        echo("no rates known yet: run sharmill calibrate, or name an earlier run with --rates", "dim")
    return predictions


def _print_prediction(predictions: Sequence[StagePrediction], source: str, gpu_hour: float | None) -> None:
    """Print the predictions: a row for each stage, and a row for the total.

    Args:
        source: the origin of the rates, as text.
        gpu_hour: the price of one GPU hour, or None.
    """
    columns = ["stage", "workers", "time", "GPU h", "core h", "disk", *(["price"] if gpu_hour is not None else [])]
    by_row = []
    for step in dict.fromkeys(one.name for one in predictions):
        rounds = [one for one in predictions if one.name == step]
        star = "" if all(one.is_planned for one in rounds) else " *"
        by_row.append((f"{step}{star}", str(max(one.ranks for one in rounds)), rounds))
    rows = []
    for name, ranks, of_row in [*by_row, ("all", "", list(predictions))]:
        gpu = sum(one.rank_seconds for one in of_row if one.on_gpu) / 3600
        core = sum(one.rank_seconds for one in of_row if not one.on_gpu) / 3600
        num_bytes = sum(one.num_bytes for one in of_row)
        cells = [
            name, ranks, describe_time(sum(one.wall_seconds for one in of_row)), describe_hours(gpu),
            describe_hours(core), decimal(round(num_bytes)) if num_bytes else "",
        ]  # fmt: skip
        cells += [f"{gpu * gpu_hour:,.2f}"] if gpu_hour is not None else []
        rows.append([plain(cell, style="bold" if name == "all" else "") for cell in cells])
    print_table("predicted for the remaining work", columns, rows, no_wrap=columns)
    echo(f"rates: {source}", style="dim")
    if any(one.on_gpu for one in predictions):
        echo("GPU h: worker hours; workers that share a GPU are counted separately", style="dim")
    echo("not included: startup time and the report page", style="dim")
    if any(not one.is_planned for one in predictions):
        echo("*: cannot be planned yet; estimated from the number of input records", style="dim")


def describe_cores(wanted: Mapping[str, int | None]) -> str:
    """Return, as text, how many cores per GPU each stage needs for decoding to keep up with the model.

    >>> describe_cores({"match": 6, "write": None, "encode": 2})
    'cores needed to keep one GPU busy: match 6, encode 2'
    """
    listed = ", ".join(f"{name} {cores}" for name, cores in wanted.items() if cores is not None)
    return f"cores needed to keep one GPU busy: {listed}" if listed else ""


def describe_hours(hours: float) -> str:
    """Return worker hours as text; an empty string for zero.

    >>> describe_hours(1234.5), describe_hours(0.25), describe_hours(0)
    ('1,234', '0.250', '')
    """
    return f"{hours:,.{0 if hours >= 1000 else 1 if hours >= 10 else 3}f}" if hours else ""


@click.command()
@click.argument("arguments", nargs=-1, required=True, metavar="CONFIG [KEY=VALUE...]")
# The limit on --records keeps the matrix of all pairwise similarities below 2 GB.
@click.option("--records", "size", type=click.IntRange(2, 10_000), default=1000, show_default=True,
              help="Number of records in the sample, which consists of whole speaker groups.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Random seed of the sample.")
@click.option("--max-wrong", type=click.FloatRange(0, 1), default=0.01, show_default=True,
              help="Acceptable share of contexts from the wrong speaker.")  # fmt: skip
@click.option("--rates/--no-rates", default=True, show_default=True,
              help="Also write and encode the sample, to measure rates for sharmill plan.")  # fmt: skip
@json_option
def calibrate(arguments: tuple[str, ...], size: int, seed: int, max_wrong: float, rates: bool) -> None:
    """Process a sample and recommend thresholds.

    A random sample of speaker groups is checked, decoded and embedded. The results are printed, and written in full to
    calibration.json in the run directory: contexts and wrong speakers at each threshold, rejects, formats, durations.
    """
    [config] = load_configs("calibrate", arguments, single=True)
    check_config(config, stages=())
    path, found = run_pilot(
        config, size=size, seed=seed, max_wrong=max_wrong, measure=rates,
        device="cuda" if usable_gpus(config.executor.device) else "cpu", tell=lambda line: echo(line, style="dim"),
    )  # fmt: skip
    print_json(found)
    _print_calibration(found)
    echo(str(path))


def _print_calibration(found: Calibration) -> None:
    """Print the tables and recommendations of a pilot."""
    echo(
        f"pilot: {found.num_drawn:,} of {found.num_records:,} records, {found.num_groups:,} speaker groups, "
        f"{found.audio_seconds:,.0f} s of audio; seed {found.seed}"
    )
    if found.num_partial_groups:
        echo(
            f"{found.num_partial_groups} groups are too large for the sample and were truncated: the shares of "
            "contexts and of wrong speakers are lower bounds, since a whole group has more candidates"
        )
    if found.advice is not None:
        _print_thresholds(found.advice, are_copies=found.max_similarity is not None)
    if found.max_similarity is not None:
        echo(
            f"{found.near_copies} utterances would get a copy of themselves as context, differing only in compression "
            f"or level: set match.max_similarity={found.max_similarity:g} and calibrate again",
            style="yellow",
        )
    if found.rejects:
        columns = ("stage", "reason", "records", "share", "example")
        rows = [(one.stage, one.reason, str(one.count), f"{one.share:.1%}", one.example[:100]) for one in found.rejects]
        print_table(
            "records rejected regardless of the threshold", columns, rows, left=("stage", "reason", "example")
        )  # fmt: skip
    formats = ", ".join(
        f"{one.count:,} {one.format} at {one.sampling_rate} Hz{f' with {one.channels} channels' * (one.channels > 1)}"
        for one in found.formats
    )
    echo(f"audio: {formats or 'none'}")
    if line := describe_cores({rate.name: rate.cores_per_gpu for rate in found.rates}):
        echo(line)
    if found.durations:
        listed = ", ".join(f"{float(share):.0%} {value:g}" for share, value in found.durations.items())
        echo(f"duration percentiles in seconds: {listed}")
    if found.too_short_for_context:
        echo(f"{found.too_short_for_context:.1%} of the utterances are too short to be contexts")


def _print_thresholds(advice: Advice, *, are_copies: bool) -> None:
    # Copies are similar at any threshold, so no threshold is recommended before they are excluded.
    recommended = None if are_copies else advice.recommended
    rows = []
    for place, one in enumerate(advice.thresholds):
        chosen = one == recommended
        # Leave out a threshold with the same result as the next threshold to be printed.
        following = advice.thresholds[place + _PRINTED_STEP :][:1]
        is_repeated = any((one.context_share, one.wrong_share) == (n.context_share, n.wrong_share) for n in following)
        if chosen or (place % _PRINTED_STEP == 0 and not is_repeated):
            wrong, most = ("" if share is None else f"{share:.1%}" for share in (one.wrong_share, one.wrong_bound))
            note, style = ("recommended", "bold") if chosen else ("", "")
            cells = (f"{one.min_similarity:.2f}", f"{one.context_share:.1%}", wrong, most, note)
            rows.append([plain(cell, style=style) for cell in cells])
    columns = ("min_similarity", "with context", "wrong speaker", "upper bound (95%)", "")
    print_table("contexts by match.min_similarity", columns, rows, left=("",), no_wrap=columns)
    if advice.misplaced is not None and advice.foreign is not None:
        echo(
            f"labels: about {advice.misplaced:.1%} of the utterances are in the group of another speaker; for the "
            f"remaining utterances, {advice.foreign:.1%} of the candidates are from another speaker"
        )
    if are_copies:
        return
    setting = "" if recommended is None else f"set match.min_similarity={recommended.min_similarity:g}: "
    echo(f"{setting}{advice.reason}")
