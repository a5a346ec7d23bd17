"""Packages whose public names are imported when they are first asked for, and whose `dir` shows these names alone."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(
    package: str, places: Mapping[str, str], modules: Iterable[str] = (), absent: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__`.

    Args:
        package: Its name, such as `bridge.testing`.
        places: The module of each public name.
        modules: Its public modules.
        absent: Names that cannot be imported here; `dir` leaves them out.
    """

    def get(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(places[name]), name)

    return get, lambda: sorted({*places, *modules}.difference(absent))
