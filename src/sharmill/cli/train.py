"""Commands for training: ``bins``, ``tune-batch``, ``verify-resume`` and ``doctor``."""

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
    echo,
    echo_all,
    has_option,
    json_option,
    plain,
    print_json,
    print_pairs,
    workers_option,
)
from sharmill.errors import ConfigError, SharmillError
from sharmill.executors.machine import examine_machine
from sharmill.training.buckets.batch_size import tune_to_yaml
from sharmill.training.buckets.bins import estimate_report
from sharmill.training.buckets.lengths import BinsOptions
from sharmill.training.nemo.settings import read_train_settings


class _NemoStyleCommand(click.Command):
    """A command whose ``--langs`` and ``--tokenizer`` accept several values each, as in NeMo's script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--langs" in args:
            several = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
            for option in ("--langs", "--tokenizer"):
                several.add_argument(option, nargs="*", default=[])
            found, args = several.parse_known_args(args)
            if len(found.langs) != len(found.tokenizer):
                raise click.UsageError(
                    f"--langs has {len(found.langs)} values, but --tokenizer has {len(found.tokenizer)}: use the same "
                    "number of values for both. Put SOURCE first, since words after these options are read as values",
                    ctx,
                )
            args += [f"--tokenizer={'='.join(pair)}" for pair in zip(found.langs, found.tokenizer, strict=True)]
        return super().parse_args(ctx, args)


@click.command(cls=_NemoStyleCommand)
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...", type=click.Path(path_type=str))
@click.option("-b", "--buckets", "num_buckets", default=30, show_default=True, help="Number of buckets by length.")
@click.option("-s", "--sub-buckets", type=int, help="Number of sub-buckets by text tokens in each bucket.")
@click.option("-t", "--tokenizer", multiple=True, metavar="[LANGUAGE=]NAME",
              help="bytes, chars, a tokenizer.json, a SentencePiece .model, or module:callable.")  # fmt: skip
@click.option("--langs", metavar="LANGUAGE...", expose_value=False,
              help="Languages of the tokenizers, in the order of --tokenizer.")  # fmt: skip
@click.option("--tokens", "token_bins", is_flag=True, help="Measure audio in frames, for token-based sampling.")
@click.option("--token-equivalent-duration", "seconds_per_frame", type=click.FloatRange(0, min_open=True),
              help="Seconds per frame (default: of the codec).")  # fmt: skip
@click.option("--closed", is_flag=True, help="Close the last bucket, as bucket_batch_size and tune-batch require.")
@click.option("--min-duration", default=0.0, help="Leave out shorter cuts (seconds).")
@click.option("--max-duration", default=float("inf"), help="Leave out longer cuts (seconds; default: no limit).")
@click.option("--token-outlier-threshold", "--token_outlier_threshold", "outlier_threshold", default=4.0,
              show_default=True,
              help="Leave out cuts this many standard deviations above the mean tokens per second.")  # fmt: skip
@click.option("--prompt-format", help="Count tokens with this NeMo prompt format, such as canary.")
@click.option("--prompt", metavar="TURNS",
              help="Prompt for all speech: [{'role': 'user', 'slots': {...}}] (default: each cut's own).")  # fmt: skip
@click.option("--section", metavar="NAME", help="Sampler of a multi_config.")
@click.option("--samples", type=click.IntRange(1), default=100_000, show_default=True,
              help="Number of examples to read from sources that are not dataset folders.")  # fmt: skip
@workers_option
@json_option
def bins(sources: tuple[str, ...], **options: Any) -> None:
    """Estimate length buckets for batches.

    SOURCE is a dataset folder or any other Shar folder, a NeMo manifest or a range of its shards, a text file, the YAML
    of a training or an input_cfg, or a weighted list: [[a.json,0.7],[b.json,0.3]].

    The output is YAML for NeMo's loader, with a histogram in comments: sharmill bins DATASET --closed > bins.yaml
    """
    echo("reading lengths", err=True)
    _print_yaml(estimate_report(sources, BinsOptions(**options)))


def _print_yaml(text: str) -> None:
    """Print YAML with its comments; with ``--json``, print its keys as JSON."""
    if has_option("json"):
        print_json(yaml.safe_load(text))
    else:
        click.echo(text, nl=False)


@click.command("tune-batch")
@click.option("--step", metavar="MODULE:CALLABLE",
              help="Function step(batch_size, length, num_tokens, device), or a class of such objects.")  # fmt: skip
@click.option("--module-name", metavar="MODULE.CLASS",
              help="NeMo class, such as nemo.collections.asr.models.EncDecCTCModel; with --config-path.")  # fmt: skip
@click.option("--config-path", metavar="FILE", help="Training YAML with a model section, for --module-name.")
@click.option("--pretrained-name", metavar="NAME", help="A .nemo file or the name of a pretrained NeMo model.")
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), default="bf16", show_default=True,
              help="Precision of NeMo models.")  # fmt: skip
@click.option("--tokens-per-second", type=click.FloatRange(0, min_open=True),
              help="Text tokens per second for one-dimensional bins (default: max_tps, or 12).")  # fmt: skip
@click.option("--bins", "--buckets", "bins_text", required=True, metavar="FILE|LIST",
              help="Output of sharmill bins --closed, or a list such as [1.5, 3.0].")  # fmt: skip
@click.option("--memory-share", "--memory-fraction", default=0.9, show_default=True,
              type=click.FloatRange(0, 1, min_open=True, max_open=True),
              help="Share of the memory to use; the rest is a reserve for fragmentation.")  # fmt: skip
@click.option("--memory", help="Total memory, as in 8GiB (default: all GPU memory, or the available CPU memory).")
@click.option("--device", default="auto", show_default=True, help="Device: auto, cpu or cuda:0.")
@click.option("--max-batch-size", type=click.IntRange(1), default=4096, show_default=True,
              help="Largest batch size to try.")  # fmt: skip
@click.option("--tolerance", type=click.FloatRange(0, 1, max_open=True), default=0.0, show_default=True,
              help="Stop searching when the remaining interval is at most this share.")  # fmt: skip
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=1800.0, show_default=True,
              help="Time limit for the steps of one batch size, in seconds.")  # fmt: skip
@json_option
def tune_batch(bins_text: str, **options: Any) -> None:
    """Find the largest batch size that fits for each bucket.

    Run a training step with synthetic batches of increasing size until memory runs out, and print YAML for NeMo's
    loader. The step is your own function (--step) or the training step of a NeMo model.
    """
    echo("loading the training step", err=True)
    _print_yaml(tune_to_yaml(bins_text, **options, tell=partial(click.echo, err=True)))


@contextmanager
def _errors_of_data() -> Iterator[None]:
    """Convert errors in the data, including those from the loader's worker processes, to one-line errors.

    The message of an error from a worker process is a traceback that ends with the original error.
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
            f"the data cannot be read: {said}; correct the path (relative paths start at the manifest's folder)",
            code="missing_input",
        ) from error


