"""What a sub-command is, and how one of another package is loaded.

Another package adds one by an entry point in its `pyproject.toml`:

    [project.entry-points."gymnasium_bridge.commands"]
    greet = "my_package.greet"

`gymnasium-bridge --help` lists it, with the package that has it, and imports nothing of it. `gymnasium-bridge greet`
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
"""The group of entry points."""


class Command(Protocol):
    """A sub-command: what an entry point names, a module or an object with this function."""

    def register(self, commands: Any) -> None:
        """Add the parser of the sub-command: `parser = commands.add_parser(NAME, description=…, epilog=…)`.

        NAME is that of the entry point. `parser.set_defaults(run=…)` says what is run: a function that takes the parsed
        arguments, an `argparse.Namespace`, and returns the exit code, 0 for success. What it raises becomes a line on
        standard error: exit code 2 for a `bridge.errors.UsageError`, such as a setting that is wrong, 1 for anything
        else; `parser.set_defaults(exit_codes={MyError: 3})` says others. Every command has the options `--help` and
        `--debug`, which shows the traceback. `arguments.parser` is the parser.

        Args:
            commands: What `argparse.ArgumentParser.add_subparsers` returns.
        """
        ...


class CommandError(Exception):
    """A sub-command that cannot be used: its package is broken, or is not there."""


def load_command(entries: Sequence[EntryPoint], commands: Any, debug: bool) -> None:
    """Import a sub-command of another package, and add its parser.

    Args:
        entries: As `bridge.core.plugins.found` has them.
        commands: What its `register` takes.
        debug: Whether the traceback is printed of what it raises.

    Raises:
        CommandError: It cannot be imported, is no command, or several packages have one of its name.
    """
    from bridge.errors import SettingError  # here: it imports Gymnasium, which `--help` does without

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
