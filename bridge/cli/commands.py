"""The interface of a sub-command, and how commands of other packages are loaded.

Another package adds a sub-command with an entry point in its `pyproject.toml`:

    [project.entry-points."gymnasium_bridge.commands"]
    greet = "my_package.greet"

`gymnasium-bridge --help` lists the command with the name of its package, without importing it. `gymnasium-bridge greet`
imports `my_package.greet`, and no other command.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from typing import Any, Protocol

from bridge.core.plugins import load, loading, package_of

__all__ = ["GROUP", "Command", "CommandError", "load_command"]

GROUP = "gymnasium_bridge.commands"
"""The group of entry points for sub-commands."""


class Command(Protocol):
    """A sub-command: a module, or another object, with this function; an entry point names it."""

    def register(self, commands: Any) -> None:
        """Add the parser of the sub-command: `parser = commands.add_parser(NAME, description=…, epilog=…)`.

        NAME is the name of the entry point. `parser.set_defaults(run=…)` sets the function to run: it takes the parsed
        arguments, an `argparse.Namespace`, and returns the exit code, 0 for success. An exception becomes a line on
        standard error. Its exit code is 2 for a `bridge.errors.UsageError`, such as a wrong setting, and 1 for other
        exceptions; `parser.set_defaults(exit_codes={MyError: 3})` sets further ones. Every command has the options
        `--help` and `--debug`, which shows the traceback. `arguments.parser` is the parser.

        Args:
            commands: The result of `argparse.ArgumentParser.add_subparsers`.
        """
        ...


class CommandError(Exception):
    """A sub-command that cannot be used: its package is broken or missing."""


def load_command(entries: Sequence[EntryPoint], commands: Any, debug: bool) -> None:
    """Import a sub-command from another package, and add its parser.

    Args:
        entries: The entry points with its name, from `bridge.core.plugins.found`.
        commands: The argument of its `register`.
        debug: True: print the traceback of an exception.

    Raises:
        CommandError: It cannot be imported, is not a command, or several packages have a command with its name.
    """
    from bridge.errors import SettingError  # imported here, because it imports Gymnasium, which `--help` does not need

    name, package = entries[0].name, package_of(entries)
    try:
        command: Command = load(GROUP, name, "command")
        with loading(f"the command {name}", package):
            command.register(commands)
    except SettingError as error:
        if debug:
            traceback.print_exc()
        raise CommandError(str(error)) from error
    parser = commands.choices.get(name)
    if parser is None or not callable(parser.get_default("run")):
        text = f"expected register() of {entries[0].value} to add a parser {name!r} with a default run"
        raise CommandError(
            f"the command {name} of the package {package} cannot be used: {text}; update or uninstall {package}"
        )
