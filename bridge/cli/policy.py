"""`gymnasium-bridge policy`: serve a policy over openpi's protocol."""

from __future__ import annotations

import argparse
from typing import Any

from bridge.cli.program import OK, port_number, say
from bridge.cli.running import server_logging
from bridge.cli.target import find_function
from bridge.core.signals import sigterm_as_interrupt
from bridge.core.transport.credentials import add_credential_options, credential_keywords

__all__ = ["register"]

_EPILOG = """examples:
  gymnasium-bridge policy my_module:act
  gymnasium-bridge policy my_module:act_on_one --rows --port 8000
  gymnasium-bridge policy my_module:plan --chunked --host 0.0.0.0 --token-file token

MODULE:FUNCTION takes a batch of observations, (rows, …) or a dict of such arrays, and returns actions, (rows, …).
"""


def register(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "policy",
        description="Serve a policy until Ctrl-C, for `gymnasium-bridge evaluate`, RemotePolicy and clients of openpi.",
        epilog=_EPILOG,
    )
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="observations in, actions out")
    parser.add_argument("--rows", action="store_true", help="the function takes one observation, not a batch")
    parser.add_argument("--chunked", action="store_true", help="the function returns chunks: (rows, horizon, …)")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=port_number, default=8000, help="the port; 0: any free port (default: 8000)")
    parser.add_argument(
        "--max-batch", type=int, default=64, metavar="N", help="most observations in a call (default: 64)"
    )
    parser.add_argument(
        "--max-wait",
        type=float,
        default=0.002,
        metavar="S",
        help="seconds to wait for more observations (default: 0.002)",
    )
    parser.add_argument("--max-connections", type=int, default=64, metavar="N", help="most clients (default: 64)")
    parser.add_argument("--insecure", action="store_true", help="beyond loopback: do not ask for a token")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="log more")
    add_credential_options(parser, listens=True)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal."""
    from bridge.policies import by_rows, serve_policy  # they need an extra, which `--help` does not

    function = find_function(arguments.function)
    names = ("host", "port", "chunked", "max_batch", "max_wait", "max_connections", "insecure")
    access = credential_keywords(arguments)
    given = {**access, **{name: getattr(arguments, name) for name in names}}
    with server_logging(arguments.verbose, False), sigterm_as_interrupt():
        try:
            with serve_policy(by_rows(function) if arguments.rows else function, **given) as server:
                say(f"serving the policy {arguments.function} at {server.url}")
                if server.token is not None and not access.keys() & {"token", "token_file"}:
                    say(f"clients need the token {server.token}")
                say("Ctrl-C stops.")
                server.wait()
        except KeyboardInterrupt:  # a signal before `wait` took over
            pass
        say("stopped")
    return OK
