"""What nothing can change: values that need no copy, and functions, told apart by what they do and hold."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import hashlib
import logging
import pathlib
import random
import re
import types
import uuid
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

from bridge.states.fields import held_by
from bridge.states.refusal import CannotCopyError, place_name

__all__ = ["ATOMS", "IMMUTABLE", "digest_function", "has_cells", "is_constant"]


ATOMS = (
    type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented), range, slice,
    np.dtype, np.generic, enum.Enum, decimal.Decimal, fractions.Fraction, datetime.date, datetime.time,
    datetime.timedelta, datetime.tzinfo, pathlib.PurePath, uuid.UUID, re.Pattern, EnvSpec, property,
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.CodeType, logging.Logger,
)  # fmt: skip
"""Types whose objects nothing changes, or that all share; those of functions are looked at before."""

IMMUTABLE = frozenset((type(None), bool, int, float, complex, str, bytes, np.float64, np.float32, np.int64, np.bool_))
"""Types of most of the values that environments hold: known at once, without a look at what they derive from."""


def has_cells(function: types.FunctionType, within: tuple[Any, ...] = ()) -> bool:
    """True if the closure of a function holds more than functions without one, classes and modules.

    Args:
        function: The function.
        within: The functions whose closures led to it.
    """
    if any(function is outer for outer in within):  # one that calls itself
        return True
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # it is empty yet
            return True
        if isinstance(value, types.FunctionType):
            if has_cells(value, (*within, function)):
                return True
        elif not isinstance(value, (type, types.ModuleType)):
            return True
    return False


def is_constant(value: Any) -> bool:
    """True if nothing can change a value, nor what it holds."""
    kind = type(value)  # whatever the object says its class is
    if kind is types.FunctionType:
        if has_cells(value):
            return False
        return all(not isinstance(item, types.FunctionType) and is_constant(item) for item in held_by(value))
    if issubclass(kind, types.ModuleType):
        return value not in (random, np.random)
    if kind is types.BuiltinMethodType:
        return isinstance(value.__self__, (types.ModuleType, type, type(None)))
    if kind in (tuple, frozenset):
        return all(map(is_constant, value))
    return issubclass(kind, (type, *ATOMS))


def digest_function(
    function: Any, layers: Mapping[int, int], path: tuple[str, ...], changeable: list[Any] | None = None
) -> str:
    """Return a digest of what a function does and holds: two of the same digest do the same.

    Args:
        function: The function.
        layers: The numbers of the layers, by their ids.
        path: Where it is, for errors.
        changeable: Gets the arrays, lists and spaces that it holds.
    """
    parts: list[bytes] = []
    seen: set[int] = set()

    def add(value: Any, depth: int = 0) -> None:
        if changeable is not None and isinstance(value, (np.ndarray, list, gymnasium.Space)):
            changeable.append(value)
        if id(value) in layers:
            parts.append(f"layer {layers[id(value)]}".encode())
        elif isinstance(value, types.FunctionType) and depth < 5:
            parts.append(f"function {value.__module__}.{value.__qualname__}".encode())
            parts.append(value.__code__.co_code)
            for item in held_by(value):
                add(item, depth + 1)
        elif type(value) is np.ndarray and not value.dtype.hasobject:
            parts.append(f"array {value.dtype.str} {value.shape}".encode() + value.tobytes())
        elif is_constant(value):
            parts.append(f"{type(value).__qualname__} {value!r}".encode())
        elif type(value) in (list, tuple) and depth < 5:
            parts.append(type(value).__name__.encode())
            for item in value:
                add(item, depth + 1)
        elif isinstance(value, gymnasium.Space):
            # Spaces sample by a generator, which a function that only looks at them does not use.
            parts.append(repr(value).encode())
        elif id(value) in seen:
            return
        else:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise CannotCopyError(f"{place_name(path)} is a function whose closure holds a {kind}, which is not copied")

    add(function)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()
