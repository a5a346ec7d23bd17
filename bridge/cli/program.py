"""The common part of all sub-commands: finding them, their error messages and their exit codes.

A sub-command is a module with a function `register(commands)`, which adds a parser and sets its default `run` to a
function that takes the parsed arguments and returns an exit code; a default `exit_codes` maps exceptions to exit
codes. `bridge.cli.commands.Command` documents this in full. To add a sub-command, write the module and add it to
`COMMANDS`; another package uses an entry point. Only the module of the chosen sub-command is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType, MappingProxyType
from typing import NoReturn, TextIO

from bridge.core.extras import has_feature, says_what_to_install

__all__ = ["COMMANDS", "FAILED", "INTERRUPTED", "OK", "PROGRAM", "USAGE", "clean", "main", "make_parser"]
__all__ += ["add_wait_option", "bytes_count", "port_number", "positive", "positive_int", "say", "seconds", "table"]

PROGRAM = "gymnasium-bridge"
"""The program's name in its output. The name `bridge` is installed too, but it is also a command of iproute2."""

COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("bridge.cli.serve", "publish environments until Ctrl-C"),
    "info": ("bridge.cli.info", "say what a server is and has"),
    "health": ("bridge.cli.health", "tell by the exit code whether a server takes worlds"),
    "top": ("bridge.cli.top", "watch servers and fleets in a table"),
    "bench": ("bridge.cli.bench", "measure steps per second and latency"),
    "check": ("bridge.cli.check", "check any dm_env_rpc server against the protocol"),
    "policy": ("bridge.cli.policy", "serve a policy, for robots, evaluations and seats elsewhere"),
    "evaluate": ("bridge.cli.evaluate", "say how good a policy is on served environments"),
    "lobby": ("bridge.cli.lobby", "join a PERLERT lobby and play in the terminal"),
    "runs": ("bridge.cli.runs", "list the episodes of recordings"),
    "replay": ("bridge.cli.replay", "verify a recorded episode, or watch it again"),
    "export": ("bridge.cli.export", "turn recorded episodes into a dataset, arrays or a film"),
    "standalone": ("bridge.cli.standalone", "print a server in one file, for an old Python, gym or Gymnasium"),
    "cert": ("bridge.core.transport.certificates", "make certificates for development"),
    "token": ("bridge.cli.token", "make a token, which a server asks its clients for"),
    "web": ("bridge.cli.web", "show other servers' worlds and PERLERT lobbies on a page for browsers"),
    "play": ("bridge.cli.play", "play a remote environment with the keyboard"),
    "demo": ("bridge.cli.demo", "watch an agent learn CartPole in other processes"),
    "completion": ("bridge.cli.completion", "complete commands and options by Tab in bash, zsh and fish"),
}
"""The sub-commands in the order of `--help`, each with its module and its description."""
_FEATURES = {
    "health": "fleet",
    "top": "fleet",
    "check": "testing",
    "policy": "policies",
    "evaluate": "policies",
    "lobby": "perlert",
    "runs": "recording",
    "replay": "recording",
    "export": "recording",
    "standalone": "standalone",
    "web": "web",
    "demo": "testing",
}
"""The feature folder that a sub-command needs. Without it, `--help` does not list the command."""

OK = 0
FAILED = 1
USAGE = 2
INTERRUPTED = 130

_EXIT_CODES = """exit codes:
  0    success
  1    the server or the environment failed, or a port is in use
  2    the command line, a URL or a setting is wrong
  130  interrupted by Ctrl-C; serve, policy, web and top, which end by it, stop in order and exit with 0
"""


def _lacks(command: str) -> str | None:
    """Return the feature folder that one of `COMMANDS` needs and this installation lacks; None: nothing is missing."""
    name = _FEATURES.get(command)
    return None if name is None or has_feature(name) else name


class _Parser(argparse.ArgumentParser):
    """A parser whose error about what is missing says where it is explained; its sub-parsers are of this class, too."""

    def error(self, message: str) -> NoReturn:
        """Print an error, and exit."""
        super().error(f"{message}; `{self.prog} --help` has examples" if "required" in message else message)


