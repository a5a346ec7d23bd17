"""The command `bridge`: one module a sub-command, joined in `program`."""

from bridge.cli.program import main

__all__ = ["main"]
