"""``sharmill append``: new shards for a finished dataset, from a configuration or from another dataset."""

from __future__ import annotations

import click

from sharmill.cli.console import json_option, make_console, plain, print_json
from sharmill.cli.exit_status import OK


@click.command()
@click.argument("arguments", nargs=-1, required=True, metavar="CONFIG [KEY=VALUE...] | DATASET NEW")
@click.option("--copy", is_flag=True, help="Copy the files; by default they are hard links where possible.")
@json_option
def append(arguments: tuple[str, ...], copy: bool, as_json: bool) -> int:
    """Append shards to a finished dataset.

    With a CONFIG, all stages make its dataset_dir of the records that the dataset append_to has not, and its shards are
    appended to append_to. DATASET NEW appends the shards of the finished dataset NEW. Old files stay as they are.
    """
    from sharmill.cli.arguments import is_override, split_arguments
    from sharmill.cli.run import run_configs
    from sharmill.config import load_config
    from sharmill.errors import ConfigError
    from sharmill.grow.append import append_dataset

    if any(argument.endswith((".yaml", ".yml")) and not is_override(argument) for argument in arguments):
        paths, overrides, names = split_arguments(arguments)
        if len(paths) > 1 or names:
            raise ConfigError("'append' takes one configuration, or two datasets", code="bad_usage")
        config = load_config(paths[0], overrides)
        if config.append_to is None:
            raise ConfigError(
                f"{paths[0]} does not say which dataset grows: set append_to, as in append_to=data/speech",
                code="missing_key",
            )
        dataset, new = config.append_to, config.dataset_dir
        if status := run_configs([config], None):
            return status
    elif len(arguments) == 2:
        dataset, new = arguments
    else:
        raise ConfigError("'append' takes one configuration, or two datasets", code="bad_usage")
    appended = append_dataset(dataset, new, copy=copy)
    make_console().print(plain(appended.describe(dataset, new)), soft_wrap=True)
    if as_json:
        print_json(appended)
    return OK
