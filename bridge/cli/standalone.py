"""`gymnasium-bridge standalone`: print a server of one file, for Pythons and packages that are too old for this one."""

from __future__ import annotations

import argparse
import importlib.resources
import sys
from typing import Any

from bridge.cli.program import OK

__all__ = ["register"]

_EPILOG = """examples:
  gymnasium-bridge standalone > serve_env.py                               copy it to the machine of the environment
  python serve_env.py my_package:MyEnv-v0 --port 50051           there: Python 3.7 or newer
  python serve_env.py CartPole-v1 --port 50051 --num-envs 4
  python serve_env.py --help

It serves environments of gym from 0.21 on and of any Gymnasium, and needs grpcio, protobuf and numpy beside them.
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
    """Print the file; it is ASCII, whatever the terminal's encoding is."""
    sys.stdout.write(importlib.resources.files("bridge").joinpath("standalone/serve_env.py").read_text("ascii"))
    return OK
