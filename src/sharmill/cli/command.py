"""Shared parts of all commands: exit statuses, arguments, options, and the console to which they print."""

import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, Final

import click
import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sharmill.config import Config, load_config, resolve_stage
from sharmill.errors import ConfigError, printable_line, refuse
from sharmill.files.location import is_url

OK: Final = 0
FAILED: Final = 1
FINDINGS: Final = 3

_FORMER_STAGES: Final = {"survey": "encode.segments", "assemble": "encode.shards"}
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
# A path such as data/lang=en/config.yaml contains a "=" too, but no key precedes it.
_OVERRIDE = re.compile(r"[\w.\[\]-]*=")


class LocalPath(click.Path):
    """Path of an output. A URL is refused, because it would become a local folder called ``s3:``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if is_url(str(value)):
            self.fail(f"{value} is a URL; name a path on this machine", param, ctx)
        return super().convert(value, param, ctx)


def combine_exit_codes(statuses: Iterable[int]) -> int:
    """Return one exit status for several datasets: the most serious one."""
    # The status of a dataset that could not be processed is more serious than that of a dataset with findings.
    return max(statuses, key=(OK, FINDINGS, ConfigError.exit_status, FAILED).index, default=OK)


def _remember_flag(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        context.meta[f"sharmill.{parameter.name}"] = True


quiet_option = click.Option(
    ["--quiet", "-q"], is_flag=True, expose_value=False, callback=_remember_flag, help="Print errors only."
)
json_option = click.option(
    "--json", is_flag=True, expose_value=False, callback=_remember_flag, help="Print only the result, as JSON."
)
verbose_option = click.option(
    "--verbose",
    is_flag=True,
    help="Show all details, and each round of encode separately.",
)


def has_option(option: str) -> bool:
    """Return True if the current command was called with this option: ``quiet`` or ``json``."""
    context = click.get_current_context(silent=True)
    return context is not None and f"sharmill.{option}" in context.meta


def print_json(value: Any) -> None:
    """Print a value as JSON if ``--json`` was given; otherwise print nothing.

    Control characters and characters that reorder text are escaped, since a terminal would act on them.
    """
    if not has_option("json"):
        return
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    if not text.isascii() or "\x7f" in text:
        text = "".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text)
    click.echo(text)


def make_console() -> Console:
    """Return the console of a command, as wide as the terminal, or 120 columns wide without a terminal.

    It prints nothing with ``--quiet`` or ``--json``.
    """
    # A console without a terminal would have 80 columns by default.
    fixed = None if (sys.stdout is not None and sys.stdout.isatty()) or "COLUMNS" in os.environ else 120
    return Console(highlight=False, width=fixed, quiet=has_option("quiet") or has_option("json"))


def echo(text: str, style: str = "", *, err: bool = False) -> None:
    """Print text on one line, however long it is; print nothing with ``--quiet`` or ``--json``.

    Args:
        err: print to stderr, for text that is not a result of the command.
    """
    console = make_console()
    console.stderr = err
    console.print(plain(text, style), soft_wrap=True)


def echo_all(lines: Iterable[str]) -> list[str]:
    """Print each line as soon as it is available, and return all lines."""
    printed = []
    for line in lines:
        echo(line)
        printed.append(line)
    return printed


def plain(text: str, style: str = "") -> Text:
    """Return text that rich prints literally on one line, without interpreting control characters or [markup]."""
    return Text(printable_line(text), style=style)


def make_table(
    title: str | None = None, columns: Sequence[str] = (), *, left: Sequence[str] = ("stage",),
    no_wrap: Sequence[str] = (), expand: bool = False,
) -> Table:  # fmt: skip
    """Return an empty table in the style of all commands.

    Args:
        columns: the headings.
        left: headings of the columns that are aligned to the left, because they hold text.
        no_wrap: headings of the columns whose cells stay on one line.
        expand: make the table as wide as the console.
    """
    table = Table(
        title=None if title is None else plain(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
        show_edge=False, padding=(0, 1, 0, 0), expand=expand,
    )  # fmt: skip
    for column in columns:
        on_one_line = column in no_wrap
        table.add_column(
            column,
            justify="left" if column in left else "right",
            no_wrap=on_one_line,
            overflow="ellipsis" if on_one_line else "fold",
        )
    return table


def print_table(
    title: str | None, columns: Sequence[str], rows: Iterable[Iterable[str | Text]], *,
    left: Sequence[str] = ("stage",), no_wrap: Sequence[str] = (),
) -> None:  # fmt: skip
    """Print a table, leaving out empty columns; see ``make_table``."""
    # A row may have fewer cells than there are columns.
    cells = [[cell for _, cell in zip_longest(columns, row, fillvalue="")] for row in rows]
    used = [place for place in range(len(columns)) if not cells or any(row[place] for row in cells)]
    table = make_table(title, [columns[place] for place in used], left=left, no_wrap=no_wrap)
    _print_rows(table, ([row[place] for place in used] for row in cells))


def print_pairs(pairs: Iterable[tuple[str | Text, str | Text]]) -> None:
    """Print pairs of a name and a value as a table without headings."""
    table = make_table()
    table.show_header = False
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    _print_rows(table, pairs)


def _print_rows(table: Table, rows: Iterable[Iterable[str | Text]]) -> None:
    for row in rows:
        table.add_row(*[cell if isinstance(cell, Text) else plain(cell) for cell in row])
    make_console().print(table)


def describe_cost(*costs: float, records: bool) -> str:
    """Return costs of units as text; the last cost determines the number of decimals.

    Args:
        costs: seconds of audio or numbers of records: the finished part, the total, or both in this order.
        records: True if the costs are numbers of records.

    >>> describe_cost(970.0, 1940.0, records=False)
    '0.269/0.539 h'
    >>> describe_cost(120_000, 10_000_000, records=True)
    '0.12M/10.00M records'
    """
    if records:
        numbers = [f"{cost / 1e6:.2f}M" if costs[-1] >= 1e6 else f"{cost:.0f}" for cost in costs]
        return f"{'/'.join(numbers)} {'record' if numbers[-1] == '1' else 'records'}"
    hours = costs[-1] / 3600
    digits = 3 if hours < 1 else 2 if hours < 100 else 1 if hours < 1000 else 0
    return f"{'/'.join(f'{cost / 3600:.{digits}f}' for cost in costs)} h"


def describe_time(seconds: float) -> str:
    """Return a time as hours, minutes and seconds.

    >>> describe_time(3725.4)
    '1:02:05'
    """
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"


def describe_sum(what: str, seconds: Sequence[float | None]) -> str:
    """Return the sum of the times left for several parts, as text; an empty string if none of the times is known.

    >>> describe_sum("run", [60.0, None])
    'run: at least 0:01:00 left'
    """
    known = [part for part in seconds if part is not None]
    least = "at least " if len(known) < len(seconds) else ""
    return f"{what}: {least}{describe_time(sum(known))} left" if sum(known) >= 1 or not least else ""


def resolve_stages(names: Sequence[str]) -> list[str]:
    """Return the kinds of the stages named in a command.

    If a name is that of a round of ``encode`` that was a separate stage in earlier versions, a message is printed.

    Raises:
        ConfigError: a stage does not exist.
    """
    current = {name: current_name(name, ": name encode to run all of its rounds") for name in names}
    return [current[name] if current[name] != name else resolve_stage(name) for name in names]


def current_name(name: str, advice: str = "") -> str:
    """Return the current name of a stage; print a message if the given name is from an earlier version.

    Args:
        advice: text that is appended to the message.
    """
    kind, slash, item = name.partition("/")
    if kind in _FORMER_STAGES:
        echo(f"{name} is now a round of the stage encode{advice}", style="dim")
    return f"{_FORMER_STAGES.get(kind, kind)}{slash}{item}"


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Split arguments into configuration files, ``key=value`` overrides and other names.

    Raises:
        ConfigError: no configuration file is named, or an argument is not UTF-8 and could not be written to the files
            of a run.
    """
    foreign = [argument for argument in arguments if _SURROGATE.search(argument)]
    refuse((foreign, f"{' '.join(foreign)} is not UTF-8: rename the file, or name a link to it"), code="bad_usage")
    overrides = [argument for argument in arguments if is_override(argument)]
    others = [argument for argument in arguments if not is_override(argument)]
    paths = [argument for argument in others if argument.endswith((".yaml", ".yml"))]
    names = [argument for argument in others if argument not in paths]
    refuse((not paths, f"no configuration in {' '.join(arguments)}: name a .yaml file"), code="bad_usage")
    return paths, overrides, names


