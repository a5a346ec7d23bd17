"""Answers a shell's request for completions."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from bridge.core.extras import needed

__all__ = ["complete"]


def complete(known: set[str], make_parser: Callable[[str | None], argparse.ArgumentParser]) -> None:
    """Answer a shell's request for completions, and end the process. Called only if `_ARGCOMPLETE` is set.

    Args:
        known: The names of the sub-commands.
        make_parser: `bridge.cli.program.make_parser`.
    """
    with needed("completion needs the package argcomplete", "completion"):
        import argcomplete

    words = os.environ.get("COMP_LINE", "")[: int(os.environ.get("COMP_POINT", "0"))].split(" ")
    # Import only the module of the sub-command that is already complete on the command line.
    chosen = next((word for word in words[1:-1] if word), None)
    argcomplete.autocomplete(make_parser(chosen if chosen in known else None))