def make_parser(command: str | None = None, debug: bool = False) -> argparse.ArgumentParser:
    """Return the parser of the command line, with the names of all sub-commands and the options of one.

    Args:
        command: The sub-command to import; None: import none, and list those of other packages too.
        debug: True: print the traceback if the module of another package cannot be imported.

    Raises:
        CommandError: The sub-command belongs to another package and is broken, or its feature is not installed.
    """
    from bridge.cli.commands import GROUP, CommandError, load_command  # slow imports, after Ctrl-C is handled
    from bridge.core.plugins import found, package_of
    from bridge.version import __version__

    parser = _Parser(
        prog=PROGRAM,
        description="Serve Gymnasium environments, and inspect, measure and play served ones.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gymnasium-bridge {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, (module, text) in COMMANDS.items():
        if name == command:
            if (lacking := _lacks(name)) is not None:
                raise CommandError(f"this installation lacks bridge.{lacking}, which the command {name} needs")
            importlib.import_module(module).register(commands)
        elif _lacks(name) is None:
            commands.add_parser(name, help=text, add_help=False)
    others = {} if command in COMMANDS else found(GROUP)
    for name, entries in others.items():
        if name == command:
            load_command(entries, commands, debug)
        elif name not in COMMANDS:  # our own command has precedence over another package's
            commands.add_parser(name, help=f"of the package {clean(package_of(entries))}", add_help=False)
    if command is not None:
        chosen = commands.choices[command]
        chosen.formatter_class = argparse.RawDescriptionHelpFormatter
        if "exit codes" not in (chosen.epilog or ""):
            chosen.epilog = f"{chosen.epilog or ''}\n{_EXIT_CODES}"
        chosen.description = _wrapped(chosen.description or "")
        chosen.epilog = _wrapped(chosen.epilog or "")
        chosen.add_argument("--debug", action="store_true", help="show the traceback of an error")
        actions = chosen._actions  # noqa: SLF001 - argparse has no public list of a parser's options
        spelled = {action.dest: action.option_strings[0] for action in actions if action.option_strings}
        chosen.set_defaults(spelled=spelled, parser=chosen)
    return parser


def _wrapped(text: str) -> str:
    """Wrap the paragraphs of a text to the width of the terminal; indented lines, such as commands, are kept."""
    width = shutil.get_terminal_size().columns - 2
    return "\n".join(
        textwrap.fill(" ".join(lines), width, break_on_hyphens=False) if is_prose else "\n".join(lines)
        for is_prose, lines in itertools.groupby(text.split("\n"), lambda line: line[:1] not in ("", " "))
    )


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; raise SystemExit if it is wrong or asks for help."""
    import difflib

    known = {*COMMANDS}
    if "_ARGCOMPLETE" in os.environ:
        from bridge.cli.completing import complete

        complete(known, make_parser)
    if not argv or argv[0] not in known:
        from bridge.cli.commands import GROUP  # finding other packages is slow
        from bridge.core.plugins import found

        known |= {*found(GROUP)}
    parser = make_parser(argv[0] if argv and argv[0] in known else None, "--debug" in argv)
    if not argv:
        parser.print_help(sys.stderr)
        raise SystemExit(USAGE)
    if argv[0] not in (*known, "-h", "--help", "--version"):
        close = difflib.get_close_matches(argv[0], sorted({*known, "--help", "--version"}), 1)
        hint = f"did you mean {close[0]}? " if close else ""
        parser.error(f"there is no command {argv[0]!r}; {hint}`{PROGRAM} --help` lists the commands")
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        for option, name in getattr(arguments, "lacking", {}).items():
            if any(word.startswith(option) for word in unknown):
                arguments.parser.error(f"this installation lacks bridge.{name}, which {option} needs")
        spelled = list(arguments.spelled.values())
        close = [near for word in unknown for near in difflib.get_close_matches(word.partition("=")[0], spelled, 1)]
        hint = f"; did you mean {' and '.join(close)}?" if close else ""
        secret = any(word in option for option in close for word in ("token", "key"))
        # Do not print the value of a misspelled --token: it would be in the logs.
        shown = [word.partition("=")[0] for word in unknown if word.startswith("-")] if secret else unknown
        arguments.parser.error(f"unrecognized arguments: {' '.join(shown)}{hint}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code. An error becomes a line on standard error.

    Args:
        argv: The arguments after the program's name; None: those of this process.
    """
    _open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # replace characters that the terminal's encoding lacks
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        with _quiet_interrupt():
            arguments = _parse(argv)
    except SystemExit as end:  # argparse has printed an error or the help
        return end.code if isinstance(end.code, int) else USAGE
    except ImportError as error:
        if not _is_remedy(error):
            raise
        _complain(str(error))
        return USAGE
    except Exception as error:
        from bridge.cli.commands import CommandError

        if not isinstance(error, CommandError):
            raise
        _complain(str(error))
        return USAGE
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code: int = arguments.run(arguments)
            sys.stdout.flush()
            return code
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output has closed the pipe, such as `head`
        _drop(sys.stdout)
        return OK
    except Exception as error:
        from bridge.errors import ListenError, StartError, UsageError

        if arguments.debug:
            traceback.print_exc()
        elif isinstance(error, StartError):  # show where the user's own code has failed
            for line in error.traceback.splitlines():
                _write(line)
        if isinstance(error, ImportError) and _is_remedy(error):
            _complain(str(error))
            return USAGE
        _complain(explain(error, arguments.debug, arguments.spelled))
        codes = {**getattr(arguments, "exit_codes", {}), ListenError: FAILED, UsageError: USAGE}
        return next((code for kind, code in codes.items() if isinstance(error, kind)), FAILED)


def _is_remedy(error: ImportError) -> bool:
    """True if an ImportError was raised with a text for users. Python's own ImportErrors have the module's name."""
    return error.name is None or says_what_to_install(error)


def _open_standard_streams() -> None:
    """Open the null device for closed standard streams: otherwise the next socket would get their descriptors."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for the process's life


@contextlib.contextmanager
def _quiet_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the process with a short message, even in the middle of imports."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        _complain("interrupted")
        sys.stderr.flush()
        os._exit(INTERRUPTED)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def explain(error: Exception, debug: bool, spelled: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the text of an error in one line.

    Args:
        error: The error.
        debug: True if its traceback was shown already.
        spelled: The options by their keywords in Python, which errors name.
    """
    from bridge.errors import BridgeError, EnvironmentFailedError

    said = str(error)
    if not debug:  # without a server's traceback, which would be a line of a thousand characters
        said = said.partition("\nTraceback (most recent call last)")[0]
    text = " ".join(said.split()) if not isinstance(error, EnvironmentFailedError) else str(error).split("\n")[0]
    if isinstance(error, BridgeError):
        return in_options(text, spelled)
    if isinstance(error, OSError):
        from bridge.core.logs import reason_of

        return in_options(" ".join(reason_of(error).split()), spelled)
    hint = "" if debug else " (--debug shows where)"
    return f"unexpected {type(error).__name__}: {text}{hint}"


_KEYWORD = re.compile(r"(?<![\w.'?&\-])(?P<name>[a-z_]+)\b(?:=(?P<value>'[^']*'|\"[^\"]*\"|\{[^}]*\}|[^\s,;:)]*))?")

_GROUPED = re.compile(r"\b(?P<group>tls|limits|realtime)=[A-Za-z]+\((?P<fields>\w+=[^()]*)\)")


def in_options(text: str, spelled: Mapping[str, str]) -> str:
    """Replace keywords of Python in a text by the corresponding options of the command line.

    `port=0` becomes `--port 0`, `fork=True` `--fork`, `tls=TLS(ca=…)` `--tls-ca`, `limits=Limits(max_worlds=2)`
    `--max-worlds 2`. A name with an underscore, such as `token_file`, is replaced even without a value.
    """

    def flat(match: re.Match[str]) -> str:
        prefix = "tls_" if match["group"] == "tls" else ""
        return " and ".join(f"{prefix}{field.removesuffix('…')}" for field in match["fields"].split(", "))

    def spell(match: re.Match[str]) -> str:
        name, value = match["name"], match["value"]
        if name not in spelled or (value is None and "_" not in name):
            return match[0]
        return spelled[name] if value in (None, "", "True") else f"{spelled[name]} {value}"

    return _KEYWORD.sub(spell, _GROUPED.sub(flat, text))


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Write a warning as one line, without its place in the code."""
    _complain(f"warning: {' '.join(str(message).split())}")


def positive(text: str) -> float:
    """Read a positive number of at most a million, for `add_argument(type=…)`."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1e6:
        raise argparse.ArgumentTypeError(f"expected a positive number, at most a million, got {text!r}")
    return value


class _NoQuantityError(argparse.ArgumentTypeError, ValueError):
    """A text that is not a number of seconds or bytes."""


_QUANTITY = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "k": 2**10, "m": 2**20, "g": 2**30}
_BYTES.update(kib=2**10, mib=2**20, gib=2**30)


