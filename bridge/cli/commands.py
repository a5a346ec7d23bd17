"""What a sub-command is, and how those of other packages are found.

Another package adds one by an entry point in its `pyproject.toml`:

    [project.entry-points."gymnasium_bridge.commands"]
    greet = "my_package.greet"

`gymnasium-bridge --help` lists it, with the package that has it, and imports nothing of it. `gymnasium-bridge greet`
imports `my_package.greet`, and no other command.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

__all__ = ["GROUP", "Command", "CommandError", "load_command", "other_commands", "package_of"]

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


def other_commands() -> dict[str, list[EntryPoint]]:
    """Return the sub-commands of other packages by name, in alphabetical order; imports nothing of them.

    A name has several where several packages have a command of it.
    """
    found: dict[str, list[EntryPoint]] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        same = found.setdefault(entry.name, [])
        # A package is found twice where two folders of `sys.path` have it.
        if entry.value not in [other.value for other in same]:
            same.append(entry)
    return found


def package_of(entries: Sequence[EntryPoint]) -> str:
    """Return the names of the packages that have a sub-command, as they were installed."""
    return " and ".join(entry.dist.name if entry.dist is not None else entry.module for entry in entries)


def load_command(entries: Sequence[EntryPoint], commands: Any, debug: bool) -> None:
    """Import a sub-command of another package, and add its parser.

    Args:
        entries: As `other_commands` has them.
        commands: What its `register` takes.
        debug: Whether the traceback is printed of what it raises.

    Raises:
        CommandError: It cannot be imported, is no command, or several packages have one of its name.
    """
    name, package = entries[0].name, package_of(entries)
    title = f"the command {name} of the package {package}"
    if len(entries) > 1:
        raise CommandError(f"the packages {package} have a command {name} each: uninstall all but one")
    try:
        command: Command = entries[0].load()
        command.register(commands)
    # Whatever the code of another package raises; SystemExit, too, would end without a word.
    except (Exception, SystemExit) as error:
        if debug:
            traceback.print_exc()
        text = f"{title} cannot be loaded: {type(error).__name__}: {error}"
        raise CommandError(f"{text}; update or uninstall {package}") from error
    parser = commands.choices.get(name)
    if parser is None or not callable(parser.get_default("run")):
        text = f"expected register() of {entries[0].value} to add a parser {name!r} with a default run"
        raise CommandError(f"{title} cannot be used: {text}; update or uninstall {package}")
