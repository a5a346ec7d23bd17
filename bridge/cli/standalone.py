"""`gymnasium-bridge standalone`: print a server in one file, for a Python or packages too old for this package."""

from __future__ import annotations

import argparse
import importlib.resources
import sys
from typing import Any

from bridge.cli.program import OK

__all__ = ["register"]

_EPILOG = """examples:
  gymnasium-bridge standalone > serve_env.py             copy it to the machine of the environment
  python serve_env.py my_package:MyEnv-v0 --port 50051   there: Python 3.7 or newer
  python serve_env.py CartPole-v1 --port 50051 --num-envs 4
  python serve_env.py --help

It serves environments of gym 0.21 or newer and of any Gymnasium. It also needs grpcio, protobuf and numpy.
"""


def register(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "standalone",
        description="Print a server that is a single Python file, for a simulator that needs an old Python or Gym.",
        epilog=_EPILOG,
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the file. It is ASCII, so it fits any terminal encoding."""
    sys.stdout.write(importlib.resources.files("bridge").joinpath("standalone/serve_env.py").read_text("ascii"))
    return OK
