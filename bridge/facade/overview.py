"""What the overview of a server has of features that a server, or a world, does without: the page reads it of each."""

from __future__ import annotations

from bridge.core.server.registry import Overview

__all__ = ["overview"]


def overview(*, lists_worlds: bool) -> Overview:
    """Return what the overview shows.

    Args:
        lists_worlds: Whether clients may see the worlds that others made, as people do at the page.
    """
    return Overview(
        lists_worlds, server={"records": False, "match": False}, world=dict.fromkeys(("recording", "replay", "match"))
    )
