"""The console that commands print to, and text from manifests, datasets and file names on its way there."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from sharmill.executors.logs import one_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


# Of the context of a command, where it prints no more than errors, or JSON.
_QUIET: Final = "sharmill.quiet"


def _be_quiet(context: click.Context, parameter: click.Parameter, value: bool) -> bool:
    context.meta[_QUIET] = context.meta.get(_QUIET, False) or value
    return value


quiet_option = click.Option(
    ["--quiet", "-q"], is_flag=True, expose_value=False, callback=_be_quiet, help="Print errors only."
)
json_option = click.option(
    "--json", "as_json", is_flag=True, callback=_be_quiet, help="Print the result as JSON, and nothing else."
)


def print_json(value: Any) -> None:
    """Print a value as JSON; what consoles would print is left out where ``json_option`` is given.

    Characters that a terminal would obey, or that reorder text, are escaped as JSON escapes them.
    """
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    if not text.isascii() or "\x7f" in text:
        text = "".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text)
    click.echo(text)


def print_lines(lines: Iterable[str], *, as_json: bool) -> None:
    """Print lines as they come, or all of them as a JSON list."""
    if as_json:
        print_json(list(lines))
        return
    console = make_console()
    for line in lines:
        console.print(plain(line), soft_wrap=True)


def print_yaml(text: str, *, as_json: bool) -> None:
    """Print YAML with its comments, or its keys alone as JSON."""
    import yaml

    if as_json:
        print_json(yaml.safe_load(text))
    else:
        click.echo(text, nl=False)


def make_console() -> Console:
    """Return the console of a command: as wide as the terminal, or 120 columns where there is none.

    With ``--quiet`` or ``--json`` it prints nothing.
    """
    from rich.console import Console

    context = click.get_current_context(silent=True)
    quiet = context is not None and context.meta.get(_QUIET, False)

    # A log file has no width of its own, and rich would assume 80 columns.
    fixed = None if (sys.stdout is not None and sys.stdout.isatty()) or "COLUMNS" in os.environ else 120
    return Console(highlight=False, width=fixed, quiet=quiet)


def plain(text: str, style: str = "") -> Text:
    """Return text that rich prints on one line, as it stands: control characters and [markup] have no meaning."""
    from rich.text import Text

    return Text(one_line(text), style=style)


def make_table(
    title: str | None = None, columns: Sequence[str] = (), *, left: Sequence[str] = ("stage",), no_wrap: bool = False,
    expand: bool = False,
) -> Table:  # fmt: skip
    """Return a table without rows, as all commands print them.

    Args:
        columns: their headings.
        left: those that are not of numbers.
        no_wrap: cells stay on one line.
        expand: it is as wide as the console.
    """
    from rich import box
    from rich.table import Table

    table = Table(
        title=None if title is None else plain(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
        show_edge=False, padding=(0, 1, 0, 0), expand=expand,
    )  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=no_wrap)
    return table


def make_pairs() -> Table:
    """Return a table without rows and headings, for names and their values."""
    table = make_table()
    table.show_header = False
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


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
