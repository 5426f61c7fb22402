"""The command line: converts options, calls one function, turns its outcome into an exit status.

0 all done, 1 something failed, 2 wrong use or configuration, 3 validation found problems.
"""

from __future__ import annotations

import logging
import re
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

import sharmill
from sharmill.errors import ConfigError, SharmillError
from sharmill.executors.logs import PrintableFormatter, printable

if TYPE_CHECKING:
    from rich.console import Console

    from sharmill.config import Config
    from sharmill.validate.report import Report

OK, FAILED, WRONG_USE, FINDINGS = 0, 1, 2, 3
# Of several datasets the worst counts: something that did not run outweighs findings in what did.
_BY_SEVERITY = (OK, FINDINGS, WRONG_USE, FAILED)
# A path such as data/lang=en/config.yaml has a "=" as well, but no key before it.
_OVERRIDE = re.compile(r"[\w.\[\]-]*=")


redo_option = click.option(
    "--redo",
    type=click.Path(path_type=str),
    metavar="FINDINGS.json",
    help="Do the shards again that a validation names: what its --json wrote.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(sharmill.__version__)
def cli() -> None:
    """Turn speech manifests into training-ready Lhotse Shar datasets.

    Every command may be ended at any time; the same command goes on where it stopped.
    """


@cli.command(context_settings={"ignore_unknown_options": False})
@click.argument("arguments", nargs=-1, required=True, metavar="CONFIG... [STAGE...] [KEY=VALUE...]")
@click.option("--restart", is_flag=True, help="Begin the stages anew: forget their plans and remove their output.")
@redo_option
def run(arguments: tuple[str, ...], restart: bool, redo: str | None) -> int:
    """Run all stages, or those named, for datasets.

    CONFIG is a YAML file. STAGE is prepare, match (stage1), write (stage2), encode (stage3) or validate.
    KEY=VALUE overrides the configuration, as in match.min_similarity=0.7.
    """
    from sharmill.config import STAGES, load_config, resolve_stage

    paths, overrides, names = split_arguments(arguments)
    stages = [resolve_stage(name) for name in names] or list(STAGES)
    configs = [load_config(path, overrides) for path in paths]
    named = read_findings(redo, configs, restart=restart)
    return run_configs(configs, stages, restart=restart, redo=named)


@cli.command()
@click.argument("arguments", nargs=-1, required=True, metavar="DATASET | CONFIG... [KEY=VALUE...]")
@click.option("--deep", is_flag=True, help="Decode every audio item as well.")
@click.option("--recheck-codes", default="0", metavar="SHARE", help="Encode this share of the segments again: 0.1%.")
@click.option("--codec-model", "codec_models", multiple=True, metavar="CODEC=MODEL",
              help="Where the model of a codec is now, for --recheck-codes.")  # fmt: skip
@click.option("--against", multiple=True, metavar="MANIFEST", help="Account for every record of this manifest.")
@click.option("--rejects", multiple=True, metavar="FILE", help="rejects.jsonl of the run directory, for --against.")
@click.option("--audio-root", "audio_roots", multiple=True, metavar="DIR",
              help="What absolute paths in the manifests lie below, for --against.")  # fmt: skip
@click.option("--json", "json_file", type=click.Path(path_type=str), help="Write the whole report to this file.")
@click.option("--workers", default="auto", show_default=True, help="Worker processes: a number, or auto.")
def validate(
    arguments: tuple[str, ...], deep: bool, recheck_codes: str, codec_models: tuple[str, ...],
    against: tuple[str, ...], rejects: tuple[str, ...], audio_roots: tuple[str, ...], json_file: str | None,
    workers: str,
) -> int:  # fmt: skip
    """Check a finished dataset.

    DATASET is its directory; for a CONFIG it is that of the configuration, checked on the executor that this names.
    Exit status 3 means errors; warnings alone leave it at 0.
    """
    from sharmill.cli.validation import Request, check_directory

    request = Request(
        deep=deep, recheck_codes=recheck_codes, codec_models=codec_models, against=against, rejects=rejects,
        audio_roots=audio_roots, json_file=json_file, workers=parse_workers(workers),
    )  # fmt: skip
    if not arguments[0].endswith((".yaml", ".yml")):
        report = check_directory(make_console(), arguments, request)
        return FINDINGS if report.errors else OK
    paths, overrides, names = split_arguments(arguments)
    if names:
        raise ConfigError(f"'validate' takes configurations or one dataset, not {', '.join(names)}")
    return run_configs(request.load_configs(paths, overrides), ["validate"], json_file=json_file)


@cli.command()
@click.argument("dataset", type=click.Path(path_type=str))
@click.option("--name", help="The name of the dataset (default: as it was, or the folder's).")
@click.option("--codec", "codecs", multiple=True, metavar="NAME,KEY=VALUE,...",
              help="What the files cannot tell of a codec: codebook_size, sampling_rate ...")  # fmt: skip
def index(dataset: str, name: str | None, codecs: tuple[str, ...]) -> int:
    """Make the index of a dataset from its files.

    Writes shards.jsonl and dataset.json again, or for the first time for a Shar of another tool.
    """
    from pathlib import Path

    from sharmill.shar.rebuild import parse_codec_facts, rebuild_index

    console = make_console()
    facts = [parse_codec_facts(text) for text in codecs]
    for line in rebuild_index(Path(dataset), facts, name=name):
        console.print(printable(line), markup=False, soft_wrap=True)
    return OK


@cli.command()
@click.argument("dataset", type=click.Path(path_type=str))
@click.option("--into", type=click.Path(path_type=str), metavar="DIR", help="Where to write (default: into DATASET).")
def sidecars(dataset: str, into: str | None) -> int:
    """Write the index files with which lhotse 2 takes any cut by its number; sharmill's reader needs none."""
    from sharmill.shar.sidecars import write_sidecars

    write_sidecars(dataset, into)
    return OK


@cli.command()
@click.argument("directory", default="demo", type=click.Path(path_type=str))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE...]")
def demo(directory: str, overrides: tuple[str, ...]) -> int:
    """Run all stages on a synthetic corpus.

    Makes corpus, run directory, dataset and demo.yaml in DIRECTORY (default: demo).
    """
    from pathlib import Path

    from sharmill.config import STAGES
    from sharmill.demo.run import make_demo
    from sharmill.storage import require_writable

    if _OVERRIDE.match(directory):
        directory, overrides = "demo", (directory, *overrides)
    require_writable(Path(directory))
    console = make_console()
    config = make_demo(Path(directory), overrides, tell=lambda line: console.print(line, markup=False))
    return run_configs([config], list(STAGES), restart=False)


