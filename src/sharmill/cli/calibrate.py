"""``sharmill calibrate``: a pilot over a sample of the input, and its advice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from sharmill.cli.arguments import split_arguments
from sharmill.cli.console import json_option, make_console, make_table, plain, print_json
from sharmill.cli.exit_status import OK
from sharmill.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from sharmill.pilot.advice import Advice, Threshold
    from sharmill.pilot.calibrate import Calibration

# Of the hundred thresholds of a calibration, those that are printed beside the recommended one.
_PRINTED_STEP = 5
_MAX_EXAMPLE = 100
# Each is compared with each, which takes 2 GB.
_MOST_RECORDS = 10_000


@click.command()
@click.argument("arguments", nargs=-1, required=True, metavar="CONFIG [KEY=VALUE...]")
@click.option("--records", "size", type=click.IntRange(2, _MOST_RECORDS), default=1000, show_default=True,
              help="Records to draw, in whole speaker groups.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the draw.")
@click.option("--max-wrong", type=click.FloatRange(0, 1), default=0.01, show_default=True,
              help="Share of contexts that may be another speaker.")  # fmt: skip
@click.option("--rates/--no-rates", default=True, show_default=True,
              help="Measure rates of the stages, for sharmill plan: write and encode the sample too.")  # fmt: skip
@json_option
def calibrate(arguments: tuple[str, ...], size: int, seed: int, max_wrong: float, rates: bool, as_json: bool) -> int:
    """Try a sample, and advise on thresholds.

    Speaker groups are drawn, checked, decoded and embedded. What is printed, and more, is written to calibration.json
    in the run directory: contexts and wrong speakers at each threshold, rejects, formats and durations.
    """
    from sharmill.config import load_config
    from sharmill.executors.devices import usable_gpus
    from sharmill.pilot.calibrate import run_pilot
    from sharmill.pipeline import check_config

    paths, overrides, names = split_arguments(arguments)
    if names or len(paths) > 1:
        raise ConfigError("'calibrate' takes one configuration, and no stage names", code="bad_usage")
    config = load_config(paths[0], overrides)
    check_config(config, stages=())
    console = make_console()
    path, found = run_pilot(
        config, size=size, seed=seed, max_wrong=max_wrong, measure=rates,
        device="cuda" if usable_gpus(config.executor.device) else "cpu",
        tell=lambda line: console.print(plain(line, style="dim")),
    )  # fmt: skip
    if as_json:
        print_json(found)
    print_calibration(console, found)
    console.print(plain(str(path)), soft_wrap=True)
    return OK


def print_calibration(console: Console, found: Calibration) -> None:
    """Print the tables and the advice of a pilot."""
    console.print(plain(
        f"pilot: {found.num_drawn:,} of {found.num_records:,} records, {found.num_groups:,} speaker groups, "
        f"{found.audio_seconds:,.0f} s of audio; seed {found.seed}"
    ), soft_wrap=True)  # fmt: skip
    if found.num_partial_groups:
        console.print(plain(
            f"{found.num_partial_groups} groups are too large to be taken whole: contexts and wrong speakers are lower "
            "bounds, since in the whole group there is more to choose from"
        ), soft_wrap=True)  # fmt: skip
    if found.advice is not None:
        _print_thresholds(console, found.advice)
    if found.rejects:
        table = make_table(
            "records that would be rejected whatever the threshold is",
            ("stage", "reason", "records", "share", "one of them"), left=("stage", "reason", "one of them"),
        )  # fmt: skip
        for reject in found.rejects:
            cells = (reject.stage, reject.reason, str(reject.count), f"{reject.share:.1%}",
                     reject.example[:_MAX_EXAMPLE])  # fmt: skip
            table.add_row(*map(plain, cells))
        console.print(table)
    formats = ", ".join(f"{one.count:,} {one.format} of {one.sampling_rate} Hz and {one.channels} channels"
                        if one.channels > 1 else f"{one.count:,} {one.format} of {one.sampling_rate} Hz"
                        for one in found.formats)  # fmt: skip
    console.print(plain(f"audio: {formats or 'none'}"), soft_wrap=True)
    if found.durations:
        listed = ", ".join(f"{float(share):.0%} {value:g}" for share, value in found.durations.items())
        console.print(plain(f"seconds, by share of utterances that are shorter: {listed}"), soft_wrap=True)
    if found.too_short_for_context:
        share = f"{found.too_short_for_context:.1%} of the utterances cannot be contexts, by their duration"
        console.print(plain(share), soft_wrap=True)


def _print_thresholds(console: Console, advice: Advice) -> None:
    columns = ("min_similarity", "records with a context", "of these another speaker", "at most, 95 % sure", "")
    table = make_table("contexts by match.min_similarity", columns, left=("",), no_wrap=True)
    recommended = advice.recommended
    for place, one in enumerate(advice.thresholds):
        chosen = one == recommended
        if chosen or (place % _PRINTED_STEP == 0 and _is_telling(advice, place)):
            wrong, most = ("" if share is None else f"{share:.1%}" for share in (one.wrong_share, one.wrong_bound))
            cells = (f"{one.min_similarity:.2f}", f"{one.context_share:.1%}", wrong, most,
                     "recommended" if chosen else "")  # fmt: skip
            table.add_row(*(plain(cell, style="bold" if chosen else "") for cell in cells))
    console.print(table)
    if advice.misplaced is not None and advice.foreign is not None:
        console.print(plain(
            f"labels: about {advice.misplaced:.1%} of the utterances stand in a group of another speaker, and "
            f"{advice.foreign:.1%} of the others' candidates are of another"
        ), soft_wrap=True)  # fmt: skip
    if recommended is not None:
        console.print(
            plain(f"set match.min_similarity={recommended.min_similarity:g}: {advice.reason}"), soft_wrap=True
        )
    else:
        console.print(plain(advice.reason), soft_wrap=True)


def _is_telling(advice: Advice, place: int) -> bool:
    """Return True unless the next printed threshold does the same as this one."""
    following: list[Threshold] = advice.thresholds[place + _PRINTED_STEP :: _PRINTED_STEP][:1]
    one = advice.thresholds[place]
    return not following or (one.context_share, one.wrong_share) != (
        following[0].context_share,
        following[0].wrong_share,
    )
