"""``sharmill completion``: what a shell needs to complete commands and options."""

from __future__ import annotations

import click

from sharmill.cli.exit_status import OK


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> int:
    """Print a script that completes commands in a shell.

    For bash: eval "$(sharmill completion bash)" in ~/.bashrc.
    """
    from click.shell_completion import get_completion_class

    from sharmill.cli.main import cli

    found = get_completion_class(shell)
    assert found is not None, "click has a class for each of these shells"
    click.echo(found(cli, {}, "sharmill", "_SHARMILL_COMPLETE").source())
    return OK
