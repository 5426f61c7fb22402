"""The command ``validate``, which runs only the checker."""

import tempfile
from pathlib import Path
from typing import Literal

import click

from sharmill.cli.command import (
    FINDINGS,
    OK,
    LocalPath,
    combine_exit_codes,
    load_configs,
    parse_pairs,
    workers_option,
)
from sharmill.cli.progress import ProgressListener
from sharmill.cli.results import print_report
from sharmill.cli.run import run_configs
from sharmill.engine.run_dir import RunDir
from sharmill.errors import ConfigError, refuse
from sharmill.executors.local import run_alone
from sharmill.files.atomic import require_writable
from sharmill.shar.index import open_directory
from sharmill.sources.files import unpacked_name
from sharmill.sources.nemo import NemoSource
from sharmill.sources.table import TableSource, delimiter_of
from sharmill.validate.accounts import ExpectedRecords
from sharmill.validate.findings import read_report
from sharmill.validate.stage import Subject, ValidateConfig, ValidateStage


@click.command()
@click.argument("arguments", nargs=-1, required=True, metavar="DATASET | URL | CONFIG... [KEY=VALUE...]")
@click.option("--deep", is_flag=True, help="Also decode every audio item.")
@click.option(
    "--recheck-codes", default="0", metavar="SHARE", help="Encode this share of the segments again, as in 0.1%."
)
@click.option("--codec-model", "models", multiple=True, metavar="CODEC=MODEL", callback=parse_pairs,
              help="Model of a codec, for --recheck-codes.")  # fmt: skip
@click.option("--against", multiple=True, metavar="MANIFEST",
              help="Check that every record of this manifest or table was written or rejected.")  # fmt: skip
@click.option("--rejects", multiple=True, metavar="FILE", help="rejects.jsonl of a run directory, for --against.")
@click.option("--audio-root", "audio_roots", multiple=True, metavar="DIR",
              help="Root of absolute paths in the manifests, for --against.")  # fmt: skip
@click.option("--json", "json_file", type=LocalPath(path_type=str), help="Write the whole report to this file.")
@workers_option
def validate(
    arguments: tuple[str, ...], workers: int | Literal["auto"], deep: bool, recheck_codes: str, models: dict[str, str],
    against: tuple[str, ...], rejects: tuple[str, ...], audio_roots: tuple[str, ...], json_file: str | None,
) -> int:  # fmt: skip
    """Check a finished dataset.

    DATASET is a dataset directory or its URL (https://, s3://, gs:// or ais://), whose files are cached in
    ~/.cache/sharmill. With a CONFIG, check the dataset of the configuration with the configured executor.

    Exit status 3 means that there are errors. Warnings alone do not change the exit status.
    """
    if json_file is not None:
        refuse((Path(json_file).is_dir(), f"--json {json_file} is a folder: name a file"), code="bad_usage")
        require_writable(Path(json_file).parent)
    try:
        level = ValidateConfig(deep=deep, recheck_codes=recheck_codes, codec_models=models)
    except ValueError as error:
        raise ConfigError(f"--recheck-codes {recheck_codes}: {error}", code="bad_usage") from error
    if arguments[0].endswith((".yaml", ".yml")):
        refuse(
            (
                against or rejects or audio_roots,
                "--against, --rejects and --audio-root are for dataset directories: with a configuration, use "
                "validate.against_sources=true",
            ),
            code="bad_usage",
        )
        given = {f"validate.codec_models.{codec}": model for codec, model in models.items()} | {
            "validate.deep": "true" if deep else "",
            "validate.recheck_codes": recheck_codes if level.recheck_share else "",
            "executor.workers": "" if workers == "auto" else str(workers),
        }
        configs = load_configs("validate", arguments, [f"{key}={value}" for key, value in given.items() if value])
        refuse(
            (json_file is not None and len(configs) > 1, "--json takes one configuration: leave out the others"),
            code="bad_usage",
        )
        for config in configs:
            _require_recheck(models, config.section(ValidateConfig))
        return combine_exit_codes(status for status, _ in run_configs(configs, ["validate"], json_file=json_file))
    found = " ".join(arguments)
    refuse(
        (len(arguments) > 1, f"'validate' takes one dataset, or configurations ending in .yaml, not {found}"),
        (not against and (rejects or audio_roots), "--rejects and --audio-root need --against: add it"),
        code="bad_usage",
    )
    _require_recheck(models, level)
    # Only the records are read, not the audio, so ``audio_root`` of a source has no effect.
    sources = tuple(
        TableSource(table=name, delimiter=delimiter_of(name), audio_root=".")
        if unpacked_name(name).lower().endswith((".csv", ".tsv"))
        else NemoSource(manifest=name, audio_root=".")
        for name in against
    )
    accounts = ExpectedRecords(sources=sources, rejects=rejects, audio_roots=audio_roots) if against else None
    with tempfile.TemporaryDirectory(prefix="sharmill-validate-") as scratch, ProgressListener() as listener:
        subject = Subject(dataset_dir=open_directory(arguments[0]), level=level, against=accounts)
        checked = run_alone(
            ValidateStage(subject), RunDir(Path(scratch) / "run"), workers=workers, listener=listener, resumes=False
        )
        with checked as (run, _):
            report = read_report(run.product("validate/report"))
    print_report(report, json_file)
    return FINDINGS if report.errors else OK


def _require_recheck(models: dict[str, str], level: ValidateConfig) -> None:
    """Raise ConfigError if models are given although nothing is encoded again."""
    refuse((models and not level.recheck_share, "--codec-model needs --recheck-codes: add it"), code="bad_usage")