@cli.command()
@click.argument("run_dir", type=click.Path(path_type=str))
@click.option("--watch", is_flag=True, help="Go on showing it, every two seconds, until Ctrl-C.")
def status(run_dir: str, watch: bool) -> int:
    """Show the progress of every stage and rank of a run directory."""
    import time
    from contextlib import suppress
    from pathlib import Path

    from sharmill.cli.status import print_status

    console = make_console()
    print_status(console, Path(run_dir))
    with suppress(KeyboardInterrupt):
        while watch:
            time.sleep(2)
            console.clear()
            print_status(console, Path(run_dir))
    return OK


@cli.command()
@click.argument("arguments", nargs=-1, required=True, metavar="CONFIG... [KEY=VALUE...]")
@click.option("--ranks", type=click.IntRange(1), help="Show the balance over this many ranks (default: the cores).")
def plan(arguments: tuple[str, ...], ranks: int | None) -> int:
    """Show what would run, and run nothing.

    That is units, hours, cost per rank, balance and the disk needed, of each stage whose input is there already.
    """
    from sharmill.cli.preview import print_plan
    from sharmill.config import load_config

    paths, overrides, names = split_arguments(arguments)
    if names:
        raise ConfigError(f"'plan' takes no stage names: {', '.join(names)}")
    console = make_console()
    for path in paths:
        print_plan(console, load_config(path, overrides), ranks)
    return OK


@cli.command()
@click.argument("arguments", nargs=-1, required=True, metavar="STAGE|all CONFIG... [KEY=VALUE...]")
@click.option("--cluster", type=click.Choice(["slurm", "local", "debug"]), default="slurm", show_default=True,
              help="slurm: job arrays; local: processes here; debug: in this process.")  # fmt: skip
@click.option("--profile", type=click.Path(path_type=str), help="What ranks need: a YAML file in configs/clusters.")
@click.option("--restart", is_flag=True, help="Begin the stages anew: forget their plans and remove their output.")
@redo_option
@click.option("--wait", is_flag=True, help="Wait until all datasets are done, and return how that ended.")
@click.option("--dry-run", is_flag=True, help="Show the sbatch scripts and the balance; submit nothing.")
def submit(
    arguments: tuple[str, ...], cluster: str, profile: str | None, restart: bool, redo: str | None, wait: bool,
    dry_run: bool,
) -> int:  # fmt: skip
    """Run stages on a cluster, each dataset in a chain of its own.

    CONFIG, STAGE and KEY=VALUE are those of sharmill run.
    """
    from sharmill.cli.submission import show_submission, submit_all
    from sharmill.config import STAGES, load_config, resolve_stage
    from sharmill.executors.slurm.profile import ClusterProfile, load_profile

    paths, overrides, names = split_arguments(arguments)
    stages = list(STAGES) if names == ["all"] else [resolve_stage(name) for name in names]
    if not stages:
        raise ConfigError("name a stage, or 'all'")
    if cluster == "debug":
        overrides.append("executor.workers=1")
    configs = [load_config(path, overrides) for path in paths]
    named = read_findings(redo, configs, restart=restart)
    if cluster != "slurm":
        return run_configs(configs, stages, restart=restart, redo=named)
    loaded = load_profile(profile) if profile else ClusterProfile()
    console = make_console()
    if dry_run:
        if named is not None:
            raise ConfigError("--dry-run shows what is left to do; with --redo that would have to be taken back first")
        show_submission(console, configs, stages, loaded)
        return OK
    outcomes = submit_all(console, configs, stages, loaded, restart=restart, wait=wait, redo=named)
    return max(outcomes, key=_BY_SEVERITY.index)


