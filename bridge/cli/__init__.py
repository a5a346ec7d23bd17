"""The command `gymnasium-bridge`: one module for each sub-command, combined in `program`.

May be imported by `bridge.__main__` alone.
"""

from bridge.cli.program import FAILED, INTERRUPTED, OK, USAGE, main, make_parser, say

__all__ = ["FAILED", "INTERRUPTED", "OK", "USAGE", "main", "make_parser", "say"]
