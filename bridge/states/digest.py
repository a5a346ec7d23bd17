"""A digest of values by content: equal digests mean equal values.

Objects of Python classes count field by field; functions count with their defaults, attributes and closures. Objects
that cannot be inspected count by their identity.
"""

from __future__ import annotations

import contextvars
import functools
import hashlib
import logging
import os
import pickle
import random
import threading
import types
import typing
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import gymnasium
import numpy as np

from bridge.states.fields import dict_of, fields_of, held_by, is_pure, is_trusted, module_of
from bridge.states.tables import is_table, table_digest

__all__ = ["digest_of", "objects_in"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_INERT = (
    *(type(threading.Lock()), type(threading.RLock()), logging.Handler, logging.Logger),
    *(typing.TypeVar, typing.ParamSpec),
)
_MOST_DEEP = 100


def objects_in(values: Iterable[Any]) -> dict[int, Any]:
    """Return the objects in values, at any depth, for which a copy would be a different object, by id."""
    found: dict[int, Any] = {}
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        kind = type(value)
        fixed = kind in _PLAIN or isinstance(value, (type, types.ModuleType, gymnasium.Env, types.FunctionType))
        if fixed or id(value) in found:
            continue
        found[id(value)] = value
        if is_table(value):  # which fills caches of its own
            continue
        if isinstance(value, dict):
            waiting += [part for pair in dict.items(value) for part in pair]
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            waiting += value
        elif not is_trusted(module_of(kind)) or kind is types.SimpleNamespace:
            waiting += [item for _, item in fields_of(value)]
            # Another object may refer to this `__dict__`: `vars` returns it.
            waiting.append(dict_of(value))
    return found


def digest_of(
    values: Iterable[Any],
    *,
    samples: bool = True,
    layers: Mapping[int, int] | None = None,
    unseen: list[Any] | None = None,
) -> str:
    """Return a digest of the current content of values.

    Args:
        values: The values.
        samples: False: the generators of spaces do not count.
        layers: Environments that count by these numbers, by id.
        unseen: A list to which objects are added that may change but cannot be inspected.
    """
    made = hashlib.blake2b(digest_size=16)
    seen: dict[int, int] = {}
    alive: list[Any] = []  # keeps the objects alive whose ids are in `seen`

    def add_by_identity(value: Any) -> None:
        made.update(str(id(value)).encode())
        if unseen is not None and not _is_inert(value):
            unseen.append(value)

    def add(value: Any, depth: int) -> None:
        kind = type(value)
        if kind in _PLAIN:
            made.update(f"{kind.__name__} {value!r};".encode())
            return
        if layers is not None and id(value) in layers:
            made.update(f"layer {layers[id(value)]};".encode())
            return
        if id(value) in seen:
            made.update(f"again {seen[id(value)]};".encode())
            return
        seen[id(value)] = len(seen)
        alive.append(value)
        title = f"{module_of(kind)}.{kind.__qualname__}"
        made.update(f"{title}(".encode())
        if depth > _MOST_DEEP:
            add_by_identity(value)
        elif is_table(value):
            try:
                made.update(table_digest(value).encode())
            except ValueError:
                add_by_identity(value)
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            made.update(f"{value.dtype.str} {value.shape} ".encode() + value.tobytes())
            for name, item in fields_of(value):
                made.update(name.encode())
                add(item, depth + 1)
        elif isinstance(value, (list, tuple, dict, set, frozenset, deque)):
            items: list[Any] = list(value)
            if isinstance(value, dict):
                items = [part for pair in dict.items(value) for part in pair]
            if isinstance(value, (set, frozenset)):
                # The order of a set depends on hashes.
                items = sorted(items, key=repr)
            for item in items:
                add(item, depth + 1)
            if kind not in (list, tuple, dict, set, frozenset, deque):
                for name, item in fields_of(value):
                    made.update(name.encode())
                    add(item, depth + 1)
        elif isinstance(value, types.FunctionType):
            made.update(f"{value.__module__}.{value.__qualname__} ".encode() + value.__code__.co_code)
            for item in held_by(value):
                add(item, depth + 1)
        elif isinstance(value, (type, types.ModuleType)):
            made.update(f"{getattr(value, '__module__', '')}.{value.__name__}".encode())
        elif isinstance(value, types.MethodType):
            add(value.__func__, depth + 1)
            add(value.__self__, depth + 1)
        elif isinstance(value, functools.partial):
            for item in (value.func, value.args, value.keywords, vars(value)):
                add(item, depth + 1)
        elif isinstance(value, types.SimpleNamespace):
            add(vars(value), depth + 1)
        elif isinstance(value, types.MappingProxyType):
            add(dict(value), depth + 1)
        elif isinstance(value, weakref.ref):
            add(value(), depth + 1)
        elif value is os.environ:
            add(dict(os.environ), depth + 1)
        elif isinstance(value, contextvars.ContextVar):
            add(value.get(None), depth + 1)
        elif isinstance(value, gymnasium.Space) and not samples:
            made.update(repr(value).encode())
        elif isinstance(value, gymnasium.Env):
            # An environment held by a class or a module has its own state, which does not count here.
            add_by_identity(value)
        elif is_trusted(module_of(kind)) or not is_pure(kind) or isinstance(value, random.Random):
            try:
                made.update(pickle.dumps(value))
            except Exception:  # an object that cannot be pickled counts by its identity
                add_by_identity(value)
        else:
            for name, item in fields_of(value):
                made.update(name.encode())
                add(item, depth + 1)
        made.update(b")")

    for value in values:
        add(value, 0)
    # `add` refers to itself, so it lives until the next garbage collection, and would keep these objects alive.
    alive.clear()
    return made.hexdigest()


def _is_inert(value: Any) -> bool:
    """True if an object's identity is enough: it holds nothing that influences later steps."""
    kind = type(value)
    if isinstance(value, _INERT) or module_of(kind).partition(".")[0] == "pygame":
        return True
    # Such as a compiled function. A method of a C object may change that object, so it is not inert.
    return callable(value) and getattr(value, "__self__", None) is None and not isinstance(value, functools.partial)
