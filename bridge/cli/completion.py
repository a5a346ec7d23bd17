"""`gymnasium-bridge completion`: print shell code that completes commands, options and environments by argcomplete."""

from __future__ import annotations

import argparse
from typing import Any

from bridge.cli.program import OK
from bridge.core.extras import needed

__all__ = ["register"]

_EPILOG = """examples:
  eval "$(gymnasium-bridge completion bash)"                               in ~/.bashrc
  eval "$(gymnasium-bridge completion zsh)"                                in ~/.zshrc, after compinit
  gymnasium-bridge completion fish > ~/.config/fish/completions/gymnasium-bridge.fish

It needs the extra `completion`.
"""


def register(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "completion", description="Print shell code that completes the command by Tab.", epilog=_EPILOG
    )
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], help="which shell")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print it, for both names of the command."""
    with needed("completion needs the package argcomplete", "completion"):
        from argcomplete.shell_integration import shellcode

    print(shellcode(["gymnasium-bridge", "bridge"], shell=arguments.shell))
    return OK
