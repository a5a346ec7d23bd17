"""The command `bridge`: one module a sub-command, joined in `program`."""

from bridge.cli.program import main, make_parser

__all__ = ["main", "make_parser"]
