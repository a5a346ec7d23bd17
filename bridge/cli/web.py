"""`gymnasium-bridge web URL …`: a page for browsers with the worlds of other servers, and PERLERT lobbies.

The options are the keywords of `serve_gateway`, and, with the prefix `--upstream-`, those of a client.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from bridge.cli.program import OK, in_options, say
from bridge.cli.running import add_running_options, read_key, run_server, server_logging
from bridge.cli.serve import add_sections, flag_of, grouped_keywords, keyword_options
from bridge.core.extras import provided
from bridge.core.server.core_server import CoreServer
from bridge.core.transport.credentials import ClientCredentials, add_credential_options, credential_keywords
from bridge.errors import SettingError
from bridge.web.gateway.serve import serve_gateway

__all__ = ["register"]

_PORT = 8080
_UPSTREAM = "upstream-"
# The limits on worlds are left out: a gateway has no worlds of its own.
_OF_WORLDS = (
    "--max-worlds",
    "--max-lanes",
    "--max-world-bytes",
    "--call-timeout",
    "--abandoned-timeout",
    "--idle-timeout",
    "--reset-world-timeout",
)
_EPILOG = """examples:
  gymnasium-bridge web grpc://host-a:50051 grpc://host-b:50051
  gymnasium-bridge web grpc+dns://envs.default.svc:50051 --port 8080     every server of a name, as they come and go
  gymnasium-bridge web file:///shared/urls.txt                           a file with a URL a line
  gymnasium-bridge web perlert://host-c:32322/cartpole:0                 a PERLERT lobby, which people join by the page
  gymnasium-bridge web grpcs://host-a:50051 --upstream-token-file token  what the gateway shows to the servers

The servers need no page of their own. Started with --web they tell which worlds they have; of others the page shows
the default world, which make_remote("grpc://HOST:PORT?world=") joins.
"""


def register(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "web",
        usage="%(prog)s URL [URL ...] [options]",
        description="Show the worlds of other servers, of fleets, and PERLERT lobbies on one page, until Ctrl-C.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "urls",
        nargs="+",
        metavar="URL",
        help="grpc://HOST:PORT of a server; file:///PATH, grpc+dns://HOST:PORT or ray://FLEET of many; "
        "perlert://HOST:PORT/NAME:NUMBER of a lobby",
    )
    options = dict(_own_options())
    text = f"the port to listen on, 0 for any free port (default: {_PORT})"
    options["--port"] = {**options["--port"], "default": _PORT, "help": text}
    add_sections(parser, options.items())
    for keyword, text in _scheme_keywords().items():
        parser.add_argument(flag_of(f"{keyword}_file"), type=Path, metavar="PATH", help=f"a file with {text}")
    add_running_options(parser)
    add_credential_options(parser, _UPSTREAM, "what the gateway shows to the servers")
    parser.set_defaults(run=run)


def _own_options() -> list[tuple[str, dict[str, Any]]]:
    """Return the options that are keywords of `serve_gateway`."""
    return [(flag, options) for flag, options in keyword_options(serve_gateway) if flag not in _OF_WORLDS]


def _scheme_keywords() -> dict[str, str]:
    """Return the keywords of `serve_gateway` that its URL schemes define, with their descriptions."""
    return {keyword: text for scheme in provided("gateway_schemes") for keyword, text in scheme.keywords.items()}


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal."""
    names = [flag.removeprefix("--").replace("-", "_") for flag, _ in _own_options()]
    keywords = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    spelled = {name.removeprefix("upstream_"): text for name, text in arguments.spelled.items() if "upstream" in name}
    try:
        upstream = ClientCredentials.of(**credential_keywords(arguments, _UPSTREAM))
    except SettingError as error:
        raise SettingError(in_options(str(error), spelled)) from error
    if upstream.from_environment:  # the environment variable is for clients of the gateway
        upstream = dataclasses.replace(upstream, token=None)
    given = grouped_keywords(keywords, serve_gateway)
    for keyword in _scheme_keywords():
        if (value := read_key(getattr(arguments, f"{keyword}_file"))) is not None:
            given[keyword] = value
    with server_logging(arguments.verbose, False):
        run_server(
            lambda: serve_gateway(arguments.urls, upstream=upstream, start=False, **given),
            lambda server: _announce(server, keywords),
            exit_on_eof=arguments.exit_on_eof,
        )
    say("stopped: connections are closed")
    return OK


def _announce(server: CoreServer, keywords: dict[str, Any]) -> None:
    url = server.web_url or ""
    asks = "#" not in url and bool({"token", "token_file"} & set(keywords))
    say(f"In a browser: {url}{' (it asks for the token)' if asks else ''}")
    say("Ctrl-C stops.")
