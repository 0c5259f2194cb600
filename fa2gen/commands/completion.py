"""``fa2gen completion``: the script that teaches a shell fa2gen's commands, options and values."""

from __future__ import annotations

import os
from pathlib import Path

import click

SHELLS = ("bash", "zsh", "fish")
# click's own name for it: the program's name in capitals. The script sets it and calls fa2gen for every completion.
COMPLETE_VARIABLE = "_FA2GEN_COMPLETE"


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS), required=False, metavar="[SHELL]")
def command(shell: str | None) -> None:
    """Print the script that completes fa2gen's commands, options and GPU names in bash, zsh or fish.

    Without SHELL, the one that $SHELL names.

    \b
    Examples:
      fa2gen completion bash > ~/.local/share/bash-completion/completions/fa2gen
      fa2gen completion fish > ~/.config/fish/completions/fa2gen.fish
      eval "$(fa2gen completion zsh)"
    """
    from click.shell_completion import get_completion_class

    name = shell or _shell_of_user()
    completion = get_completion_class(name)
    assert completion is not None
    root = click.get_current_context().find_root()
    click.echo(completion(root.command, {}, "fa2gen", COMPLETE_VARIABLE).source())


def _shell_of_user() -> str:
    named = os.environ.get("SHELL", "")
    if Path(named).name in SHELLS:
        return Path(named).name
    found = f"$SHELL is {named}" if named else "$SHELL is not set"
    raise click.UsageError(f"{found}: name a shell, one of {', '.join(SHELLS)}", click.get_current_context(silent=True))
