"""The command ``validate``: from its options to a report, for a directory or for configurations."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from sharmill.cli.console import ProgressListener, print_report
from sharmill.config import Config, ValidateConfig, load_config
from sharmill.errors import ConfigError
from sharmill.pipeline import validate_dataset
from sharmill.storage import require_writable, write_atomic
from sharmill.validate.accounts import ExpectedRecords
from sharmill.validate.report import Report, encode_report


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of the command as they were given."""

    deep: bool
    recheck_codes: str
    codec_models: tuple[str, ...]
    against: tuple[str, ...]
    rejects: tuple[str, ...]
    audio_roots: tuple[str, ...]
    json_file: str | None
    workers: int | str

    def level(self) -> ValidateConfig:
        """Raises ConfigError where an option has no meaning."""
        try:
            return ValidateConfig(deep=self.deep, recheck_codes=self.recheck_codes, codec_models=self._models())
        except ValueError as error:
            raise ConfigError(f"--recheck-codes {self.recheck_codes}: {error}") from error

    def load_configs(self, paths: Sequence[str], overrides: Sequence[str]) -> list[Config]:
        """The configurations, with the options in place of what they say themselves."""
        self.check_json_file()
        if self.against or self.rejects or self.audio_roots:
            raise ConfigError(
                "--against, --rejects and --audio-root are for a dataset directory; "
                "a configuration knows its own: validate.against_sources=true"
            )
        if self.json_file is not None and len(paths) > 1:
            raise ConfigError("--json is for one configuration")
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
            self.check_models(config.validate)
        return configs

    def accounts(self) -> ExpectedRecords | None:
        """What the dataset is to be compared with."""
        if not self.against:
            if self.rejects or self.audio_roots:
                raise ConfigError("--rejects and --audio-root go with --against")
            return None
        return ExpectedRecords(manifests=self.against, rejects=self.rejects, audio_roots=self.audio_roots)

    def check_models(self, level: ValidateConfig) -> None:
        """Raises ConfigError where models are named and nothing is encoded again."""
        if self.codec_models and not level.recheck_share:
            raise ConfigError("--codec-model goes with --recheck-codes")

    def _models(self) -> dict[str, str]:
        pairs = [text.partition("=") for text in self.codec_models]
        if wrong := [codec for codec, separator, model in pairs if not (codec and separator and model)]:
            raise ConfigError(f"--codec-model {wrong[0]}: write CODEC=MODEL")
        return {codec: model for codec, _, model in pairs}

    def check_json_file(self) -> None:
        """Raises ConfigError where the report could not be written, before any work."""
        if self.json_file is None:
            return
        if Path(self.json_file).is_dir():
            raise ConfigError(f"--json {self.json_file} is a folder; name a file")
        require_writable(Path(self.json_file).parent)


def check_directory(console: Console, arguments: Sequence[str], request: Request) -> Report:
    """Checks a dataset directory, with worker processes of this machine, and prints and writes the report.

    Raises:
        ConfigError: the options or the directory cannot be used.
    """
    if len(arguments) > 1:
        raise ConfigError(f"'validate' takes one dataset, or configurations that end in .yaml: {' '.join(arguments)}")
    request.check_json_file()
    level = request.level()
    request.check_models(level)
    with (
        tempfile.TemporaryDirectory(prefix="sharmill-validate-") as scratch,
        ProgressListener(console) as listener,
    ):
        report = validate_dataset(
            Path(arguments[0]), Path(scratch), listener, level, workers=request.workers, against=request.accounts(),
        )  # fmt: skip
    print_report(console, report)
    if request.json_file is not None:
        write_atomic(Path(request.json_file), encode_report(report))
    return report