@cli.command()
@click.argument("datasets", nargs=-1, required=True, metavar="DATASET...", type=click.Path(path_type=str))
@click.option("-b", "--buckets", "num_buckets", default=30, show_default=True, help="How many buckets by length.")
@click.option("-s", "--sub-buckets", type=int, help="Divide each into this many by number of text tokens.")
@click.option("-t", "--tokenizer", multiple=True, metavar="[LANGUAGE=]NAME",
              help="bytes, chars, a tokenizer.json, a SentencePiece .model, or module:callable.")  # fmt: skip
@click.option("--tokens", "token_bins", is_flag=True, help="Count audio in frames, for token-based sampling.")
@click.option("--token-equivalent-duration", "seconds_per_frame", type=click.FloatRange(0, min_open=True),
              help="Seconds of a frame (default: the codec's).")  # fmt: skip
@click.option("--closed", is_flag=True, help="End with the longest cut, as bucket_batch_size and tune-batch need it.")
@click.option("--min-duration", default=0.0, help="Leave out shorter cuts (seconds).")
@click.option("--max-duration", default=float("inf"), help="Leave out longer cuts (seconds; default: no limit).")
@click.option("--token-outlier-threshold", "outlier_threshold", default=4.0, show_default=True,
              help="Texts are too long this many standard deviations of tokens per second above the mean.")  # fmt: skip
@click.option("--workers", default="auto", show_default=True, help="Worker processes: a number, or auto.")
def bins(datasets: tuple[str, ...], tokenizer: tuple[str, ...], token_bins: bool, min_duration: float,
         max_duration: float, workers: str, **options: Any) -> int:  # fmt: skip
    """Estimate buckets for batches from the cuts alone.

    Prints YAML for NeMo's loader, with a histogram as comments: sharmill bins DATASET --closed > bins.yaml
    """
    from sharmill.training.buckets.bins_report import BinsOptions, estimate_report

    report = estimate_report(
        datasets, BinsOptions(**options), tokenizer=tokenizer, token_bins=token_bins, min_duration=min_duration,
        max_duration=max_duration, workers=parse_workers(workers),
    )  # fmt: skip
    click.echo(report, nl=False)
    return OK


@cli.command("tune-batch")
@click.option("--step", required=True, metavar="MODULE:CALLABLE",
              help="Runs one step: step(batch_size, length, num_tokens, device), or a class of such.")  # fmt: skip
@click.option("--bins", "bins_text", required=True, metavar="FILE|LIST",
              help="What sharmill bins --closed printed, or [1.5, 3.0].")  # fmt: skip
@click.option("--memory-share", default=0.9, show_default=True, help="Share of the memory to use.")
@click.option("--memory", help="Of how much, as in 8GiB (default: all of the GPU, or what is available to the CPU).")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, or cuda:0.")
@click.option("--max-batch-size", type=click.IntRange(1), default=4096, show_default=True, help="Ask for no more.")
@click.option("--tolerance", type=click.FloatRange(0, 1, max_open=True), default=0.0, show_default=True,
              help="Stop when the gap between fitting and not is at most this share.")  # fmt: skip
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=1800.0, show_default=True,
              help="Seconds that the steps of one size may take.")  # fmt: skip