def seconds(text: str) -> float:
    """Read seconds, such as `90`, `1.5` or `10m`, for `add_argument(type=…)`."""
    with contextlib.suppress(ValueError):
        return float(text)  # even out of range: the keyword's own error is more specific
    found = _QUANTITY.fullmatch(text)
    if found is None or found[2].lower() not in _SECONDS:
        raise _NoQuantityError(f"expected seconds, such as 90, 1.5, 500ms, 10m or 2h, got {text!r}")
    return float(found[1]) * _SECONDS[found[2].lower()]


def bytes_count(text: str) -> int:
    """Read a number of bytes, such as `1000000`, `64MiB` (also `64M`) or `600MB`, for `add_argument(type=…)`."""
    with contextlib.suppress(ValueError):
        return int(text)
    found = _QUANTITY.fullmatch(text)
    size = None if found is None or found[2].lower() not in _BYTES else float(found[1]) * _BYTES[found[2].lower()]
    if size is None or size != int(size):
        raise _NoQuantityError(f"expected bytes, such as 1000000, 512KiB, 64MiB (or 64M) or 2GB, got {text!r}")
    return int(size)


def add_wait_option(parser: argparse.ArgumentParser) -> None:
    """Add `--wait-for-server`, the keyword `wait_for_server=` of `make_remote`."""
    parser.add_argument(
        "--wait-for-server",
        type=_seconds_or_zero,
        default=0.0,
        metavar="S",
        help="seconds to wait for a server that is not up yet (default: 0)",
    )


