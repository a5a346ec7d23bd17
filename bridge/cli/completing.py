"""Answers a shell that asks what a command line may go on with."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from bridge.core.extras import needed

__all__ = ["complete"]


def complete(known: set[str], make_parser: Callable[[str | None], argparse.ArgumentParser]) -> None:
    """Answer a shell that asks for completions, and end the process; only then `_ARGCOMPLETE` is set.

    Args:
        known: The names of the sub-commands.
        make_parser: As `bridge.cli.program` has it.
    """
    with needed("completion needs the package argcomplete", "completion"):
        import argcomplete

    words = os.environ.get("COMP_LINE", "")[: int(os.environ.get("COMP_POINT", "0"))].split(" ")
    # Only the module of the sub-command is imported that is written out already.
    chosen = next((word for word in words[1:-1] if word), None)
    argcomplete.autocomplete(make_parser(chosen if chosen in known else None))