def tune_batch(step: str, bins_text: str, memory_share: float, memory: str | None, device: str, **options: Any) -> int:
    """Find the largest batch of each bucket that fits.

    Runs your training step with larger and larger made-up batches, until it has not enough memory, and prints YAML for
    NeMo's loader.
    """
    from sharmill.training.buckets.batch_size import make_budget, read_buckets, to_yaml, tune_batch_sizes
    from sharmill.training.buckets.memory import parse_memory

    buckets = read_buckets(bins_text)
    budget = make_budget(device, memory_share, parse_memory(memory) if memory else None)
    click.echo(f"searching within {budget}", err=True)
    most = options["max_batch_size"]
    sizes = tune_batch_sizes(
        step, buckets, budget, **options,
        tell=lambda bucket, size: click.echo(f"{bucket}: {size}{' or more' * (size == most)}", err=True),
        tell_try=lambda bucket, size, fits: click.echo(f"  {size} {'fits' if fits else 'does not fit'}", err=True),
    )  # fmt: skip
    click.echo(to_yaml(step, buckets, sizes, budget), nl=False)
    return OK


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Configuration files, ``key=value`` overrides and other names, in this order.

    Raises:
        ConfigError: there is no configuration file among them.
    """
    overrides = [argument for argument in arguments if _OVERRIDE.match(argument)]
    others = [argument for argument in arguments if not _OVERRIDE.match(argument)]
    paths = [argument for argument in others if argument.endswith((".yaml", ".yml"))]
    names = [argument for argument in others if argument not in paths]
    if not paths:
        raise ConfigError(f"no configuration among {' '.join(arguments)}: name a .yaml file")
    return paths, overrides, names


def run_configs(
    configs: Sequence[Config], stages: Sequence[str], *, restart: bool = False, redo: Report | None = None,
    json_file: str | None = None,
) -> int:  # fmt: skip
    """Runs the datasets one after the other and returns the worst exit status."""
    from sharmill.pipeline import check_config

    # One dataset is checked by its own run; of several, a bad one must not show only after the others have run.
    for config in configs if len(configs) > 1 else ():
        check_config(config, stages)
    worst = OK
    for config in configs:
        try:
            status = _run_one(config, stages, restart=restart, redo=redo, json_file=json_file)
        except SharmillError as error:
            if len(configs) == 1:
                raise
            click.echo(printable(f"Error: {config.name}: {error}"), err=True)
            status = exit_status(error)
        worst = max(worst, status, key=_BY_SEVERITY.index)
    return worst


def _run_one(
    config: Config, stages: Sequence[str], *, restart: bool, redo: Report | None, json_file: str | None
) -> int:
    from pathlib import Path

    from sharmill.cli.console import ProgressListener, print_report, print_result
    from sharmill.pipeline import run_dataset
    from sharmill.storage import write_atomic
    from sharmill.validate.report import encode_report

    console = make_console()
    with ProgressListener(console) as listener:
        result = run_dataset(config, listener, stages=stages, restart=restart, redo=redo)
    print_result(console, result)
    if not result.ok:
        return FAILED
    if (report := result.report) is None:
        return OK
    print_report(console, report)
    if json_file is not None:
        write_atomic(Path(json_file), encode_report(report))
    return FINDINGS if report.errors else OK


def read_findings(path: str | None, configs: Sequence[Config], *, restart: bool) -> Report | None:
    """The report that ``--redo`` names.

    Raises:
        ConfigError: it cannot be read, or goes with neither several datasets nor ``--restart``.
    """
    from pathlib import Path

    from sharmill.validate.report import read_report

    if path is None:
        return None
    if restart or len(configs) > 1:
        raise ConfigError("--redo is for one configuration, and without --restart")
    return read_report(Path(path))


def parse_workers(text: str) -> int | str:
    """``auto`` or a positive number."""
    if text != "auto" and not (text.isdigit() and int(text) > 0):
        raise ConfigError(f"--workers is {text!r}; use 'auto' or a number from 1")
    return text if text == "auto" else int(text)


def make_console() -> Console:
    from rich.console import Console

    # A log file has no width of its own, and rich would assume 80 columns.
    return Console(highlight=False, width=None if sys.stdout is not None and sys.stdout.isatty() else 120)


def exit_status(error: SharmillError) -> int:
    return WRONG_USE if isinstance(error, ConfigError) else FAILED


def main(arguments: Sequence[str] | None = None) -> Any:
    """Entry point: one line for each error that is meant for the user."""
    # The run directory has the full logs; the terminal gets what must be seen.
    handler = logging.StreamHandler()
    handler.setLevel(logging.ERROR)
    handler.setFormatter(PrintableFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler])
    # A cluster ends jobs with SIGTERM: the same clean end as Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(cli.main(args=list(arguments) if arguments is not None else None, standalone_mode=False) or OK)
    except click.ClickException as error:
        error.show()
        sys.exit(WRONG_USE)
    except (KeyboardInterrupt, click.Abort):
        click.echo("Interrupted. What is done is kept; run the same command again to go on.", err=True)
        sys.exit(FAILED)
    except SharmillError as error:
        click.echo(printable(f"Error: {error}"), err=True)
        sys.exit(exit_status(error))


if __name__ == "__main__":
    main()
