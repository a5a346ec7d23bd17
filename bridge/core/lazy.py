"""Packages whose public names are imported when they are first asked for, and whose `dir` shows these names alone."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from bridge.core.extras import feature

__all__ = ["lazy_names"]


def lazy_names(
    package: str,
    places: Mapping[str, str],
    modules: Mapping[str, str] = MappingProxyType({}),
    absent: Iterable[str] = (),
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__`.

    Args:
        package: Its name, such as `bridge.testing`.
        places: The module of each public name.
        modules: Its public modules, each with what is imported when it is first asked for: itself or a module in it.
        absent: Names that cannot be imported here; `dir` leaves them out.
    """

    def get(name: str) -> Any:
        if name not in places and name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        place = places.get(name) or modules[name]
        with feature(place.split(".")[1], f"{package}.{name}" if name in places else "this program"):
            module = importlib.import_module(place)
        return getattr(module, name) if name in places else sys.modules[f"{package}.{name}"]

    return get, lambda: sorted({*places, *modules}.difference(absent))
