"""`gymnasium-bridge check URL`: the conformance checks on the command line."""

from __future__ import annotations

import argparse
import json
from typing import Any

from bridge.core.transport.credentials import add_credential_options, credential_keywords
from bridge.errors import ConnectError, UsageError
from bridge.testing.conformance import REQUIREMENTS, check_server

__all__ = ["add_check_parser", "run"]

EPILOG = """\
examples:
  gymnasium-bridge check grpc://localhost:50051
  gymnasium-bridge check ws://localhost:50051                  over WebSocket
  gymnasium-bridge check listen://127.0.0.1:6000               waits for a server that dials ws://127.0.0.1:6000
  gymnasium-bridge check localhost:50051/CartPole-v1 --require action
  gymnasium-bridge check localhost:50051 --set level=2 --set 'map="forest"' --action 'say="hello"'
  gymnasium-bridge check localhost:50051 --only D-9,D-15 --json

The checks create, play, reset and destroy worlds: use a server that nobody is playing on.

exit codes: 0 nothing failed, 1 something failed, 2 wrong usage, 3 no server answers
"""


def add_check_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the sub-command `check`; `args.run` is set to `run`."""
    parser = subparsers.add_parser(
        "check",
        description="Test whether a running dm_env_rpc server conforms to the protocol, one line for each requirement.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    named: dict[str, Any] = {"metavar": "NAME=VALUE", "action": "append", "default": [], "type": _named_value}
    parser.add_argument(
        "url",
        metavar="URL",
        help="grpc://HOST:PORT or ws://HOST:PORT, with the environment id as its path and settings as its query; or "
        "listen://HOST:PORT, which waits --timeout seconds for a server that dials by WebSocket, without TLS",
    )
    parser.add_argument(
        "--timeout", type=float, default=10.0, metavar="S", help="seconds to wait for each answer (default: 10)"
    )
    parser.add_argument(
        "--set", dest="create", help="a CreateWorld setting; VALUE is read as JSON if it can be, else as text", **named
    )
    parser.add_argument("--join-set", dest="join", help="a JoinWorld setting", **named)
    parser.add_argument(
        "--action",
        dest="actions",
        help="an allowed value of an action, where its spec does not say, as for text",
        **named,
    )
    parser.add_argument(
        "--require", metavar="NAME", action="append", default=[], help="an action that must be in every Step"
    )
    parser.add_argument(
        "--steps", type=int, default=500, metavar="N", help="steps to wait for the end of a sequence (default: 500)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the random actions (default: 0)")
    parser.add_argument(
        "--only", default="", metavar="IDS", help=f"check these requirements only, out of {', '.join(REQUIREMENTS)}"
    )
    parser.add_argument("--strict", action="store_true", help="report notes as failures")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_credential_options(parser)
    parser.set_defaults(run=run, exit_codes={ConnectError: 3, UsageError: 2, OSError: 2})
    return parser


def _named_value(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def run(args: argparse.Namespace) -> int:
    """Check the server, print the report to standard output, and return the exit code (see the epilog of `--help`)."""
    report = check_server(
        args.url,
        timeout=args.timeout,
        create_settings=dict(args.create),
        join_settings=dict(args.join),
        actions=dict(args.actions),
        required_actions=args.require,
        steps=args.steps,
        seed=args.seed,
        strict=args.strict,
        only=[part.strip() for part in args.only.split(",") if part.strip()],
        **credential_keywords(args),
    )
    print(json.dumps(report.as_dict(), indent=2) if args.json else report)
    return report.exit_code