def _seconds_or_zero(text: str) -> float:
    """Read a positive number like `positive`, or zero for no wait."""
    with contextlib.suppress(ValueError):
        if float(text) == 0.0:
            return 0.0
    return positive(text)


def positive_int(text: str) -> int:
    """Read a positive integer, for `add_argument(type=…)`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def port_number(text: str) -> int:
    """Read a port, for `add_argument(type=…)`."""
    if not (text.isascii() and text.isdecimal() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
    return int(text)


def known_port(text: str) -> int:
    """Read a port other than 0, for a port that is printed before it is open, for `add_argument(type=…)`."""
    port = port_number(text)
    if port == 0:
        raise argparse.ArgumentTypeError("expected a port from 1 to 65535, got '0'")
    return port


def seed_number(text: str) -> int:
    """Read a seed, for `add_argument(type=…)`."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"expected a seed, an integer from 0 on, got {text!r}")
    return int(text)


def clean(text: str) -> str:
    """Replace control characters in a line: text from a server or a recording may contain escape sequences."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def say(line: str) -> None:
    """Print a cleaned line. If the output cannot be written, such as to a full disk, warn once and go on."""
    try:
        print(clean(line), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop(sys.stdout)
        _complain(f"warning: the output cannot be written, and is dropped from here on: {error.strerror or error}")


def table(rows: Sequence[Sequence[str]], numbers: Sequence[int]) -> list[str]:
    """Return rows as lines with aligned columns; columns of numbers are right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    aligned = [
        [cell.rjust(widths[at]) if at in numbers else cell.ljust(widths[at]) for at, cell in enumerate(row)]
        for row in rows
    ]
    return ["  ".join(cells).rstrip() for cells in aligned]


def _complain(line: str) -> None:
    """Write a line to standard error, after the program's name."""
    _write(f"{PROGRAM}: {line}")


def _write(line: str) -> None:
    """Write a line to standard error; ignore errors, because there is no other place to report them."""
    try:
        print(clean(line), file=sys.stderr)
    except OSError:
        _drop(sys.stderr)


def _drop(stream: TextIO) -> None:
    """Redirect a stream to the null device, so that further output, and its flush at the end, raises no error."""
    with contextlib.suppress(OSError, ValueError):  # the stream has no file, such as in a test
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, stream.fileno())
        os.close(sink)
