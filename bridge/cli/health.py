"""`gymnasium-bridge health`: whether a server takes worlds, as an exit code for probes, such as those of Kubernetes."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from bridge.cli.program import FAILED, OK, positive
from bridge.core.transport.address import parse_address
from bridge.core.transport.credentials import ClientCredentials, add_credential_options, credential_keywords
from bridge.fleet.health import SERVING, check_health, has_room

__all__ = ["register"]

_EPILOG = """examples:
  gymnasium-bridge health grpc://localhost:50051
  gymnasium-bridge health grpcs://localhost:50051 --no-verify    with TLS, from within the container
  gymnasium-bridge health unix:///run/env.sock --timeout 2

For a server that takes worlds it prints SERVING, and exits with 0. A full server is SERVING too, and the line says that
it is full. For a draining server it prints NOT_SERVING, and exits with 1. If there is no answer, it prints the reason,
and exits with 1. The check needs no token, and takes none of the server's places. Servers have a health service if the
extra `ops` is installed.
"""


def register(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "health", description="Ask a server by gRPC's health service whether it takes worlds.", epilog=_EPILOG
    )
    parser.add_argument("url", metavar="URL", help="grpc://HOST:PORT, grpcs://HOST:PORT or unix:///PATH")
    parser.add_argument(
        "--timeout", type=positive, default=5.0, metavar="S", help="seconds to wait for the answer (default: 5)"
    )
    parser.add_argument(
        "--no-verify",
        action="store_true",
        help="with TLS: accept any certificate; only for probes on the server's own machine",
    )
    parser.add_argument("--room", action="store_true", help="exit with 1 for a full server too")
    add_credential_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Ask, and print the answer."""
    address = parse_address(arguments.url)
    credentials = ClientCredentials.of(**credential_keywords(arguments))
    address = dataclasses.replace(address, credentials=credentials)
    verify = not arguments.no_verify
    status = check_health(address, arguments.timeout, verify=verify)
    full = status == SERVING and not has_room(address, arguments.timeout, verify=verify)
    print(f"{status}, full: it takes no further client" if full else status)
    return OK if status == SERVING and not (full and arguments.room) else FAILED