@click.command("verify-resume")
@click.argument("settings", metavar="TRAIN.yaml", type=click.Path(path_type=str))
@click.option(
    "--ranks", type=click.IntRange(1), default=2, show_default=True, help="Data-parallel ranks before a stop."
)
@click.option("--then", type=click.IntRange(1), default=3, show_default=True, help="Data-parallel ranks after a stop.")
@click.option("--batches", "num_batches", type=click.IntRange(1), default=10, show_default=True,
              help="Batches per rank between two stops.")  # fmt: skip
@click.option("--stops", "num_stops", type=click.IntRange(1), default=3, show_default=True, help="Number of stops.")
@click.option("--tokenizer", help="Tokenizer as for sharmill bins, if the training needs one.")
@json_option
def verify_resume(
    settings: str, ranks: int, then: int, num_batches: int, num_stops: int, tokenizer: str | None
) -> None:
    """Check that data loading resumes exactly.

    Load batches, save the state, restore it in new processes, and compare the batches with an uninterrupted run. No
    model is trained and no audio is loaded.
    """
    echo("loading NeMo", style="dim")
    from sharmill.training.nemo.trial import stop_and_resume

    lines = stop_and_resume(
        read_train_settings(Path(settings)), ranks=ranks, then=then, num_batches=num_batches, num_stops=num_stops,
        tokenizer=tokenizer,
    )  # fmt: skip
    with _errors_of_data():
        print_json(echo_all(lines))


@click.command()
@click.argument("settings", metavar="[TRAIN.yaml]", required=False, type=click.Path(path_type=str))
@click.option("--folder", default=".", show_default=True, type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="Folder for datasets, whose file system is tested.")  # fmt: skip
@click.option("--ranks", type=click.IntRange(1), default=1, show_default=True, help="Data-parallel ranks.")
@click.option("--batches", "num_batches", type=click.IntRange(1), default=100, show_default=True,
              help="Number of batches of the first rank to examine.")  # fmt: skip
@click.option("--tokenizer", help="Tokenizer as for sharmill bins, if the training needs one.")
@json_option
def doctor(settings: str | None, folder: Path, ranks: int, num_batches: int, tokenizer: str | None) -> int:
    """Check this machine or a training configuration.

    Without TRAIN.yaml, check versions, shared memory, GPUs, the file system (locks, rename, free space and inodes),
    SLURM and Ray, and print a remedy for each problem. Exit status 3 means that there are problems.

    With TRAIN.yaml, show how the data are divided among ranks, whether training can resume, epochs and padding, with
    lines that begin with "advice:" or "error:". Exit status 2 means that there are errors. No model is trained.
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
    echo("loading NeMo", style="dim")
    from sharmill.models.nemo_models import quiet_nemo
    from sharmill.training.nemo.trial import examine

    found = read_train_settings(Path(settings))
    with quiet_nemo(), _errors_of_data():
        lines = echo_all(examine(found, ranks=ranks, num_batches=num_batches, tokenizer=tokenizer))
    print_json(lines)
    return ConfigError.exit_status if any(line.startswith("error: ") for line in lines) else OK
