"""`gymnasium-bridge token`: generate a token for a server and its clients."""

from __future__ import annotations

import argparse
import secrets
from typing import Any

from bridge.cli.program import OK
from bridge.core.transport.credentials import write_secret

__all__ = ["register"]

_BYTES = 32
_EPILOG = """examples:
  gymnasium-bridge token --out token
  gymnasium-bridge serve CartPole-v1 --host 0.0.0.0 --port 50051 --token-file token
  BRIDGE_TOKEN=$(gymnasium-bridge token) gymnasium-bridge serve CartPole-v1   in the environment, without a file

Copy the file to the machines that connect: they give token_file="token" (make_remote) or --token-file token.
"""


def register(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "token",
        description="Make a random token: what clients show to a server that others can reach.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="write it to this new file, which only you can read (default: print it)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print a token, or write it to a file."""
    token = secrets.token_hex(_BYTES)  # hexadecimal, so that it never begins with "-" like an option
    if arguments.out is None:
        print(token)
        return OK
    write_secret(arguments.out, f"{token}\n".encode())
    print(f"wrote {arguments.out}, which only you can read: give it to the server and to its clients as --token-file")
    return OK
