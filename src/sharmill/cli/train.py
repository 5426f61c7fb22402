"""Commands for a training: buckets, batch sizes, resuming, and the state of its settings or of this machine."""

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
import yaml

from sharmill.cli.command import (
    FINDINGS,
    OK,
    has_option,
    json_option,
    plain,
    print_json,
    print_pairs,
    say,
    say_all,
    workers_option,
)
from sharmill.errors import ConfigError, SharmillError
from sharmill.executors.machine import examine_machine
from sharmill.training.buckets.batch_size import tune_to_yaml
from sharmill.training.buckets.bins import estimate_report
from sharmill.training.buckets.lengths import BinsOptions
from sharmill.training.nemo.settings import read_train_settings


class _AsNemo(click.Command):
    """A command whose ``--langs`` and ``--tokenizer`` may have several values each, as those of NeMo's script have."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--langs" in args:
            several = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
            for option in ("--langs", "--tokenizer"):
                several.add_argument(option, nargs="*", default=[])
            found, args = several.parse_known_args(args)
            if len(found.langs) != len(found.tokenizer):
                raise click.UsageError(
                    f"--langs has {len(found.langs)} values and --tokenizer {len(found.tokenizer)}: give as many, and "
                    "put SOURCE before them or behind another option",
                    ctx,
                )
            args += [f"--tokenizer={'='.join(pair)}" for pair in zip(found.langs, found.tokenizer, strict=True)]
        return super().parse_args(ctx, args)


@click.command(cls=_AsNemo)
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...", type=click.Path(path_type=str))
@click.option("-b", "--buckets", "num_buckets", default=30, show_default=True, help="How many buckets by length.")
@click.option("-s", "--sub-buckets", type=int, help="Divide each into this many by number of text tokens.")
@click.option("-t", "--tokenizer", multiple=True, metavar="[LANGUAGE=]NAME",
              help="bytes, chars, a tokenizer.json, a SentencePiece .model, or module:callable.")  # fmt: skip
@click.option("--langs", metavar="LANGUAGE...", expose_value=False,
              help="The languages of so many names that follow --tokenizer.")  # fmt: skip
@click.option("--tokens", "token_bins", is_flag=True, help="Count audio in frames, for token-based sampling.")
@click.option("--token-equivalent-duration", "seconds_per_frame", type=click.FloatRange(0, min_open=True),
              help="Seconds of a frame (default: the codec's).")  # fmt: skip
@click.option("--closed", is_flag=True, help="End with the longest cut, as bucket_batch_size and tune-batch need it.")
@click.option("--min-duration", default=0.0, help="Leave out shorter cuts (seconds).")
@click.option("--max-duration", default=float("inf"), help="Leave out longer cuts (seconds; default: no limit).")
@click.option("--token-outlier-threshold", "--token_outlier_threshold", "outlier_threshold", default=4.0,
              show_default=True,
              help="Texts are too long this many standard deviations of tokens per second above the mean.")  # fmt: skip
@click.option("--prompt-format", help="Count the tokens of texts in this prompt format of NeMo's, such as canary.")
@click.option("--prompt", metavar="TURNS",
              help="One prompt for all speech: [{'role': 'user', 'slots': {...}}] (default: of each cut).")  # fmt: skip
@click.option("--section", metavar="NAME", help="The sampler of a multi_config to make bins for.")
@click.option("--samples", type=click.IntRange(1), default=100_000, show_default=True,
              help="Examples to look at, of data that are no folders of datasets.")  # fmt: skip
@workers_option
@json_option
def bins(sources: tuple[str, ...], **options: Any) -> None:
    """Estimate buckets for batches from lengths alone.

    SOURCE is a folder of a dataset or another Shar, a NeMo manifest (also as a range of shards), a text, the YAML of a
    training or of an input_cfg, or a list with weights: [[a.json,0.7],[b.json,0.3]].

    Prints YAML for NeMo's loader, with a histogram as comments: sharmill bins DATASET --closed > bins.yaml
    """
    say("reading lengths", err=True)
    _print_yaml(estimate_report(sources, BinsOptions(**options)))


def _print_yaml(text: str) -> None:
    """Print YAML with its comments, or its keys alone as JSON."""
    if has_option("json"):
        print_json(yaml.safe_load(text))
    else:
        click.echo(text, nl=False)


@click.command("tune-batch")
@click.option("--step", metavar="MODULE:CALLABLE",
              help="Runs one step: step(batch_size, length, num_tokens, device), or a class of such.")  # fmt: skip
@click.option("--module-name", metavar="MODULE.CLASS",
              help="A class of NeMo's, as nemo.collections.asr.models.EncDecCTCModel; with --config-path.")  # fmt: skip
@click.option("--config-path", metavar="FILE", help="The YAML of its training, with the section model.")
@click.option("--pretrained-name", metavar="NAME", help="A .nemo file, or the name of a model of NeMo's, instead.")
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), default="bf16", show_default=True,
              help="Of NeMo's models.")  # fmt: skip
@click.option("--tokens-per-second", type=click.FloatRange(0, min_open=True),
              help="Of text, in batches for bins of one dimension (default: max_tps of the bins, or 12).")  # fmt: skip
@click.option("--bins", "--buckets", "bins_text", required=True, metavar="FILE|LIST",
              help="What sharmill bins --closed printed, or [1.5, 3.0].")  # fmt: skip
@click.option("--memory-share", "--memory-fraction", default=0.9, show_default=True,
              type=click.FloatRange(0, 1, min_open=True, max_open=True),
              help="Share of the memory to use; the rest is for what batches of mixed lengths fragment.")  # fmt: skip
@click.option("--memory", help="Of how much, as in 8GiB (default: all of the GPU, or what is available to the CPU).")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, or cuda:0.")
@click.option("--max-batch-size", type=click.IntRange(1), default=4096, show_default=True, help="Ask for no more.")
@click.option("--tolerance", type=click.FloatRange(0, 1, max_open=True), default=0.0, show_default=True,
              help="Stop when the gap between fitting and not is at most this share.")  # fmt: skip
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=1800.0, show_default=True,
              help="Seconds that the steps of one size may take.")  # fmt: skip
@json_option
def tune_batch(bins_text: str, **options: Any) -> None:
    """Find the largest batch of each bucket that fits.

    Runs a training step with larger and larger made-up batches, until it has not enough memory, and prints YAML for
    NeMo's loader. The step is your own, or that of a model of NeMo's.
    """
    say("loading the training step", err=True)
    _print_yaml(tune_to_yaml(bins_text, **options, tell=partial(click.echo, err=True)))


@contextmanager
def _errors_of_data() -> Iterator[None]:
    """Raise an error of the data, or of a worker process of the loader, as one line.

    That of a worker has its traceback as the message, with the error itself at the end.
    """
    from lhotse.audio.utils import AudioLoadingError

    try:
        yield
    except (SharmillError, OSError, AudioLoadingError) as error:
        first, *rest = str(error).splitlines()
        in_worker = re.findall(r"^[\w.]+: (.+)", "\n".join(rest), re.MULTILINE) if "DataLoader worker" in first else []
        if isinstance(error, SharmillError):
            if not in_worker:
                raise
            raise type(error)(in_worker[-1], code=error.code) from error
        said = [first, *in_worker][-1].removesuffix(". Details:")
        raise ConfigError(
            f"the data cannot be read: {said}; correct the path (a relative one in a manifest starts at its folder)",
            code="missing_input",
        ) from error


@click.command("verify-resume")
@click.argument("settings", metavar="TRAIN.yaml", type=click.Path(path_type=str))
@click.option(
    "--ranks", type=click.IntRange(1), default=2, show_default=True, help="Data-parallel ranks before a stop."
)
@click.option("--then", type=click.IntRange(1), default=3, show_default=True, help="Ranks after it.")
@click.option("--batches", "num_batches", type=click.IntRange(1), default=10, show_default=True,
              help="Batches of each rank between two stops.")  # fmt: skip
@click.option("--stops", "num_stops", type=click.IntRange(1), default=3, show_default=True, help="How often to stop.")
@click.option("--tokenizer", help="As for sharmill bins; where the settings need one.")
@json_option
def verify_resume(
    settings: str, ranks: int, then: int, num_batches: int, num_stops: int, tokenizer: str | None
) -> None:
    """Stop and resume a training's data.

    Takes batches, saves, restores in fresh processes and compares. Nothing is trained, and no audio is loaded.
    """
    say("loading NeMo", style="dim")
    from sharmill.training.nemo.trial import stop_and_resume

    lines = stop_and_resume(
        read_train_settings(Path(settings)), ranks=ranks, then=then, num_batches=num_batches, num_stops=num_stops,
        tokenizer=tokenizer,
    )  # fmt: skip
    with _errors_of_data():
        print_json(say_all(lines))


@click.command()
@click.argument("settings", metavar="[TRAIN.yaml]", required=False, type=click.Path(path_type=str))
@click.option("--folder", default=".", show_default=True, type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="Where datasets are to be made: its file system is tried.")  # fmt: skip
@click.option("--ranks", type=click.IntRange(1), default=1, show_default=True, help="Data-parallel ranks.")
@click.option("--batches", "num_batches", type=click.IntRange(1), default=100, show_default=True,
              help="Batches of the first rank to look at.")  # fmt: skip
@click.option("--tokenizer", help="As for sharmill bins; where the settings need one.")
@json_option
def doctor(settings: str | None, folder: Path, ranks: int, num_batches: int, tokenizer: str | None) -> int:
    """Examine this machine, or a training's settings.

    Without settings: versions, shared memory, GPUs, the file system (locks, rename, free space and inodes), SLURM and
    Ray as found, and what to do about each thing that is off; exit status 3 if there is one. With the settings of a
    training: who reads what, whether it can be resumed, epochs, padding, and lines that begin with "advice:" or
    "error:"; exit status 2 if there is an error. Nothing is trained.
    """
    if settings is None:
        checks = list(examine_machine(folder))
        rows = []
        for check in checks:
            rows.append((plain(check.name, style="bold"), plain(check.found, style="yellow" if check.to_do else "")))
            if check.to_do:
                rows.append((plain(""), plain(f"what to do: {check.to_do}", style="yellow")))
        print_pairs(rows)
        print_json(checks)
        return FINDINGS if any(check.to_do for check in checks) else OK
    say("loading NeMo", style="dim")
    from sharmill.models.nemo_models import quiet_nemo
    from sharmill.training.nemo.trial import examine

    found = read_train_settings(Path(settings))
    with quiet_nemo(), _errors_of_data():
        lines = say_all(examine(found, ranks=ranks, num_batches=num_batches, tokenizer=tokenizer))
    print_json(lines)
    return ConfigError.exit_status if any(line.startswith("error: ") for line in lines) else OK
