"""`bridge completion`: what a shell needs to complete commands, options and environments, by argcomplete."""

from __future__ import annotations

import argparse
import os
from typing import Any

from bridge.cli.program import OK, make_parser
from bridge.core.extras import needed

__all__ = ["complete", "register"]

_EPILOG = """examples:
  eval "$(bridge completion bash)"                               in ~/.bashrc
  eval "$(bridge completion zsh)"                                in ~/.zshrc, after compinit
  bridge completion fish > ~/.config/fish/completions/gymnasium-bridge.fish

It needs the extra `completion`.
"""


def register(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "completion", description="Print what makes a shell complete the command by Tab.", epilog=_EPILOG
    )
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], help="which shell")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print it, for both names of the command."""
    with needed("completion needs the package argcomplete", "completion"):
        import argcomplete

    print(argcomplete.shellcode(["gymnasium-bridge", "bridge"], shell=arguments.shell))
    return OK


def complete(known: set[str]) -> None:
    """Answer a shell that asks for completions, and end the process; only then `_ARGCOMPLETE` is set.

    Args:
        known: The names of the sub-commands.
    """
    with needed("completion needs the package argcomplete", "completion"):
        import argcomplete

    words = os.environ.get("COMP_LINE", "")[: int(os.environ.get("COMP_POINT", "0"))].split(" ")
    # Only the module of the sub-command is imported that is written out already.
    chosen = next((word for word in words[1:-1] if word), None)
    argcomplete.autocomplete(make_parser(chosen if chosen in known else None))
