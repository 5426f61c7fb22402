"""``sharmill certify``: how far codes and choices depend on batches, devices and precisions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from sharmill.cli.arguments import split_arguments
from sharmill.cli.console import json_option, make_console, make_table, plain, print_json
from sharmill.cli.exit_status import OK
from sharmill.errors import ConfigError

if TYPE_CHECKING:
    from sharmill.models.certificate import Certificate


@click.command()
@click.argument("arguments", nargs=-1, required=True, metavar="CONFIG... [KEY=VALUE...]")
@json_option
def certify(arguments: tuple[str, ...], as_json: bool) -> int:
    """Show how far codes depend on batches, devices and precision.

    Each codec of the configuration, and its speaker encoder, computes a fixed probe in several ways. What differs is
    printed, and written into the run directory as certificate.json.
    """
    from sharmill.config import load_config
    from sharmill.pilot.certify import certify_models

    paths, overrides, names = split_arguments(arguments)
    if names:
        raise ConfigError(f"'certify' takes no stage names: {', '.join(names)}", code="bad_usage")
    console = make_console()
    for path in paths:
        written, certificate = certify_models(load_config(path, overrides))
        if as_json:
            print_json(certificate)
        _print(certificate)
        console.print(plain(str(written)))
    return OK


def _print(certificate: Certificate) -> None:
    console = make_console()
    for model in certificate.models:
        table = make_table(f"{model.name}: {model.model}")
        columns = ("way", "compared", "different", "share", "segments", "largest change")
        for column in columns if model.kind == "encoder" else columns[:-1]:
            table.add_column(column, justify="left" if column == "way" else "right")
        for found in model.comparisons:
            cells = [found.way, str(found.compared), str(found.different), f"{found.share:.3%}", str(found.items)]
            if found.largest_change is not None:
                cells.append(f"{found.largest_change:.1e}")
            table.add_row(*(plain(cell) for cell in cells))
        console.print(table)
