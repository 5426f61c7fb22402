"""Arguments and options that several commands share."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from sharmill.errors import ConfigError

if TYPE_CHECKING:
    from sharmill.config import Config
    from sharmill.validate.findings import Report

# A path such as data/lang=en/config.yaml has a "=" as well, but no key before it.
_OVERRIDE = re.compile(r"[\w.\[\]-]*=")

restart_option = click.option(
    "--restart", is_flag=True, help="Begin the stages anew: discard their plans and remove their output."
)
redo_option = click.option(
    "--redo",
    type=click.Path(path_type=str),
    metavar="FINDINGS.json",
    help="Do the shards again that a validation names: what its --json wrote.",
)
workers_option = click.option(
    "--workers", default="auto", show_default=True, help="Worker processes: a number, or auto."
)


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return configuration files, ``key=value`` overrides and other names, in this order.

    Raises:
        ConfigError: there is no configuration file among them.
    """
    overrides = [argument for argument in arguments if is_override(argument)]
    others = [argument for argument in arguments if not is_override(argument)]
    paths = [argument for argument in others if argument.endswith((".yaml", ".yml"))]
    names = [argument for argument in others if argument not in paths]
    if not paths:
        raise ConfigError(f"no configuration among {' '.join(arguments)}: name a .yaml file", code="bad_usage")
    return paths, overrides, names


def command_line(*words: str) -> str:
    """Return a command of sharmill as it can be typed anywhere, although its paths are relative to this folder."""
    return f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(['sharmill', *words])}"


def is_override(argument: str) -> bool:
    """Return True for ``key=value``."""
    return _OVERRIDE.match(argument) is not None


def parse_workers(text: str) -> int | Literal["auto"]:
    """Return ``auto`` or the positive number that ``text`` is.

    Raises:
        ConfigError: it is neither.
    """
    if text != "auto" and not (text.isdigit() and int(text) > 0):
        raise ConfigError(f"--workers is {text!r}; use 'auto' or a number from 1", code="bad_usage")
    return "auto" if text == "auto" else int(text)


def parse_codec_models(texts: Sequence[str]) -> dict[str, str]:
    """Return the models that are named by ``CODEC=MODEL``.

    Raises:
        ConfigError: a text is not of this form.
    """
    pairs = [text.partition("=") for text in texts]
    if wrong := [text for text, (codec, _, model) in zip(texts, pairs, strict=True) if not (codec and model)]:
        raise ConfigError(f"--codec-model {wrong[0]}: write CODEC=MODEL", code="bad_usage")
    return {codec: model for codec, _, model in pairs}


def read_redo_report(path: str | None, configs: Sequence[Config], *, restart: bool) -> Report | None:
    """Return the report that ``--redo`` names, or None without that option.

    Raises:
        ConfigError: it cannot be read, or is combined with several datasets or with ``--restart``.
    """
    from sharmill.validate.findings import read_report

    if path is None:
        return None
    if restart or len(configs) > 1:
        raise ConfigError("--redo is for one configuration, and without --restart", code="bad_usage")
    return read_report(Path(path))