def load_configs(
    command: str, arguments: Sequence[str], options: Sequence[str] = (), *, single: bool = False
) -> list[Config]:
    """Load the configurations named in the arguments of a command that takes no stage names.

    Args:
        options: further overrides, from the command's options.
        single: the command takes exactly one configuration.

    Raises:
        ConfigError: no configuration or too many are named, or an argument is neither a configuration nor an override.
    """
    paths, overrides, names = split_arguments(arguments)
    taken, more = ("one configuration", [*names, *paths[1:]]) if single else ("configurations", names)
    refuse((more, f"'{command}' takes {taken} and no stage names: leave out {', '.join(more)}"), code="bad_usage")
    return [load_config(path, [*overrides, *options]) for path in paths]


def is_override(argument: str) -> bool:
    """Return True if an argument has the form ``key=value``."""
    return _OVERRIDE.match(argument) is not None


def parse_workers(context: click.Context, parameter: click.Parameter, text: str | None) -> int | str | None:
    """Return ``auto`` or a positive number of workers; None if the option was not given."""
    if text is None or text == "auto":
        return text
    if not text.isdigit() or int(text) == 0:
        raise ConfigError(f"--workers is {text!r}; use 'auto' or an integer of at least 1", code="bad_usage")
    return int(text)


def parse_pairs(context: click.Context, parameter: click.Parameter, texts: Sequence[str]) -> dict[str, str]:
    """Return the values of a repeatable ``KEY=VALUE`` option, by key."""
    pairs = {text: text.partition("=") for text in texts}
    refuse(
        *(
            (not (key and value), f"{parameter.opts[0]} {text}: write it as {parameter.metavar}")
            for text, (key, _, value) in pairs.items()
        ),
        code="bad_usage",
    )
    return {key: value for key, _, value in pairs.values()}


workers_option = click.option(
    "--workers", default="auto", show_default=True, callback=parse_workers,
    help="Worker processes: a number, or auto.",
)  # fmt: skip
