"""`mlxrunner completion`: print the script with which a shell completes the program's words."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from mlxrunner.cli.options import debug_option

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_MLXRUNNER_COMPLETE"
"""The variable of the environment in which the scripts ask for words."""


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@debug_option
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands, options, models and sessions in SHELL.

    \b
    bash: add to ~/.bashrc    eval "$(mlxrunner completion bash)"
    zsh:  add to ~/.zshrc     eval "$(mlxrunner completion zsh)"
    fish: mlxrunner completion fish > ~/.config/fish/completions/mlxrunner.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ctx.find_root().command, {}, "mlxrunner", VARIABLE).source())
