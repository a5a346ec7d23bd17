"""The modules of the package, and their sources."""

from __future__ import annotations

import pkgutil
from pathlib import Path

import bridge
import bridge.wrappers
from tests.places import ROOT

MODULES = sorted(
    {
        "bridge",
        *(found.name for found in pkgutil.walk_packages(bridge.__path__, "bridge.")),
        *(found.name for found in pkgutil.walk_packages(bridge.wrappers.__path__, "bridge.wrappers.")),
    }
)


def source_of(name: str) -> Path:
    """The file of a module of ours, found without importing it."""
    *parents, last = name.split(".")
    if parents[:2] == ["bridge", "wrappers"] or (parents == ["bridge"] and last == "wrappers"):
        parents = parents[1:]
    package = ROOT.joinpath(*parents, last, "__init__.py")
    return package if package.exists() else ROOT.joinpath(*parents, f"{last}.py")
