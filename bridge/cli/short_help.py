"""A short help for commands with many options: `--help` shows the usual ones, `--help-all` shows all."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

__all__ = ["add_short_help"]


def add_short_help(
    parser: argparse.ArgumentParser, usual: Collection[str], options: Callable[[], Mapping[str, Mapping[str, Any]]]
) -> None:
    """Add `--help` and `--help-all` to a parser that was made with `add_help=False`.

    Args:
        parser: The parser of the command.
        usual: The flags in the short help, in order.
        options: Returns the arguments of `add_argument` for each flag. The short help shows the first sentence of each
            help text.
    """

    class Short(argparse.Action):
        """Prints the short help."""

        def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
            print(_short(parser, usual, options()), end="")
            parser.exit()

    class Whole(argparse.Action):
        """Prints the help of all options."""

        def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
            parser.print_help()
            parser.exit()

    none: dict[str, Any] = {"nargs": 0, "dest": argparse.SUPPRESS, "default": argparse.SUPPRESS}
    parser.add_argument("-h", "--help", action=Short, help="show the usual options, and exit", **none)
    parser.add_argument("--help-all", action=Whole, help="show all options, and exit", **none)


def _short(parser: argparse.ArgumentParser, usual: Collection[str], options: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the help of some options of a parser, each with the first sentence of its help text."""
    examples, codes, exits = (parser.epilog or "").partition("\nexit codes:")
    short = argparse.ArgumentParser(
        prog=parser.prog,
        usage=parser.usage,
        description=parser.description,
        epilog=f"{examples}{codes}{exits}",
        formatter_class=parser.formatter_class,
        add_help=False,
    )
    for flag in usual:
        given = dict(options[flag])
        if flag.startswith("-"):  # a positional argument keeps its full text
            whole = str(given["help"])
            first = whole.partition(". ")[0].partition("; ")[0]
            default = re.search(r" \(default: [^)]*\)$", whole)
            given["help"] = first + default[0] if default and not first.endswith(default[0]) else first
        short.add_argument(flag, **given)
    short.add_argument("--help-all", action="store_true", help="all options")
    return short.format_help()
