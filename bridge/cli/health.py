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

It prints SERVING, and exits with 0; a server that is full serves those that are there, and is said to be full. It
prints NOT_SERVING, and exits with 1, for one that drains; where nobody answers, it says why and exits with 1. It needs
no token, nor any of the server's places. Servers have a health service where the extra `ops` is installed.
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
        help="with TLS: take any certificate, which is for a probe of this very machine",
    )
    parser.add_argument("--room", action="store_true", help="exit with 1 for a server that is full, too")
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
