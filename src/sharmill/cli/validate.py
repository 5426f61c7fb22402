"""``sharmill validate``: from options to a report, for a dataset directory or for configurations."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from sharmill.cli.arguments import parse_codec_models, parse_workers, split_arguments, workers_option
from sharmill.cli.console import make_console
from sharmill.cli.exit_status import FINDINGS, OK
from sharmill.cli.run import run_configs
from sharmill.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from sharmill.config import Config
    from sharmill.validate.accounts import ExpectedRecords
    from sharmill.validate.config import ValidateConfig
    from sharmill.validate.findings import Report


@click.command()
@click.argument("arguments", nargs=-1, required=True, metavar="DATASET | CONFIG... [KEY=VALUE...]")
@click.option("--deep", is_flag=True, help="Decode every audio item as well.")
@click.option("--recheck-codes", default="0", metavar="SHARE", help="Encode this share of the segments again: 0.1%.")
@click.option("--codec-model", "codec_models", multiple=True, metavar="CODEC=MODEL",
              help="Model of a codec, for --recheck-codes.")  # fmt: skip
@click.option("--against", multiple=True, metavar="MANIFEST", help="Account for every record of this manifest.")
@click.option("--rejects", multiple=True, metavar="FILE", help="rejects.jsonl of the run directory, for --against.")
@click.option("--audio-root", "audio_roots", multiple=True, metavar="DIR",
              help="What absolute paths in the manifests lie below, for --against.")  # fmt: skip
@click.option("--json", "json_file", type=click.Path(path_type=str), help="Write the whole report to this file.")
@workers_option
def validate(arguments: tuple[str, ...], workers: str, **values: Any) -> int:
    """Check a finished dataset.

    DATASET is its directory; for a CONFIG it is that of the configuration, checked on the executor that this names.
    Exit status 3 means errors; warnings alone leave it at 0.
    """
    options = ValidateOptions(workers=parse_workers(workers), **values)
    if not arguments[0].endswith((".yaml", ".yml")):
        report = check_directory(make_console(), arguments, options)
        return FINDINGS if report.errors else OK
    paths, overrides, names = split_arguments(arguments)
    if names:
        raise ConfigError(f"'validate' takes configurations or one dataset, not {', '.join(names)}", code="bad_usage")
    return run_configs(options.load_configs(paths, overrides), ["validate"], json_file=options.json_file)


@dataclass(frozen=True, kw_only=True)
class ValidateOptions:
    """Options of the command as they were given."""

    deep: bool
    recheck_codes: str
    codec_models: tuple[str, ...]
    against: tuple[str, ...]
    rejects: tuple[str, ...]
    audio_roots: tuple[str, ...]
    json_file: str | None
    workers: int | Literal["auto"]

    def level(self) -> ValidateConfig:
        """Return how thoroughly to check.

        Raises:
            ConfigError: an option has no meaning.
        """
        from sharmill.validate.config import ValidateConfig

        try:
            return ValidateConfig(
                deep=self.deep, recheck_codes=self.recheck_codes, codec_models=parse_codec_models(self.codec_models)
            )
        except ValueError as error:
            raise ConfigError(f"--recheck-codes {self.recheck_codes}: {error}", code="bad_usage") from error

    def load_configs(self, paths: Sequence[str], overrides: Sequence[str]) -> list[Config]:
        """Return the configurations, with the options in place of what they say themselves.

        Raises:
            ConfigError: an option has no meaning for configurations, or one of them cannot be used.
        """
        from sharmill.config import load_config
        from sharmill.validate.config import ValidateConfig

        self.check_json_file()
        if self.against or self.rejects or self.audio_roots:
            raise ConfigError(
                "--against, --rejects and --audio-root are for a dataset directory; "
                "a configuration knows its own: validate.against_sources=true",
                code="bad_usage",
            )
        if self.json_file is not None and len(paths) > 1:
            raise ConfigError("--json is for one configuration", code="bad_usage")
        level = self.level()
        options = [f"validate.codec_models.{codec}={model}" for codec, model in level.codec_models.items()]
        if self.deep:
            options.append("validate.deep=true")
        if level.recheck_share:
            options.append(f"validate.recheck_codes={self.recheck_codes}")
        if self.workers != "auto":
            options.append(f"executor.workers={self.workers}")
        configs = [load_config(path, [*overrides, *options]) for path in paths]
        for config in configs:
            self.check_models(config.section(ValidateConfig))
        return configs

    def accounts(self) -> ExpectedRecords | None:
        """Return the records that the dataset is compared with, or None without ``--against``."""
        from sharmill.sources.nemo import NemoSource
        from sharmill.validate.accounts import ExpectedRecords

        if not self.against:
            if self.rejects or self.audio_roots:
                raise ConfigError("--rejects and --audio-root go with --against", code="bad_usage")
            return None
        # Only the records are read, and --audio-root says what absolute paths are below.
        sources = tuple(NemoSource(manifest=manifest, audio_root=".") for manifest in self.against)
        return ExpectedRecords(sources=sources, rejects=self.rejects, audio_roots=self.audio_roots)

    def check_models(self, level: ValidateConfig) -> None:
        """Raise ConfigError where models are named and nothing is encoded again."""
        if self.codec_models and not level.recheck_share:
            raise ConfigError("--codec-model goes with --recheck-codes", code="bad_usage")

    def check_json_file(self) -> None:
        """Raise ConfigError where the report could not be written, before any work."""
        from sharmill.files.storage import require_writable

        if self.json_file is None:
            return
        if Path(self.json_file).is_dir():
            raise ConfigError(f"--json {self.json_file} is a folder; name a file", code="bad_usage")
        require_writable(Path(self.json_file).parent)


def check_directory(console: Console, arguments: Sequence[str], options: ValidateOptions) -> Report:
    """Check a dataset directory, with worker processes of this machine; print, write and return the report.

    Raises:
        ConfigError: the options or the directory cannot be used.
    """
    from sharmill.cli.progress import ProgressListener
    from sharmill.cli.results import print_report
    from sharmill.executors.local import LocalExecutor
    from sharmill.files.storage import write_atomic
    from sharmill.validate.findings import encode_report
    from sharmill.validate.stage import validate_dataset

    if len(arguments) > 1:
        raise ConfigError(
            f"'validate' takes one dataset, or configurations that end in .yaml: {' '.join(arguments)}",
            code="bad_usage",
        )
    options.check_json_file()
    level = options.level()
    options.check_models(level)
    with (
        tempfile.TemporaryDirectory(prefix="sharmill-validate-") as scratch,
        ProgressListener(console) as listener,
    ):
        executor = LocalExecutor(options.workers)
        report = validate_dataset(Path(arguments[0]), Path(scratch), listener, level, executor, options.accounts())
    print_report(console, report)
    if options.json_file is not None:
        write_atomic(Path(options.json_file), encode_report(report))
    return report
