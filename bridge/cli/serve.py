"""`bridge serve`: publish environments until Ctrl-C or SIGTERM. Its options are the keywords of `serve_gym`."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from bridge.cli.lobby import read_key
from bridge.cli.program import OK, say
from bridge.errors import SettingError
from bridge.server.process_group import ServerGroup
from bridge.server.serve import serve_gym
from bridge.server.server import SWITCH_INTERVAL, Server

__all__ = ["SERVED_AT", "announce", "read_pairs", "register", "serve_options"]

SERVED_AT = " is served at "
"""In the first line of output: what stands between the environment and its URLs, which are separated by spaces."""
_PERLERT_OPTIONS = ("perlert_key_file", "spectators", "bots")
_READ = {"int": int, "float": float, "str": str}

_EPILOG = """examples:
  bridge serve CartPole-v1 --port 50051
  bridge serve CartPole-v1 --num-envs 64             one world of 64 lanes: one message steps them all
  bridge serve FrozenLake-v1 --env-kwargs map_name=8x8 is_slippery=False
  bridge serve my_package.envs:MyEnv-v0              imports the module that registers the environment
  bridge serve CartPole-v1 --perlert 32322           in real time over UDP, with a lobby
  bridge serve CartPole-v1 Taxi-v4 "MountainCar*"    a zoo, of which each client names one
