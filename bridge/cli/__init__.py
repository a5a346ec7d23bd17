"""The command `bridge`: one module a sub-command, joined in `program`."""

from bridge.cli.program import FAILED, INTERRUPTED, OK, USAGE, main, make_parser, say

__all__ = ["FAILED", "INTERRUPTED", "OK", "USAGE", "main", "make_parser", "say"]
