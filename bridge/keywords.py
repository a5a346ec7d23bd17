"""Keywords that belong together, in one small dataclass each, such as `limits=Limits(max_worlds=8)`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

__all__ = ["flat_names", "grouped"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def flat_names(keyword: str, group: type) -> dict[str, dataclasses.Field[Any]]:
    """Return what each field of a group is called where keywords cannot be grouped, such as on a command line.

    Args:
        keyword: The keyword that takes the group.
        group: A dataclass.

    Returns:
        The fields by their flat names. Those of `tls` have a prefix: `tls_ca`.
    """
    prefix = "tls_" if keyword == "tls" else ""
    return {f"{prefix}{field.name}": field for field in dataclasses.fields(group)}


def grouped(**groups: type) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a function so that it says where the keyword is that somebody looks for.

    Args:
        groups: The dataclasses that its keywords take, by keyword.
    """
    places = {
        flat: f"{keyword}={group.__name__}({field.name}=…)"
        for keyword, group in groups.items()
        for flat, field in flat_names(keyword, group).items()
    }

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        known = inspect.signature(function).parameters
        title = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for name in kwargs:
                if name in places and name not in known:
                    raise TypeError(f"{title}() got an unexpected keyword argument {name!r}: give {places[name]}")
            return function(*args, **kwargs)

        return call

    return decorate
