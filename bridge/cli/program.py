"""What all sub-commands share: how they are found, how their errors read, what their exit codes mean.

A sub-command is a module with a function `register(commands)`, which adds a parser and sets its default `run` to a
function that takes the parsed arguments and returns an exit code. To add one, write the module and name it in
`COMMANDS`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import TextIO

from bridge.errors import BridgeError, EnvironmentFailedError, UsageError
from bridge.version import __version__

__all__ = ["COMMANDS", "FAILED", "INTERRUPTED", "OK", "USAGE", "main", "make_parser", "say"]

COMMANDS = (
    "bridge.cli.serve",
    "bridge.cli.info",
    "bridge.cli.bench",
    "bridge.cli.check",
    "bridge.cli.lobby",
    "bridge.transport.certificates",
    "bridge.cli.play",
    "bridge.cli.demo",
)
"""The modules of the sub-commands, in the order that `--help` lists them."""

OK = 0
FAILED = 1
USAGE = 2
INTERRUPTED = 130

_EXIT_CODES = """exit codes:
  0    success
  1    the server or the environment failed
  2    the command line, a URL or a setting is wrong
  130  interrupted by Ctrl-C (`bridge serve` stops in order and exits with 0)
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="bridge",
        description="Serve Gymnasium environments, and inspect, measure and play served ones.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gymnasium-bridge {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name in COMMANDS:
        importlib.import_module(name).register(commands)
    for command in commands.choices.values():
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        if "exit codes" not in (command.epilog or ""):
            command.epilog = f"{command.epilog or ''}\n{_EXIT_CODES}"
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; errors are a line on standard error.

    Args:
        argv: The arguments after the program's name; None: those of this process.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows another one
    parser = make_parser()
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as end:  # argparse has said what is wrong, or has shown the help
        return end.code if isinstance(end.code, int) else USAGE
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code: int = arguments.run(arguments)
            sys.stdout.flush()
            return code
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output has enough, as `head` does
        _drop(sys.stdout)
        return OK
    except Exception as error:
        if arguments.debug:
            traceback.print_exc()
        _complain(explain(error, arguments.debug))
        return USAGE if isinstance(error, UsageError) else FAILED


def explain(error: Exception, debug: bool) -> str:
    """Say an error in one line."""
    text = " ".join(str(error).split()) if not isinstance(error, EnvironmentFailedError) else str(error).split("\n")[0]
    if isinstance(error, (BridgeError, OSError)):
        return text
    hint = "" if debug else " (--debug shows where)"
    return f"unexpected {type(error).__name__}: {text}{hint}"


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Write a warning as a line, without the place in the code that a user of the command did not write."""
    _complain(f"warning: {' '.join(str(message).split())}")


def say(line: str) -> None:
    """Print a line of a command that goes on where its output cannot be written, because the disk is full."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop(sys.stdout)
        _complain(f"warning: the output cannot be written, and is dropped from here on: {error.strerror or error}")


def _complain(line: str) -> None:
    """Write a line to standard error; where that cannot be, there is nobody to tell."""
    try:
        print(f"bridge: {line}", file=sys.stderr)
    except OSError:
        _drop(sys.stderr)


def _drop(stream: TextIO) -> None:
    """Let nothing come of what is printed, nor of what waits to be written at the end, where it would be an error."""
    with contextlib.suppress(OSError, ValueError):  # it has no file, as in a test
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, stream.fileno())
        os.close(sink)
