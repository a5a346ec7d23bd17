"""`gymnasium-bridge demo`: watch an agent learn in environments that run in other processes."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from bridge.cli.program import FAILED, OK

__all__ = ["register"]

_EPILOG = """examples:
  gymnasium-bridge demo
  gymnasium-bridge demo --servers 4 --lanes 16 --picture /tmp/curve.png

The picture needs matplotlib (extra `demo`). The exit code is 1 if the agent has not learned.
"""


def register(commands: Any) -> None:
    """Add the sub-command."""
    from bridge.facade.demo import Demo

    parser = commands.add_parser(
        "demo",
        description="Start server processes, train an agent in their environments, evaluate it, draw a learning curve.",
        epilog=_EPILOG,
    )
    texts = {
        "servers": "server processes",
        "lanes": "environments in each of them",
        "generations": "rounds of training",
        "episodes": "episodes of each policy in each round",
        "seed": "seed of environments and training",
        "picture": "where to write the learning curve",
    }
    for field in dataclasses.fields(Demo):
        kind, metavar = (Path, "FILE") if field.name == "picture" else (int, "N")
        text = f"{texts[field.name]} (default: {field.default})"
        parser.add_argument(f"--{field.name}", type=kind, default=field.default, metavar=metavar, help=text)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo."""
    from bridge.facade.demo import Demo, run_demo

    chosen = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(Demo)}
    return OK if run_demo(Demo(**chosen)).solved else FAILED
