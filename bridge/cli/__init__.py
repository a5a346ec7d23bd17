"""The command `gymnasium-bridge`: one module for each sub-command, combined in `program`.

May be imported by `bridge.__main__` alone.
"""

import sys

try:
    from bridge.cli.program import FAILED, INTERRUPTED, OK, USAGE, main, make_parser, say
except KeyboardInterrupt:  # later, `main` handles it
    sys.stderr.write("gymnasium-bridge: interrupted\n")
    sys.exit(130)

__all__ = ["FAILED", "INTERRUPTED", "OK", "USAGE", "main", "make_parser", "say"]
