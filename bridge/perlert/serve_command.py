"""The options and output of `gymnasium-bridge serve --perlert PORT`: a way to serve (`bridge.cli.serve.OtherWay`)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bridge.errors import SettingError

__all__ = ["OPTION", "OTHER_OPTIONS", "add_options", "function", "keywords", "lines"]

OPTION = "perlert"
"""The option that selects this way to serve, by its name in the parsed arguments."""
OTHER_OPTIONS = ("perlert_key_file", "spectators", "bots")
"""Options that are valid only with it."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    section = parser.add_argument_group("PERLERT")
    section.add_argument(
        "--perlert",
        type=int,
        metavar="PORT",
        help="serve in real time over PERLERT (UDP) instead of gRPC, with the lobby on this port; 0: any free port",
    )
    section.add_argument(
        "--perlert-key-file", type=Path, metavar="PATH", help="with --perlert: a file with the pre-shared key"
    )
    section.add_argument(
        "--spectators", type=int, metavar="N", help="with --perlert: so many slots for clients that only watch"
    )
    section.add_argument(
        "--bots",
        nargs="*",
        metavar="KEY",
        help="with --perlert: slots that a random policy plays while nobody holds them; without keys all",
    )


def function() -> Callable[..., Any]:
    """Return the function that serves; its keywords can be given on the command line."""
    from bridge.perlert.perlert_server import serve_perlert

    return serve_perlert


def keywords(
    arguments: argparse.Namespace, env: Any, read_key: Callable[[Path | None], bytes | None]
) -> dict[str, Any]:
    """Return the keywords of `serve_perlert` for the options.

    Args:
        arguments: The parsed arguments.
        env: The environment to serve.
        read_key: Reads a key from a file.

    Raises:
        SettingError: Several environments are given, or the key cannot be read.
    """
    if isinstance(env, list):
        raise SettingError(f"expected one environment id with --perlert, got {', '.join(env)}")
    found = {"port": arguments.perlert, "key": read_key(arguments.perlert_key_file)}
    found["spectators"] = arguments.spectators or 0
    if arguments.bots is not None:
        found["bots"] = dict.fromkeys(arguments.bots, "random") if arguments.bots else "random"
    return found


def lines(server: Any, arguments: argparse.Namespace) -> list[str]:
    """Return the lines to print when a server runs: its address, and how to play."""
    key_file = arguments.perlert_key_file
    option = "" if key_file is None else f" --key-file {key_file}"
    found = [f"serving {url}" for url in server.urls]
    found.append(f"play:   gymnasium-bridge lobby {server.url}{option}")
    if arguments.spectators:
        found.append(f"watch:  gymnasium-bridge lobby {server.url}{option} --watch")
    found.append(f'agents: bridge.make_remote("{server.url}"{"" if key_file is None else ", key=…"})')
    return found
