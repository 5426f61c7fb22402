"""What all commands have: exit statuses, arguments and options, and the console that they print to."""

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

OK: Final = 0
FAILED: Final = 1
FINDINGS: Final = 3

_FORMER_STAGES: Final = {"survey": "encode.segments", "assemble": "encode.shards"}
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
# A path such as data/lang=en/config.yaml has a "=" as well, but no key before it.
_OVERRIDE = re.compile(r"[\w.\[\]-]*=")


def worst(statuses: Iterable[int]) -> int:
    """Return the exit status that stands for several datasets."""
    # Something that did not run outweighs findings in what did.
    return max(statuses, key=(OK, FINDINGS, ConfigError.exit_status, FAILED).index, default=OK)


def _note(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        context.meta[f"sharmill.{parameter.name}"] = True


quiet_option = click.Option(
    ["--quiet", "-q"], is_flag=True, expose_value=False, callback=_note, help="Print errors only."
)
json_option = click.option(
    "--json", is_flag=True, expose_value=False, callback=_note, help="Print the result as JSON, and nothing else."
)
verbose_option = click.option(
    "--verbose",
    is_flag=True,
    help="Show all that is known, and the rounds of encode apart.",
)


def has_option(option: str) -> bool:
    """Return True if the command was given ``quiet`` or ``json``."""
    context = click.get_current_context(silent=True)
    return context is not None and f"sharmill.{option}" in context.meta


def print_json(value: Any) -> None:
    """Print a value as JSON where ``--json`` was given, and nothing otherwise.

    Characters that a terminal would obey, or that reorder text, are escaped as JSON escapes them.
    """
    if not has_option("json"):
        return
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    if not text.isascii() or "\x7f" in text:
        text = "".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text)
    click.echo(text)


def make_console() -> Console:
    """Return the console of a command: as wide as the terminal, or 120 columns where there is none.

    With ``--quiet`` or ``--json`` it prints nothing.
    """
    # A log file has no width of its own, and rich would assume 80 columns.
    fixed = None if (sys.stdout is not None and sys.stdout.isatty()) or "COLUMNS" in os.environ else 120
    return Console(highlight=False, width=fixed, quiet=has_option("quiet") or has_option("json"))


def say(text: str, style: str = "", *, err: bool = False) -> None:
    """Print text as one line, however long it is, on stderr where it is no result; nothing with --quiet or --json."""
    console = make_console()
    console.stderr = err
    console.print(plain(text, style), soft_wrap=True)


def say_all(lines: Iterable[str]) -> list[str]:
    """Print lines as they come, and return them."""
    said = []
    for line in lines:
        say(line)
        said.append(line)
    return said


def plain(text: str, style: str = "") -> Text:
    """Return text that rich prints on one line, as it stands: control characters and [markup] have no meaning."""
    return Text(printable_line(text), style=style)