"""


def register(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "serve",
        help="publish environments until Ctrl-C",
        description="Publish Gymnasium environments over dm_env_rpc until Ctrl-C or SIGTERM, which drain.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "env",
        nargs="+",
        metavar="ENV_ID",
        help="a Gymnasium id; MODULE:ENV_ID imports the module first; several ids or patterns are a zoo",
    )
    for flags, options in serve_options():
        parser.add_argument(flags, **options)
    parser.add_argument(
        "--perlert",
        type=int,
        metavar="PORT",
        help="serve in real time over the datagram protocol PERLERT instead, its lobby on this UDP port (0: any free)",
    )
    parser.add_argument(
        "--perlert-key-file", type=Path, metavar="PATH", help="with --perlert: a file with the pre-shared key"
    )
    parser.add_argument(
        "--spectators", type=int, metavar="N", help="with --perlert: so many slots for clients that only watch"
    )
    parser.add_argument(
        "--bots",
        nargs="*",
        metavar="KEY",
        help="with --perlert: slots that a random policy plays while nobody holds them; without keys all",
    )
    parser.add_argument(
        "--exit-on-eof",
        action="store_true",
        help="stop when standard input ends: for programs that start servers and must leave none behind",
    )
    parser.set_defaults(run=run)


def serve_options() -> Iterator[tuple[str, dict[str, Any]]]:
    """Give each keyword of `serve_gym` as an option: its flag, and the arguments of `add_argument`.

    The help is the keyword's line in the docstring. Keywords that a command line cannot say, such as callables, are
    left out.
    """
    texts = _keyword_texts(inspect.getdoc(serve_gym) or "")
    for name, parameter in inspect.signature(serve_gym).parameters.items():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY or name == "start":
            continue
        flag, default = f"--{name.replace('_', '-')}", parameter.default
        text = texts.get(name, "").replace("%", "%%")
        kind = _plain_type(str(parameter.annotation))
        shown = "" if default is None or isinstance(default, bool) else f" (default: {default})"
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": f"{text}{shown}"}
        choices = re.fullmatch(r"Literal\[(.*)\]", str(parameter.annotation))
        if choices:
            yield flag, {**options, "choices": [choice.strip(" '\"") for choice in choices.group(1).split(",")]}
        elif kind == "bool":
            yield flag, {**options, "action": argparse.BooleanOptionalAction if default else "store_true"}
        elif kind in _READ:
            metavar = {"port": "PORT"}.get(name, {"int": "N", "float": "X"}.get(kind, name.upper()))
            read = _or_none(_READ[kind]) if "None" in str(parameter.annotation) else _READ[kind]
            yield flag, {**options, "type": read, "metavar": metavar}
        elif kind == "Mapping":
            yield flag, {**options, "nargs": "+", "metavar": "KEY=VALUE", "action": "extend"}


def _plain_type(annotation: str) -> str:
    """Read an annotation, such as `int | None`, as a type that a command line can say; "" where there is none."""
    members = [member.strip().partition("[")[0] for member in annotation.split("|")]
    return next((member for member in members if member in ("bool", "int", "float", "str", "Mapping")), "")


def _or_none(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """Read what `kind` reads, and the word none as None."""

    def read(text: str) -> Any:
        return None if text.lower() == "none" else kind(text)

    read.__name__ = kind.__name__  # argparse names it where it refuses
    return read


def _keyword_texts(doc: str) -> dict[str, str]:
    """Read what a docstring's section `Args:` says of each keyword."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", doc, re.MULTILINE | re.DOTALL)
    entries = re.findall(r"^    (\w+): (.*(?:\n(?!    \w+: ).*)*)", section.group(1) if section else "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def read_pairs(pairs: Sequence[str], option: str = "--env-kwargs") -> dict[str, Any]:
    """Read KEY=VALUE pairs; a value is a Python literal where it reads as one, otherwise text.

    Raises:
        SettingError: A pair has no `=`, or a key is no name.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.isidentifier():
            raise SettingError(f"expected {option} to be KEY=VALUE, e.g. gravity=9.8, got {pair!r}")
        try:
            found[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found[key] = text
    return found


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal."""
    names = set(inspect.signature(serve_gym).parameters)
    keywords = {name: value for name, value in vars(arguments).items() if name in names and name != "env"}
    for name, value in keywords.items():
        if isinstance(value, list):
            keywords[name] = read_pairs(value, f"--{name.replace('_', '-')}")
    env = _published(arguments.env)
    if arguments.perlert is not None:
        return _run_perlert(env, arguments.perlert, keywords, arguments)
    for name in _PERLERT_OPTIONS:
        if getattr(arguments, name) is not None:
            raise SettingError(f"--{name.replace('_', '-')} is for --perlert PORT: give that too")
    sys.setswitchinterval(SWITCH_INTERVAL)
    with _sigterm_as_interrupt():
        server = serve_gym(env, start=False, **keywords)
        try:
            if arguments.exit_on_eof:
                threading.Thread(target=_stop_on_eof, args=(server,), daemon=True).start()
            lanes = keywords.get("num_envs", 1) > 1 or keywords.get("vectorization_mode", "sync") != "sync"
            announce(server, arguments.env, lanes)
            server.run()
        except KeyboardInterrupt:  # a signal before `run` took over
            server.stop()
        say("stopped: connections and environments are closed")
    return OK


def _run_perlert(env: str | list[str], port: int, keywords: dict[str, Any], arguments: argparse.Namespace) -> int:
    """Serve over PERLERT until a signal; the options are those of `serve_gym` that it has too, and its own."""
    from bridge.perlert.server import serve_perlert

    if not isinstance(env, str):
        raise SettingError(f"expected one environment id with --perlert, got {', '.join(env)}")
    known = set(inspect.signature(serve_perlert).parameters)
    unknown = sorted(name for name in keywords if name not in known)
    if unknown or "port" in keywords:
        refused = ", ".join(
            f"--{name.replace('_', '-')}" for name in [*unknown, *(["port"] if "port" in keywords else [])]
        )
        raise SettingError(f"{refused} cannot be given with --perlert, which names its own port")
    key = read_key(arguments.perlert_key_file)
    if arguments.bots is not None:
        keywords["bots"] = dict.fromkeys(arguments.bots, "random") if arguments.bots else "random"
    with _sigterm_as_interrupt():
        server = serve_perlert(env, port=port, key=key, spectators=arguments.spectators or 0, **keywords)
        try:
            for url in server.urls:
                say(f"serving {url}")
            option = f" --key-file {arguments.perlert_key_file}" if key is not None else ""
            say(f"play:   bridge lobby {server.url}{option}")
            if arguments.spectators:
                say(f"watch:  bridge lobby {server.url}{option} --watch")
            say(f'agents: bridge.make_remote("{server.url}"{", key=…" if key is not None else ""})')
            server.wait()
        except KeyboardInterrupt:
            pass
        finally:
            server.stop()
    return OK


def announce(server: Server, ids: Sequence[str], lanes: bool) -> None:
    """Print where the environments are, and how to connect; `lanes`: whether its worlds are of lanes."""
    say(f"{', '.join(ids)}{SERVED_AT}{' '.join(server.urls)}")
    say("Connect from Python:")
    # The URLs of one server lead to the same worlds; those of several processes are joined as one vector.
    urls = server.urls if isinstance(server, ServerGroup) else [server.url]
    for line in connecting_lines(urls, server.env_ids, lanes):
        say(f"  {line}")
    say("Ctrl-C stops.")


def connecting_lines(urls: Sequence[str], ids: Sequence[str], lanes: bool) -> list[str]:
    """Return two lines of Python that connect to what is served."""
    if len(ids) > 1:  # a zoo: the client names one of them
        urls = [f"{url}/{ids[0]}" for url in urls]
    quoted = [f'"{url}"' for url in urls]
    if len(urls) > 1:
        return ["from bridge import make_vec_remote", f"envs = make_vec_remote([{', '.join(quoted)}])"]
    if lanes:
        return ["from bridge import make_vec_remote", f"envs = make_vec_remote({quoted[0]})"]
    return ["from bridge import make_remote", f"env = make_remote({quoted[0]})"]


def _published(ids: Sequence[str]) -> str | list[str]:
    """Return what `serve_gym` takes: one id, or a list where there are several or patterns.

    Raises:
        SettingError: A module cannot be imported.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # the console script does not look there by itself
    names = []
    for item in ids:
        module, colon, name = item.rpartition(":")
        if colon:
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise SettingError(
                    f"cannot import the module of {item!r}: {error}. Expected MODULE:ENV_ID with a module that is "
                    "installed or in the current folder"
                ) from error
        names.append(name)
    is_zoo = len(names) > 1 or any(character in names[0] for character in "*?[")
    return names if is_zoo else names[0]


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does, also where a shell started this process with Ctrl-C ignored."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop_on_eof(server: Server) -> None:
    """Stop a server once whoever started this process is gone, or has closed its end of the pipe."""
    # os.read: a thread that waits in sys.stdin would hold a lock that the interpreter wants at its end.
    while os.read(0, 4096):
        pass
    server.stop(2.0)
    threading.main_thread().join(5.0)
    os._exit(OK)  # an environment is in a call that does not return
