"""Values that need no copy because nothing can change them, and digests of functions."""

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
"""Types whose objects are immutable or shared on purpose. Functions are checked separately."""

IMMUTABLE = frozenset((type(None), bool, int, float, complex, str, bytes, np.float64, np.float32, np.int64, np.bool_))
"""The most frequent immutable types: a fast check that needs no look at base classes."""


def has_cells(function: types.FunctionType, within: tuple[Any, ...] = ()) -> bool:
    """True if a function's closure holds more than classes, modules, and functions for which this is False.

    Args:
        function: The function.
        within: The outer functions whose closures led to this one.
    """
    if any(function is outer for outer in within):  # a recursive function
        return True
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # an empty cell
            return True
        if isinstance(value, types.FunctionType):
            if has_cells(value, (*within, function)):
                return True
        elif not isinstance(value, (type, types.ModuleType)):
            return True
    return False


def is_constant(value: Any) -> bool:
    """True if nothing can change a value or what it contains."""
    kind = type(value)  # not `__class__`, which a proxy may fake
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
    """Return a digest of a function's code and closure: functions with equal digests do the same.

    Args:
        function: The function.
        layers: The numbers of the layers, by their ids.
        path: The place of the function, for errors.
        changeable: A list to which the arrays, lists and spaces that it holds are added.
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
            # Without its generator, which is used only for sampling.
            parts.append(repr(value).encode())
        elif id(value) in seen:
            return
        else:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise CannotCopyError(f"{place_name(path)} is a function whose closure holds a {kind}, which is not copied")

    add(function)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()