def make_table(
    title: str | None = None, columns: Sequence[str] = (), *, left: Sequence[str] = ("stage",),
    no_wrap: Sequence[str] = (), expand: bool = False,
) -> Table:  # fmt: skip
    """Return a table without rows, as all commands print them.

    Args:
        columns: their headings.
        left: those that are not of numbers.
        no_wrap: those whose cells stay on one line.
        expand: it is as wide as the console.
    """
    table = Table(
        title=None if title is None else plain(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
        show_edge=False, padding=(0, 1, 0, 0), expand=expand,
    )  # fmt: skip
    for column in columns:
        whole = column in no_wrap
        table.add_column(
            column,
            justify="left" if column in left else "right",
            no_wrap=whole,
            overflow="ellipsis" if whole else "fold",
        )
    return table


def print_table(
    title: str | None, columns: Sequence[str], rows: Iterable[Iterable[str | Text]], *,
    left: Sequence[str] = ("stage",), no_wrap: Sequence[str] = (),
) -> None:  # fmt: skip
    """Print a table without the columns that are empty; see ``make_table``."""
    # A row may end early.
    cells = [[cell for _, cell in zip_longest(columns, row, fillvalue="")] for row in rows]
    used = [place for place in range(len(columns)) if not cells or any(row[place] for row in cells)]
    table = make_table(title, [columns[place] for place in used], left=left, no_wrap=no_wrap)
    _print_rows(table, ([row[place] for place in used] for row in cells))


def print_pairs(pairs: Iterable[tuple[str | Text, str | Text]]) -> None:
    """Print names and their values as a table without headings."""
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
    """Return costs of units, with the precision of the last one.

    Args:
        costs: seconds of audio, or numbers of records; what is done and what there is in all, or one of them.
        records: they are numbers of records.

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
    """Return the time that several things take together, as far as it is known; an empty string if it is not.

    >>> describe_sum("run", [60.0, None])
    'run: at least 0:01:00 left'
    """
    known = [part for part in seconds if part is not None]
    least = "at least " if len(known) < len(seconds) else ""
    return f"{what}: {least}{describe_time(sum(known))} left" if sum(known) >= 1 or not least else ""


def resolve_stages(names: Sequence[str]) -> list[str]:
    """Return the kinds of the stages that a command names, and say so for rounds that once were stages of their own.

    Raises:
        ConfigError: there is no such stage.
    """
    current = {name: current_name(name, ": name encode to run all of its rounds") for name in names}
    return [current[name] if current[name] != name else resolve_stage(name) for name in names]


def current_name(name: str, advice: str = "") -> str:
    """Return the name that a stage has now, and say so if that is a round which once was a stage of its own."""
    kind, slash, item = name.partition("/")
    if kind in _FORMER_STAGES:
        say(f"{name} is a round of the stage encode now{advice}", style="dim")
    return f"{_FORMER_STAGES.get(kind, kind)}{slash}{item}"


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return configuration files, ``key=value`` overrides and other names, in this order.

    Raises:
        ConfigError: there is no configuration file among them, or one of them is not UTF-8, as files of runs are.
    """
    foreign = [argument for argument in arguments if _SURROGATE.search(argument)]
    refuse((foreign, f"{' '.join(foreign)} is not UTF-8: rename it, or name a link to it"), code="bad_usage")
    overrides = [argument for argument in arguments if is_override(argument)]
    others = [argument for argument in arguments if not is_override(argument)]
    paths = [argument for argument in others if argument.endswith((".yaml", ".yml"))]
    names = [argument for argument in others if argument not in paths]
    refuse((not paths, f"no configuration among {' '.join(arguments)}: name a .yaml file"), code="bad_usage")
    return paths, overrides, names


def load_configs(
    command: str, arguments: Sequence[str], options: Sequence[str] = (), *, single: bool = False
) -> list[Config]:
    """Load the configurations that are named by the arguments of a command which takes no names of stages.

    Args:
        options: overrides beside those of the arguments.
        single: the command takes one configuration.

    Raises:
        ConfigError: there is none, more than the command takes, or another argument.
    """
    paths, overrides, names = split_arguments(arguments)
    taken, more = ("one configuration", [*names, *paths[1:]]) if single else ("configurations", names)
    refuse((more, f"'{command}' takes {taken}, and no names of stages: leave out {', '.join(more)}"), code="bad_usage")
    return [load_config(path, [*overrides, *options]) for path in paths]


def is_override(argument: str) -> bool:
    """Return True for ``key=value``."""
    return _OVERRIDE.match(argument) is not None


def parse_workers(context: click.Context, parameter: click.Parameter, text: str | None) -> int | str | None:
    """Return ``auto`` or the positive number that ``text`` is; None where the option is not given."""
    if text is None or text == "auto":
        return text
    if not text.isdigit() or int(text) == 0:
        raise ConfigError(f"--workers is {text!r}; use 'auto' or a number from 1", code="bad_usage")
    return int(text)


def parse_pairs(context: click.Context, parameter: click.Parameter, texts: Sequence[str]) -> dict[str, str]:
    """Return the values of an option that is given as ``KEY=VALUE``, any number of times, by their keys."""
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
